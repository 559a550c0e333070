"""Checkpoints: everything needed to evaluate a policy or to continue its training, written whole or not at all.

A run keeps its checkpoints as numbered directories under `checkpoint/`; the newest is the one that counts. Each holds
`policy.safetensors` (the weights under their own names, for any program), `state.safetensors` (optimisers, random
states, environments) and `checkpoint.json` (counters, contract, config). Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from embodied.contract import Binding, Contract
from embodied.errors import UserError
from embodied.files import flush

if TYPE_CHECKING:
    from torch import Tensor

    from embodied.policy import TrainablePolicy

FORMAT = 1
FOLDER = "checkpoint"
KEEP = 2


@dataclass
class Checkpoint:
    """Weights by name, contract, JSON-ready config and counters; `state` is a tree of all else."""

    policy: Mapping[str, Tensor]
    contract: Contract
    config: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def bind(self, provider: Contract) -> Binding:
        """Plan how `provider` (an environment, a robot) serves this policy, in the chunks it was trained in.

        Raises:
            UserError: on one line, where it cannot.
        """
        rows = [
            f"{size}: expected {getattr(self.contract, size)}, got {getattr(provider, size)}"
            for size in ("horizon", "executed")
            if getattr(self.contract, size) != getattr(provider, size)
        ]
        if rows := rows + self.contract.differences(provider):
            raise UserError(
                f"the checkpoint {self.path} was trained under another contract ({'; '.join(rows)}); "
                "use the task and chunk sizes of its config, or train anew"
            )
        return self.contract.bind(provider)

    def restore(self, policy: TrainablePolicy) -> None:
        """Load the weights into `policy`.

        Raises:
            UserError: on one line, where they belong to another network.
        """
        try:
            policy.load_state_dict(self.policy)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"the weights of {self.path} are of another network ({reason}...); use the policy of its config"
            ) from error


def save(run: str | Path, checkpoint: Checkpoint) -> Path:
    """Add `checkpoint` to the directory `run` and drop all but the newest two; returns its path.

    It is built under a temporary name and renamed when complete, so a kill at any moment leaves the previous one.
    """
    folder = Path(run) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".*.tmp"):  # of a process killed while it saved
        shutil.rmtree(leftover)
    complete = _complete(folder)
    number = int(complete[-1].name) + 1 if complete else 1
    final, temporary = folder / f"{number:06d}", folder / f".{number:06d}.tmp"
    try:
        _write(temporary, checkpoint)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush(folder)
    for old in [*complete, final][:-KEEP]:
        shutil.rmtree(old)
    return final


def load(path: str | Path) -> Checkpoint:
    """Read the checkpoint at `path`: a run's directory (its newest), or one numbered directory.

    Raises:
        UserError: on one line, where there is none or it is damaged, saying which other one to use.
    """
    from safetensors.torch import load_file

    from embodied.tree import load_tree

    directory = _locate(Path(path))
    with _told(directory):
        record = _record(directory)
        return Checkpoint(
            policy=load_file(directory / "policy.safetensors"),
            contract=Contract.from_dict(record["contract"]),
            config=record["config"],
            counters=record["counters"],
            state=load_tree(directory / "state.safetensors"),
            path=directory,
        )


def load_contract(path: str | Path) -> Contract:
    """The contract of the checkpoint at `path`, as `load` finds it, without the weights and without torch.

    Raises:
        UserError: as `load`.
    """
    directory = _locate(Path(path))
    with _told(directory):
        return Contract.from_dict(_record(directory)["contract"])


def _record(directory: Path) -> dict[str, Any]:
    record = json.loads((directory / "checkpoint.json").read_text())
    if record["format"] != FORMAT:
        raise UserError(f"format {record['format']}, this version reads format {FORMAT}")
    return record


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    """What is wrong with the checkpoint in `directory`, on one line, with the one to use in its place."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        others = [str(other) for other in _complete(directory.parent) if other != directory]
        advice = f"use the one before it: {others[-1]}" if others else "there is no other one in this run; train anew"
        raise UserError(f"the checkpoint {directory} cannot be read ({error}); {advice}") from error


def _write(directory: Path, checkpoint: Checkpoint) -> None:
    from embodied.tree import save_tree

    directory.mkdir()
    save_tree(directory / "state.safetensors", checkpoint.state)
    # A flat dict of tensors is a tree whose places are its keys, so any safetensors reader finds the usual names.
    save_tree(directory / "policy.safetensors", dict(checkpoint.policy))
    record = {
        "format": FORMAT,
        "counters": checkpoint.counters,
        "contract": checkpoint.contract.to_dict(),
        "config": checkpoint.config,
    }
    (directory / "checkpoint.json").write_text(json.dumps(record, indent=2) + "\n")
    flush(directory / "checkpoint.json")
    flush(directory)


def _complete(folder: Path) -> list[Path]:
    return sorted(child for child in folder.glob("[0-9]*") if child.is_dir() and child.name.isdigit())


def _locate(path: Path) -> Path:
    if (path / "checkpoint.json").exists():
        return path
    for folder in (path / FOLDER, path):
        if complete := _complete(folder):
            return complete[-1]
    raise UserError(f"no checkpoint in {path}; expected a run's directory, such as outputs/<task>/<time>")
