"""Checkpoints of the diffusion_policy project (arXiv 2303.04137): its UNet for states, and its normalisation.

Its .ckpt files are pickles with configurations and code inside. Of these only tensors and plain values are read: torch
refuses whatever is not on its list, and stand-ins without behaviour take the places of the configuration's classes. A
.safetensors file with the tensors of its `ema_model` does as well. Policies of pictures (robomimic's encoder) and
transformers are not read. All was tried with files of the same layout; no published file has been loaded yet.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from embodied.errors import UserError
from policies.chunk_networks import GROUPS, KERNEL

CONVERT = (
    'where diffusion_policy is installed, and if you trust the file: python -c "import dill, torch; from safetensors.'
    "torch import save_file; save_file(torch.load('FILE.ckpt', pickle_module=dill, map_location='cpu')"
    "['state_dicts']['ema_model'], 'FILE.safetensors')\""
)
UNREADABLE = OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError, SafetensorError
REFERENCE = re.compile(r"\$\{(\w+)\}")
"""A value of a configuration that is another one's."""
FIRST, TIME = "down_modules.0.0.blocks.0.block.0.weight", "diffusion_step_encoder.1.weight"


@dataclass(frozen=True)
class Published:
    """Tensors of a UNet by the names in `ChunkUNet`, and those of its normalisation.

    A normalised value is `scale` x + `offset`: of the state [D] and the action [A]. `settings` are those of its
    configuration by their last name; none are known of .safetensors files.
    """

    source: str
    network: dict[str, Tensor]
    state: tuple[Tensor, Tensor]  # scale and offset
    action: tuple[Tensor, Tensor]
    settings: dict[str, Any]

    @property
    def widths(self) -> list[int]:
        """Channels of the UNet's levels."""
        levels = 1 + max(int(name.split(".")[1]) for name in self.network if name.startswith("down_modules."))
        return [len(self.network[f"down_modules.{level}.0.blocks.0.block.0.weight"]) for level in range(levels)]

    @property
    def time_width(self) -> int:
        """Elements of the encoded time."""
        return self.network[TIME].shape[1]

    @property
    def features(self) -> int:
        """Elements of all observations that it reads."""
        return self.network["down_modules.0.0.cond_encoder.1.weight"].shape[1] - self.time_width

    @property
    def observations(self) -> int:
        """Observations one after another that it reads."""
        return self.features // len(self.state[0])

    @property
    def past(self) -> int:
        """Actions at the beginning of a chunk that lie before the last observation."""
        if self.settings.get("pred_action_steps_only"):
            return 0
        return self.observations - bool(self.settings.get("oa_step_convention", True))

    @property
    def length(self) -> int | None:
        """Actions of a chunk; None if it is not known."""
        return self.settings.get("n_action_steps" if self.settings.get("pred_action_steps_only") else "horizon")


def read(weights: str) -> Published:
    """What is in the file `weights`.

    Raises:
        UserError: on one line, for files that cannot be read, and for other policies.
    """
    try:
        tensors, settings = _read(Path(weights))
        network = {
            name.removeprefix("model."): value
            for name, value in tensors.items()
            if name.startswith("model.") and not name.endswith("_dummy_variable")
        }
        if wrong := _other(tensors, network, settings):
            raise UserError(f"policy.weights={weights} {wrong}")
        state, action = (
            tuple(tensors[f"normalizer.params_dict.{of}.{what}"].float() for what in ("scale", "offset"))
            for of in ("obs", "action")
        )
        return Published(weights, network, state, action, settings)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"contains {named[1]}" if named else "is no file of torch, or a damaged one"
        raise UserError(f"policy.weights={weights} {what}; nothing is run from files. Convert it {CONVERT}") from error
    except UNREADABLE as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        expected = "expected a checkpoint of diffusion_policy (.ckpt), or the .safetensors of its ema_model"
        raise UserError(f"policy.weights={weights}: {expected} ({type(error).__name__}: {reason})") from error


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, and settings."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path), {}
    with torch.serialization.safe_globals(STAND_INS):
        payload = torch.load(path, map_location="cpu", weights_only=True)
    states = payload["state_dicts"]
    tensors = states.get("ema_model", states.get("model"))
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError("state_dicts has neither ema_model nor model")
    return dict(tensors), _settings(_plain(payload.get("cfg")))


def _other(tensors: Mapping[str, Tensor], network: Mapping[str, Tensor], settings: Mapping[str, Any]) -> str:
    """Why this is not what is read here; "" if it is."""
    if any(name.startswith("obs_encoder.") for name in tensors):
        return "reads pictures by robomimic's encoder, which is not supported; only policies of states are"
    if FIRST not in network:
        return f"is no UNet of diffusion_policy: there is no model.{FIRST}"
    names = [f"normalizer.params_dict.{of}.{what}" for of in ("obs", "action") for what in ("scale", "offset")]
    if missing := [name for name in names if name not in tensors]:
        return f"has no statistics: there is no {missing[0]}"
    if (kernel := network[FIRST].shape[2]) != KERNEL:
        return f"has kernel_size={kernel}; expected {KERNEL}"
    if (groups := settings.get("n_groups", GROUPS)) != GROUPS:
        return f"has n_groups={groups}; expected {GROUPS}"
    given = network["down_modules.0.0.cond_encoder.1.weight"]
    if len(given) != 2 * len(network[FIRST]):
        return "has cond_predict_scale=false; expected true"
    if given.shape[1] <= network[TIME].shape[1]:
        return "has obs_as_global_cond=false; expected true"
    return ""


class _StandIn:
    """Takes the place of any object in a configuration, and keeps its state."""

    state: object = None

    def __new__(cls, *_: object) -> _StandIn:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Table(dict[Any, Any]):
    """Takes the place of a defaultdict, without what it calls for a missing key."""

    def __init__(self, *_: object) -> None:
        super().__init__()


def _named(name: str) -> str:
    """Takes the place of a type."""
    return name


STAND_INS: list[Any] = [
    *((_StandIn, f"omegaconf.{kind}") for kind in ("base.ContainerMetadata", "base.Metadata", "nodes.AnyNode")),
    *((_StandIn, f"omegaconf.nodes.{kind}Node") for kind in ("String", "Integer", "Float", "Boolean")),
    *((_StandIn, f"omegaconf.{kind}") for kind in ("dictconfig.DictConfig", "listconfig.ListConfig")),
    *((_StandIn, name) for name in ("typing.Any", "typing.Union")),
    (_Table, "collections.defaultdict"),
    *((_named, f"dill.{module}._load_type") for module in ("_dill", "dill")),
]
"""What is put in the places of classes that configurations name."""


def _plain(node: object) -> Any:  # noqa: ANN401 - JSON
    """A configuration of stand-ins as dictionaries, lists and values."""
    state = node.state if isinstance(node, _StandIn) else node
    if isinstance(node, _StandIn) and isinstance(state, dict):
        content = state.get("_content", state.get("_val"))
        if isinstance(content, Mapping):
            return {str(key): _plain(value) for key, value in content.items()}
        return [_plain(value) for value in content] if isinstance(content, list) else content
    return state


def _settings(config: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Those of the policy in a configuration, with those of its model and its noise; references are followed once."""
    config = config if isinstance(config, Mapping) else {}
    found = {name: config[name] for name in ("horizon", "n_obs_steps", "n_action_steps") if name in config}
    policy = config.get("policy")
    for part in ("", "model", "noise_scheduler"):
        group = policy if isinstance(policy, Mapping) and not part else (policy or {}).get(part, {})
        for name, value in group.items() if isinstance(group, Mapping) else ():
            named = REFERENCE.fullmatch(value) if isinstance(value, str) else None
            found[name] = config.get(named[1]) if named else value
    return {name: value for name, value in found.items() if isinstance(value, int | float | str | bool)}
