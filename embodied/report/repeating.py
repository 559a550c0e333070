"""Commands that repeat or continue a run, and a description of its machine."""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from embodied.commands import command, module, option, quoted, typed
from embodied.runtime.foreign_code import PLACEMENT, TASK, named

PLACES = ("output=", "resume=", "plan=", "eval_only=")
"""Options of train.py that do not affect the results of a run."""


def train_command(arguments: Sequence[str]) -> str:
    """Command that repeats a run with `arguments`, "key=value" each, where later ones (of a resumption) override."""
    last = {each.partition("=")[0]: each for each in arguments if not each.startswith(PLACES)}
    return f"{command('train')} {shlex.join(last.values())}".rstrip()


def next_commands(
    directory: Path, export_target: str | None, arguments: Sequence[str] = (), *, is_recorded: bool = False
) -> list[str]:
    """Commands to run after a finished run in `directory`, with export if there is an `export_target`.

    `arguments` are those of the run, `is_recorded` whether it learned from recorded episodes alone.
    """
    run = typed("checkpoint", typed_path(directory))
    return [
        f"{command('evaluate')} {shlex.join([option('checkpoint', typed_path(directory)), *named(arguments)])}",
        *([f"{command('serve')} {run}"] if is_recorded else []),
        *([f"{command('export')} {run} target={export_target}"] if export_target else []),
        module("tensorboard.main", "--logdir", typed_path(directory)),
    ]


def film_command(directory: Path, distribution: str, start: int, task: str | None = None) -> str:
    """Command that runs and films the initial state `start` of `distribution`, of one of several tasks if named."""
    only = [f"task.tasks=[{quoted(task)}]"] if task else []
    options = [f"distributions=[{quoted(distribution)}]", f"first_start={start}", "episodes=1", *only, "video=true"]
    return f"{command('evaluate')} {typed('checkpoint', typed_path(directory))} {shlex.join(options)}"


def resume_command(directory: Path, arguments: Sequence[str] = ()) -> str:
    """Command that continues a stopped run with `arguments` in `directory`."""
    options = [option("resume", typed_path(directory)), *named(arguments, (TASK, PLACEMENT))]
    return f"{command('train')} {shlex.join(options)}"


def machine(device: str) -> dict[str, Any]:
    """Machine of the run: processor, available cores, PyTorch's threads, `device`, operating system."""
    cores = len(os.sched_getaffinity(0))
    description = {"processor": _processor(), "cores": cores, "threads": torch.get_num_threads(), "device": device}
    if device.startswith("cuda"):
        description["gpu"] = torch.cuda.get_device_name(device)
    return description | {"system": f"{platform.system()} {platform.release()}"}


def typed_path(path: Path) -> Path:
    """Path as typed from the working directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    match = (
        re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
        if cpuinfo.exists()
        else None
    )
    return match[1] if match else platform.machine()
