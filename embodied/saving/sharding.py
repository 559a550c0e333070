"""Weights of large policies divided among processes: FSDP2, applied from outside the model, and their checkpoints.

A policy names its layers (`TrainablePolicy.blocks`), which are gathered one by one as they run; its entry points
are forward methods. They stay gathered until the backward pass: gradients also reach a layer through its keys and
values, which FSDP2 does not track. So gradients and optimiser are always divided, weights between steps.
Checkpoints are written by torch.distributed.checkpoint, a safetensors file per process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from embodied.policy import Evaluation, TrainablePolicy

pytree.register_dataclass(Evaluation)  # so that FSDP2 finds the tensors where a backward pass begins
warnings.filterwarnings("ignore", ".*returned a view tensor", UserWarning)  # the view is never changed in place
FORWARD = ("act", "evaluate", "value", "features", "sample", "loss", "inpaint")
"""Entry points of policies that run their network."""


def sharded(policy: TrainablePolicy, mesh: DeviceMesh) -> TrainablePolicy:
    """Divide the weights of `policy` over `mesh`, in place, also those of its policies `with_new_weights`."""
    make = policy.with_new_weights
    load_whole = policy.load_state_dict
    for layer in policy.blocks():
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(policy, mesh=mesh, reshard_after_forward=False)
    for name in FORWARD:
        if hasattr(policy, name):
            register_fsdp_forward_method(policy, name)
    _set(policy, with_new_weights=lambda: sharded(make(), mesh), unsharded=make, lend=lambda other: None)

    def load_state_dict(state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's
        own = policy.state_dict()
        return load_whole({name: divided(value, own.get(name)) for name, value in state.items()}, *args, **kwargs)

    _set(policy, load_state_dict=load_state_dict)
    return policy


def is_sharded(policy: object) -> bool:
    """Whether `policy` is divided."""
    return isinstance(policy, FSDPModule)


def divided(value: Tensor, like: Tensor | None) -> Tensor:
    """Divide the whole tensor `value`, the same in every process, like `like`, if that is divided."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def divide_moments(optimiser: torch.optim.Optimizer) -> None:
    """Divide the state of `optimiser`, loaded whole, like its parameters."""
    for parameter, state in optimiser.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = divided(value, parameter)


@torch.no_grad()
def whole(policy: TrainablePolicy, first: bool) -> TrainablePolicy:
    """Gather all weights in a copy of the policy in the `first` process; every process must call it."""
    weights = {name: _full(value) for name, value in policy.state_dict().items()}
    if not first:
        return policy
    copy = cast(Any, policy).unsharded()
    copy.load_state_dict(weights)
    return copy


def extract_divided(tree: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:  # noqa: ANN401 - a tree
    """Replace the divided tensors of `tree` by their names; returns the rest, and these tensors by name."""
    if isinstance(tree, DTensor):
        return {PLACEHOLDER: name}, {name: tree}
    if isinstance(tree, dict):
        pairs = {key: extract_divided(value, f"{name}/{key}") for key, value in tree.items()}
        return {key: rest for key, (rest, _) in pairs.items()}, _merged([tensors for _, tensors in pairs.values()])
    if isinstance(tree, list | tuple):
        parts = [extract_divided(value, f"{name}/{index}") for index, value in enumerate(tree)]
        return type(tree)(rest for rest, _ in parts), _merged([tensors for _, tensors in parts])
    return tree, {}


def put_back(tree: Any, tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401 - a tree
    """Insert the `tensors` of `extract_divided` into its `tree`."""
    if isinstance(tree, dict):
        if PLACEHOLDER in tree:
            return tensors[tree[PLACEHOLDER]]
        return {key: put_back(value, tensors) for key, value in tree.items()}
    return type(tree)(put_back(each, tensors) for each in tree) if isinstance(tree, list | tuple) else tree


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write divided `tensors` into `folder`; each process writes its part."""
    save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def read(folder: Path) -> dict[str, Tensor]:
    """Read the whole tensors that `write` wrote, by name, on the CPU; in any number of processes."""
    reader = HuggingFaceStorageReader(str(folder))
    metadata = cast(dict[str, Any], reader.read_metadata().state_dict_metadata)
    tensors = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in metadata.items()}
    load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return tensors


PLACEHOLDER = "divided tensor"


def _merged(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for part in parts for name, value in part.items()}


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _set(module: nn.Module, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        object.__setattr__(module, name, method)
