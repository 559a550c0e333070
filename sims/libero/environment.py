"""LIBERO tasks as a vectorised Environment with state observations and optional images.

Letters in shape comments: N environments, K executed actions of a chunk, M objects, L words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import Transition
from embodied.environments.engine import Outcome, RestorableEngine
from embodied.errors import UserError
from sims.libero.assets import Assets, find_assets
from sims.libero.counterfactual import Aims
from sims.libero.failures import Handling
from sims.libero.observation import CAMERAS, Observer, contract
from sims.libero.perturbed.noise import PIXELS
from sims.libero.physics.backend import LiberoSim, simulate
from sims.libero.published import Published
from sims.libero.randomisation import Draws, Randomisation
from sims.libero.rendering.cameras import AGENT_VIEW
from sims.libero.scene.placement import InitialState, Placement, check_names
from sims.libero.scene.scene import build_scene
from sims.libero.suite import WARM_UP, Task, step_limit_of
from sims.libero.viewing import LiberoView


class LiberoEnvironment(RestorableEngine):
    """N environments; environment i runs `tasks[i % len(tasks)]`.

    The reward is 1 at the step that reaches the goal, else 0. Actions are clipped to [-1, 1]. For
    failed episodes whose objects are not at their goals, `Transition.failures` has the cause (see `failures`).

    Args:
        tasks: one or more tasks, of any suites.
        num_envs: N.
        distribution: "official" (LIBERO's 50 initial states), "wide" or "areas", see `placement`.
        split: "train" or "eval": disjoint initial states of the wide distribution.
        areas_share: share of initial states of "areas" in the training split of "wide".
        counterfactual_share: share of training episodes that ask for another object of the scene, see `counterfactual`;
            the initial states remain the same.
        wording: one of `language.WORDINGS`; if it has several texts, the number of the initial state selects one.
        horizon: H, actions a policy predicts; `executed`: K, actions run between observations.
        step_limit: control steps after which an episode is truncated; the suite's own (`STEP_LIMITS`) if None.
        assets: the asset source, or a path to official assets; found by `find_assets` if None.
        seed: chooses the initial states of a reset without `starts`.
        threads: number of simulation threads; all cores if None.
        image_size: side of images in the observation, pixels, rendered once per chunk; no images if None.
        images: cameras of these images.
        joints: whether actors observe joint angles.
        convention: the convention of published checkpoints, whose observations and number of steps before the first
            observation are then used; ours if None.
        sim: the physics library: MuJoCo on the CPU, or mujoco_warp on `device`, where everything stays.
        randomisation: differences between worlds, drawn by the number of the start; none if None.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        num_envs: int,
        *,
        distribution: str = "wide",
        split: str = "train",
        areas_share: float = 0.0,
        counterfactual_share: float = 0.0,
        wording: str = "name",
        horizon: int = 8,
        executed: int = 8,
        step_limit: int | None = None,
        assets: Assets | str | Path | None = None,
        seed: int = 0,
        threads: int | None = None,
        image_size: int | None = None,
        images: Sequence[str] = CAMERAS,
        joints: bool = True,
        convention: Published | None = None,
        sim: LiberoSim = LiberoSim.mujoco,
        device: torch.device | str = "cpu",
        randomisation: Randomisation | None = None,
    ) -> None:
        check_names(distribution, split)
        if not tasks:
            raise UserError("expected at least one task")
        _check_perturbations(tasks, image_size, images, sim)
        self.assets = assets if isinstance(assets, Assets) else find_assets(assets)
        self.scenes = [build_scene(task, self.assets) for task in tasks]
        super().__init__(
            contract(horizon, executed, image_size, images, joints, convention),
            num_envs,
            step_limit_of(tasks) if step_limit is None else step_limit,
            task_names=tuple(task.name for task in tasks),
            instructions=tuple(task.language for task in tasks),
            num_starts=min(task.official_starts for task in tasks) if distribution == "official" else None,
            seed=seed,
            device=device if sim is LiberoSim.mjwarp else "cpu",
        )
        self._scene_of = self.task_index.tolist()
        options = randomisation or Randomisation()
        self._draws = [Draws(scene, options, split) for scene in self.scenes]
        env_scenes = [self.scenes[index] for index in self._scene_of]
        self.simulation = simulate(sim, env_scenes, threads, self.device, options.fields(split))
        self._observer = Observer(self.simulation, image_size, images, convention)
        self._warm_up = np.tile(WARM_UP[:1], (convention.settling_steps if convention else len(WARM_UP), 1))
        self._handling = Handling(env_scenes, self._observer.most, self.device)
        share = counterfactual_share if split == "train" else 0.0
        if share and sim is not LiberoSim.mujoco:
            raise UserError(f"task.counterfactual_share={share:g} needs task.sim=mujoco, got {sim.value}")
        self.aims = [Aims(scene, wording, share) for scene in self.scenes]
        self._placements = [Placement(scene, distribution, split, areas_share) for scene in self.scenes]
        self._moved: Tensor | None = None  # [N] bool, since the last observation; None: all

    def begin(self, ids: Tensor, starts: Tensor) -> None:
        """Place the objects, set goal and instruction, and run LIBERO's warm-up steps."""
        self.simulation.begin(ids, starts, self.initial_state)
        self._aim(ids, starts)
        self._moved = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device).index_fill(0, ids, True)
        warm_up = torch.from_numpy(self._warm_up).to(self.device).expand(self.num_envs, -1, -1)
        self.simulation.run(warm_up, len(self._warm_up) * self._moved, stop_on_success=False)

    def advance(self, actions: Tensor, remaining_steps: Tensor) -> Outcome:
        """Execute the chunk; where the physics diverges, the observation remains the one before the chunk."""
        self._moved = remaining_steps > 0
        executed, success, diverged = self.simulation.run(actions.detach().double().clamp(-1.0, 1.0), remaining_steps)
        last = (executed.sum(1, keepdim=True) - 1).clamp_min(0)
        reward = torch.zeros(executed.shape, device=self.device).scatter_(1, last, success[:, None].float())
        return Outcome(reward, executed, success, success, diverged=diverged, overflow=self.simulation.overflow)

    def observe(self) -> TensorDict:
        """Observations of all environments; images are rendered only where the state has changed."""
        moved = self._moved
        self._moved = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        observation = self._observer.observe(moved)
        self._handling.see(observation, self.steps)
        return observation

    def settle(self, outcome: Outcome) -> Transition:
        """Settle as the parent, and add the causes of failure of the episodes that have now failed."""
        done_before = self.done
        transition = super().settle(outcome)
        for env in (transition.done & ~transition.success & ~done_before).nonzero().flatten().tolist():
            self._handling.judge(env, self.simulation.achieved(env))
        return replace(transition, failures=transition.failures | self._handling.failures())

    def save(self) -> dict[str, Any]:
        """State of MuJoCo, of the controllers, and of the handled objects."""
        return self.simulation.state_dict() | self._handling.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        """Load a state as `RestorableEngine` does; states without causes of failures are accepted, too."""
        return super().load_state_dict(state | {"simulator": self._handling.state_dict() | state["simulator"]})

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of `save`, and set goals and instructions."""
        self.simulation.load_state_dict(state)
        self._handling.load_state_dict(state)
        self._aim(torch.arange(self.num_envs, device=self.device), self.start)
        self._moved = None

    def go_on(self) -> TensorDict:
        """Begin episodes where the simulations are, with the goals that they have."""
        self.restart()
        return self.observe()

    def view(self) -> LiberoView:
        """View of the simulations for the viewer."""
        return LiberoView(self.simulation)

    def close(self) -> None:
        """Stop the threads."""
        self.simulation.close()

    def initial_state(self, env: int, start: int) -> InitialState:
        """State from which environment `env` begins an episode with the number `start`."""
        scene = self._scene_of[env]
        return self._placements[scene](start)._replace(model_fields=self._draws[scene](start))

    def _aim(self, ids: Tensor, starts: Tensor) -> None:
        """Set the goals and instructions of the episodes of environments `ids` [M] from `starts` [M]."""
        instructions = []
        for env, start in zip(ids.tolist(), starts.tolist(), strict=True):
            aims = self.aims[self._scene_of[env]]
            aim = aims(start)
            instructions.append(aim.wordings(start))
            if aims.share:
                self.simulation.aim(env, aim.goal)
                self._handling.aim(env, aim.goal)
        self._observer.instruct(ids, instructions)


def _check_perturbations(tasks: Sequence[Task], image_size: int | None, images: Sequence[str], sim: LiberoSim) -> None:
    """Check that perturbations of LIBERO-plus have an effect on observations, and are those of the benchmark.

    Raises:
        UserError: in stock LIBERO, without pictures that are perturbed, and for noise of pictures of another size.
    """
    perturbations = [task.perturbation for task in tasks if task.perturbation]
    if perturbations and sim is LiberoSim.stock:
        raise UserError("LIBERO-plus does not run in sim=stock; use mujoco or mjwarp")
    pictured = [each for each in perturbations if each.category in ("camera", "noise")]
    if pictured and not (image_size and AGENT_VIEW in images):
        raise UserError(
            f"LIBERO-plus's {pictured[0].category} perturbs pictures of {AGENT_VIEW}, which are not observed here"
        )
    if any(each.noise for each in pictured) and image_size != PIXELS:
        raise UserError(f"LIBERO-plus's noise is for task.image_size={PIXELS}, got {image_size}")
