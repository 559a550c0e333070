"""A guard of learned policies that drive by a lidar: a command that leaves no room to stop is replaced.

The simplex architecture (Sha 2001, IEEE Software 18(4)): a learned controller drives, a simple one that is known to
stop in time takes over for as long as it must. Here the simple one is the dynamic window, on the way to the same
waypoint. N is the number of observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.deployment.dynamic_window import NEAR, Drive, DynamicWindow
from embodied.errors import UserError
from embodied.policy import Decision, Policy
from embodied.rollout.memory import RecurrentPolicy

READ = "lidar", "remembered", "velocity", "waypoints"
"""Observations that a guard needs."""
AHEAD = "x_1_m", "y_1_m"
"""Elements of the waypoint that it drives to."""


class Guard:
    """Replaces commands after which `drive` could not stop before it touches what its lidar sees or lately saw.

    Raises:
        UserError: for a policy of `contract` that does not observe what the guard needs, or commands several steps.
    """

    def __init__(self, contract: Contract, drive: Drive) -> None:
        if missing := [key for key in READ if key not in contract.observation]:
            raise UserError(f"a guard needs the observations {', '.join(READ)}; the policy has no {missing[0]}")
        if contract.executed != 1:
            raise UserError(f"a guard checks every command; the policy executes {contract.executed} at once")
        self.window = DynamicWindow(contract, drive, NEAR)
        names = contract.observation["waypoints"].names
        self._ahead = [names.index(name) for name in AHEAD]

    def command(self, observation: Mapping[str, Tensor] | TensorDict, command: Tensor) -> tuple[Tensor, Tensor]:
        """Speeds and yaw rates [N, 2] to drive in place of `command` [N, 2], and which [N] differ."""
        lidar, remembered, velocity, waypoints = (observation[key] for key in READ)
        lidar = torch.minimum(lidar, remembered)
        unsafe = ~self.window.admissible(lidar, velocity, command)
        if bool(unsafe.any()):
            command = command.clone()
            given = lidar[unsafe], velocity[unsafe], waypoints[unsafe][:, self._ahead]
            command[unsafe] = self.window.command(*given)
        return command, unsafe


class Guarded:
    """`policy`, whose commands `guard` checks."""

    def __init__(self, policy: Policy, guard: Guard) -> None:
        self.policy, self.guard, self.contract = policy, guard, policy.contract

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """As the policy's, with commands replaced where the vehicle could not stop."""
        decision = self.policy.act(observation, deterministic=deterministic, generator=generator)
        first = self.guard.command(observation, decision.actions[:, 0])[0]
        return replace(decision, actions=torch.cat((first.unsqueeze(1), decision.actions[:, 1:]), 1))


class GuardedRecurrent(Guarded):
    """The same for a policy with memory."""

    policy: RecurrentPolicy

    def initial_memory(self, count: int) -> Tensor:
        """As the policy's."""
        return self.policy.initial_memory(count)


def guarded(policy: Policy, guard: Guard) -> Guarded:
    """`policy`, whose commands `guard` checks."""
    return (GuardedRecurrent if isinstance(policy, RecurrentPolicy) else Guarded)(policy, guard)
