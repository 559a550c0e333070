"""How a run is repeated and gone on from: commands to type, and the machine that it ran on."""

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
from embodied.foreign_code import PLACEMENT, TASK, named

PLACES = ("output=", "resume=", "plan=", "eval_only=")
"""Options of train.py that are no part of what a run computes."""


def train_command(arguments: Sequence[str]) -> str:
    """The command that repeats a run which was given `arguments`, "key=value" each, perhaps when it was resumed."""
    last = {each.partition("=")[0]: each for each in arguments if not each.startswith(PLACES)}
    return f"{command('train')} {shlex.join(last.values())}".rstrip()


def next_commands(directory: Path, export_target: str | None, arguments: Sequence[str] = ()) -> list[str]:
    """Commands to run after a finished run in `directory`, whose policy can be exported as `export_target`, if any.

    `arguments` are those of the run.
    """
    run = typed("checkpoint", from_here(directory))
    return [
        f"{command('evaluate')} {shlex.join([option('checkpoint', from_here(directory)), *named(arguments)])}",
        *([f"{command('export')} {run} target={export_target}"] if export_target else []),
        module("tensorboard.main", "--logdir", from_here(directory)),
    ]


def film_command(directory: Path, distribution: str, start: int, task: str | None = None) -> str:
    """The command that runs and films the initial state `start` of `distribution`, of one of several tasks if given."""
    only = [f"task.tasks=[{quoted(task)}]"] if task else []
    options = [f"distributions=[{quoted(distribution)}]", f"first_start={start}", "episodes=1", *only, "video=true"]
    return f"{command('evaluate')} {typed('checkpoint', from_here(directory))} {shlex.join(options)}"


def resume_command(directory: Path, arguments: Sequence[str] = ()) -> str:
    """The command that continues a stopped run in `directory`, which was given `arguments`."""
    options = [option("resume", from_here(directory)), *named(arguments, (TASK, PLACEMENT))]
    return f"{command('train')} {shlex.join(options)}"


def machine(device: str) -> dict[str, Any]:
    """What the run computes on: processor, cores that it may use, PyTorch's threads, `device`, operating system."""
    cores = len(os.sched_getaffinity(0))
    described = {"processor": _processor(), "cores": cores, "threads": torch.get_num_threads(), "device": device}
    if device.startswith("cuda"):
        described["gpu"] = torch.cuda.get_device_name(device)
    return described | {"system": f"{platform.system()} {platform.release()}"}


def from_here(path: Path) -> Path:
    """`path` as typed from the working directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _processor() -> str:
    told = Path("/proc/cpuinfo")
    found = (
        re.search(r"^model name\s*:\s*(.+)$", told.read_text(encoding="utf-8"), re.MULTILINE) if told.exists() else None
    )
    return found[1] if found else platform.machine()
