"""Jobs on clusters: the Slurm script of the documents with a shell in place of srun, and what the Dockerfile copies."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_a_preempted_job_of_the_array_goes_on_when_it_is_started_again(tmp_path: Path):
    page = (ROOT / "docs" / "at_scale.md").read_text()
    script = re.search(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    small = "task=quadrotor_hover env_steps=100000000 evaluation_starts=8 num_envs=64 video=false device=cpu"
    script = script.replace("task=libero_pick", small).replace(" device=cuda", "")
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (commands / "srun").chmod(0o755)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    (tmp_path / "job.sh").write_text(script)
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_ARRAY_TASK_ID": "3",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    metrics = tmp_path / "outputs" / "pick_3" / "metrics.jsonl"

    def job(lines: int) -> str:
        """Start the job, preempt it when so many lines of metrics are written; returns what it printed."""
        run = subprocess.Popen(
            ["bash", "job.sh"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        end = time.monotonic() + 240
        while time.monotonic() < end and run.poll() is None:
            if metrics.exists() and len(metrics.read_text().splitlines()) >= lines:
                break
            time.sleep(0.2)
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGTERM)  # as Slurm does, to all processes of the job step
        return run.communicate(timeout=120)[0]

    assert "Stopped and saved" in job(3)
    before = len(metrics.read_text().splitlines())
    told = job(before + 3)
    assert "continuing" in told
    assert "Stopped and saved" in told
    assert not re.search(r"^error", told, re.MULTILINE)


def test_all_that_an_image_needs_to_install_is_copied_before_it_is_installed():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    install = next(number for number, line in enumerate(lines) if "make .venv/installed" in line)
    patterns = {name for line in lines[:install] if line.startswith("COPY") for name in line.split()[1:-1]}
    matches = {pattern: {path.name for path in ROOT.glob(pattern)} for pattern in patterns}
    assert all(matches.values())
    copied = set.union(*matches.values())
    build = (ROOT / "pyproject.toml").read_text()
    included = set(re.findall(r'^"([\w.]+)" = "embodied/programs', build, re.MULTILINE))
    made = set(lines[install].split("mkdir ")[1].split(" &&")[0].split())
    assert included <= copied
    assert made == set(re.search(r"^packages = \[(.*)\]$", build, re.MULTILINE)[1].replace('"', "").split(", "))


def test_forms_for_issues_are_as_github_wants_them():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.stem == "config":
            continue
        assert {"name", "description", "body"} <= form.keys()
        assert {part["type"] for part in form["body"]} <= {"textarea", "dropdown", "input", "checkboxes", "markdown"}
        assert len({part["id"] for part in form["body"]}) == len(form["body"])
        assert all(part["attributes"]["label"] for part in form["body"])
