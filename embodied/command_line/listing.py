"""All tasks by simulator, as `train.py list=tasks` tells them: what each is, what it needs, whether that is here."""

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
    """What a simulator needs beyond the smallest install: an `extra`, which brings `modules`, for tasks `of` a kind.

    Where its packages do not go together with ours, `install` installs it into an environment of its own, `venv`.
    """

    extra: str
    modules: tuple[str, ...]
    of: str = ""
    venv: str = ""
    install: str = ""

    def told(self) -> str:
        """The extra, whether it is installed, and how to install it."""
        missing = [name for name in self.modules if find_spec(name) is None]
        python = Path(self.venv) / "bin" / "python"
        if missing and self.venv and python.exists():
            state = f"installed in {self.venv}: task.python={python}"
        elif missing:
            how = self.install or f"pip install 'embodied-rl[{self.extra}]'"
            state = f"not installed: {how}"
        else:
            state = "installed"
        return f"extra {self.extra}{f' for {self.of}' if self.of else ''}, {state}"


def tasks(classes: Mapping[str, type], needs: Mapping[str, Needs]) -> str:
    """The tasks of configs/task/, grouped by the package of their class of `classes`, with what that `needs`."""
    found: dict[str, list[tuple[str, str]]] = {}
    heads: dict[str, str] = {}
    for path in sorted((CONFIGS / "task").glob("*.yaml")):
        made = classes[_schema(path, classes)]
        simulator = made.__module__.split(".")[-2]
        found.setdefault(simulator, []).append((path.stem, _described(path)))
        heads[simulator] = _head(simulator, made, needs.get(simulator))
    width = max(len(name) for listed in found.values() for name, _ in listed)
    lines = []
    for simulator, listed in sorted(found.items()):
        told = (textwrap.shorten(text, WIDTH - width - 4, placeholder=" ...") for _, text in listed)
        rows = [f"  {name:{width}}  {text}" for (name, _), text in zip(listed, told, strict=True)]
        lines += [heads[simulator], *rows, ""]
    return "\n".join([*lines, f"{command('train')} task=NAME trains one; --help task=NAME tells its options."])


def _head(simulator: str, made: type, needs: Needs | None) -> str:
    assets = made().asset_kind
    told = [needs.told() if needs else "needs nothing more", *([f"{assets} assets found"] if assets else [])]
    return f"{simulator} ({'; '.join(told)})"


def _schema(path: Path, classes: Mapping[str, type]) -> str:
    """Which of `classes` the file's defaults name, or those of the task that it derives from."""
    loaded: Any = OmegaConf.load(path)
    first = str(loaded.defaults[0]).partition("@")[0]
    return first if first in classes else _schema(path.with_stem(first), classes)


def _described(path: Path) -> str:
    """The first sentence of the comment that the file begins with."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment += [] if "@package" in line else [line.lstrip("# ")]
    return " ".join(comment).partition(". ")[0].rstrip(".")


def choices(described: str, chosen: Mapping[str, str], groups: Groups) -> str:
    """The beginning of a program's --help: what it is, what there is of each group, and what goes with the task."""
    listed = [f"{group}: {', '.join(names(group, groups))}" for group in groups]
    takes = f"task={(task := chosen['task'])} takes {combinations.described(task)}"
    options = " ".join(f"{group}={name}" for group, name in chosen.items())
    return "\n".join([described, *listed, "", takes, "", f"Options of {options}:"])
