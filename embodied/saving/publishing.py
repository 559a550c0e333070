"""Publishes a trained policy as a folder: its checkpoint without the state of training, and a model card."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from embodied.errors import UserError
from embodied.extras import needs_extra
from embodied.saving.checkpoint import Checkpoint, save
from embodied.saving.files import complete_or_absent_folder

REPORT_FILES = "report.md", "report.html", "report.json", "curves.png", "trajectories.png", "video.mp4"
"""Files of a run that the card shows or links."""


def publish(saved: Checkpoint, run: Path, folder: Path) -> None:
    """Write the policy `saved` of the directory `run` into `folder`, complete or not at all.

    The folder is a run without optimisers, replay and environments: programs evaluate, serve and export it, and start
    from it.

    Raises:
        UserError: for a folder that exists.
    """
    with complete_or_absent_folder(folder) as temporary:
        save(temporary, replace(saved, state={}))
        for name in REPORT_FILES:
            if (run / name).is_file():
                shutil.copyfile(run / name, temporary / name)
        report = run / "report.md"
        (temporary / "README.md").write_text(
            card(saved, report.read_text(encoding="utf-8") if report.is_file() else ""), encoding="utf-8"
        )


def card(saved: Checkpoint, report: str) -> str:
    """Model card in Markdown with the hub's front matter; it ends with the `report` of the run."""
    choices: dict[str, Any] = saved.config.get("choices", {})
    names = [str(choices[kind]) for kind in ("task", "policy", "algorithm") if choices.get(kind)]
    front = {"library_name": "embodied-rl", "pipeline_tag": "robotics", "tags": ["reinforcement-learning", *names]}
    contract = saved.contract
    specs = [*contract.observation.items(), ("action", contract.action)]
    rows = [
        f"| {name}{', for the critic alone' if spec.privileged else ''} | {spec.dtype} {list(spec.shape)} |"
        f" {spec.unit or ''} | {', '.join(spec.names)} |"
        for name, spec in specs
    ]
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False).strip(),
        "---",
        "",
        f"# {', '.join(names) or 'policy'}",
        "",
        "A policy of embodied-rl. In a folder DIR that holds these files:",
        "",
        "```",
        "python evaluate.py checkpoint=DIR",
        "python serve.py checkpoint=DIR",
        "python train.py start_from=DIR ...",
        "```",
        "",
        f"Chunks of {contract.horizon} actions, of which {contract.executed} are executed,"
        f" {contract.control_dt_s:g} s each. Weights are safetensors, all else is JSON; changed files are refused.",
        "",
        "| observed, and action | type | unit | elements |",
        "|---|---|---|---|",
        *rows,
        "",
        *(report.splitlines() or ["Nothing was measured."]),
    ]
    return "\n".join(lines) + "\n"


def push(folder: Path, name: str) -> str:
    """Upload `folder` to the Hugging Face hub as `name`, a private repository created if missing; return its address.

    Raises:
        UserError: on one line, if the hub cannot be reached or returns an error.
    """
    with needs_extra("vla"):
        from huggingface_hub import HfApi

    try:
        address = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # any error of its HTTP client
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{folder} is written, but not uploaded to hub={name}: {reason}") from error
    return str(address)
