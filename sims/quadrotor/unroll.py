"""Flying with a policy in one call, and back: what analytic policy gradients need.

Letters: T decisions, N environments, L lanes.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.errors import UserError
from embodied.rollout import Rollout
from sims.quadrotor.emit import LANES
from sims.quadrotor.episode import COUNTERS, Episode
from sims.quadrotor.kernels import split
from sims.quadrotor.observation import split_rows
from sims.quadrotor.program import UNIFORM

if TYPE_CHECKING:
    from sims.quadrotor.environment import QuadrotorEnvironment

SOURCE = Path(__file__).with_name("unroll.h")
PAD = 16
MAX_LAYERS = 8
Layers = Sequence[tuple[Tensor, Tensor]]
"""(weight [out, in], bias [out]) of each layer."""


def unroll(env: QuadrotorEnvironment, layers: Layers, decisions: int) -> Rollout:
    """Fly `decisions` steps in every environment with the policy a = tanh(W_n ... tanh(W_1 x + b_1) ... + b_n).

    x are the task's observations and the actions remembered, concatenated in the order of the contract. Reward,
    observations and actions of the rollout carry gradients to the layers; these begin at the present state, so that
    none flows into earlier steps. An environment whose episode ends on the way freezes: from the next decision on
    `executed` is False, `reward` 0, what it shows is its last observation, and its actions are nobody's. Afterwards
    `env` is where the rollout ended, detached, and environments that are done wait for `env.reset(mask=...)`. On the
    CPU all of it is one call of compiled C each way; elsewhere the same is done step by step.

    Raises:
        UserError: for layers that do not fit the contract, another chunk than K = 1, or before the first reset.
    """
    _check(env, layers, decisions)
    started = time.perf_counter()
    env.detach()
    rollout = (_compiled if env._kernels.library is not None else _by_steps)(env, layers, decisions)
    env.detach()
    rollout.simulation_s = time.perf_counter() - started
    return rollout


def unroll_source(episode: Episode) -> str:
    """C that follows that of the episode's programs."""
    step = next(program for program in episode.programs() if program.name == "step")
    rows = {group.name: group for group in step.inputs}
    constants = {
        "STATE_ROWS": rows["state"].rows, "RECORD_ROWS": rows["record"].rows, "SEEN_ROWS": episode.observation_rows,
        "PHYSICAL_ROWS": episode.physical_rows, "AIRFRAME_LANE": int(rows["airframe"].kind != UNIFORM),
    }  # fmt: skip
    return "\n".join((*(f"#define {name} {value}" for name, value in constants.items()), SOURCE.read_text()))


def _check(env: QuadrotorEnvironment, layers: Layers, decisions: int) -> None:
    if env.contract.executed != 1:
        raise UserError(f"unroll flies one action a decision, got executed={env.contract.executed}; use executed=1")
    env.check_begun()
    if decisions < 1 or not 1 <= len(layers) <= MAX_LAYERS:
        raise ValueError(
            f"expected at least one decision and 1 to {MAX_LAYERS} layers, got {decisions} and {len(layers)}"
        )
    widths = [env.episode.physical_rows + 4 * env._history.length, *(len(weight) for weight, _ in layers)]
    for (inputs, outputs), (weight, bias) in zip(pairwise(widths), layers, strict=True):
        if weight.shape != (outputs, inputs) or bias.shape != (outputs,):
            raise ValueError(
                f"expected a weight of shape ({outputs}, {inputs}) and a bias of shape ({outputs},), got "
                f"{tuple(weight.shape)} and {tuple(bias.shape)}"
            )
    if widths[-1] != 4:
        raise ValueError(f"expected 4 outputs of the last layer, one per rotor, got {widths[-1]}")


def _by_steps(env: QuadrotorEnvironment, layers: Layers, decisions: int) -> Rollout:
    """One step at a time: for devices without the compiled unroll, and to check it."""
    specs = env.contract.observation.items()
    keys = [key for key, spec in specs if key in env.mdp.OBSERVED or not spec.privileged]
    observations, actions, made = [env._observed()], [], []
    for _ in range(decisions):
        x = torch.cat([observations[-1][key] for key in keys], dim=-1)
        for weight, bias in layers:
            x = torch.tanh(torch.nn.functional.linear(x, weight, bias))
        actions.append(x.unsqueeze(1))
        made.append(env.step(actions[-1]))
        observations.append(made[-1].observation)
    fields = ("reward", "executed", "terminated", "truncated", "success")
    stacked = {name: torch.stack([getattr(transition, name) for transition in made]) for name in fields}
    return _rollout(env, torch.stack(observations), torch.stack(actions), **stacked)


def _compiled(env: QuadrotorEnvironment, layers: Layers, decisions: int) -> Rollout:
    buffers = _Buffers(env, layers, decisions)
    reward, seen, actions = _Fused.apply(buffers, *(tensor for layer in layers for tensor in layer))
    N, length, record = env.num_envs, env._history.length, buffers.tensors["record"]
    executed = buffers.tensors["executed"] > 0.5
    old = _histories(actions, executed) if length > 1 else None
    env._state, env._seen, env._record = buffers.tensors["state"][-1], seen[-1], record[-1]
    if old is not None:
        env._history.rows = old[:, -1]
    parts = split_rows(env.contract.observation, seen[..., :N].movedim(1, 0), None if old is None else old[..., :N])
    after = record[1:, :, :N].movedim(1, 0)
    terminated, truncated = after[1:COUNTERS] > 0.5
    return _rollout(
        env, TensorDict(parts, batch_size=[decisions + 1, N]),
        actions[length:, :, :N].transpose(1, 2).unsqueeze(2), reward=reward[:, :N, None],
        executed=executed[:, :N, None], terminated=terminated, truncated=truncated,
        success=env.mdp.success(truncated, after[COUNTERS:]),
    )  # fmt: skip


def _rollout(env: QuadrotorEnvironment, observations: TensorDict, actions: Tensor, **fields: Tensor) -> Rollout:
    """A rollout from `observations` [T + 1, N] and what lies between; its log-probabilities are 0."""
    T, N = actions.shape[:2]
    return Rollout(
        observation=observations[:-1],
        next_observation=observations[1:],
        actions=actions,
        sample=TensorDict({}, batch_size=[T, N]),
        log_prob=torch.zeros(T, N, 1, device=env.device),
        task_index=env.task_index.expand(T, N),
        start=env.start.expand(T, N),
        simulation_s=0.0,
        policy_s=0.0,
        **fields,
    )


def _histories(actions: Tensor, executed: Tensor) -> Tensor:
    """Remembered actions before each decision and after the last, [4 length, T + 1, L]; they freeze as episodes end."""
    length, L = len(actions) - len(executed), executed.shape[1]
    windows = actions.unfold(0, length, 1)  # [T + 1, 4, L, length]
    moved = torch.cat((executed.new_zeros(1, L), executed)).long().cumsum(0)
    found = windows.permute(0, 2, 3, 1)[moved, torch.arange(L)]  # [T + 1, L, length, 4]
    return found.flatten(2).movedim(2, 0)


class _Sizes(ctypes.Structure):
    """`Sizes` of unroll.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("decisions", "history", "layers", "lanes")),
        ("width", ctypes.c_int64 * (MAX_LAYERS + 1)),
        ("padded", ctypes.c_int64 * (MAX_LAYERS + 1)),
        *((name, ctypes.c_int64) for name in ("activations", "packed")),
    )


TENSORS = (
    *("state", "record", "seen", "actions", "reward", "executed", "activations", "disturbance", "airframe", "settings"),
    *("key", "forward", "backward", "grad_seen", "grad_reward", "grad_actions", "grad_packed", "scratch"),
)


FLOWN = ("reward", "seen", "actions")
"""Tensors through which gradients flow."""


class _Tensors(ctypes.Structure):
    """`Tensors` of unroll.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in TENSORS)


class _Buffers:
    """Memory of one unroll, and the calls that fill it."""

    def __init__(self, env: QuadrotorEnvironment, layers: Layers, decisions: int) -> None:
        L, history = env._state.shape[1], env._history
        self.library, self.lanes = env._kernels.library, L
        self.widths = [layers[0][0].shape[1], *(len(weight) for weight, _ in layers)]
        self.padded = [-(-width // PAD) * PAD for width in self.widths]
        packed = sum((a + 1) * b for a, b in pairwise(self.padded))
        self.sizes = _Sizes(decisions, history.length, len(layers), L)
        self.sizes.width[: len(self.widths)], self.sizes.padded[: len(self.padded)] = self.widths, self.padded
        self.sizes.activations, self.sizes.packed = sum(self.padded), packed
        T, S = decisions, env.options.state_rows
        self.tensors = {
            "state": torch.empty(T + 1, S, L), "record": torch.empty(T + 1, len(env._record), L),
            "seen": torch.empty(T + 1, len(env._seen), L), "actions": torch.empty(history.length + T, 4, L),
            "reward": torch.empty(T, L), "executed": torch.empty(T, L),
            "activations": torch.empty(T, L, sum(self.padded)), "disturbance": env._disturbance,
            "airframe": env._airframe, "settings": env._settings, "key": env._key,
        }  # fmt: skip
        past = history.rows if history.length > 1 else env._seen[env.episode.previous]
        for name, first in (("state", env._state), ("record", env._record), ("seen", env._seen)):
            self.tensors[name][0] = first
        self.tensors["actions"][: history.length] = past.view(history.length, 4, L)

    def forward(self, layers: Layers) -> None:
        """Fly."""
        self.tensors["forward"] = self._pack(layers, transposed=True)
        self._call("unroll")

    def backward(self, layers: Layers, grads: dict[str, Tensor | None]) -> list[Tensor]:
        """Gradients of each layer's weight and bias from those of the tensors by name."""
        self.tensors |= {f"grad_{name}": grad.contiguous() for name, grad in grads.items() if grad is not None}
        given = self.tensors.get("grad_actions")
        self.tensors |= {
            "backward": self._pack(layers, transposed=False),
            "grad_actions": torch.zeros_like(self.tensors["actions"]) if given is None else given.clone(),
            "grad_packed": torch.zeros(self.lanes // LANES, self.sizes.packed),
            "scratch": torch.empty(self.lanes, 2 * max(self.padded)),
        }
        self._call("unroll_vjp")
        return self._unpack(self.tensors["grad_packed"].sum(0))

    def _call(self, name: str) -> None:
        pointers = _Tensors(**{key: tensor.data_ptr() for key, tensor in self.tensors.items()})
        function = getattr(self.library, name)
        sizes, tensors = ctypes.byref(self.sizes), ctypes.byref(pointers)
        split(
            lambda first, last: function(ctypes.c_int64(first), ctypes.c_int64(last), sizes, tensors),
            self.lanes, share=2 * LANES,
        )  # fmt: skip

    def _pack(self, layers: Layers, transposed: bool) -> Tensor:
        """All weights and biases in one tensor, padded with zeros."""
        found = torch.zeros(self.sizes.packed)
        for (weights, bias), (weight, given) in zip(self._views(found, transposed), layers, strict=True):
            outputs, inputs = weight.shape
            if transposed:
                weights[:inputs, :outputs] = weight.detach().t()
            else:
                weights[:outputs, :inputs] = weight.detach()
            bias[:outputs] = given.detach()
        return found

    def _unpack(self, packed: Tensor) -> list[Tensor]:
        found = []
        for (weights, bias), (inputs, outputs) in zip(self._views(packed, False), pairwise(self.widths), strict=True):
            found += [weights[:outputs, :inputs], bias[:outputs]]
        return found

    def _views(self, packed: Tensor, transposed: bool) -> list[tuple[Tensor, Tensor]]:
        views, place = [], 0
        for inputs, outputs in pairwise(self.padded):
            shape = (inputs, outputs) if transposed else (outputs, inputs)
            weights = packed[place : place + inputs * outputs].view(shape)
            place += inputs * outputs
            views.append((weights, packed[place : place + outputs]))
            place += outputs
        return views


class _Fused(torch.autograd.Function):
    """The compiled unroll; returns reward [T, L], what is seen [T + 1, O, L] and actions [history + T, 4, L]."""

    @staticmethod
    def forward(ctx: Any, buffers: _Buffers, *flat: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Fly."""
        buffers.forward(list(zip(flat[::2], flat[1::2], strict=True)))
        ctx.buffers = buffers
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*flat)
        return tuple(buffers.tensors[name].detach() for name in FLOWN)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Back through all steps."""
        flat = ctx.saved_tensors
        found = ctx.buffers.backward(
            list(zip(flat[::2], flat[1::2], strict=True)), dict(zip(FLOWN, grads, strict=True))
        )
        return (None, *found)
