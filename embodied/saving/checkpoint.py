"""Checkpoints: everything needed to evaluate a policy or to continue its training, written completely or not at all.

A run stores checkpoints as numbered directories under `checkpoint/`; the newest is used. Each contains
`policy.safetensors` (the weights under their own names, for any program), `state.safetensors` (optimisers, random
states, environments) and `checkpoint.json` (counters, contract, config, and the checksums of all three). Nothing is
pickled.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from embodied.contract import Contract
from embodied.errors import DivergedError, UserError
from embodied.saving import sealed
from embodied.saving.files import flush, rename

if TYPE_CHECKING:
    from torch import Tensor

    from embodied.policy import TrainablePolicy

FORMAT = 2
FILES = WEIGHTS, STATE = "policy.safetensors", "state.safetensors"
RECORD = "checkpoint.json"
FOLDER = "checkpoint"
SHARDS = "shards"
POLICY = "/policy/"
"""Folder of a checkpoint with tensors that were divided among processes, and prefix of the weights' names there."""
BEST = "best"
"""Folder of a run with its best policy, next to the folder of its checkpoints."""
KEEP = 2
UNREADABLE = OSError, SafetensorError, ValueError, KeyError, TypeError
"""Errors of reading damaged files."""


@dataclass
class Checkpoint:
    """Weights by name, contract, JSON-ready config and counters; `state` is a tree of everything else.

    `shards` is a folder of the tensors in it that are divided among processes, which `save` moves.
    A loaded checkpoint has its `path` and the checksum of its weights, `weights_sha256`. `chosen` describes the
    selection of the best of several policies: its figure and number of episodes.
    """

    policy: Mapping[str, Tensor]
    contract: Contract
    config: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    weights_sha256: str | None = None
    chosen: dict[str, Any] | None = None
    shards: Path | None = None

    def check(self, env: Contract) -> None:
        """Raise an error for environments whose tensors this policy cannot use unchanged, or with other chunk sizes.

        Raises:
            UserError: with the differences on one line.
        """
        rows = [
            f"{size}: expected {getattr(self.contract, size)}, got {getattr(env, size)}"
            for size in ("horizon", "executed")
            if getattr(self.contract, size) != getattr(env, size)
        ]
        if rows := rows + self.contract.mismatches(env):
            raise UserError(
                f"the checkpoint {self.path} was trained with another contract ({'; '.join(rows)}); "
                "use the task and chunk sizes of its config, or train again"
            )

    def restore(self, policy: TrainablePolicy) -> None:
        """Load the weights into `policy`.

        Raises:
            UserError: on one line, if they belong to another network.
        """
        try:
            policy.load_state_dict(self.policy)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            new = [repr(key) for key in policy.contract.observation if key not in self.contract.observation]
            if new:
                reason = f"it has never seen the observations {', '.join(new)}"
            raise UserError(
                f"the weights of {self.path} are of another network ({reason}...); "
                "use the policy and the observations of its config"
            ) from error


def save(run: str | Path, checkpoint: Checkpoint, protected: int = 0) -> Path:
    """Add `checkpoint` to the run directory `run`, and return its path.

    All but the newest two and number `protected` are deleted. It is written under a temporary name and renamed when
    complete, so that a kill at any moment leaves the previous one.

    Raises:
        DivergedError: for weights that `load` would not accept; the earlier checkpoints remain.
    """
    final = _add(Path(run) / FOLDER, checkpoint)
    for old in _complete(final.parent)[:-KEEP]:
        if int(old.name) != protected:
            shutil.rmtree(old)
    return final


def save_best(run: str | Path, checkpoint: Checkpoint) -> Path:
    """Replace the best policy of the run directory `run` by `checkpoint`, of a policy alone; see `save`."""
    final = _add(Path(run) / BEST, checkpoint)
    for old in _complete(final.parent)[:-1]:
        shutil.rmtree(old)
    return final


def _add(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `checkpoint` as the newest one of `folder`."""
    from embodied.saving.weights import implausible

    if reason := implausible(checkpoint.policy):
        raise DivergedError(f"the policy has diverged and is not saved: {reason}; use a lower learning rate")
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".*.tmp"):  # left by a process killed while saving
        shutil.rmtree(leftover)
    complete = _complete(folder)
    number = int(complete[-1].name) + 1 if complete else 1
    final = folder / f"{number:06d}"
    temporary = folder / f".{number:06d}.tmp"
    try:
        _write(temporary, checkpoint)
        rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush(folder)
    return final


def newest(run: str | Path) -> Path | None:
    """Path of the newest checkpoint of the run directory `run`; None if there is none yet."""
    return next(reversed(_complete(Path(run) / FOLDER)), None)


def results_folder(path: Path) -> Path:
    """Folder of the results of the complete checkpoint at `path`: its run if it is the newest there.

    Other results must not replace those of the run: the best policy's are written into its folder `best`, an older
    one's into its own.
    """
    if path.parent.name == FOLDER and newest(path.parent.parent) == path:
        return path.parent.parent
    return path.parent if path.parent.name == BEST else path


def load(path: str | Path) -> Checkpoint:
    """Read the checkpoint at `path`: a run's directory (its newest), or one numbered directory.

    Raises:
        UserError: on one line, if there is none, a file is damaged, or weights are implausible; it names another
            checkpoint to use.
    """
    directory = _locate(Path(path))
    with _named_damage(directory):
        return _read(directory)


def load_weights(path: str | Path, contract: Contract) -> Checkpoint:
    """Read weights to start from: of the checkpoint at `path`, see `load`, or of a .safetensors file.

    Raises:
        UserError: see `load`; also for a checkpoint whose contract does not match `contract`.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        saved = load(path)
        saved.check(contract)
        return saved
    from safetensors.torch import load_file

    from embodied.saving.weights import implausible

    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read the weights {path} ({error}); expected a .safetensors file") from error
    if reason := implausible(weights):
        raise UserError(f"{path} is not a policy: {reason}")
    return Checkpoint(weights, contract, path=path)


def load_contract(path: str | Path) -> Contract:
    """Read the contract of the checkpoint at `path`, see `load`, without the weights and without torch.

    Raises:
        UserError: see `load`.
    """
    directory = _locate(Path(path))
    with _named_damage(directory):
        return Contract.from_dict(sealed.read(directory / RECORD, FORMAT)["contract"])


def load_config(path: str | Path) -> dict[str, Any]:
    """Read the composed configuration of the checkpoint at `path`, see `load`, without the weights.

    Raises:
        UserError: see `load`.
    """
    directory = _locate(Path(path))
    with _named_damage(directory):
        return sealed.read(directory / RECORD, FORMAT)["config"]


def load_counters(run: str | Path) -> list[dict[str, Any]]:
    """Read the counters of all checkpoints of the run directory `run`, the oldest first, without their weights.

    Raises:
        UserError: if one is damaged.
        OSError: if one cannot be read.
    """
    return [sealed.read(each / RECORD, FORMAT)["counters"] for each in _complete(Path(run) / FOLDER)]


def _read(directory: Path) -> Checkpoint:
    from safetensors.torch import load_file

    from embodied.saving.tree import load_tree
    from embodied.saving.weights import implausible

    record = sealed.read(directory / RECORD, FORMAT)
    sealed.check_files(directory / RECORD, record)
    weights = load_file(directory / WEIGHTS)
    state = load_tree(directory / STATE)
    if SHARDS in record:
        divided, state = _undivided(directory, record[SHARDS], state)
        weights |= divided
    if reason := implausible(weights):
        raise UserError(f"{WEIGHTS} is not a policy: {reason}")
    return Checkpoint(
        policy=weights,
        contract=Contract.from_dict(record["contract"]),
        config=record["config"],
        counters=record["counters"],
        state=state,
        path=directory,
        weights_sha256=record.get("weights_sha256", record["files"][WEIGHTS]),
        chosen=record.get("chosen"),
    )


def _undivided(directory: Path, digests: dict[str, str], state: Any) -> tuple[dict[str, Tensor], Any]:  # noqa: ANN401 - a tree
    """Read the shards in `directory`: weights by name, and `state` with whole tensors."""
    for name, expected in digests.items():
        file = directory / SHARDS / name
        if not file.is_file():
            raise UserError(f"{SHARDS}/{name}, one of {len(digests)} shards, is missing")
        if sealed.digest(file) != expected:
            raise UserError(f"{SHARDS}/{name} is damaged: its checksum differs from the one in {RECORD}")
    from embodied.saving import sharding

    tensors = sharding.read(directory / SHARDS)
    weights = {name.removeprefix(POLICY): each for name, each in tensors.items() if name.startswith(POLICY)}
    return weights, sharding.put_back(state, tensors)


@contextmanager
def _named_damage(directory: Path) -> Iterator[None]:
    """Context that reports errors in the checkpoint in `directory` as a UserError with another checkpoint."""
    try:
        yield
    except UNREADABLE as error:
        others = [other for other in reversed(_complete(directory.parent)) if other != directory and _readable(other)]
        advice = f"use {others[0]}" if others else "no other checkpoint of this run can be read: train again"
        raise UserError(f"the checkpoint {directory} cannot be read ({error}); {advice}") from error


def _readable(directory: Path) -> bool:
    try:
        _read(directory)
    except UNREADABLE:
        return False
    return True


def _write(directory: Path, checkpoint: Checkpoint) -> None:
    from embodied.saving.tree import save_tree

    directory.mkdir()
    save_tree(directory / STATE, checkpoint.state)
    digests: dict[str, str] = {}
    if checkpoint.shards:
        rename(checkpoint.shards, directory / SHARDS)
        files = sorted(path for path in (directory / SHARDS).iterdir() if path.is_file())
        digests = {path.name: sealed.digest(path) for path in files}
    # A flat dict of tensors is a tree whose names are its keys: any safetensors reader finds the usual names.
    save_tree(directory / WEIGHTS, dict(checkpoint.policy))
    record = {
        "format": FORMAT,
        "counters": checkpoint.counters,
        "contract": checkpoint.contract.to_dict(),
        "config": checkpoint.config,
        **({"chosen": checkpoint.chosen} if checkpoint.chosen else {}),
        **({SHARDS: digests, "weights_sha256": sealed.combined(digests)} if digests else {}),
    }
    sealed.write(directory / RECORD, record, FILES)
    flush(directory)


def _complete(folder: Path) -> list[Path]:
    return sorted(child for child in folder.glob("[0-9]*") if child.is_dir() and child.name.isdigit())


def _locate(path: Path) -> Path:
    if (path / RECORD).exists():
        return path
    for folder in (path / FOLDER, path):
        if complete := _complete(folder):
            return complete[-1]
    raise UserError(f"no checkpoint in {path}; expected a run's directory, such as outputs/<task>/<run>")
