"""Statistics of state and action that published weights of pi0 and pi0.5 bring, as three programs leave them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from embodied.errors import UserError
from embodied.saving.json_text import loads

STATISTICS = ("state_mean", "state_std", "action_mean", "action_std")
PARTS, MEANS, RANGES = ("state", "action"), ("mean", "std"), ("q01", "q99")
NORMALIZER = "policy_preprocessor_step_*_normalizer_processor.safetensors"
ADVICE = "mend this file, or remove it to take those of demonstrations"
Pairs = list[list[Any]]
"""What two names say of the state, and of the action; [] where a file is about something else."""
UNREADABLE = OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError
"""Errors of reading missing or damaged files."""


def read(folder: Path, kind: str) -> dict[str, Tensor]:
    """`STATISTICS` from where transformers, LeRobot or openpi leave them in `folder`; {} if there are none.

    Those of pi05 are middle and half width of the range between the first and the last of a hundred quantiles.

    Raises:
        UserError: on one line that names the file, if they are damaged, not finite, or of nothing that varied.
    """
    ours = MEANS if kind == "pi0" else RANGES
    kept = [
        *((path, _transformers, MEANS) for path in sorted(folder.glob("*processor_config.json"))),
        *((path, _lerobot, ours) for path in sorted(folder.glob(NORMALIZER))),
        *((path, _openpi, ours) for path in sorted(folder.rglob("norm_stats.json"))),
    ]
    for path, reader, names in kept:
        try:
            pairs = [[torch.as_tensor(each, device="cpu").float() for each in pair] for pair in reader(path, names)]
            wrong = [_wrong(names, *pair) for pair in pairs]
        except UNREADABLE as error:
            raise UserError(f"cannot read the statistics in {path} ({reason(error)}); {ADVICE}") from error
        if any(wrong):
            told = "; ".join(f"{part}: {what}" for part, what in zip(PARTS, wrong, strict=True) if what)
            raise UserError(f"wrong statistics in {path} ({told}); {ADVICE}")
        if pairs:
            return _located(names, pairs)
    return {}


def fitting(mean: Tensor, std: Tensor, size: int) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation of the first `size` elements if all others are padding, which never varies; else None.

    Elements that never varied are divided by 1.
    """
    if len(mean) < size or bool(std[size:].any()):
        return None
    return mean[:size], torch.where(std[:size] < 1e-6, 1.0, std[:size])


def counted(std: Tensor) -> int:
    """Elements that a deviation is of, without padding at its end."""
    return int(std.nonzero().max()) + 1


def reason(error: Exception) -> str:
    """What went wrong, on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = (str(error).strip().splitlines() or [""])[0]
    return f"it lacks {said}" if isinstance(error, KeyError) else said or type(error).__name__


def _transformers(path: Path, names: Sequence[str]) -> Pairs:
    said = loads(path.read_text(encoding="utf-8"))
    if not (said.get("state_mean") and said.get("actions_mean")):
        return []  # about something else
    return [[said[f"{of}_{what}"] for what in names] for of in ("state", "actions")]


def _lerobot(path: Path, names: Sequence[str]) -> Pairs:
    said = load_file(path)
    keys = [[f"{of}.{what}" for what in names] for of in ("observation.state", "action")]
    return [[said[key] for key in pair] for pair in keys] if {*keys[0], *keys[1]} <= said.keys() else []


def _openpi(path: Path, names: Sequence[str]) -> Pairs:
    said = loads(path.read_text(encoding="utf-8"))
    said = said.get("norm_stats", said)
    return [[said[of][what] for what in names] for of in ("state", "actions")]


def _wrong(names: Sequence[str], first: Tensor, second: Tensor) -> str:
    """Why these cannot be statistics; "" if they can."""
    if first.ndim != 1 or first.shape != second.shape:
        sizes = f"{list(first.shape)} and {list(second.shape)}"
        return f"expected {names[0]} and {names[1]} of as many elements, got {sizes}"
    for name, values in zip(names, (first, second), strict=True):
        if not bool(values.isfinite().all()):
            return f"infinity or not a number in {name}"
    spread, what = (second, "std") if names == MEANS else (second - first, "q99 - q01")
    least = int(spread.argmin()) if len(spread) else 0
    if bool((spread < 0.0).any()):
        return f"expected {what} of at least 0, got {spread[least]:g} of element {least}"
    return "" if bool(spread.any()) else f"{what} is 0 of all {len(spread)} elements"


def _located(names: Sequence[str], pairs: list[list[Tensor]]) -> dict[str, Tensor]:
    if names == RANGES:
        pairs = [[(low + high) / 2.0, (high - low) / 2.0] for low, high in pairs]
    return dict(zip(STATISTICS, [value for pair in pairs for value in pair], strict=True))
