"""Publishes trained policies as LeRobot's folder `pretrained_model`, which LeRobot and `policy.weights` read.

Of ACT and diffusion policies are written config.json, model.safetensors, both processors with the statistics, the
contract and a model card. Differs from acting here: LeRobot does not clamp actions to their limits. Diffusion policies
act by DDIM there, as deterministic acting does here, but with noise that is not derived from clipped actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from policies.diffusion import DiffusionPolicy
from policies.lerobot.act import ACTPolicy
from policies.lerobot.act_network import ACTSizes
from policies.lerobot.checkpoint import ACTION, CONFIG, ENVIRONMENT, PREFIXES, STATE, WEIGHTS, Layout
from policies.lerobot.diffusion import LeRobotDiffusion, LeRobotEncoder, encoder_name, network_name
from policies.vla.checkpoints.lerobot_folder import (
    BEGINNING,
    CPU,
    PICTURE,
    loading,
    named_statistics,
    normalisers,
    stored,
    write_json,
    write_processors,
)
from policies.vla.checkpoints.lerobot_publishing import publish as publish_pi0
from policies.vla.checkpoints.publishing import check_new, write_description
from policies.vla.checkpoints.statistics import Mode
from policies.vla.groot.policy import GrootPolicy
from policies.vla.groot.publishing import publish as publish_groot
from policies.vla.pi0 import Pi0Policy
from policies.vla.pi0_fast.policy import Pi0FastPolicy
from policies.vla.pi0_fast.publishing import publish as publish_pi0_fast
from policies.vla.pi05 import Pi05Policy
from policies.vla.smolvla.policy import SmolVLAPolicy
from policies.vla.smolvla.publishing import publish as publish_smolvla

CLASSES = {"act": "ACTPolicy", "diffusion": "DiffusionPolicy"}
"""LeRobot's classes."""
MODES = {"act": Mode.MEAN_STD, "diffusion": Mode.MIN_MAX}
"""Normalisation of states and action; that of pictures is MEAN_STD."""
Pair = tuple[Tensor, Tensor]
"""Offset and divisor of a normalisation."""


@dataclass(frozen=True)
class Contents:
    """Contents of a folder: `settings` of config.json beside the features, and tensors by LeRobot's names.

    `state` and `action` are normalisations of elements, and `pictures` those of the channels of each camera, [C, 3].
    """

    layout: Layout
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    state: Pair
    action: Pair
    pictures: Pair


def publish(policy: TrainablePolicy, folder: Path, run: Path) -> None:
    """Write `policy` into `folder`, which must not exist; the card ends with the report of the directory `run`.

    Raises:
        UserError: for a folder that exists, and policies that LeRobot does not have or cannot represent.
    """
    writer = WRITERS.get(type(policy))
    if writer is None:
        kinds = "pi0, pi05, pi0_fast, smolvla, groot, act and diffusion"
        raise UserError(f"target=lerobot is for policy={kinds}, got {type(policy).__name__}; use target=hub")
    writer(policy, folder, run)


def _publish(policy: ACTPolicy | DiffusionPolicy, folder: Path, run: Path) -> None:
    contents = _act(policy) if isinstance(policy, ACTPolicy) else _diffusion(policy)
    check_new(folder)
    pairs = _normalisations(contents)
    features = _features(contents.layout)
    modes = [Mode.MEAN_STD if name.startswith(PICTURE) else MODES[policy.kind] for name in pairs]
    config = contents.settings | {
        "type": policy.kind,
        "input_features": {name: feature for name, feature in features.items() if name != ACTION},
        "output_features": {ACTION: features[ACTION]},
        "n_action_steps": policy.contract.executed,
        "normalization_mapping": {features[name]["type"]: mode.value for name, mode in zip(pairs, modes, strict=True)},
    }
    folder.mkdir(parents=True)
    write_json(folder / CONFIG, config)
    tensors = {PREFIXES[policy.kind] + name: value for name, value in contents.tensors.items()}
    save_file(stored(tensors), folder / WEIGHTS, {"format": "pt"})
    normaliser, unnormaliser = normalisers(config)
    write_processors(folder, [*BEGINNING, CPU, normaliser], [unnormaliser, CPU], named_statistics(pairs, modes))
    write_description(policy, folder, run, "lerobot", loading(policy.kind, CLASSES[policy.kind], "select_action"))


def _act(policy: ACTPolicy) -> Contents:
    layout, state, config = policy.layout, policy.state, asdict(policy.config)
    if not layout.cameras and not layout.environment:
        raise UserError("LeRobot's ACT needs pictures or an environment's state, which this has not; use target=hub")
    settings = {
        "n_obs_steps": 1,
        "chunk_size": layout.chunk,
        **{each.name: config[each.name] for each in fields(ACTSizes)},
        "vision_backbone": policy.config.vision_backbone.value,
        "pretrained_backbone_weights": None,
        "kl_weight": policy.config.kl_weight,
    }
    return Contents(
        layout,
        settings,
        policy.network.state_dict(),
        (state.mean[: state.observed], state.scale[: state.observed]),
        (policy.action_offset, policy.action_scale),
        (policy.picture_mean, policy.picture_std),
    )


def _diffusion(policy: DiffusionPolicy) -> Contents:
    pretrained, encoder = policy.pretrained, policy.encoder
    if not isinstance(pretrained, LeRobotDiffusion) or not isinstance(encoder, LeRobotEncoder):
        raise UserError("target=lerobot is for diffusion policies that began with LeRobot's weights; use target=hub")
    tensors = {network_name(name): value for name, value in policy.network.state_dict().items()}
    if encoder.eyes:
        tensors |= {encoder_name(name): value for name, value in encoder.eyes.state_dict().items()}
    published = pretrained.checkpoint
    tensors |= {name: value for name, value in published.tensors.items() if "num_batches" in name}
    return Contents(
        published.layout,
        pretrained.settings | {"noise_scheduler_type": "DDIM", "num_inference_steps": policy.config.denoising_steps},
        tensors,
        (encoder.offset, encoder.scale),
        (policy.action_mean, policy.action_std),
        (encoder.picture_offset, encoder.picture_scale) if encoder.cameras else (torch.zeros(0, 3),) * 2,
    )


def _features(layout: Layout) -> dict[str, dict[str, Any]]:
    """Features by name, as config.json has them."""
    pictures = {_picture(name): {"type": "VISUAL", "shape": [3, *size]} for name, size in layout.cameras.items()}
    kinds = {STATE: "STATE", ENVIRONMENT: "ENV", ACTION: "ACTION"}
    sizes = zip(kinds.items(), (layout.state, layout.environment, layout.action), strict=True)
    return pictures | {name: {"type": kind, "shape": [size]} for (name, kind), size in sizes if size}


def _normalisations(contents: Contents) -> dict[str, Pair]:
    """Normalisations of the features, in their order."""
    layout = contents.layout
    means, stds = (values[..., None, None] for values in contents.pictures)
    pairs = {_picture(name): pair for name, *pair in zip(layout.cameras, means, stds, strict=True)}
    parts = (value.split((layout.state, layout.environment)) for value in contents.state)
    states = dict(zip((STATE, ENVIRONMENT), zip(*parts, strict=True), strict=True))
    return pairs | {name: pair for name, pair in states.items() if len(pair[0])} | {ACTION: contents.action}


def _picture(name: str) -> str:
    """LeRobot's name of the picture of a camera; that of published weights has it already."""
    return name if name.startswith("observation.") else PICTURE + name


WRITERS: dict[type, Callable[[Any, Path, Path], None]] = {
    Pi0Policy: publish_pi0,
    Pi05Policy: publish_pi0,
    Pi0FastPolicy: publish_pi0_fast,
    SmolVLAPolicy: publish_smolvla,
    GrootPolicy: publish_groot,
    ACTPolicy: _publish,
    DiffusionPolicy: _publish,
}
"""Functions that write a policy of a type into a folder, with the report of a directory."""
