"""A scripted expert for Lift, and its demonstrations: the gripper moves above the cube, down, closes and rises."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied import seeding
from embodied.data.episodes import Episodes, EpisodeWriter
from embodied.errors import UserError
from embodied.runtime.progress import Progress
from sims.robosuite.environment import RobosuiteEnvironment

EXPERT = "Lift"
"""Task of the expert."""
STEP_M = 0.05
"""Displacement of the end effector for an action of 1."""
ABOVE_M = 0.06
ASIDE_M = 0.02
AT_M = 0.01
"""Height of the approach; horizontal distance below which to go down, and height below which to grasp."""
GRASPED_M = 0.07
STILL_M_S = 0.005
"""Largest opening and speed of fingers that hold the cube, even across its diagonal of 0.062 m."""
SPARE_FAILURES = 10


def act(observation: TensorDict) -> Tensor:
    """Actions [N, 7] for observations [N] of Lift with a Panda, from the positions of cube and fingers."""
    to_cube = observation["gripper_to_cube_pos"]
    fingers = observation["robot0_gripper_qpos"]
    opening = fingers[:, 0] - fingers[:, 1]
    off_axis = to_cube[:, :2].norm(dim=1) > ASIDE_M
    above = ~off_axis & (to_cube[:, 2] < -AT_M)
    still = observation["robot0_gripper_qvel"].abs().amax(1) < STILL_M_S
    holding = ~off_axis & ~above & still & (opening < GRASPED_M)
    target = to_cube.clone()
    target[:, 2] += torch.where(off_axis, ABOVE_M, 0.0)
    target[:, 2] = torch.where(holding, STEP_M, target[:, 2])
    closes = torch.where(off_axis | above, -1.0, 1.0)
    turns = torch.zeros_like(to_cube)
    return torch.cat((target / STEP_M, turns, closes.unsqueeze(1)), 1).clamp(-1.0, 1.0)


def collect(writer: EpisodeWriter, env: RobosuiteEnvironment, episodes: int, noise: float, seed: int) -> None:
    """Write `episodes` successful episodes of the expert in one environment, with action noise of deviation `noise`.

    Raises:
        UserError: if the expert fails too often.
    """
    generator = seeding.generator(seed, "expert")
    failed = 0
    with Progress("demonstrations", episodes, "episode") as bar:
        while bar.done < episodes:
            if (episode := _episode(env, noise, generator)) is not None:
                writer.add(episode)
                bar.update()
            elif (failed := failed + 1) > SPARE_FAILURES:
                raise UserError(f"the scripted expert failed in {failed} episodes; use less task.noise than {noise}")
    writer.origin["failed"] = failed


def _episode(env: RobosuiteEnvironment, noise: float, generator: torch.Generator) -> Episodes | None:
    """One episode, or None if it failed; the noise affects the arm's translation only."""
    observations = [env.reset()]
    actions = []
    rewards = []
    while not bool(env.done):
        action = act(observations[-1])
        action[:, :3] = (action[:, :3] + noise * torch.randn(1, 3, generator=generator)).clamp(-1.0, 1.0)
        transition = env.step(action.unsqueeze(1))
        observations.append(transition.observation)
        actions.append(action)
        rewards.append(transition.reward[:, 0])
    if not bool(transition.success):
        return None
    before = torch.cat(observations[:-1])
    return Episodes.of(before, torch.cat(actions), reward=torch.cat(rewards), final_observation=observations[-1][0])
