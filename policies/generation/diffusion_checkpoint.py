"""Checkpoints of the diffusion_policy project (arXiv 2303.04137): its UNet for states, and its normalisation.

Its .ckpt files are pickles with configurations and code inside. Of these only tensors and plain values are read: torch
refuses everything that is not on its list, and stand-ins without behaviour replace the configuration's classes. A
.safetensors file with the tensors of its `ema_model` is read, too. Policies of pictures (robomimic's encoder) and
transformers are not supported. All was tested with files of the same layout; no published file has been loaded yet.
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
from policies.generation.chunk_networks import GROUPS, KERNEL

CONVERT = (
    'where diffusion_policy is installed, and if you trust the file: python -c "import dill, torch; from safetensors.'
    "torch import save_file; save_file(torch.load('FILE.ckpt', pickle_module=dill, map_location='cpu')"
    "['state_dicts']['ema_model'], 'FILE.safetensors')\""
)
UNREADABLE = OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError, SafetensorError
REFERENCE = re.compile(r"\$\{(\w+)\}")
"""Value of a configuration that refers to another one."""
FIRST = "down_modules.0.0.blocks.0.block.0.weight"
TIME = "diffusion_step_encoder.1.weight"


@dataclass(frozen=True)
class Published:
    """Tensors of a UNet by the names in `ChunkUNet`, and tensors of its normalisation.

    A normalised value is `scale` x + `offset`: of the state [D] and the action [A]. `settings` are entries of its
    configuration by their last name; .safetensors files have none.
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
        """Number of elements of the encoded time."""
        return self.network[TIME].shape[1]

    @property
    def features(self) -> int:
        """Number of elements of all observations that it reads."""
        return self.network["down_modules.0.0.cond_encoder.1.weight"].shape[1] - self.time_width

    @property
    def observations(self) -> int:
        """Number of consecutive observations that it reads."""
        return self.features // len(self.state[0])

    @property
    def past(self) -> int:
        """Number of actions at the beginning of a chunk that lie before the last observation."""
        if self.settings.get("pred_action_steps_only"):
            return 0
        return self.observations - bool(self.settings.get("oa_step_convention", True))

    @property
    def length(self) -> int | None:
        """Number of actions of a chunk; None if it is not known."""
        return self.settings.get("n_action_steps" if self.settings.get("pred_action_steps_only") else "horizon")


def read(weights: str) -> Published:
    """Read the file `weights`.

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
        if mismatch := _other(tensors, network, settings):
            raise UserError(f"policy.weights={weights} {mismatch}")
        state, action = (
            tuple(tensors[f"normalizer.params_dict.{group}.{content}"].float() for content in ("scale", "offset"))
            for group in ("obs", "action")
        )
        return Published(weights, network, state, action, settings)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        refused_class = re.search(r"GLOBAL ([\w.]+)", str(error))
        content = f"contains {refused_class[1]}" if refused_class else "is no file of torch, or a damaged one"
        raise UserError(
            f"policy.weights={weights} {content}; nothing is run from files. Convert it {CONVERT}"
        ) from error
    except UNREADABLE as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        expected = "expected a checkpoint of diffusion_policy (.ckpt), or the .safetensors of its ema_model"
        raise UserError(f"policy.weights={weights}: {expected} ({type(error).__name__}: {reason})") from error


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors by name, and the settings."""
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
    """Reason why these tensors are not supported; "" if they are."""
    if any(name.startswith("obs_encoder.") for name in tensors):
        return "reads pictures by robomimic's encoder, which is not supported; only policies of states are"
    if FIRST not in network:
        return f"is no UNet of diffusion_policy: there is no model.{FIRST}"
    names = [
        f"normalizer.params_dict.{group}.{statistic}"
        for group in ("obs", "action")
        for statistic in ("scale", "offset")
    ]
    if missing := [name for name in names if name not in tensors]:
        return f"has no statistics: there is no {missing[0]}"
    if (kernel := network[FIRST].shape[2]) != KERNEL:
        return f"has kernel_size={kernel}; expected {KERNEL}"
    if (groups := settings.get("n_groups", GROUPS)) != GROUPS:
        return f"has n_groups={groups}; expected {GROUPS}"
    condition_weight = network["down_modules.0.0.cond_encoder.1.weight"]
    if len(condition_weight) != 2 * len(network[FIRST]):
        return "has cond_predict_scale=false; expected true"
    if condition_weight.shape[1] <= network[TIME].shape[1]:
        return "has obs_as_global_cond=false; expected true"
    return ""


class _StandIn:
    """Stand-in of any object in a configuration, which keeps its state."""

    state: object = None

    def __new__(cls, *_: object) -> _StandIn:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Table(dict[Any, Any]):
    """Stand-in of a defaultdict, without its default factory."""

    def __init__(self, *_: object) -> None:
        super().__init__()


def _named(name: str) -> str:
    """Stand-in of a type."""
    return name


STAND_INS: list[Any] = [
    *((_StandIn, f"omegaconf.{kind}") for kind in ("base.ContainerMetadata", "base.Metadata", "nodes.AnyNode")),
    *((_StandIn, f"omegaconf.nodes.{kind}Node") for kind in ("String", "Integer", "Float", "Boolean")),
    *((_StandIn, f"omegaconf.{kind}") for kind in ("dictconfig.DictConfig", "listconfig.ListConfig")),
    *((_StandIn, name) for name in ("typing.Any", "typing.Union")),
    (_Table, "collections.defaultdict"),
    *((_named, f"dill.{module}._load_type") for module in ("_dill", "dill")),
]
"""Replacements of the classes that configurations name."""


def _plain(node: object) -> Any:  # noqa: ANN401 - JSON
    """Convert a configuration of stand-ins to dictionaries, lists and values."""
    state = node.state if isinstance(node, _StandIn) else node
    if isinstance(node, _StandIn) and isinstance(state, dict):
        content = state.get("_content", state.get("_val"))
        if isinstance(content, Mapping):
            return {str(key): _plain(value) for key, value in content.items()}
        return [_plain(value) for value in content] if isinstance(content, list) else content
    return state


def _settings(config: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Settings of the policy in a configuration, of its model and of its noise; references are followed once."""
    config = config if isinstance(config, Mapping) else {}
    settings = {name: config[name] for name in ("horizon", "n_obs_steps", "n_action_steps") if name in config}
    policy = config.get("policy")
    for part in ("", "model", "noise_scheduler"):
        group = policy if isinstance(policy, Mapping) and not part else (policy or {}).get(part, {})
        for name, value in group.items() if isinstance(group, Mapping) else ():
            reference = REFERENCE.fullmatch(value) if isinstance(value, str) else None
            settings[name] = config.get(reference[1]) if reference else value
    return {name: value for name, value in settings.items() if isinstance(value, int | float | str | bool)}
