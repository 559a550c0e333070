"""Bytes that passes of a learner's networks store for the backward pass, from shapes on torch's meta device.

Tensors there have shapes but no values, so that passes of any size cost no memory and no time. N are environments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from embodied.algorithms.micro_batch import rows_within, saved_bytes
from embodied.contract import Contract
from embodied.policy import Decision, TrainablePolicy
from embodied.rollout.memory import STARTED, Memory

META = torch.device("meta")
LONG = 2**31 - 1
"""Integers that are read from the meta device: a length, which leaves shapes as they are."""
aten = torch.ops.aten
READING = (aten._to_copy.default, aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default)
VARIABLE = 8
"""Assumed length of an axis whose length the contract leaves open."""


@dataclass(frozen=True)
class Passes:
    """Passes of `policy`, on the meta device, in one of `processes` with `num_envs` environments each.

    `rollout_length` is the number of decisions of a rollout.
    """

    policy: TrainablePolicy
    num_envs: int
    rollout_length: int
    processes: int = 1

    def of(self, policy: TrainablePolicy, rollout_length: int) -> Passes:
        """Passes of another policy on the meta device, and another length of rollouts."""
        set_flags(policy)
        return replace(self, policy=policy, rollout_length=rollout_length)

    @property
    def has_memory(self) -> bool:
        """Whether the policy is recurrent, so that learners score sequences."""
        return Memory(self.policy, 1, META).policy is not None

    def share(self, rows: int) -> int:
        """Number of this process's rows of a minibatch of `rows`."""
        return -(-rows // self.processes)

    def observation(self, *batch: int) -> TensorDict:
        """Observations [*batch] as the policy reads them, with its memory."""
        observation = meta_observation(self.policy.contract, *batch)
        if self.has_memory:
            memory = Memory(self.policy, batch[-1], META).with_observation(TensorDict({}, [batch[-1]]))
            observation.update({key: value.expand(*batch, *value.shape[1:]) for key, value in memory.items()})
            observation[STARTED] = torch.empty(batch, dtype=torch.bool, device=META)
        return observation

    def actions(self, *batch: int) -> Tensor:
        """Action chunks [*batch, H, A]."""
        contract = self.policy.contract
        return torch.empty(*batch, contract.horizon, *contract.action.shape, device=META)

    def decision(self) -> Decision:
        """Decision of one environment."""
        return self.policy.act(self.observation(1))

    def loss(self, *batch: int) -> int:
        """Bytes of the supervised loss of chunks [*batch]."""
        observation = self.observation(*batch)
        actions = self.actions(*batch)
        return saved_bytes(lambda: self.policy.loss(observation, actions, actions[..., 0] > 0.0))

    def value(self, rows: int) -> int:
        """Bytes of the values of `rows` observations."""
        return saved_bytes(lambda: self.policy.value(self.observation(rows)))

    def evaluate(
        self, minibatch: int, memory_gb: float | None, also: Callable[[TensorDict], object] | None = None
    ) -> int:
        """Bytes of scoring a minibatch, or the largest piece of it that `memory_gb` allows.

        A learner's loss `also` has outputs for observations [*batch], beside the scores.
        """
        sample = self.decision().sample
        length = self.rollout_length

        def evaluated(rows: int) -> object:
            shape = (length, rows) if self.has_memory else (rows,)
            samples = sample.apply(lambda part: part.new_empty(*shape, *part.shape[1:]), batch_size=shape)
            observation = self.observation(*shape)
            scores = self.policy.evaluate(observation, cast(TensorDict, samples))
            return scores, also(observation) if also else None

        rows = min(self.share(minibatch), length * self.num_envs)
        rows = max(1, rows // length) if self.has_memory else rows
        rows = rows_within(memory_gb, rows, evaluated)
        return saved_bytes(lambda: evaluated(rows))


class MetaValues(TorchDispatchMode):
    """Mode in which values on the meta device can be read, so that code that depends on values runs there.

    Tensors that are copied from there are zeros, their numbers 0.0 or `LONG`, booleans True, and equal to all others;
    none is nonzero.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Call the operator `func`, unless it reads values of a tensor on the meta device."""
        kwargs = kwargs or {}
        if func in READING and args[0].is_meta:
            return self._read(func, args[0], kwargs)
        return func(*args, **kwargs)

    def _read(self, func: Any, tensor: Tensor, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        device = torch.device(kwargs.get("device") or META)
        if func is aten._to_copy.default:
            return (
                func(tensor, **kwargs)
                if device == META
                else torch.zeros(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype, device=device)
            )
        if func is aten.nonzero.default:
            return tensor.new_empty(0, tensor.ndim, dtype=torch.int64)
        if func is aten.equal.default or tensor.dtype is torch.bool:
            return True
        return 0.0 if tensor.is_floating_point() else LONG


def meta_observation(contract: Contract, *batch: int) -> TensorDict:
    """Observations [*batch] of a contract, on the meta device."""

    def empty(shape: tuple[int, ...], dtype: str) -> Tensor:
        sizes = [VARIABLE if size < 0 else size for size in shape]
        return torch.empty(*batch, *sizes, dtype=getattr(torch, dtype), device=META)

    specs = contract.observation
    return TensorDict({key: empty(spec.shape, spec.dtype) for key, spec in specs.items()}, list(batch))


def on_meta(make: Callable[[], Any]) -> Any:  # noqa: ANN401 - a TrainablePolicy
    """Build a policy on the meta device; its policies `with_new_weights` are there, too."""
    with META:
        policy = make().to(META)
    set_flags(policy)
    new = policy.with_new_weights
    policy.with_new_weights = lambda: on_meta(new)
    return policy


def set_flags(policy: nn.Module) -> None:
    """Give flags on the meta device values, which decide what is computed: the policy is fitted, and does not rank."""
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype is torch.bool and not buffer.ndim:
                setattr(module, name, torch.tensor(name == "fitted"))
