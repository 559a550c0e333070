"""Swarms as a vectorised, differentiable Environment: a row is a drone, M consecutive rows are a world.

Letters in shape comments: N drones in all, W = N / M worlds of M drones, K executed actions, L lanes, O observations.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environments.engine import Outcome, RestorableEngine
from sims.quadrotor.observation import contract
from sims.quadrotor.physics.airframes import CRAZYFLIE, Airframe
from sims.quadrotor.physics.dynamics import BODY_ROWS, Body, Options, sound
from sims.quadrotor.starts import draws, keys
from sims.quadrotor.tasks.hover import ERROR_STEPS
from sims.swarm.mdp import FLYING, HIT_ROOM, Record, Swarm, collisions, length
from sims.swarm.physics import Physics
from sims.swarm.practice import Curriculum, Replay
from sims.swarm.viewing import SwarmView
from sims.swarm.ways import Ways
from sims.swarm.worlds import Worlds, build

REPLAYED = 0.3
"""Share of the training worlds that begin shortly before an earlier collision."""


class SwarmEnvironment(RestorableEngine):
    """N drones in worlds of M; implements `embodied.environment.DifferentiableEnvironment`.

    Actions are clipped to [-1, 1]. In grad mode rewards and observations carry gradients from the actions of all drones
    of a world, of their step and of earlier ones, back to `detach` or the episode's beginning; but none through
    downwash.

    The drones of a world begin and end together, so `reset` takes whole worlds. The start of its first drone defines a
    world. The split decides what a collision does:

    - "train": it ends the world's episode. Drones that collided have terminated, the others are truncated. The obstacle
      density grows as worlds end without collisions (`Curriculum`), and some resets without starts go back to a moment
      before an earlier collision (`Replay`).
    - "eval": drones that collided are removed and the others fly on. A removed drone waits without executing actions,
      and terminates with the world's episode: at the step limit, or when no drone is left.

    Success means no collision and a mean distance from the goal of at most `Swarm.success_error_m` over the last
    second. Metrics: no collision ("collision_free"), none in the whole world ("world_collision_free"), what was hit,
    and that mean distance (of drones that flew to the end).

    Args:
        num_envs: N, rounded up to whole worlds.
        mdp: the task.
        airframe: airframe of all drones.
        options: effects of the dynamics.
        split: "train" or "eval".
        executed: K, actions of a chunk, all of which are executed.
        step_limit: control steps after which an episode ends.
        seed: selects the initial states of a reset without starts.
        noise: whether observations are noisy.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        mdp: Swarm | None = None,
        airframe: Airframe = CRAZYFLIE,
        options: Options | None = None,
        split: str = "train",
        executed: int = 1,
        step_limit: int = Swarm.STEP_LIMIT,
        seed: int = 0,
        noise: bool = True,
    ) -> None:
        self.mdp = mdp or Swarm()
        self.airframe = airframe
        self.options = options or Options()
        self.split = split
        self.group = self.mdp.drones
        self.num_worlds = -(-num_envs // self.group)
        super().__init__(
            contract(self.mdp.OBSERVED, executed=executed),
            self.num_worlds * self.group,
            step_limit,
            task_names=("swarm",),
            instructions=(self.mdp.INSTRUCTION,),
            seed=seed,
        )
        self.curriculum = Curriculum() if split == "train" else None
        self._physics = Physics(self.mdp, airframe, self.options, noise)
        self._worlds = self._build(keys(split, torch.zeros(self.num_worlds, dtype=torch.int64)))
        self._ways = Ways(self.mdp, self._worlds)
        self._replay = Replay(self._worlds) if split == "train" else None
        self._replaying = False
        self._over = torch.ones(self.num_worlds, dtype=torch.bool)
        sizes = [math.prod(spec.shape) for spec in self.contract.observation.values()]
        self._observations = torch.zeros(self.num_envs, sum(sizes))

    @property
    def pose(self) -> tuple[Tensor, Tensor]:
        """True position [N, 3], m, and rotation matrix [N, 3, 3] from body to world."""
        body = Body.of(self._worlds.state.detach().flatten(0, 1).t())
        return torch.stack(body.position, 1), torch.stack(body.rotation(), 1).view(-1, 3, 3)

    @property
    def worlds(self) -> Worlds:
        """The current worlds."""
        return self._worlds

    def view(self) -> SwarmView:
        """View of the drones for the viewer."""
        return SwarmView(self.group, self.airframe, lambda: self.worlds, self.kick)

    def kick(self, row: int, change_m_s: Tensor) -> None:
        """Change the velocity of drone `row` by `change_m_s` [3], world frame."""
        change = torch.zeros_like(self._worlds.state)
        change[row // self.group, row % self.group, 7:10] = change_m_s.to(change)
        self._worlds.state = self._worlds.state + change

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        """Reset as every engine does; worlds without starts may go back to before a collision."""
        self._replaying = starts is None
        observation = super().reset(mask, starts)
        self.steps = self._worlds.steps.flatten()
        return observation

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Build the worlds of drones `ids`, which are whole worlds."""
        worlds = ids[:: self.group] // self.group
        key = keys(self.split, starts[:: self.group])
        self._worlds.put(worlds, self._build(key))
        if self._replay:
            if self._replay.count and self._replaying:
                u = draws(key ^ 0x5BD1E995, 2)  # numbers not used to make the world
                replayed = u[0] < REPLAYED
                self._worlds.put(worlds[replayed], self._replay.take(u[1, replayed]))
            self._replay.begin(self._worlds, worlds)
        self._over = self._over.index_fill(0, worlds, False)
        observations = self._physics.look(self._worlds, self._ways, self._worlds.fate == FLYING).observations
        self._observations = self._observations.index_copy(0, ids, observations.flatten(0, 1)[ids])

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        """Execute the chunk; drones that collided are removed, and end with their world."""
        rewards = []
        executed = []
        for action in actions.float().unbind(1):
            flying = (self._worlds.fate == FLYING) & ~self._over.unsqueeze(1)
            rewards.append(self._fly(action.view(self.num_worlds, self.group, 4), flying))
            executed.append(flying.flatten())
        terminated, truncated = self._ended()
        record = Record(self._worlds.fate, self._worlds.steps, self._worlds.error, self.step_limit)
        reward = torch.stack(rewards, 1)
        executed_steps = torch.stack(executed, 1)
        return Outcome(
            reward,
            executed_steps,
            terminated,
            truncated & self.mdp.success(record).flatten(),
            truncated,
            metrics={name: values.flatten() for name, values in self.mdp.metrics(record).items()},
            failures={name: hit.flatten() for name, hit in self.mdp.failures(record).items()},
        )

    def observe(self) -> TensorDict:
        """Measurements of every drone, and its observations of neighbours and obstacles."""
        observation = {}
        column = 0
        for key, spec in self.contract.observation.items():
            size = math.prod(spec.shape)
            observation[key] = self._observations[:, column : column + size].unflatten(1, spec.shape)
            column += size
        return TensorDict(observation, batch_size=[self.num_envs])

    def detach(self) -> None:
        """Detach the current state: gradients of later steps end here."""
        self._worlds.state, self._observations = self._worlds.state.detach(), self._observations.detach()

    def save(self) -> dict[str, Any]:
        """The worlds, the curriculum and the collisions."""
        state = {name: tensor.detach().clone() for name, tensor in self._worlds.tensors().items()}
        saved = {"worlds": state, "over": self._over.clone(), "seen": self._observations.detach().clone()}
        if self.curriculum and self._replay:
            saved |= {"curriculum": dict(vars(self.curriculum)), "replay": self._replay.state_dict()}
        return saved

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `save` returned."""
        self._worlds = Worlds(**{field.name: state["worlds"][field.name].clone() for field in fields(Worlds)})
        self._over, self._observations = state["over"].clone(), state["seen"].clone()
        if self.curriculum and self._replay:
            vars(self.curriculum).update(state["curriculum"])
            self._replay.load_state_dict(state["replay"])

    def _build(self, key: Tensor) -> Worlds:
        level = self.curriculum.level if self.curriculum else 1.0
        return build(self.mdp, self.airframe, self.options, key, level * self.mdp.density)

    def _fly(self, action: Tensor, flying: Tensor) -> Tensor:
        """One control step of the drones `flying` [W, M] with `action` [W, M, 4]; returns the reward [N]."""
        worlds = self._worlds
        before = worlds.state
        moved = self._physics.advance(worlds, action, flying)
        lost = flying & ~sound(list(moved.detach().unbind(-1)))
        worlds.state = torch.where((flying & ~lost).unsqueeze(-1), moved, before)
        worlds.steps = worlds.steps + flying
        change = action.clamp(-1.0, 1.0) - before[..., BODY_ROWS : BODY_ROWS + 4]
        observations, now = self._physics.look(worlds, self._ways, flying, change)
        self._observations = torch.where(flying.view(-1, 1), observations.flatten(0, 1), self._observations)
        rewards = torch.where(flying, self.mdp.reward(now), 0.0)
        with torch.no_grad():
            late = flying & (worlds.steps > self.step_limit - ERROR_STEPS)
            worlds.error = worlds.error + torch.where(late, length(now.to_goal), 0.0)
            worlds.fate = torch.where(flying, collisions(now.position, now.near), worlds.fate)
            worlds.fate = torch.where(lost, HIT_ROOM, worlds.fate)  # treated as having left the room
            self._finish(flying)
        return rewards.flatten()

    def _finish(self, flying: Tensor) -> None:
        """End the episodes of finished worlds after a step of the drones `flying` [W, M]."""
        worlds = self._worlds
        crashed = flying & (worlds.fate != FLYING)
        late = (worlds.steps >= self.step_limit).any(1)
        any_flying = (worlds.fate == FLYING).any(1)
        before = self._over
        if self.curriculum and self._replay:
            self._over = before | late | crashed.any(1)
            ended = self._over & ~before
            free = ended & ~crashed.any(1)
            self.curriculum.add(int(ended.sum()), int(free.sum()))
            if bool(crashed.any()):
                self._replay.keep(crashed.any(1).nonzero().squeeze(1))
            self._replay.remember(worlds)
        else:
            self._over = before | late | ~any_flying

    def _ended(self) -> tuple[Tensor, Tensor]:
        """Terminated and truncated, [N] each."""
        flying = self._worlds.fate == FLYING
        over = self._over.unsqueeze(1)
        return (over & ~flying).flatten(), (over & flying).flatten()
