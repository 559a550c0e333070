"""Demonstrations: the library's own solutions of its tasks, with a straight-line servo instead of their planner.

The solutions (`mani_skill.examples.motionplanning.panda`) define poses of the tool and times of grasping. Their
planner, mplib, crashes with NumPy 2 and commands joint positions; the servo has no dependencies, and commands the
control mode of the task, so that a policy can imitate it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.data.episodes import Episodes, EpisodeWriter
from embodied.errors import UserError
from embodied.runtime.progress import Progress
from sims.maniskill.environment import ManiSkillEnvironment
from sims.maniskill.vulkan import load

FOLDER = "mani_skill.examples.motionplanning.panda"
SOLVED = {
    "PickCube-v1": "pick_cube",
    "PushCube-v1": "push_cube",
    "StackCube-v1": "stack_cube",
    "PullCube-v1": "pull_cube",
    "PegInsertionSide-v1": "peg_insertion_side",
}
"""Modules of the solutions by task id."""
MODES = ("pd_ee_delta_pose", "pd_ee_delta_pos")
CLOSE_M = 0.004
CLOSE_RAD = 0.03
LONGEST = 30
"""Distances below which a target is reached, and control steps after which the servo continues anyway."""
PATIENCE = 5
"""Largest number of attempted initial states per requested episode."""


class EpisodeOver(Exception):  # noqa: N818 - not an error, but the exit from a solution
    """The episode has ended."""


class Player:
    """One recorded episode of an environment of one world, with the interface of the library's own environment."""

    control_mode = "pd_joint_pos"  # required by some solutions; the servo ignores it

    def __init__(self, env: ManiSkillEnvironment, start: int, noise: float, generator: torch.Generator) -> None:
        self._env = env
        self._noise = noise
        self._generator = generator
        self._observation = env.reset(starts=torch.tensor([start]))
        action = env.contract.action
        self._half = (torch.tensor(action.high) - torch.tensor(action.low)) / 2
        self._rows: list[tuple[TensorDict, Tensor, Tensor]] = []
        self.success = False

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of a task
        return getattr(self._env.worlds[0], name)

    @property
    def unwrapped(self) -> Player:
        """This environment: there is no wrapper."""
        return self

    def reset(self, seed: int | None = None) -> None:
        """No-op: the episode has begun."""

    def play(self, action: Tensor) -> None:
        """Execute `action` [A] with noise; raises EpisodeOver if the episode ends."""
        noise = self._noise * self._half * torch.randn(len(action), generator=self._generator)
        spec = self._env.contract.action
        action = (action + noise).clamp(torch.tensor(spec.low), torch.tensor(spec.high))
        transition = self._env.step(action.view(1, 1, -1))
        self._rows.append((self._observation, action, transition.reward[0]))
        self._observation = transition.observation
        if bool(transition.done):
            self.success = bool(transition.success)
            raise EpisodeOver

    def episode(self) -> Episodes:
        """The recorded episode."""
        observations, actions, rewards = zip(*self._rows, strict=True)
        return Episodes.of(
            torch.cat(observations),
            torch.stack(actions),
            success=self.success,
            reward=torch.cat(rewards),
            terminated=bool(self._env.terminated),
            final_observation=self._observation[0],
        )


class Servo:
    """Moves the tool in straight lines, with the interface of the planner that the solutions call."""

    OPEN = 1
    CLOSED = -1

    def __init__(self, player: Player, **_: Any) -> None:  # noqa: ANN401 - the planner's, of no use here
        self.player, self.gripper = player, float(self.OPEN)
        self.names = player._env.contract.action.names

    def move_to_pose_with_screw(self, pose: Any, dry_run: bool = False, refine_steps: int = 0) -> int:  # noqa: ANN401
        """Move the tool to `pose` in the world, whose axes are those of the robot's base; returns 0."""
        for _ in range(0 if dry_run else LONGEST):
            position, rotation = self._error(pose)
            if position.norm() < CLOSE_M and ("rotation_x" not in self.names or rotation.norm() < CLOSE_RAD):
                break
            self._command(torch.cat((position, rotation)))
        for _ in range(refine_steps):
            self._command(torch.cat(self._error(pose)))
        return 0

    move_to_pose_with_RRTConnect = move_to_pose_with_RRTStar = move_to_pose_with_screw  # noqa: N815 - the planner's

    def close_gripper(self, t: int = 6, gripper_state: float = CLOSED) -> int:
        """Close the gripper for `t` control steps."""
        self.gripper = gripper_state
        for _ in range(t):
            self._command(torch.zeros(6))
        return 0

    def open_gripper(self, t: int = 6, gripper_state: float = OPEN) -> int:
        """Open the gripper for `t` control steps."""
        return self.close_gripper(t, gripper_state)

    def close(self) -> None:
        """Hold the pose until the episode is over."""
        while True:
            self._command(torch.zeros(6))

    def _error(self, pose: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - SAPIEN's, or the library's
        from mani_skill.utils.geometry.rotation_conversions import matrix_to_euler_angles
        from mani_skill.utils.structs import Pose

        target = Pose.create(pose).to_transformation_matrix()[0]
        now = self.player.agent.tcp.pose
        now = now.to_transformation_matrix()[0]
        turn = target[:3, :3] @ now[:3, :3].T
        return target[:3, 3] - now[:3, 3], matrix_to_euler_angles(turn, "XYZ")

    def _command(self, motion: Tensor) -> None:
        spec = self.player._env.contract.action
        middle = (spec.high[-1] + spec.low[-1]) / 2
        half = (spec.high[-1] - spec.low[-1]) / 2
        grasp = torch.tensor([middle + half * self.gripper])
        self.player.play(torch.cat((motion[: len(self.names) - 1].float(), grasp)))


def solution(task: str) -> Any:  # noqa: ANN401 - a function of the library
    """The library's solution of the task, with the servo as its planner.

    Raises:
        UserError: if the library has none.
    """
    if task not in SOLVED:
        raise UserError(f"{task} has no demonstrations; expected one of {', '.join(SOLVED)}, or use task.episodes=0")
    load()
    names = [f"{FOLDER}.motionplanner", f"{FOLDER}.motionplanner_stick"]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].PandaArmMotionPlanningSolver = sys.modules[name].PandaStickMotionPlanningSolver = Servo
    try:
        return import_module(f"{FOLDER}.solutions.{SOLVED[task]}").solve
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def collect(
    writer: EpisodeWriter, env: ManiSkillEnvironment, episodes: int, noise: float, generator: torch.Generator
) -> None:
    """Write `episodes` successful episodes, from initial states 0, 1, ... of `env`, which has one world.

    Raises:
        UserError: for a task or control mode without a solution, or one that seldom succeeds.
    """
    if env.options.control_mode not in MODES:
        raise UserError(f"demonstrations are for task.control_mode={'|'.join(MODES)}; use one, or task.episodes=0")
    solve = solution(env.options.id)
    written = 0
    with Progress("demonstrations", episodes, "episode") as bar:
        for start in range(PATIENCE * episodes):
            player = Player(env, start, noise, generator)
            with suppress(EpisodeOver):
                solve(player)
            if player.success:
                writer.add(player.episode())
                written += 1
                bar.update(1)
            if written == episodes:
                return
    raise UserError(f"{written} of {PATIENCE * episodes} episodes succeeded; use fewer task.episodes or task.noise=0")
