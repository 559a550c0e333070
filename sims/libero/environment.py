"""LIBERO tasks as a vectorised Environment with state observations, and pictures where asked for.

Letters in shape comments: N environments, K executed actions of a chunk, M objects, L words.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.environment import Transition
from embodied.errors import UserError
from sims.libero.assets import Assets, find_assets
from sims.libero.language import Wordings
from sims.libero.observation import Observer, action_spec, observation_specs
from sims.libero.placement import Placement, check_names
from sims.libero.scene import build_scene
from sims.libero.simulation import Simulation
from sims.libero.suite import OFFICIAL_STARTS, WARM_UP, Task, step_limit_of

log = logging.getLogger(__name__)

CONTROL_DT_S = 0.05
STARTS_PER_SEED = 1 << 24


class LiberoEnvironment:
    """N environments; environment i runs `tasks[i % len(tasks)]`.

    Implements `embodied.environment.StartEnvironment`. The reward is 1 at the step that reaches the goal, else 0.

    Args:
        tasks: one or more tasks, of any suites.
        num_envs: N.
        distribution: "official" (LIBERO's 50 initial states) or "wide", see `placement`.
        split: "train" or "eval": initial states of the wide distribution that have none in common.
        wording: one of `language.WORDINGS`; of several texts, the number of the initial state chooses.
        horizon: H, actions a policy predicts; `executed`: K, actions run between observations.
        step_limit: control steps after which an episode is truncated; the suite's own (`STEP_LIMITS`) if None.
        assets: where objects come from, or a path to official ones; found by `find_assets` if None.
        seed: which initial states an unnamed reset takes.
        threads: of the simulation; all cores if None.
        image_size: pixels a side of pictures in the observation, rendered once per chunk; none if None.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        num_envs: int,
        *,
        distribution: str = "wide",
        split: str = "train",
        wording: str = "name",
        horizon: int = 8,
        executed: int = 8,
        step_limit: int | None = None,
        assets: Assets | str | Path | None = None,
        seed: int = 0,
        threads: int | None = None,
        image_size: int | None = None,
    ) -> None:
        check_names(distribution, split)
        if not tasks or num_envs < 1 or (step_limit is not None and step_limit < 1):
            got = f"{len(tasks)} tasks, num_envs={num_envs}, step_limit={step_limit}"
            raise UserError(f"expected at least one task, one environment and one step, got {got}")
        self.assets = assets if isinstance(assets, Assets) else find_assets(assets)
        self.scenes = [build_scene(task, self.assets) for task in tasks]
        self.num_envs, self.step_limit = num_envs, step_limit or step_limit_of(tasks)
        self.device = torch.device("cpu")
        self.task_names = tuple(task.name for task in tasks)
        self.task_index = torch.arange(num_envs) % len(tasks)
        self.contract = Contract(
            observation_specs(self.scenes[0], image_size),
            action_spec(),
            CONTROL_DT_S,
            horizon=horizon,
            executed=executed,
        )
        scenes = [self.scenes[index] for index in self.task_index]
        self.simulation = Simulation(scenes, threads=threads)
        self._observer = Observer(self.simulation, image_size)
        self._wordings = [Wordings(task, wording) for task in tasks]
        self._placements = [Placement(scene, distribution, split) for scene in self.scenes]
        self.num_starts = OFFICIAL_STARTS if distribution == "official" else None
        self.start = torch.full((num_envs,), -1)
        self.steps = torch.zeros(num_envs, dtype=torch.int64)
        self._success, self._diverged = torch.zeros(2, num_envs, dtype=torch.bool)
        self._reseed(seed)

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
            self._reseed(seed)
        mask = self._vector("mask", torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask).bool()
        ids = mask.nonzero().flatten()
        chosen = self._next_starts(ids) if starts is None else self._vector("starts", starts)[ids].long()
        if (chosen < 0).any():
            raise ValueError(f"expected initial states >= 0, got {chosen.tolist()}")
        for env, start in zip(ids.tolist(), chosen.tolist(), strict=True):
            self.simulation.write(env, **self._placements[self.task_index[env]](start)._asdict())
            self._instruct(env, start)
        self.start[ids], self.steps[ids], self._success[ids], self._diverged[ids] = chosen, 0, False, False
        if len(ids):
            warm_up = np.broadcast_to(WARM_UP, (len(ids), *WARM_UP.shape))
            self.simulation.step(ids.numpy(), warm_up, stop_on_success=False)
        return self._observer.observe(ids.numpy())

    def step(self, actions: Tensor) -> Transition:
        """Execute the chunk `actions` [N, K, 7], clipped to [-1, 1]; environments whose episode has ended stay frozen.

        Where the physics diverges, the episode has failed: it is terminated, its observation that of the chunk before.

        Raises:
            ValueError: for another shape, a NaN, or before the first reset.
        """
        chunk = self._checked(actions)
        executed = np.zeros(chunk.shape[:2], dtype=bool)
        reward = np.zeros(chunk.shape[:2], dtype=np.float32)
        ended = self._success | self._diverged
        left = np.where(ended, 0, self.step_limit - self.steps.numpy()).clip(0, chunk.shape[1])
        for width in np.unique(left[left > 0]):
            ids = np.flatnonzero(left == width)
            executed[ids, :width], success, diverged = self.simulation.step(ids, chunk[ids, :width])
            self._diverged[ids[diverged]] = True
            winners = ids[success]
            reward[winners, executed[winners].sum(1) - 1] = 1.0
        self.steps += torch.from_numpy(executed.sum(1))
        self._success |= torch.from_numpy(reward.any(1))
        self._tell(self._diverged & ~ended)
        terminated = self._success | self._diverged
        return Transition(
            observation=self._observer.observe(np.flatnonzero(left)),
            reward=torch.from_numpy(reward),
            executed=torch.from_numpy(executed),
            terminated=terminated,
            truncated=~terminated & (self.steps >= self.step_limit),
            success=self._success.clone(),
            diverged=self._diverged.clone(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit, as a tree of tensors, arrays and numbers."""
        return {
            "simulation": self.simulation.state_dict(),
            "start": self.start.clone(),
            "steps": self.steps.clone(),
            "success": self._success.clone(),
            "diverged": self._diverged.clone(),
            "seed": self._seed,
            "taken": self._taken.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        """Continue from `state_dict`; returns the observations of all environments.

        Raises:
            UserError: where the state is of another number of environments.
        """
        if len(state["start"]) != self.num_envs:
            saved = len(state["start"])
            raise UserError(f"the saved state has {saved} environments, got {self.num_envs}; use num_envs={saved}")
        self.simulation.load_state_dict(state["simulation"])
        self._reseed(state["seed"])
        self.start, self.steps = state["start"].clone(), state["steps"].clone()
        self._success, self._diverged = state["success"].clone(), state["diverged"].clone()
        self._taken = state["taken"].clone()
        for env, start in enumerate(self.start.tolist()):
            self._instruct(env, start)
        return self._observer.observe()

    def _instruct(self, env: int, start: int) -> None:
        self._observer.instruct(env, self._wordings[self.task_index[env]](start))

    def _tell(self, diverged: Tensor) -> None:
        for i in diverged.nonzero().flatten().tolist():
            name, start, step = self.simulation.scenes[i].task.name, int(self.start[i]), int(self.steps[i])
            log.warning(f"physics diverged in {name}, initial state {start}, control step {step}: counted as a failure")

    def _reseed(self, seed: int) -> None:
        if not 0 <= seed < 1 << 31:
            raise UserError(f"expected a seed in [0, 2^31), got {seed}")
        self._seed = seed
        self._taken = torch.zeros(len(self.scenes), dtype=torch.int64)

    def _next_starts(self, ids: Tensor) -> Tensor:
        """Numbers of initial states that no earlier episode of the task had since seeding, in order."""
        taken = []
        for task in self.task_index[ids].tolist():
            taken.append(int(self._taken[task]))
            self._taken[task] += 1
        if self.num_starts:
            return torch.tensor([(self._seed + number) % self.num_starts for number in taken], dtype=torch.int64)
        return torch.tensor([self._seed * STARTS_PER_SEED + number for number in taken], dtype=torch.int64)

    def _vector(self, name: str, values: Tensor) -> Tensor:
        if values.shape != (self.num_envs,):
            raise ValueError(f"expected {name} of shape ({self.num_envs},), got {tuple(values.shape)}")
        return values.cpu()

    def _checked(self, actions: Tensor) -> np.ndarray:
        expected = (self.num_envs, self.contract.executed, 7)
        if actions.shape != expected:
            raise ValueError(f"expected actions of shape {expected}, got {tuple(actions.shape)}")
        if (self.start < 0).any():
            raise ValueError("an environment has no episode yet; call reset() before step()")
        chunk = actions.detach().cpu().double().numpy()
        broken = np.flatnonzero(~np.isfinite(chunk).all((1, 2)))
        if len(broken):
            raise ValueError(f"actions of environments {broken.tolist()} are not finite; check the policy's output")
        return chunk.clip(-1.0, 1.0)
