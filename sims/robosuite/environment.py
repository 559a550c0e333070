"""robosuite's environments, one after another in this process, as a vectorised Environment.

Letters in shape comments: N environments, K executed actions of a chunk, A action dimension, M environments that begin.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environments.engine import Outcome, RestorableEngine
from embodied.errors import UserError
from sims.robosuite.catalogue import entry
from sims.robosuite.contract import contract
from sims.robosuite.world import Options, World

SPLITS = ("train", "eval")


class RobosuiteEnvironment(RestorableEngine):
    """N environments of one task. Robosuite clips actions to their limits.

    With the sparse reward, 1 at the step that succeeds, success terminates an episode; the same holds in evaluation. In
    training with robosuite's shaped reward, which every step near the goal receives, an episode continues to its limit,
    as in robosuite, because termination would forgo later rewards.

    Args:
        num_envs: N.
        options: task, robots, controller and reward.
        split: "train" or "eval", with disjoint initial states.
        images: cameras whose pictures are observed, of `image_size` pixels a side, rendered once a chunk.
        horizon: H, actions a policy predicts; `executed`: K, actions run between observations.
        step_limit: control steps after which an episode is truncated; the task's of `catalogue` if None.
        seed: selects the initial states of a reset without starts.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        options: Options,
        split: str = "train",
        images: tuple[str, ...] = (),
        image_size: int = 128,
        horizon: int = 1,
        executed: int = 1,
        step_limit: int | None = None,
        seed: int = 0,
    ) -> None:
        if split not in SPLITS:
            raise UserError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
        about = entry(options.task)
        super().__init__(
            contract(options, images, image_size, horizon, executed),
            num_envs,
            about.step_limit if step_limit is None else step_limit,
            task_names=(options.task,),
            instructions=(about.instruction,),
            seed=seed,
        )
        self.options = options
        self.split = split
        self.images = images
        self.image_size = image_size
        self.ends = split == "eval" or not options.shaped
        self.worlds = [World(options) for _ in range(num_envs)]
        specs = self.contract.observation.items()
        self._observations = {name: np.zeros((num_envs, *spec.shape), dtype=spec.dtype) for name, spec in specs}

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Place robots and objects of environments `ids` [M] by the numbers `starts` [M]."""
        for env, start in zip(ids.tolist(), starts.tolist(), strict=True):
            self.worlds[env].begin(self.options.task, self.split, start)
            self._look(env)

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        """Execute the chunk; where the physics diverges, the observation remains the one before the chunk."""
        chunk = actions.detach().double().numpy()  # robosuite clips them
        reward = np.zeros(chunk.shape[:2], dtype=np.float32)
        executed = np.zeros(chunk.shape[:2], dtype=bool)
        success, diverged = np.zeros((2, self.num_envs), dtype=bool)
        for env, count in enumerate(remaining_steps.tolist()):
            for k in range(count):
                step_reward, reached, is_diverged = self.worlds[env].step(chunk[env, k])
                executed[env, k] = True
                success[env] = success[env] or reached
                diverged[env] = is_diverged
                if not is_diverged:
                    reward[env, k] = step_reward if self.options.shaped else float(reached)
                if is_diverged or (reached and self.ends):
                    break
            if count and not diverged[env]:
                self._look(env)
        done = torch.from_numpy(success & ~diverged)
        failed = torch.from_numpy(diverged)
        ended = done if self.ends else torch.zeros_like(done)
        return Outcome(torch.from_numpy(reward), torch.from_numpy(executed), ended, done, diverged=failed)

    def observe(self) -> TensorDict:
        """Observations of robosuite's sensors and cameras."""
        observation = {name: torch.from_numpy(rows.copy()) for name, rows in self._observations.items()}
        return TensorDict(observation, batch_size=[self.num_envs])

    def save(self) -> dict[str, Any]:
        """Physics, grippers and latest observations of all environments."""
        saved = [world.save() for world in self.worlds]
        stacked = {name: np.stack([state[name] for state in saved]) for name in saved[0]}
        return stacked | {"seen": {name: rows.copy() for name, rows in self._observations.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Begin the episodes again from their numbers, then restore what `save` returned."""
        for env, (start, steps) in enumerate(zip(self.start.tolist(), self.steps.tolist(), strict=True)):
            if start >= 0:
                self.worlds[env].begin(self.options.task, self.split, start)
            if start >= 0 and steps:
                self.worlds[env].restore({name: state[name][env] for name in ("physics", "grippers")})
        self._observations = {name: np.array(rows) for name, rows in state["seen"].items()}

    def close(self) -> None:
        """Free models, data and rendering contexts."""
        for world in self.worlds:
            world.env.close()

    def _look(self, env: int) -> None:
        for name, value in self.worlds[env].observe().items():
            self._observations[name][env] = value
        for camera in self.images:
            self._observations[f"{camera}_image"][env] = self.worlds[env].picture(camera, self.image_size)
