"""Statistics of state and action in published weights of pi0 and pi0.5, in the formats of three programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from embodied.errors import UserError
from embodied.saving.json_text import loads

STATISTICS = ("state_mean", "state_std", "action_mean", "action_std")
CONSTANTS = ("state_constant", "action_constant")
"""Names of the normalised values of constant elements (`Mode.constant`)."""
PARTS = ("state", "action")
MEANS = ("mean", "std")
NORMALIZERS = tuple(
    f"policy_preprocessor_step_*_{step}.safetensors" for step in ("normalizer_processor", "groot_pack_inputs_v3")
)
"""Files of LeRobot's processors with statistics; the second is GR00T's."""
ADVICE = "mend this file, or remove it to take those of demonstrations"
BUFFERS = "normalize_inputs.buffer_observation_state.{}", "unnormalize_outputs.buffer_action.{}"
"""LeRobot's names of statistics of state and action in model.safetensors, before its release 0.4."""
DEMONSTRATIONS = "demonstrations"
"""Value of `unnorm_key` with which published statistics are not read."""
Pairs = list[list[Any]]
"""Two statistics each of the state and of the action; [] for a file with other contents."""
TROSSEN = "trossen"
"""Name of the data set of ALOHA, of which openpi published models; others have "aloha" in their names."""
UNREADABLE = OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError
"""Errors of reading missing or damaged files."""


class Mode(Enum):
    """Normalisation of a feature, by LeRobot's names: to (x - mean) / std, or a range between two values to [-1, 1]."""

    MEAN_STD = "MEAN_STD"
    MIN_MAX = "MIN_MAX"
    QUANTILES = "QUANTILES"
    QUANTILE10 = "QUANTILE10"
    IDENTITY = "IDENTITY"

    @property
    def names(self) -> tuple[str, str]:
        """Names of its two statistics; IDENTITY uses only their number of elements."""
        ranges = {Mode.MIN_MAX: ("min", "max"), Mode.QUANTILES: ("q01", "q99"), Mode.QUANTILE10: ("q10", "q90")}
        return ranges.get(self, MEANS)

    @property
    def constant(self) -> float:
        """Normalised value of a constant element: the lower end of a range, or its middle where there is no range."""
        return 0.0 if self.names == MEANS else -1.0

    def located(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Offset that is subtracted from a feature, and divisor of the difference."""
        if self is Mode.IDENTITY:
            return torch.zeros_like(first), torch.ones_like(first)
        # a range [a, b] goes to [-1, 1]: (x - (a + b) / 2) / ((b - a) / 2)
        return (first, second) if self is Mode.MEAN_STD else ((first + second) / 2.0, (second - first) / 2.0)

    def stated(self, offset: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
        """Statistics for which `located` gives this offset and divisor."""
        return (offset, divisor) if self.names == MEANS else (offset - divisor, offset + divisor)


Modes = tuple[Mode, Mode]
"""Normalisation of the state and of the action."""


def read(folder: Path, modes: Modes, key: str | None = None) -> dict[str, Tensor]:
    """Read `STATISTICS` and `CONSTANTS` as transformers, LeRobot or openpi wrote them into `folder`; {} without.

    `key` names one of several data sets with openpi's statistics, or is "demonstrations": then they are not read.

    Raises:
        UserError: on one line that names the file, if they are damaged, not finite, or of constants only; for several
        without a `key`, or an unknown `key`; and for openpi's of ALOHA.
    """
    if key == DEMONSTRATIONS:
        return {}
    means = Mode.MEAN_STD, Mode.MEAN_STD
    sources: list[tuple[Path, Callable[[Path, Sequence[Sequence[str]]], Pairs], Modes]] = [
        *((path, _transformers, means) for path in sorted(folder.glob("*processor_config.json"))),
        *((path, _lerobot, modes) for pattern in NORMALIZERS for path in sorted(folder.glob(pattern))),
        *((path, _buffers, modes) for path in sorted(folder.glob("model*.safetensors"))),
        *((_without_turned_joints(path), _openpi, modes) for path in _chosen(folder, key)),
    ]
    for path, reader, source_modes in sources:
        names = [mode.names for mode in source_modes]
        try:
            # in float64, in which openpi's text has them: their middle and half width are then exact
            pairs = [
                [torch.as_tensor(each, dtype=torch.float64, device="cpu") for each in pair]
                for pair in reader(path, names)
            ]
            problems = [
                _wrong(pair_names, *pair) if mode is not Mode.IDENTITY else ""
                for mode, pair_names, pair in zip(source_modes, names, pairs, strict=False)
            ]
        except UNREADABLE as error:
            raise UserError(f"cannot read the statistics in {path} ({reason(error)}); {ADVICE}") from error
        if any(problems):
            message = "; ".join(f"{part}: {problem}" for part, problem in zip(PARTS, problems, strict=True) if problem)
            raise UserError(f"wrong statistics in {path} ({message}); {ADVICE}")
        if pairs:
            located = [value for mode, pair in zip(source_modes, pairs, strict=True) for value in mode.located(*pair)]
            constants = [torch.tensor(mode.constant, device="cpu") for mode in source_modes]
            names = (*STATISTICS, *CONSTANTS)
            return {name: value.float() for name, value in zip(names, (*located, *constants), strict=True)}
    return {}


def data_set(folder: Path, key: str | None = None) -> str | None:
    """Name of the data set of openpi's statistics that `read` chooses in `folder`; None without a name."""
    paths = [] if key == DEMONSTRATIONS else _chosen(folder, key)
    name = paths[0].parent.relative_to(folder).as_posix() if paths else "."
    return None if name == "." else name.removeprefix("assets/")


def _chosen(folder: Path, key: str | None) -> list[Path]:
    """Files of openpi's statistics of the data set `key`, or of the only one."""
    by_name = {str(path.parent.relative_to(folder)): path for path in sorted(folder.rglob("norm_stats.json"))}
    paths = [path for name, path in by_name.items() if key is None or name == key or name.endswith(f"/{key}")]
    names = ", ".join(Path(name).name if name != "." else name for name in by_name)
    if key is not None and not paths:
        raise UserError(f"{folder} has no statistics of policy.unnorm_key={key}; expected one of {names or 'none'}")
    if len(paths) > 1:
        raise UserError(f"{folder} has statistics of {len(paths)} data sets; choose policy.unnorm_key from {names}")
    return paths


def _without_turned_joints(path: Path) -> Path:
    """The `path` of openpi's statistics.

    Raises:
        UserError: for those of ALOHA, which are of other joint angles than the robot's: openpi converts between them.
    """
    if (name := path.parent.name.lower()) == TROSSEN or "aloha" in name:
        raise UserError(
            f"{path} is of ALOHA, whose joints openpi turns (adapt_to_pi), which is not supported;"
            f" use policy.unnorm_key={DEMONSTRATIONS}"
        )
    return path


def fitting(mean: Tensor, std: Tensor, size: int, constant: Tensor | float = 0.0) -> tuple[Tensor, Tensor] | None:
    """Offset and divisor of `size` elements if the statistics have so many, without padding (`counted`); else None.

    Constant elements are divided by 1, and normalised to `constant`.
    """
    if size not in (len(mean), counted(mean, std)):
        return None
    mean, std = mean[:size], std[:size]
    is_constant = std < 1e-6
    # (x - offset) / 1 = constant at x = mean
    return torch.where(is_constant, mean - constant, mean), torch.where(is_constant, 1.0, std)


def counted(mean: Tensor, std: Tensor) -> int:
    """Number of elements, without padding at the end, which is elements of mean and deviation 0."""
    real = ((mean != 0.0) | (std != 0.0)).nonzero()
    return int(real.max()) + 1 if len(real) else 0


def reason(error: Exception) -> str:
    """Reason of an error, on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message = (str(error).strip().splitlines() or [""])[0]
    return f"it lacks {message}" if isinstance(error, KeyError) else message or type(error).__name__


def _transformers(path: Path, names: Sequence[Sequence[str]]) -> Pairs:
    contents = loads(path.read_text(encoding="utf-8"))
    if not (contents.get("state_mean") and contents.get("actions_mean")):
        return []  # other contents
    return _pairs(contents, ("state_{}", "actions_{}"), names)


def _lerobot(path: Path, names: Sequence[Sequence[str]]) -> Pairs:
    tensors = load_file(path)
    keys = ("observation.state.{}", "action.{}")
    if not any(name.startswith(("observation.state.", "action.")) for name in tensors):
        return []  # other contents
    return _pairs(tensors, keys, names)


def _buffers(path: Path, names: Sequence[Sequence[str]]) -> Pairs:
    with safe_open(path, "pt") as tensors:
        entries = {name: tensors.get_tensor(name) for name in tensors.keys() if ".buffer_" in name}  # noqa: SIM118
    entry_names = [key.format(statistic) for key, pair in zip(BUFFERS, names, strict=True) for statistic in pair]
    if not any(name in entries and bool(entries[name].isfinite().any()) for name in entry_names):
        return []  # without statistics LeRobot filled them with infinity
    return _pairs(entries, BUFFERS, names)


def _openpi(path: Path, names: Sequence[Sequence[str]]) -> Pairs:
    contents = loads(path.read_text(encoding="utf-8"))
    contents = contents.get("norm_stats", contents)
    return [[contents[group][name] for name in pair] for group, pair in zip(("state", "actions"), names, strict=True)]


def _pairs(entries: dict[str, Any], keys: Sequence[str], names: Sequence[Sequence[str]]) -> Pairs:
    return [[entries[key.format(statistic)] for statistic in pair] for key, pair in zip(keys, names, strict=True)]


def _wrong(names: Sequence[str], first: Tensor, second: Tensor) -> str:
    """Reason why these cannot be statistics; "" if they can."""
    if first.ndim != 1 or first.shape != second.shape:
        sizes = f"{list(first.shape)} and {list(second.shape)}"
        return f"expected {names[0]} and {names[1]} of as many elements, got {sizes}"
    for name, values in zip(names, (first, second), strict=True):
        if not bool(values.isfinite().all()):
            return f"infinity or not a number in {name}"
    spread, expression = (second, "std") if names == MEANS else (second - first, f"{names[1]} - {names[0]}")
    index = int(spread.argmin()) if len(spread) else 0
    if bool((spread < 0.0).any()):
        return f"expected {expression} of at least 0, got {spread[index]:g} of element {index}"
    return "" if bool(spread.any()) else f"{expression} is 0 of all {len(spread)} elements"
