"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen model, by peft, which are stored without the base weights.

In pi0, SmolVLA and GR00T attention and feed-forward layers of language model and expert are adapted, as in openpi; the
projections of state, time and actions, or GR00T's encoders and decoder of them, are trained in full. Differs from
openpi: pictures are encoded by frozen weights, which openpi trains in full. In OpenVLA all dense layers are adapted
except the vocabulary's, as in OpenVLA-OFT; the state's projection and the regression are trained in full.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from embodied.errors import UserError
from embodied.extras import needs_extra
from embodied.policy import TrainablePolicy, copy_statistics
from policies.vla.model import FlowModel
from policies.vla.openvla.model import OpenVLAModel

TRAINED = (
    *("embed_action_time", "action_out_proj"),
    *("state_proj", "action_in_proj", "action_time_mlp_in", "action_time_mlp_out"),
    *("action_head.state_encoder", "action_head.action_encoder", "action_head.action_decoder"),
)
"""Modules of pi0, SmolVLA and GR00T that are trained in full, in addition to adapters."""
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
"""Files in peft's format."""
KEPT = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
)
"""Fields of a configuration of adapters that say where they are, and how large their effect is."""
PREFIX = "base_model.model."
NAME = "default"
"""Prefix of tensor names in peft, and its name of a single adapter, which its files leave out."""
SAMPLED = 4096
"""Number of evenly spaced values of each tensor that a fingerprint reads."""


class AdaptablePolicy(TrainablePolicy):
    """Policy whose `model` has adapters if `config.lora_rank` is positive.

    They are on weights of which `base` is the fingerprint. Its state_dict leaves these weights out, which are never
    trained.
    """

    model: Any
    base: Tensor

    def lend(self, other: AdaptablePolicy) -> None:
        """Share the memory of the adapted base weights with `other`, of the same configuration."""
        if self.config.lora_rank:
            for own, other_weight in zip(self.model.parameters(), other.model.parameters(), strict=True):
                other_weight.data = other_weight.data if other_weight.requires_grad else own.data

    def with_new_weights(self) -> Self:
        """Build a policy of the same configuration with new weights, and with the same base weights in adapters."""
        policy = type(self)(self.contract, self.config)
        self.lend(policy)
        policy = policy.to(self.device).train(self.training)
        copy_statistics(policy, self)
        return policy

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401 - torch's
        """Weights and normalisation statistics; with adapters, without the base weights that they adapt."""
        omitted = self._adapted_names()
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if name not in omitted}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: ANN401 - torch's
        """Load the result of `state_dict`.

        Raises:
            UserError: for adapters of another rank or on other weights, and for a policy without.
            RuntimeError: for another network.
        """
        if not self.config.lora_rank:
            return super().load_state_dict(state_dict, strict, assign)
        rank = next((len(value) for name, value in state_dict.items() if ".lora_A." in name), 0)
        if rank != self.config.lora_rank:
            adapters = f"adapters of rank {rank}" if rank else "no adapters"
            raise UserError(
                f"expected weights with adapters of policy.lora_rank={self.config.lora_rank}, got {adapters}"
            )
        if not torch.equal(state_dict["base"].to(self.base.device), self.base):
            raise UserError(
                f"the adapters were trained on other weights than policy.weights={self.config.weights} now has"
            )
        adapted = self._adapted_names()
        base_weights = {name: value for name, value in super().state_dict().items() if name in adapted}
        return super().load_state_dict({**state_dict, **base_weights}, strict, assign)

    def _adapted_names(self) -> set[str]:
        """Names of the base weights that adapters adapt."""
        if not self.config.lora_rank:
            return set()
        return {f"model.{name}" for name, weight in self.model.named_parameters() if not weight.requires_grad}


def fingerprint(native: nn.Module) -> Tensor:
    """SHA-256 [32], uint8, of names, shapes and `SAMPLED` values of all parameters, on the CPU."""
    digest = hashlib.sha256()
    for name, weight in sorted(native.named_parameters()):
        flat = weight.detach().flatten()
        digest.update(json.dumps([name, list(weight.shape)]).encode())
        digest.update(flat[:: max(1, len(flat) // SAMPLED)].float().cpu().numpy().tobytes())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def adapt(model: FlowModel | OpenVLAModel, rank: int) -> None:
    """Freeze the published weights of `model` save for `TRAINED`, and add adapters of `rank`, without effect at first.

    Raises:
        UserError: where peft is not installed.
    """
    with needs_extra("vla"):
        from peft import LoraConfig
    config = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=model.adapted, exclude_modules=model.unread or None, lora_dropout=0.0
    )
    _inject(model.native, config)


def read(model: FlowModel, folder: Path, base: Tensor) -> None:
    """Adapt `model`, whose fingerprint is `base`, by the adapters that peft or `write` stored in `folder`.

    Raises:
        UserError: on one line, if they are damaged, of another kind of adapter, or of another base.
    """
    with needs_extra("vla"):
        from peft import LoraConfig, PeftConfig
    try:
        config = PeftConfig.from_pretrained(folder)
        if not isinstance(config, LoraConfig) or config.use_dora:
            raise UserError(f"the adapters in {folder} are of another kind; expected plain LoRA")
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            trained_on = (file.metadata() or {}).get("base")
    except UserError:
        raise
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise UserError(f"cannot read the adapters in {folder}: {_line(error)}") from error
    if trained_on not in (None, bytes(base.tolist()).hex()):
        raise UserError(
            f"the adapters in {folder} were trained on other weights than {config.base_model_name_or_path} now has"
        )
    full_modules = config.modules_to_save or []
    config.modules_to_save = None
    config.lora_dropout = 0.0  # with which a chunk would be scored by other weights than those that sampled it
    try:
        _inject(model.native, config)
    except ValueError as error:
        raise UserError(f"the adapters in {folder} do not fit: {_line(error)}") from error
    _copy(
        {name: weight for name, weight in _named(model.native).items() if _belongs(name, full_modules)}, tensors, folder
    )


def write(native: nn.Module, folder: Path, weights: str, base: Tensor) -> None:
    """Write the adapters of `native` and its fully trained modules into `folder`, in peft's format.

    `weights` names the base, whose fingerprint is `base`.
    """
    from peft import LoraConfig

    config: Any = native.peft_config[NAME]
    stored = LoraConfig(**{key: getattr(config, key) for key in KEPT})
    stored.base_model_name_or_path, stored.inference_mode = weights, True
    names = {name for name, _ in native.named_modules()}
    stored.modules_to_save = [name for name in TRAINED if name in names]
    folder.mkdir(parents=True, exist_ok=True)
    stored.save_pretrained(str(folder))
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in _named(native).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt", "base": bytes(base.tolist()).hex()})


def rank_of(native: nn.Module) -> int:
    """Rank of the adapters of `native`, 0 without."""
    configs: Any = getattr(native, "peft_config", {})
    return configs[NAME].r if configs else 0


@torch.no_grad()
def merge(model: FlowModel) -> None:
    """Add the adapters of `model` to its weights and remove them, so that it has the published structure."""
    from peft.tuners.lora import LoraLayer

    native = model.native
    for name, module in [(name, module) for name, module in native.named_modules() if isinstance(module, LoraLayer)]:
        parent, _, last = name.rpartition(".")
        # W <- W + (alpha / r) B A
        module.merge()
        setattr(native.get_submodule(parent), last, module.get_base_layer())
    del native.peft_config
    model.train_all()


def _inject(native: nn.Module, config: Any) -> None:  # noqa: ANN401 - of peft
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, native)
    native.requires_grad_(False)
    for name, weight in native.named_parameters():
        weight.requires_grad_(".lora_" in name or name.startswith(TRAINED))


def _named(native: nn.Module) -> dict[str, Tensor]:
    """Adapters and fully trained weights, by peft's names."""
    weights = {name: weight for name, weight in native.named_parameters() if weight.requires_grad}
    return {PREFIX + name.replace(f".{NAME}.", "."): weight for name, weight in weights.items()}


def _belongs(name: str, modules: list[str]) -> bool:
    return ".lora_" in name or any(f".{module}." in f".{name}." for module in modules)


@torch.no_grad()
def _copy(to: dict[str, Tensor], tensors: dict[str, Tensor], folder: Path) -> None:
    if other := sorted(to.keys() ^ tensors.keys()):
        raise UserError(
            f"the adapters in {folder} are of another model: {len(other)} tensors differ, such as {other[0]}"
        )
    for name, weight in to.items():
        if weight.shape != tensors[name].shape:
            sizes = f"{tuple(weight.shape)}, got {tuple(tensors[name].shape)}"
            raise UserError(f"the adapters in {folder} are of another model: expected {name} of {sizes}")
        weight.copy_(tensors[name])


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
