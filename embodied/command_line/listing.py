"""List of all tasks by simulator for `train.py list=tasks`: descriptions, requirements, installation."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from embodied.command_line import combinations
from embodied.command_line.config import Groups, names
from embodied.commands import CONFIGS, command

WIDTH = 120


@dataclass(frozen=True)
class Needs:
    """Requirements of a simulator beyond the smallest install: an `extra`, with `modules`, for tasks `of` a kind.

    If its packages conflict with ours, `install` installs it into an environment of its own, `venv`.
    """

    extra: str
    modules: tuple[str, ...]
    of: str = ""
    venv: str = ""
    install: str = ""

    def described(self) -> str:
        """Text on the extra: whether it is installed, and the command that installs it."""
        missing = [name for name in self.modules if find_spec(name) is None]
        python = Path(self.venv) / "bin" / "python"
        if missing and self.venv and python.exists():
            state = f"installed in {self.venv}: task.python={python}"
        elif missing:
            install_command = self.install or f"pip install 'embodied-rl[{self.extra}]'"
            state = f"not installed: {install_command}"
        else:
            state = "installed"
        return f"extra {self.extra}{f' for {self.of}' if self.of else ''}, {state}"


def tasks(classes: Mapping[str, type], needs: Mapping[str, Needs]) -> str:
    """List the tasks of configs/task/, grouped by the package of their class of `classes`, with what that `needs`."""
    by_simulator: dict[str, list[tuple[str, str]]] = {}
    heads: dict[str, str] = {}
    for path in sorted((CONFIGS / "task").glob("*.yaml")):
        task_class = classes[_schema(path, classes)]
        simulator = task_class.__module__.split(".")[-2]
        by_simulator.setdefault(simulator, []).append((path.stem, described(path.stem)))
        heads[simulator] = _head(simulator, task_class, needs.get(simulator))
    width = max(len(name) for entries in by_simulator.values() for name, _ in entries)
    lines = []
    for simulator, entries in sorted(by_simulator.items()):
        texts = (textwrap.shorten(text, WIDTH - width - 4, placeholder=" ...") for _, text in entries)
        rows = [f"  {name:{width}}  {text}" for (name, _), text in zip(entries, texts, strict=True)]
        lines += [heads[simulator], *rows, ""]
    return "\n".join([*lines, f"{command('train')} task=NAME trains one; --help task=NAME tells its options."])


def _head(simulator: str, task_class: type, needs: Needs | None) -> str:
    assets = task_class().asset_kind
    parts = [needs.described() if needs else "needs nothing more", *([f"{assets} assets found"] if assets else [])]
    return f"{simulator} ({'; '.join(parts)})"


def _schema(path: Path, classes: Mapping[str, type]) -> str:
    """Name in `classes` of the file's defaults, or of the task from which it derives."""
    loaded: Any = OmegaConf.load(path)
    first = str(loaded.defaults[0]).partition("@")[0]
    return first if first in classes else _schema(path.with_stem(first), classes)


def described(task: str) -> str:
    """First sentence of the comment at the beginning of the file of `task`."""
    path = CONFIGS / "task" / f"{task}.yaml"
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment += [] if "@package" in line else [line.lstrip("# ")]
    return " ".join(comment).partition(". ")[0].rstrip(".")


def choices(text: str, chosen: Mapping[str, str], groups: Groups) -> str:
    """First part of --help=all: the program's `text`, choices of each group, and valid combinations of the task."""
    lines = [f"{group}: {', '.join(names(group, groups))}" for group in groups]
    takes = f"task={(task := chosen['task'])} takes {combinations.described(task)}"
    options = " ".join(f"{group}={name}" for group, name in chosen.items())
    return "\n".join([text, *lines, "", takes, "", f"Options of {options}:"])
