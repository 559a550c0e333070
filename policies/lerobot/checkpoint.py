"""Policies as LeRobot publishes them: sizes, tensors and normalisation of a folder `pretrained_model`.

Read are config.json, model.safetensors, and the statistics of policy_preprocessor.json and policy_postprocessor.json in
their `*_step_*.safetensors`; of releases before 0.4, the statistics in model.safetensors. Nothing in a file is run.
Files that LeRobot 0.4.4 itself wrote were read; no published weights have been loaded yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.saving.json_text import loads
from policies.vla.checkpoints.statistics import Mode
from policies.vla.checkpoints.weights import folder_of, planned, reading

log = logging.getLogger(__name__)
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
STATE = "observation.state"
ENVIRONMENT = "observation.environment_state"
ACTION = "action"
"""LeRobot's names of the robot's state, the environment's state, and the action."""
PREFIXES = {"act": "model.", "diffusion": "diffusion."}
"""Beginnings of the names of the tensors of each kind of policy."""
NORMALIZER = "normalizer_processor"
UNNORMALIZER = "unnormalizer_processor"
STEPS = {"rename_observations_processor", "to_batch_processor", "device_processor", NORMALIZER, UNNORMALIZER}
"""Steps of processors that are supported: all but the normalisers leave values as they are."""
EARLIER = "normalize_inputs.buffer_", "unnormalize_outputs.buffer_", "normalize_targets.buffer_"
"""Beginnings of the names of statistics in model.safetensors before LeRobot 0.4."""
EPSILON = 1e-8
"""LeRobot's smallest divisor, where a processor does not name it."""


@dataclass(frozen=True)
class Layout:
    """Inputs and outputs of a policy in its own order.

    `cameras` are names of pictures and their height and width, `state` and `environment` numbers of elements of the
    robot's and the environment's state, `action` that of the action, `chunk` the number of predicted actions.
    """

    cameras: dict[str, tuple[int, int]]
    state: int
    environment: int
    action: int
    chunk: int


@dataclass(frozen=True)
class Checkpoint:
    """Tensors of a network by LeRobot's names, without those of statistics; its config.json, and its layout.

    `normalisers` have an offset and a divisor of each feature, by name: (x - offset) / divisor enters the network; of
    the action, x divisor + offset leaves it.
    """

    source: str
    config: dict[str, Any]
    layout: Layout
    tensors: dict[str, Tensor]
    normalisers: dict[str, tuple[Tensor, Tensor]]


def read(weights: str, kind: str, chunk: str) -> Checkpoint:
    """Read a policy of a `kind` (act or diffusion) from a folder or a name on the hub.

    Its field `chunk` is the number of actions of a chunk. While a run is only planned, no tensors are read.

    Raises:
        UserError: on one line, for missing or damaged files, policies of another kind, processing that is not
            supported, and missing statistics.
    """
    folder = folder_of(weights, f"LeRobot's {kind}")
    option = f"policy.weights={weights}"
    if not (folder / CONFIG).exists():
        raise UserError(f"{option} has no {CONFIG}; expected LeRobot's folder pretrained_model")
    with reading(f"{option}: cannot read {CONFIG}"):
        config = loads((folder / CONFIG).read_text(encoding="utf-8"))
        if config.get("type") != kind:
            raise ValueError(f"it is of type {config.get('type')}, and not {kind}")
        features = {**config["input_features"], **config["output_features"]}
        layout = _layout(features, config[chunk])
    if planned():
        return Checkpoint(weights, config, layout, {}, {})
    with reading(f"{option}: cannot read {WEIGHTS}"):
        tensors = load_file(folder / WEIGHTS)
    statistics = _Statistics(folder, option, config, tensors)
    prefix = PREFIXES[kind]
    network = {name.removeprefix(prefix): value for name, value in tensors.items() if not name.startswith(EARLIER)}
    return Checkpoint(
        weights, config, layout, network, {name: statistics.of(name, features[name]) for name in features}
    )


def fill(module: nn.Module, tensors: Mapping[str, Tensor], option: str, published: Callable[[str], str] = str) -> None:
    """Load `tensors` into `module`, which has exactly these; `published` is the name in a file of each of our names.

    Raises:
        UserError: that names the first tensor which is missing, misshapen, not finite or unknown.
    """
    own = {published(name): value for name, value in module.state_dict().items()}
    for name, value in own.items():
        if name not in tensors:
            raise UserError(f"{option} lacks the tensor {name}")
        if tensors[name].shape != value.shape:
            shapes = f"expected {list(value.shape)}, got {list(tensors[name].shape)}"
            raise UserError(f"{option} has {name} of another shape: {shapes}")
        if not bool(tensors[name].isfinite().all()):
            raise UserError(f"{option} has infinity or not a number in {name}; download or export the weights again")
    if unknown := sorted(tensors.keys() - own.keys()):
        raise UserError(f"{option} has the tensor {unknown[0]}, which this network does not have")
    module.load_state_dict({name: tensors[published(name)] for name in module.state_dict()})


def matched_cameras(checkpoint: Checkpoint, contract: Contract, own: list[str]) -> list[str]:
    """Pictures `own` of `contract` in the order of the checkpoint's: by name, or with a warning as they are.

    Raises:
        UserError: for another number of cameras, or pictures of another size.
    """
    option = f"policy.weights={checkpoint.source}"
    names = {
        name.removeprefix("observation.").removeprefix("images."): size
        for name, size in checkpoint.layout.cameras.items()
    }
    if len(own) != len(names):
        learned = ", ".join(names) or "no cameras"
        raise UserError(
            f"{option} has learned with {learned}; the task has {', '.join(own) or 'none'}: set task.images"
        )
    if set(own) == set(names):
        own = list(names)
    else:
        warn(f"{option} has learned with {', '.join(names)}, and sees {', '.join(own)}")
    for name, size in zip(own, names.values(), strict=True):
        if (shape := contract.observation[name].shape[-3:-1]) != size:
            sizes = f"{size[0]} x {size[1]} pixels, the task's {name} has {shape[0]} x {shape[1]}"
            raise UserError(f"{option} has learned with pictures of {sizes}: set task.image_size")
    return own


def check_sizes(checkpoint: Checkpoint, state: int, contract: Contract) -> None:
    """Raise UserError unless the task's `state` and action have as many elements as those of the checkpoint."""
    layout = checkpoint.layout
    option = f"policy.weights={checkpoint.source}"
    if state != layout.state + layout.environment:
        parts = f" and {layout.environment} of the environment's" if layout.environment else ""
        raise UserError(f"{option} reads {layout.state} elements of the robot's state{parts}; the task has {state}")
    if (actions := contract.action.shape[-1]) != layout.action:
        raise UserError(f"{option} has actions of {layout.action} elements, the task of {actions}")


class _Statistics:
    """Statistics and normalisation of the features of a checkpoint."""

    def __init__(self, folder: Path, option: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.option = option
        self.modes: dict[str, str] = dict(config.get("normalization_mapping") or {})
        self.epsilon = EPSILON
        self.normalised: list[str] | None = None  # names of the observations that are normalised; None: all
        self.tensors = {_later(name): value for name, value in tensors.items() if name.startswith(EARLIER)}
        # the action's statistics are those of the postprocessor, which undoes the normalisation
        for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
            if (folder / name).exists():
                self._read(folder / name)

    def of(self, name: str, feature: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Offset and divisor of the feature `name`, flat."""
        mode = self._mode(name, str(feature["type"]))
        shape = feature["shape"]
        size = shape[0] if feature["type"] == "VISUAL" else shape[-1]
        if mode is Mode.IDENTITY:
            return torch.zeros(size), torch.ones(size)
        values: list[Tensor] = []
        for statistic in mode.names:
            if (value := self.tensors.get(_key(name, statistic))) is None:
                raise UserError(
                    f"{self.option} has no statistics {name}.{statistic} for its normalisation {mode.value}"
                )
            if value.numel() != size or not bool(value.isfinite().all()):
                problem = "infinity or not a number" if value.numel() == size else f"{value.numel()} elements"
                raise UserError(f"{self.option} has {problem} in {name}.{statistic}; expected {size} finite elements")
            values.append(value.float().flatten())
        return _normaliser(mode, values[0], values[1], self.epsilon, undone=name == ACTION)

    def _mode(self, name: str, kind: str) -> Mode:
        skipped = self.normalised is not None and name != ACTION and name not in self.normalised
        mode = Mode.IDENTITY.value if skipped else self.modes.get(kind, Mode.IDENTITY.value)
        if mode not in {each.value for each in Mode}:
            expected = ", ".join(each.value for each in Mode)
            raise UserError(f"{self.option} has the normalisation {mode} of {name}; expected one of {expected}")
        return Mode(mode)

    def _read(self, file: Path) -> None:
        """Read modes and statistics of a processor."""
        with reading(f"cannot read {file}"):
            for step in loads(file.read_text(encoding="utf-8"))["steps"]:
                kind = str(step.get("registry_name", step.get("class")))
                if kind not in STEPS:
                    raise ValueError(f"it has the step {kind}, which is not supported")
                if kind not in (NORMALIZER, UNNORMALIZER):
                    continue
                options = step["config"]
                self.modes |= options["norm_map"]
                if kind == NORMALIZER:
                    self.epsilon = options.get("eps", EPSILON)
                    self.normalised = options.get("normalize_observation_keys")
                if state := step.get("state_file"):
                    statistics = load_file(file.parent / Path(state).name)
                    own = {_key(*name.rsplit(".", 1)): value for name, value in statistics.items()}
                    self.tensors |= own


def _layout(features: Mapping[str, Any], chunk: int) -> Layout:
    cameras = {name: feature["shape"] for name, feature in features.items() if feature["type"] == "VISUAL"}
    supported = {STATE, ENVIRONMENT, ACTION, *cameras}
    if other := sorted(features.keys() - supported):
        raise ValueError(f"it has the feature {other[0]}, which is not supported")
    if other := sorted(name for name, shape in cameras.items() if len(shape) != 3 or shape[0] != 3):
        raise ValueError(f"{other[0]} is of shape {cameras[other[0]]}, expected [3, height, width]")
    sizes = {name: int(features[name]["shape"][-1]) if name in features else 0 for name in supported - cameras.keys()}
    heights_and_widths = {name: (int(shape[1]), int(shape[2])) for name, shape in cameras.items()}
    return Layout(heights_and_widths, sizes[STATE], sizes[ENVIRONMENT], sizes[ACTION], int(chunk))


def _normaliser(mode: Mode, first: Tensor, second: Tensor, epsilon: float, *, undone: bool) -> tuple[Tensor, Tensor]:
    """Offset and divisor, as LeRobot computes them; if `undone`, of the way back from normalised values.

    Constant elements of a range are -1 in the network. Their divisor is 1, where LeRobot's amplifies rounding by 1e8;
    on the way back it is 0.
    """
    if mode is Mode.MEAN_STD:
        return first, second if undone else second + epsilon
    offset, divisor = mode.located(first, second)
    constant = divisor == 0.0
    if undone:
        return offset, divisor
    return torch.where(constant, first + 1.0, offset), torch.where(constant, 1.0, divisor)


def _key(name: str, statistic: str) -> str:
    """Name of a statistic with underscores, as earlier releases spell it."""
    return f"{name.replace('.', '_')}.{statistic}"


def _later(name: str) -> str:
    """Name of a statistic in model.safetensors without its beginning."""
    return next(name.removeprefix(prefix) for prefix in EARLIER if name.startswith(prefix))


@cache
def warn(message: str) -> None:
    """Warn once: a run builds several policies of the same weights."""
    log.warning(message)
