"""Flying with a policy in one call, and back: what analytic policy gradients need.

Letters: T decisions, N environments, L lanes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import Transition
from sims.quadrotor.emit import LANES
from sims.quadrotor.episode import OBSERVATION_ROWS, PHYSICAL_ROWS, PREVIOUS
from sims.quadrotor.kernels import split
from sims.quadrotor.observation import split_rows
from sims.quadrotor.program import UNIFORM, Program

if TYPE_CHECKING:
    from sims.quadrotor.environment import QuadrotorEnvironment

SOURCE = Path(__file__).with_name("unroll.h")
PAD = 16
MAX_LAYERS = 8
Layers = Sequence[tuple[Tensor, Tensor]]
"""(weight [out, in], bias [out]) of each layer."""


@dataclass
class Unroll:
    """T decisions of N environments.

    An environment whose episode ends on the way freezes: `executed` is False and `reward` 0 from the next decision on,
    what it shows of itself is its last observation, and its actions are those of nobody. `reward`, `state` and
    `transition.observation` carry gradients to the layers, the rest does not.
    """

    observation: TensorDict  # [T, N] before each decision
    actions: Tensor  # [T, N, 1, 4]
    reward: Tensor  # [T, N]
    executed: Tensor  # [T, N] bool
    state: (
        Tensor  # [S, N] rows of the last state: position 3, quaternion 4, velocity 3, angular velocity 3, rotors 4, ...
    )
    transition: Transition  # of the last decision

    @property
    def env_steps(self) -> int:
        """Control steps executed."""
        return int(self.executed.sum())


def unroll(env: QuadrotorEnvironment, layers: Layers, decisions: int) -> Unroll:
    """Fly `decisions` steps in every environment with the policy a = tanh(W_n ... tanh(W_1 x + b_1) ... + b_n).

    x are the observations that are not privileged, concatenated in the order of the contract. Gradients begin at the
    present state: none flows into earlier steps. Afterwards `env` is where the unroll ended, detached; environments
    whose episode ended (`transition.done`) wait for `env.reset(mask=...)`. On the CPU all of it is one call of compiled
    C each way; elsewhere the same is done step by step.

    Raises:
        ValueError: for layers that do not fit the contract, another chunk than K = 1, or before the first reset.
    """
    _check(env, layers, decisions)
    env.detach()
    run = _compiled if env._kernels.library is not None else _by_steps
    found = run(env, layers, decisions)
    env.detach()
    return found


def unroll_source(programs: Sequence[Program]) -> str:
    """C that follows the programs' own."""
    step = next(program for program in programs if program.name == "step")
    rows = {group.name: group for group in step.inputs}
    constants = {
        "STATE_ROWS": rows["state"].rows, "SEEN_ROWS": OBSERVATION_ROWS, "PHYSICAL_ROWS": PHYSICAL_ROWS,
        "AIRFRAME_LANE": int(rows["airframe"].kind != UNIFORM),
    }  # fmt: skip
    return "\n".join((*(f"#define {name} {value}" for name, value in constants.items()), SOURCE.read_text()))


def _check(env: QuadrotorEnvironment, layers: Layers, decisions: int) -> None:
    if env.contract.executed != 1:
        raise ValueError(f"unroll flies one action a decision, got executed={env.contract.executed}; use executed=1")
    if bool((env.start < 0).any()):
        raise ValueError("an environment has no episode yet; call reset() before unroll()")
    if decisions < 1 or not 1 <= len(layers) <= MAX_LAYERS:
        raise ValueError(
            f"expected at least one decision and 1 to {MAX_LAYERS} layers, got {decisions} and {len(layers)}"
        )
    widths = [PHYSICAL_ROWS + 4 * env._history.length, *(len(weight) for weight, _ in layers)]
    for (inputs, outputs), (weight, bias) in zip(pairwise(widths), layers, strict=True):
        if weight.shape != (outputs, inputs) or bias.shape != (outputs,):
            raise ValueError(
                f"expected a weight of shape ({outputs}, {inputs}) and a bias of shape ({outputs},), got "
                f"{tuple(weight.shape)} and {tuple(bias.shape)}"
            )
    if widths[-1] != 4:
        raise ValueError(f"expected 4 outputs of the last layer, one per rotor, got {widths[-1]}")


def _by_steps(env: QuadrotorEnvironment, layers: Layers, decisions: int) -> Unroll:
    """One step at a time: for devices without the compiled unroll, and to check it."""
    keys = [key for key, spec in env.contract.observation.items() if not spec.privileged]
    observation, rows = env._observed(), []
    for _ in range(decisions):
        x = torch.cat([observation[key] for key in keys], dim=-1)
        for weight, bias in layers:
            x = torch.tanh(torch.nn.functional.linear(x, weight, bias))
        transition = env.step(x.unsqueeze(1))
        rows.append((observation.detach(), x.detach().unsqueeze(1), transition))
        observation = transition.observation
    observations, actions, transitions = zip(*rows, strict=True)
    return Unroll(
        observation=torch.stack(list(observations)),
        actions=torch.stack(list(actions)),
        reward=torch.cat([transition.reward for transition in transitions], 1).t(),
        executed=torch.cat([transition.executed for transition in transitions], 1).t(),
        state=env._state[:, : env.num_envs],
        transition=transitions[-1],
    )


def _compiled(env: QuadrotorEnvironment, layers: Layers, decisions: int) -> Unroll:
    buffers = _Buffers(env, layers, decisions)
    flat = [tensor for layer in layers for tensor in layer]
    reward, state, seen = _Fused.apply(buffers, *flat)
    N, history = env.num_envs, env._history
    executed = buffers.tensors["executed"] > 0.5
    old = _histories(buffers, executed) if history.length > 1 else None
    env._state, env._seen, env._record = state, seen, buffers.tensors["record"][-1]
    rows = buffers.tensors["seen"][:-1].movedim(1, 0)[..., :N]
    observation = TensorDict(split_rows(rows, None if old is None else old[:, :-1, :N]), batch_size=[decisions, N])
    if old is not None:
        history.rows = old[:, -1]
    actions = buffers.tensors["actions"][history.length :, :, :N]
    return Unroll(
        observation=observation,
        actions=actions.transpose(1, 2).unsqueeze(2),
        reward=reward[:, :N],
        executed=executed[:, :N],
        state=state[:, :N],
        transition=env._transition(reward[-1:, :N].t(), executed[-1:, :N].t()),
    )


def _histories(buffers: _Buffers, executed: Tensor) -> Tensor:
    """Remembered actions before each decision and after the last, [4 length, T + 1, L]; they freeze with the episode."""
    actions, L = buffers.tensors["actions"], executed.shape[1]
    length = len(actions) - len(executed)
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
    *("key", "forward", "backward", "grad_state", "grad_seen", "grad_reward", "grad_actions", "grad_packed", "scratch"),
)


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
            "state": torch.empty(T + 1, S, L), "record": torch.empty(T + 1, 4, L),
            "seen": torch.empty(T + 1, OBSERVATION_ROWS, L), "actions": torch.empty(history.length + T, 4, L),
            "reward": torch.empty(T, L), "executed": torch.empty(T, L),
            "activations": torch.empty(T, L, sum(self.padded)), "disturbance": env._disturbance,
            "airframe": env._airframe, "settings": env._settings, "key": env._key,
        }  # fmt: skip
        past = history.rows if history.length > 1 else env._seen[PREVIOUS]
        for name, first in (("state", env._state), ("record", env._record), ("seen", env._seen)):
            self.tensors[name][0] = first
        self.tensors["actions"][: history.length] = past.view(history.length, 4, L)

    def forward(self, layers: Layers) -> None:
        """Fly."""
        self.tensors["forward"] = self._pack(layers, transposed=True)
        self._call("unroll")

    def backward(self, layers: Layers, grads: dict[str, Tensor]) -> list[Tensor]:
        """Gradients of each layer's weight and bias."""
        blocks, packed = self.lanes // LANES, self.sizes.packed
        self.tensors |= {name: grad.contiguous() for name, grad in grads.items()}
        self.tensors["backward"] = self._pack(layers, transposed=False)
        self.tensors["grad_actions"] = torch.zeros_like(self.tensors["actions"])
        self.tensors["grad_packed"] = torch.zeros(blocks, packed)
        self.tensors["scratch"] = torch.empty(self.lanes, 2 * max(self.padded))
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
    """The compiled unroll; returns reward [T, L], the last state [S, L] and the last observation [32, L]."""

    @staticmethod
    def forward(ctx: Any, buffers: _Buffers, *flat: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Fly."""
        buffers.forward(list(zip(flat[::2], flat[1::2], strict=True)))
        ctx.buffers = buffers
        ctx.save_for_backward(*flat)
        return (
            buffers.tensors["reward"].clone(),
            buffers.tensors["state"][-1].clone(),
            buffers.tensors["seen"][-1].clone(),
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Back through all steps."""
        flat = ctx.saved_tensors
        named = dict(zip(("grad_reward", "grad_state", "grad_seen"), grads, strict=True))
        found = ctx.buffers.backward(list(zip(flat[::2], flat[1::2], strict=True)), named)
        return (None, *found)
