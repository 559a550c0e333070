"""Checks of observations, rewards and signals where they enter, before anything is learned from them."""

from __future__ import annotations

import math
from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import Environment, Transition
from embodied.errors import UserError

RESERVED = {
    "distribution",
    "episode_return",
    "episode_steps",
    "episodes",
    "failures",
    "high",
    "immediate",
    "low",
    "mean_steps",
    "outcomes",
    "per_task",
    "repeatable",
    "return",
    "stage",
    "step_limit",
    "success",
    "task",
    "title",
}
"""Names taken by other numbers in metrics of rollouts and rows of reports, which signals and events cannot have."""


def check_observation(env: Environment, observation: TensorDict) -> None:
    """Check that all numbers of `observation` [..., N] are finite.

    Raises:
        UserError: naming the environment, the observation and its element.
    """
    for key, leaf in observation.items(include_nested=True, leaves_only=True):
        value = cast(Tensor, leaf)
        if value.is_floating_point() and not _is_finite(value):
            name = ".".join(key) if isinstance(key, tuple) else key
            dims = observation.batch_dims
            _refuse(env, f"element {_element(env, name, value, dims)} of observation {name!r}", value, dims - 1)


def check_reward(env: Environment, reward: Tensor) -> None:
    """Check that all rewards [..., N, K] are finite.

    Raises:
        UserError: naming the environment.
    """
    if not _is_finite(reward):
        _refuse(env, "the reward", reward, reward.ndim - 2)


def check_transition(env: Environment, transition: Transition) -> None:
    """Check observation, reward, signals and events of one step.

    Raises:
        UserError: see `check_observation` and `check_reward`; also for names and shapes of signals and events.
    """
    check_reward(env, transition.reward)
    check_observation(env, transition.observation)
    _check_names(transition)
    for name, values in transition.signals.items():
        if values.shape != transition.reward.shape:
            raise UserError(f"expected signal {name!r} of shape {[*transition.reward.shape]}, got {[*values.shape]}")
        if not _is_finite(values):
            _refuse(env, f"signal {name!r}", values, 0)
    for name, flags in transition.events.items():
        if flags.shape != transition.terminated.shape or flags.dtype != torch.bool:
            shape = [*transition.terminated.shape]
            raise UserError(f"expected event {name!r} as bool {shape}, got {flags.dtype} {[*flags.shape]}")


def _is_finite(values: Tensor) -> bool:
    """Whether all `values` are finite."""
    # a sum is cheaper than the exact test, which decides if the sum is not finite: finite numbers may overflow
    return math.isfinite(values.detach().sum()) or bool(values.isfinite().all())


def _check_names(transition: Transition) -> None:
    """Raise UserError unless names of signals and events are identifiers, each of them unique."""
    names = [*transition.signals, *transition.events]
    for name in names:
        if not name.isidentifier() or name in RESERVED or name in transition.metrics or names.count(name) > 1:
            raise UserError(f"expected a name of its own for each signal and event, an identifier, got {name!r}")


def _refuse(env: Environment, subject: str, values: Tensor, env_dim: int) -> None:
    values = values.detach()
    index = (~values.isfinite()).nonzero()[0]
    number = int(index[env_dim])
    task = env.task_names[int(env.task_index[number])]
    raise UserError(
        f"{subject} became {float(values[tuple(index)])} in environment {number} ({task}); expected finite numbers:"
        " check the simulator and the task's functions"
    )


def _element(env: Environment, name: str, value: Tensor, dims: int) -> str:
    """Name of the first element that is not finite; its index where elements have no names."""
    index = (~value.isfinite()).nonzero()[0][dims:].tolist()
    spec = env.contract.observation.get(name)
    names: tuple[str, ...] = spec.names if spec else ()
    return str(names[index[0]]) if len(index) == 1 and len(names) > index[0] else str(index)
