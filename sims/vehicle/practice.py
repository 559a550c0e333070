"""Practice of fast laps on one track without resets: a car that has crashed or is stuck recovers by itself.

As in FastRLAP (arXiv 2304.09831) checkpoints along the track are the goals, one after the other, a crash terminates an
episode, being stuck truncates it, and the next one begins where the recovery has left the car.

Differs from the paper:
    - the policy sees a planar lidar, not pictures, and checkpoints lie on the track's centre line;
    - the recovery goes back and forth until the car faces the next checkpoint; the paper's steers at random for 1 s;
    - a car that touches a wall stands where it was one control step before, at rest: nothing is damaged or dented.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.configuration import NonNegativeFloat, NonNegativeInt, PositiveInt
from embodied.contract import TensorSpec
from embodied.environments.engine import Outcome
from embodied.seeding import derive
from sims.vehicle.environment import VehicleEnvironment
from sims.vehicle.episode import FORWARD, YAW, Moment, X, Y
from sims.vehicle.places.tracks import POINTS, tracks
from sims.vehicle.race import COLUMNS, Race
from sims.vehicle.worlds import Array

STUCK_M = 0.3
STUCK_STEPS = 30
"""A car that has not left a circle of this radius, m, for so many control steps is stuck."""
RECOVERY_M_S = 1.0
RECOVERY_STEPS = 120
LEG_STEPS = 20
"""Speed, m/s, and largest number of control steps of a recovery, and of one of its legs, which go back and forth."""
CLEAR_STEPS = 10
AIMED_RAD = 0.3
"""A recovery ends after the first number of steps, once the next checkpoint is within this angle ahead."""
TURN = 2.0
"""Steering angle per angle to the next checkpoint in a recovery, rad/rad."""
ANCHOR = slice(COLUMNS, COLUMNS + 2)
STILL = COLUMNS + 2
"""Columns of the memory after those of `Race`: where the car was when it last moved on, m, and steps since then."""


@dataclass(frozen=True)
class Practice(Race):
    """Parameters of the task; those of `Race`, except that progress is that towards the next checkpoint.

    Attributes:
        track: number of the track.
        checkpoints: number of checkpoints, equally spaced along the centre line.
    """

    weight_steering: NonNegativeFloat = 0.02
    track: NonNegativeInt = 0
    checkpoints: PositiveInt = 16

    OBSERVED: ClassVar[Mapping[str, TensorSpec]] = {
        **Race.OBSERVED,
        "checkpoint": TensorSpec((2,), unit="m", frame="base", names=("x", "y")),
    }

    def worlds(self, rng: np.random.Generator, count: int) -> dict[str, Array]:
        """The same track `count` times; cars begin at its first point, at rest, with random offsets and headings."""
        own = np.random.Generator(np.random.Philox(key=derive(self.track, "practice")))
        radius_m = self.radius_low_m, self.radius_high_m
        track = tracks(own, 1, radius_m=radius_m, half_width_m=(self.half_width_low_m, self.half_width_high_m))
        worlds = {name: np.repeat(values, count, 0) for name, values in track.items()}
        offset, turn = rng.uniform(-0.2, 0.2, (2, count))
        x, y, yaw = worlds["pose"].T
        worlds["pose"] = np.stack((x - offset * np.sin(yaw), y + offset * np.cos(yaw), yaw + turn), 1)
        worlds["speed_m_s"] = np.zeros(count)
        return worlds

    def reset(self, state: Tensor, world: TensorDict) -> Tensor:
        """Initial memory, of a car that has just moved."""
        still = torch.zeros(len(state), 1, device=state.device)
        return torch.cat((super().reset(state, world), state[:, [X, Y]], still), 1)

    def observe(self, now: Moment) -> dict[str, Tensor]:
        """Observations of a race, and the next checkpoint relative to the car."""
        offset = self._next(now) - now.state[:, [X, Y]]
        cos, sin = now.state[:, YAW].cos(), now.state[:, YAW].sin()
        x, y = offset.unbind(1)
        return {**super().observe(now), "checkpoint": torch.stack((cos * x + sin * y, cos * y - sin * x), 1)}

    def update(self, now: Moment) -> Tensor:
        """Memory after a control step; the anchor follows a car that has left its circle."""
        assert now.before is not None
        before = now.before.memory
        position = now.state[:, [X, Y]]
        moved = (position - before[:, ANCHOR]).norm(dim=1, keepdim=True) > STUCK_M
        anchor = torch.where(moved, position, before[:, ANCHOR])
        still = torch.where(moved[:, 0], 0.0, before[:, STILL] + 1.0)
        return torch.cat((super().update(now), anchor, still.unsqueeze(1)), 1)

    def reward(self, now: Moment) -> Tensor:
        """Reward for driving towards the next checkpoint, penalties for changes of steering and for contact."""
        assert now.before is not None
        # r = c_p (|p - c| - |p' - c|) - c_s (change of steering)^2 + c_h [contact], c: the next checkpoint before
        checkpoint = self._next(now.before)
        before, after = ((checkpoint - state[:, [X, Y]]).norm(dim=1) for state in (now.before.state, now.state))
        change = (now.action[:, 0] - now.previous[:, 0]).square()
        reward = self.reward_progress * (before - after) - self.weight_steering * change
        return reward + torch.where(now.hit, self.reward_collision, 0.0)

    def stuck(self, now: Moment) -> Tensor:
        """Whether the car does not move on, [N] bool."""
        return now.memory[:, STILL] >= STUCK_STEPS

    def finished(self, now: Moment) -> Tensor:
        """Whether all laps are complete, or the car is stuck."""
        return super().finished(now) | self.stuck(now)

    def success(self, now: Moment) -> Tensor:
        """Whether all laps are complete."""
        return now.memory[:, 2] >= self.laps

    def failures(self, now: Moment) -> dict[str, Tensor]:
        """Causes of failure: a collision, or standing still."""
        return {**super().failures(now), "stuck": self.stuck(now)}

    def _next(self, now: Moment) -> Tensor:
        """Position [N, 2] of the next checkpoint, m: the first that lies at least half a spacing ahead."""
        share = now.memory[:, 1] / now.world["length_m"] * self.checkpoints
        number = (share + 1.5).floor().long() % self.checkpoints
        index = number * POINTS // self.checkpoints
        return now.world["route"].gather(1, index.view(-1, 1, 1).expand(-1, 1, 2))[:, 0]


class PracticeEnvironment(VehicleEnvironment):
    """Cars that nobody puts back: after the first one, episodes begin where the cars are, once they have recovered.

    Arguments are those of `VehicleEnvironment`. Signals of the first step of an episode: "recoveries" and
    "recovery_steps" before it, and "requests" to a person, who puts a car back that has not come as far as the next
    checkpoint is in `tries` recoveries.
    """

    mdp: Practice

    def __init__(self, num_envs: int, *, mdp: Practice, tries: int, **options: Any) -> None:  # noqa: ANN401 - the parent's
        self.tries = tries
        super().__init__(num_envs, mdp=replace(mdp, laps=1_000_000), **options)
        self._placed = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self._free = self.now.state.clone()  # [N, 7] before the last control step
        self._pending = torch.zeros(num_envs, len(SIGNALS), device=self.device)
        self._failed = torch.zeros(num_envs, device=self.device)  # recoveries near the same place
        self._reached = torch.zeros(num_envs, device=self.device)  # progress, m, at the first of them

    def next_starts(self, ids: Tensor) -> Tensor:
        """The first initial state, in which a person puts a car."""
        return torch.zeros_like(ids)

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Let cars that have crashed or are stuck recover; place those that are not on the track yet."""
        new = ids[~self._placed[ids]]
        if len(new):
            super().begin(new, torch.zeros_like(new))
            self._placed[new] = True
            self._failed[new] = self._reached[new] = 0.0
        chosen = torch.zeros_like(self._placed).index_fill(0, ids, True)
        need = chosen & (self.now.hit | self.mdp.stuck(self.now))
        if bool(need.any()):
            self._recover(need)
        self.now.steps[ids] = 0
        if bool((lost := need & (self._failed > self.tries)).any()):
            self._placed &= ~lost
            self._pending[:, 2] += lost
            self.begin(lost.nonzero().squeeze(1), starts)

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        """Execute the chunk, and add the signals of what came before it."""
        outcome = super().advance(actions, remaining_steps)
        first = torch.zeros_like(outcome.reward).unsqueeze(2).repeat(1, 1, len(SIGNALS))
        acted = outcome.executed[:, 0]
        first[acted, 0] = self._pending[acted]
        self._pending[acted] = 0.0
        return replace(outcome, signals=dict(zip(SIGNALS, first.unbind(2), strict=True)))

    def save(self) -> dict[str, Any]:
        """State of the cars and of their practice."""
        return super().save() | {name: getattr(self, name).clone() for name in OWN}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `save` returned."""
        self._placed.fill_(False)
        super().restore(state)
        for name in OWN:
            setattr(self, name, state[name].to(self.device, copy=True))

    def _move(self, action: Tensor, active: Tensor) -> Tensor:
        self._free = torch.where(active.unsqueeze(1), self.now.state, self._free)
        return super()._move(action, active)

    def _recover(self, need: Tensor) -> None:
        """Let the cars `need` [N] back out and turn towards their next checkpoints."""
        now = self.now
        state = torch.where((need & now.hit).unsqueeze(1), self._free, now.state)
        state[need, FORWARD:] = 0.0  # at rest, wheels straight
        active = need.clone()
        direction = -torch.ones_like(state[:, FORWARD])  # backwards first
        leg = torch.zeros_like(direction)  # steps since it has changed
        for step in range(RECOVERY_STEPS):
            x, y = self.mdp.observe(replace(now, state=state))["checkpoint"].unbind(1)
            angle = torch.atan2(y, x)
            active = active & ((step < CLEAR_STEPS) | (angle.abs() > AIMED_RAD))
            if not bool(active.any()):
                break
            limit = self.vehicle.steering_rad
            # backwards the nose turns against the steering angle
            steering = (direction * TURN * angle).clamp(-limit, limit)
            command = torch.stack((steering, direction * RECOVERY_M_S), 1)
            before = state
            state, hit = self.simulator.advance(
                state, command, self.parameters, self.mdp.circles(now), now.world["segments"], ~active
            )
            blocked = active & hit
            state = torch.where(blocked.unsqueeze(1), before, state)
            state[blocked, FORWARD:] = 0.0
            self._pending[:, 1] += active
            turns = blocked | (leg >= LEG_STEPS)
            direction = torch.where(turns, -direction, direction)
            leg = torch.where(turns, 0.0, leg + 1.0)
        state[need, FORWARD:] = 0.0
        now.state = state
        now.hit = now.hit & ~need
        self._previous[need] = 0.0
        self._pending[:, 0] += need
        progress = now.memory[:, 0]
        far = (progress - self._reached).abs() > now.world["length_m"] / self.mdp.checkpoints
        self._failed = torch.where(need, torch.where(far, 1.0, self._failed + 1.0), self._failed)
        self._reached = torch.where(need & far, progress, self._reached)
        now.memory[need] = self._rested(need)
        now.ranges[need] = self._scan(state)[need]

    def _rested(self, need: Tensor) -> Tensor:
        """Memory of the cars `need`, with their present place, from which they have not moved yet."""
        memory = self.now.memory[need].clone()
        memory[:, ANCHOR] = self.now.state[need][:, [X, Y]]
        memory[:, STILL] = 0.0
        return memory


SIGNALS = ("recoveries", "recovery_steps", "requests")
OWN = ("_placed", "_free", "_pending", "_failed", "_reached")
