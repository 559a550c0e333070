"""Vehicles in numbered worlds as a vectorised Environment.

Letters in shape comments: N environments, K executed actions of a chunk, M environments that begin an episode, B beams.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.environment import Transition
from embodied.errors import UserError
from embodied.seeding import derive
from sims.counter_rng import mix
from sims.vehicle.episode import FORWARD, STEERING, Mdp, Moment, Outcome
from sims.vehicle.geometry import Lidar
from sims.vehicle.simulator import Simulator
from sims.vehicle.vehicles import Model, Vehicle
from sims.vehicle.worlds import worlds

STARTS_PER_SEED = 1 << 24


class VehicleEnvironment:
    """N vehicles, each in an episode of its own; implements `embodied.environment.StartEnvironment`.

    Initial state `start` is a world with all that is random in its episode. An episode is terminated where the vehicle
    touches something, and where the task says so; it is truncated at the step limit.

    Args:
        num_envs: N.
        mdp: the task.
        vehicle: what drives.
        randomisation: every episode's `vehicles.SCATTERED` differ from the vehicle's by up to this share.
        lidar: in place of the task's.
        split: "train" or "eval": worlds that have none in common.
        executed: K, actions of a chunk, all of which are executed.
        step_limit: control steps after which an episode is truncated; the task's if None.
        seed: which initial states an unnamed reset takes.
        device: where it runs: "cpu" (compiled C) or a CUDA device (torch).
        backend: "c" or "torch" in place of the device's own.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        mdp: Mdp,
        vehicle: Vehicle,
        randomisation: float = 0.0,
        lidar: Lidar | None = None,
        split: str = "train",
        executed: int = 1,
        step_limit: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        backend: str | None = None,
    ) -> None:
        self.mdp, self.vehicle, self.randomisation, self.split = mdp, vehicle, randomisation, split
        self.num_envs, self.device = num_envs, torch.device(device)
        self.step_limit = mdp.STEP_LIMIT if step_limit is None else step_limit
        if min(num_envs, self.step_limit, executed) < 1:
            got = f"num_envs={num_envs}, step_limit={step_limit}, executed={executed}"
            raise UserError(f"expected at least one of each, got {got}")
        self.simulator = Simulator(
            mdp.MODEL, lidar or mdp.LIDAR, dt_s=mdp.DT_S, substeps=mdp.SUBSTEPS, device=device, backend=backend
        )
        action = action_spec(mdp, vehicle)
        beams = self.simulator.lidar.beams
        specs = {
            "lidar": TensorSpec((beams,), unit="m", frame="lidar"), **mdp.OBSERVED,
            "previous_action": replace(action, low=(), high=()),
        }  # fmt: skip
        self.contract = Contract(specs, action, mdp.DT_S, horizon=executed, executed=executed)
        self.task_names: tuple[str, ...] = (type(mdp).__name__.lower(),)
        self.task_index = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.num_starts = None
        self._low, self._high = (torch.tensor(each, device=self.device) for each in (action.low, action.high))
        self._seed, self._taken, self._begun = _checked(seed), 0, False
        self._allocate()

    @property
    def steps(self) -> Tensor:
        """Control steps executed in the running episode, [N] int64."""
        return self.now.steps.long()

    def reset(self, mask: Tensor | None = None, seed: int | None = None, starts: Tensor | None = None) -> TensorDict:
        """Start new episodes where `mask` [N] is True (everywhere if None); returns the observations of all.

        Args:
            mask: which environments.
            seed: begin the stream of initial states anew from this seed.
            starts: [N] initial states by number; the next ones of the stream if None.

        Raises:
            ValueError: for shapes other than [N] or negative initial states.
        """
        if seed is not None:
            self._seed, self._taken = _checked(seed), 0
        mask = torch.ones(self.num_envs) if mask is None else self._vector("mask", mask)
        ids = mask.to(self.device).bool().nonzero().squeeze(1)
        if len(ids):
            if starts is None:
                first = self._seed * STARTS_PER_SEED + self._taken
                self._taken += len(ids)
                chosen = torch.arange(first, first + len(ids))
            else:
                chosen = self._vector("starts", starts)[ids].long().cpu()
            if bool((chosen < 0).any()):
                raise ValueError(f"expected initial states >= 0, got {int(chosen.min())}")
            self._begin(ids, chosen)
        return self._observed()

    def step(self, actions: Tensor) -> Transition:
        """Execute the chunk `actions` [N, K, 2], clipped to its limits; environments that have ended stay frozen.

        Raises:
            ValueError: for another shape, an action that is not finite, or before the first reset.
        """
        self._check(actions)
        rewards, ran = [], []
        for action in actions.to(self.device).float().unbind(1):
            active = ~(self._terminated | self._truncated)
            rewards.append(self._advance(action.clamp(self._low, self._high), active))
            ran.append(active)
        return Transition(
            observation=self._observed(),
            reward=torch.stack(rewards, 1),
            executed=torch.stack(ran, 1),
            terminated=self._terminated.clone(),
            truncated=self._truncated.clone(),
            success=self._success.clone(),
            metrics=self.mdp.metrics(self.now, self._success, self._hit),
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit: worlds are made again from their numbers."""
        tensors = {name: getattr(self, f"_{name}").clone() for name in SAVED}
        moment = {name: getattr(self.now, name).clone() for name in MOMENT}
        return {**tensors, **moment, "start": self.start.clone(), "seed": self._seed, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        """Continue from `state_dict`; returns the observations of all environments.

        Raises:
            UserError: where the state is of other environments.
        """
        mine = self.state_dict()
        for name in (*SAVED, *MOMENT, "start"):
            if state[name].shape != mine[name].shape:
                raise UserError(
                    f"the saved {name} has shape {tuple(state[name].shape)}, expected {tuple(mine[name].shape)}; "
                    "use the num_envs and lidar that it was saved with"
                )
        begun = (state["start"] >= 0).nonzero().squeeze(1)
        if len(begun):
            self._begin(begun.to(self.device), state["start"][begun].cpu())
        for name in SAVED:
            setattr(self, f"_{name}", state[name].to(self.device, copy=True))
        moved = {name: state[name].to(self.device, copy=True) for name in MOMENT}
        self.now = replace(self.now, **moved)
        self.start = state["start"].to(self.device, copy=True)
        self._seed, self._taken, self._begun = state["seed"], state["taken"], False
        return self._observed()

    def _allocate(self) -> None:
        count, device = self.num_envs, self.device
        self.start = torch.full((count,), -1, device=device)
        world = worlds(self.mdp, self.split, torch.zeros(count, dtype=torch.int64)).to(device)
        state = torch.zeros(count, STEERING + 1, device=device)
        memory = self.mdp.begin(state, world)
        ranges = torch.zeros(count, self.simulator.lidar.beams, device=device)
        self.now = Moment(state, ranges, torch.zeros(count, dtype=torch.int32, device=device), memory, world)
        self.parameters = self.vehicle.scattered(world["draws"], self.randomisation)
        self._key = torch.zeros(count, dtype=torch.int32, device=device)
        self._previous = torch.zeros(count, 2, device=device)
        for name in FLAGS:  # frozen until the first reset
            setattr(self, f"_{name}", torch.full((count,), name == "terminated", device=device))

    def _begin(self, ids: Tensor, starts: Tensor) -> None:
        """Put environments `ids` [M] at the beginning of episodes `starts` [M]."""
        made = worlds(self.mdp, self.split, starts).to(self.device)
        now, count = self.now, len(ids)
        rest = torch.zeros(count, STEERING - FORWARD, device=self.device)
        state = torch.cat((made["pose"], made["speed_m_s"].unsqueeze(1), rest), 1)
        now.world[ids], now.steps[ids], now.state[ids] = made, 0, state
        now.memory[ids] = self.mdp.begin(state, made)
        self.parameters[ids] = self.vehicle.scattered(made["draws"], self.randomisation)
        key = mix(mix(starts) ^ (derive(0, "lidar", self.split) & 0xFFFFFFFF) ^ (starts >> 32))
        self._key[ids] = torch.where(key < 1 << 31, key, key - (1 << 32)).to(self.device, torch.int32)
        self._previous[ids] = 0.0
        for name in FLAGS:
            getattr(self, f"_{name}")[ids] = False
        self.start[ids] = starts.to(self.device)
        now.ranges[ids] = self._scan(state, ids)

    def _advance(self, action: Tensor, active: Tensor) -> Tensor:
        """One control step; returns the reward [N]."""
        before, world = self.now, self.now.world
        state, hit = self.simulator.advance(
            before.state, action, self.parameters, world["circles"], world["segments"], ~active
        )
        after = replace(before, state=state, steps=before.steps + active.int())
        self.now = after
        after.ranges = self._scan(state)
        middle, half = 0.5 * (self._low + self._high), 0.5 * (self._high - self._low)
        scaled, previous = (action - middle) / half, (self._previous - middle) / half
        outcome = self.mdp.outcome(before, after, hit, scaled, previous)
        after.memory = torch.where(active.unsqueeze(1), outcome.memory, before.memory)
        self._previous = torch.where(active.unsqueeze(1), action, self._previous)
        self._end(outcome, active, hit)
        return torch.where(active, outcome.reward, 0.0)

    def _end(self, outcome: Outcome, active: Tensor, hit: Tensor) -> None:
        won = active & outcome.done & ~hit
        ended = torch.zeros_like(won) if self.mdp.ENDLESS else won
        self._hit, self._success = self._hit | hit, self._success | won
        self._terminated = self._terminated | hit | ended
        limit = self.now.steps >= self.step_limit
        self._truncated = self._truncated | (active & (limit | won) & ~self._terminated)

    def _scan(self, state: Tensor, ids: Tensor | slice = slice(None)) -> Tensor:
        now = self.now
        circles, segments = now.world["circles"][ids], now.world["segments"][ids]
        return self.simulator.scan(state, self.parameters[ids], circles, segments, self._key[ids], now.steps[ids])

    def _observed(self) -> TensorDict:
        now = self.now
        seen = {"lidar": now.ranges, **self.mdp.observe(now), "previous_action": self._previous}
        return TensorDict({name: part.clone() for name, part in seen.items()}, batch_size=[self.num_envs])

    def _check(self, actions: Tensor) -> None:
        expected = (self.num_envs, self.contract.executed, 2)
        if actions.shape != expected:
            raise ValueError(f"expected actions of shape {expected}, got {tuple(actions.shape)}")
        self._begun = self._begun or bool((self.start >= 0).all())
        if not self._begun:
            raise ValueError("an environment has no episode yet; call reset() first")
        if not bool(actions.isfinite().all()):
            broken = (~actions.isfinite().all(-1).all(-1)).nonzero().flatten().tolist()
            raise ValueError(f"actions of environments {broken} are not finite; check the policy's output")

    def _vector(self, name: str, values: Tensor) -> Tensor:
        if values.shape != (self.num_envs,):
            raise ValueError(f"expected {name} of shape ({self.num_envs},), got {tuple(values.shape)}")
        return values


def action_spec(mdp: Mdp, vehicle: Vehicle) -> TensorSpec:
    """Forward speed and yaw rate of a differential drive, steering angle and forward speed of a bicycle."""
    speed = vehicle.speed_min_m_s, vehicle.speed_max_m_s
    if mdp.MODEL is Model.DIFFERENTIAL_DRIVE:
        turn = vehicle.yaw_rate_rad_s
        low, high, unit = (speed[0], -turn), (speed[1], turn), "m/s, rad/s"
    else:
        turn = vehicle.steering_rad
        low, high, unit = (-turn, speed[0]), (turn, speed[1]), "rad, m/s"
    return TensorSpec((2,), unit=unit, frame="base", names=mdp.ACTION, low=low, high=high)


def _checked(seed: int) -> int:
    if not 0 <= seed < 1 << 31:
        raise UserError(f"expected a seed in [0, 2^31), got {seed}")
    return seed


FLAGS = ("terminated", "truncated", "success", "hit")
SAVED = ("key", "previous", *FLAGS)
MOMENT = ("state", "ranges", "steps", "memory")
