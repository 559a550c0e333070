"""Vehicles in numbered worlds as a vectorised Environment.

Letters in shape comments: N environments, K executed actions of a chunk, M environments that begin an episode, B lidar
beams.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.environments.engine import Outcome, RestorableEngine
from embodied.navigation.guard import READ, Guard
from embodied.seeding import derive
from sims.counter_rng import mix
from sims.vehicle.episode import FORWARD, STEERING, Mdp, Moment
from sims.vehicle.geometry import Lidar
from sims.vehicle.mapping import drive_of, local_map
from sims.vehicle.simulator import Simulator
from sims.vehicle.vehicles import Model, Vehicle
from sims.vehicle.viewing import VehicleView
from sims.vehicle.worlds import worlds

MOMENT = ("state", "ranges", "steps", "memory", "map", "replaced", "hit")


class VehicleEnvironment(RestorableEngine):
    """N vehicles in separate episodes. Actions are clipped to their limits.

    The number `start` of an initial state determines the world and all random numbers of the episode. An episode is
    terminated if the vehicle touches something or the task ends it; it is truncated at the step limit.

    Args:
        num_envs: N.
        mdp: the task.
        vehicle: parameters of the vehicle.
        randomisation: share by which `vehicles.SCATTERED` parameters vary between episodes.
        lidar: lidar to use instead of the task's.
        mapped: whether vehicles make maps, and observe waypoints of the shortest paths to the goal on them.
        guarded: whether a guard replaces commands after which the vehicle could not stop; needs maps.
        split: "train" or "eval": disjoint sets of worlds.
        executed: K, actions of a chunk, all executed.
        step_limit: control steps after which an episode is truncated; the task's if None.
        seed: chooses the initial states of a reset without `starts`.
        device: "cpu" (compiled C) or a CUDA device (torch).
        backend: "c" or "torch"; None: the device's default.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        mdp: Mdp,
        vehicle: Vehicle,
        randomisation: float = 0.0,
        lidar: Lidar | None = None,
        mapped: bool = False,
        guarded: bool = False,
        split: str = "train",
        executed: int = 1,
        step_limit: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        backend: str | None = None,
    ) -> None:
        self.mdp = mdp
        self.vehicle = vehicle
        self.randomisation = randomisation
        self.split = split
        self.simulator = Simulator(
            mdp.MODEL, lidar or mdp.LIDAR, dt_s=mdp.DT_S, substeps=mdp.SUBSTEPS, device=device, backend=backend
        )
        self.map = local_map(self.simulator.lidar, vehicle, mdp.DT_S) if mapped else None
        super().__init__(
            contract(mdp, vehicle, self.simulator.lidar, executed, mapped),
            num_envs,
            mdp.STEP_LIMIT if step_limit is None else step_limit,
            task_names=(type(mdp).__name__.lower(),),
            instructions=(mdp.INSTRUCTION,),
            seed=seed,
            device=device,
        )
        self.guard = Guard(self.contract, drive_of(vehicle, self.simulator.lidar)) if guarded else None
        action = self.contract.action
        self._low, self._high = (torch.tensor(each, device=self.device) for each in (action.low, action.high))
        self._allocate()

    def view(self) -> VehicleView:
        """View of the vehicles for the viewer."""
        return VehicleView(self.mdp, self.vehicle, lambda: self.now)

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Place the vehicles in their worlds, at rest or with the world's initial speed."""
        starts = starts.cpu()
        new_worlds = worlds(self.mdp, self.split, starts).to(self.device)
        now = self.now
        count = len(ids)
        rest = torch.zeros(count, STEERING - FORWARD, device=self.device)
        state = torch.cat((new_worlds["pose"], new_worlds["speed_m_s"].unsqueeze(1), rest), 1)
        now.world[ids] = new_worlds
        now.steps[ids] = 0
        now.state[ids] = state
        now.memory[ids] = self.mdp.reset(state, new_worlds)
        self.parameters[ids] = self.vehicle.scattered(new_worlds["draws"], self.randomisation)
        key = mix(mix(starts) ^ (derive(0, "lidar", self.split) & 0xFFFFFFFF) ^ (starts >> 32))
        self._key[ids] = torch.where(key < 1 << 31, key, key - (1 << 32)).to(self.device, torch.int32)
        self._previous[ids] = 0.0
        now.hit[ids] = False
        now.ranges[ids] = self._scan(state, ids)
        if self.map:
            now.map[ids] = self.map.begin(*(part[ids] for part in self._measured()))
            self._read = None

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        """Execute the chunk; a vehicle that touches something fails, even at the goal."""
        rewards = []
        executions = []
        failed, ended, finished, succeeded = torch.zeros(4, self.num_envs, dtype=torch.bool, device=self.device)
        for k, action in enumerate(actions.float().unbind(1)):
            active = (remaining_steps > k) & ~(failed | ended | finished)
            reward = self._move(action.clamp(self._low, self._high), active)
            now = self.now
            sound = active & ~self.now.hit
            terminated = sound & self.mdp.terminated(now)
            limit = sound & (now.steps >= self.step_limit)
            failed = failed | active & now.hit
            ended = ended | terminated
            if (over := self.mdp.finished(now)) is not None:
                finished = finished | sound & over
                limit = limit | sound & over
            succeeded = succeeded | (terminated | limit) & self.mdp.success(now)
            rewards.append(reward)
            executions.append(active)
        now = replace(self.now, succeeded=self.success | succeeded)
        return Outcome(
            torch.stack(rewards, 1),
            torch.stack(executions, 1),
            failed | ended,
            succeeded,
            finished,
            metrics=self.mdp.metrics(now),
            failures=self.mdp.failures(now),
        )

    def observe(self) -> TensorDict:
        """Observations of the lidar, the task and the last command."""
        now = self.now
        observation = {
            "lidar": now.ranges,
            **self.mdp.observe(now),
            **self._map_observations,
            "previous_action": self._previous,
        }
        return TensorDict({name: part.clone() for name, part in observation.items()}, batch_size=[self.num_envs])

    def save(self) -> dict[str, Any]:
        """State of the vehicles; worlds are not saved, because their numbers determine them."""
        moment = {name: getattr(self.now, name).clone() for name in MOMENT}
        return moment | {"previous": self._previous.clone()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore vehicles from what `save` returned, and worlds from the numbers of their starts."""
        started = (self.start >= 0).nonzero().squeeze(1)
        if len(started):
            self.begin(started, self.start[started])
        moment = {name: state[name].to(self.device, copy=True) for name in MOMENT}
        self.now = replace(self.now, **moment)
        self._previous = state["previous"].to(self.device, copy=True)

    def _allocate(self) -> None:
        count = self.num_envs
        device = self.device
        world = worlds(self.mdp, self.split, torch.zeros(count, dtype=torch.int64)).to(device)
        state = torch.zeros(count, STEERING + 1, device=device)
        memory = self.mdp.reset(state, world)
        ranges = torch.zeros(count, self.simulator.lidar.beams, device=device)
        steps = torch.zeros(count, dtype=torch.int32, device=device)
        maps = torch.zeros(count, self.map.size if self.map else 0, device=device)
        replaced = torch.zeros(count, device=device)
        hit = torch.zeros(count, dtype=torch.bool, device=device)
        self.now = Moment(state, ranges, steps, memory, world, maps, replaced, hit)
        self._read: dict[str, Tensor] | None = None  # observations of the present maps, computed at first use
        self.parameters = self.vehicle.scattered(world["draws"], self.randomisation)
        self._key = torch.zeros(count, dtype=torch.int32, device=device)
        self._previous = torch.zeros(count, 2, device=device)

    def _move(self, action: Tensor, active: Tensor) -> Tensor:
        """One control step of the `active` vehicles; returns the reward [N]."""
        before = replace(self.now, before=None)
        world = self.now.world
        action, replaced = self._checked(action)
        state, touched = self.simulator.advance(
            before.state, action, self.parameters, self.mdp.circles(before), world["segments"], ~active
        )
        # Actions in half ranges around the middle of their limits, [-1, 1].
        middle = 0.5 * (self._low + self._high)
        half = 0.5 * (self._high - self._low)
        now = self.now = replace(
            before,
            state=state,
            steps=before.steps + active.int(),
            replaced=(replaced & active).float(),
            hit=before.hit | active & touched,
            action=(action - middle) / half,
            previous=(self._previous - middle) / half,
            before=before,
        )
        self._read = None
        now.memory = torch.where(active.unsqueeze(1), self.mdp.update(now), before.memory)
        reward = torch.where(active, self.mdp.reward(now), 0.0)
        now.ranges = self._scan(state)
        if self.map and bool(active.all()):
            self.map.update(now.map, *self._measured())
        elif self.map and bool(active.any()):
            maps = now.map[active]
            self.map.update(maps, *(part[active] for part in self._measured()))
            now.map[active] = maps
        self._previous = torch.where(active.unsqueeze(1), action, self._previous)
        return reward

    @property
    def _map_observations(self) -> dict[str, Tensor]:
        """Observations of the maps, shared by the guard and the observation."""
        if self._read is None:
            self._read = self.map.observe(self.now.map) if self.map else {}
        return self._read

    def _checked(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Commands [N, 2] to execute, and whether the guard replaced them, [N]."""
        if not self.guard:
            return action, torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        observation = {"lidar": self.now.ranges, **self.mdp.observe(self.now), **self._map_observations}
        return self.guard.command({key: observation[key] for key in READ}, action)

    def _measured(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ranges [N, B], speed and yaw rate [N, 2], the goal [N, 2] (m, base)."""
        observation = self.mdp.observe(self.now)
        return self.now.ranges, observation["velocity"], observation["goal_distance"] * observation["goal_direction"]

    def _scan(self, state: Tensor, ids: Tensor | slice = slice(None)) -> Tensor:
        now = self.now
        circles = self.mdp.circles(now)[ids]
        segments = now.world["segments"][ids]
        return self.simulator.scan(state, self.parameters[ids], circles, segments, self._key[ids], now.steps[ids])


def contract(mdp: Mdp, vehicle: Vehicle, lidar: Lidar, executed: int = 1, mapped: bool = False) -> Contract:
    """Contract of the task with its vehicle and lidar: chunks of K actions, all executed."""
    action = action_spec(mdp, vehicle)
    specs = {
        "lidar": TensorSpec((lidar.beams,), unit="m", frame="lidar"),
        **mdp.OBSERVED,
        **(local_map(lidar, vehicle, mdp.DT_S).specs if mapped else {}),
        "previous_action": replace(action, low=(), high=()),
    }
    return Contract(specs, action, mdp.DT_S, horizon=executed, executed=executed)


def action_spec(mdp: Mdp, vehicle: Vehicle) -> TensorSpec:
    """Forward speed and yaw rate of a differential drive, steering angle and forward speed of a bicycle."""
    speed = vehicle.speed_min_m_s, vehicle.speed_max_m_s
    if mdp.MODEL is Model.DIFFERENTIAL_DRIVE:
        turn = vehicle.yaw_rate_rad_s
        low = (speed[0], -turn)
        high = (speed[1], turn)
        unit = "m/s, rad/s"
    else:
        turn = vehicle.steering_rad
        low = (-turn, speed[0])
        high = (turn, speed[1])
        unit = "rad, m/s"
    return TensorSpec((2,), unit=unit, frame="base", names=mdp.ACTION, low=low, high=high)
