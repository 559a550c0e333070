"""An arm of four joints with a parallel gripper lifts a cube."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from embodied.configuration import FiniteFloat, NonNegativeFloat, PositiveFloat
from embodied.contract import TensorSpec
from sims.mjcf.mdp import Draws, Mdp, Moment, Start

JOINTS = ("yaw", "shoulder", "elbow", "wrist", "left", "right")
REST = (0.0, 0.5, 1.65, 0.95, 0.03, 0.03)
"""Joint positions with the gripper open, 18 cm above the table, pointing downwards."""
EDGE_M = 0.04
PLACE_M = (0.4, 0.0)
"""Edge of the cube, and middle of its initial positions."""
XYZ = ("x", "y", "z")


@dataclass(frozen=True)
class Lift(Mdp):
    """Lifting of a cube within `place_m` of a point 40 cm in front of the arm, turned by up to `turn_rad`.

    An episode succeeds if at its end the cube is at least `lifted_m` above its initial height.
    """

    place_m: NonNegativeFloat = 0.05
    turn_rad: NonNegativeFloat = 0.4
    lifted_m: PositiveFloat = 0.1
    reward_reach: FiniteFloat = 0.5
    reward_grasp: FiniteFloat = 0.5
    reward_lift: FiniteFloat = 3.0
    cost_tilt: NonNegativeFloat = 0.2
    cost_action_rate: NonNegativeFloat = 0.01

    MODEL = Path(__file__).with_name("lift.xml")
    INSTRUCTION = "lift the cube"
    SUBSTEPS = 8
    STEP_LIMIT = 75
    ACTION_UNIT = "rad, rad, rad, rad, m"
    OBSERVED: ClassVar = {
        "joint_position": TensorSpec((6,), unit="rad, rad, rad, rad, m, m", names=JOINTS),
        "joint_velocity": TensorSpec((6,), unit="rad/s, rad/s, rad/s, rad/s, m/s, m/s", names=JOINTS),
        "cube": TensorSpec((3,), unit="m", frame="world", names=XYZ),
        "cube_heading": TensorSpec((2,), unit="1", frame="world", names=("cos", "sin")),
        "error": TensorSpec((3,), unit="m", frame="world", names=XYZ),
        "touch": TensorSpec((2,), unit="1", names=("left", "right")),  # of 1 N
    }

    def reset(self, model: mujoco.MjModel, draws: Draws) -> Start:
        """The arm is above the table, the cube on it."""
        position = draws.uniform(-self.place_m, self.place_m, 2)
        half = 0.5 * draws.uniform(-self.turn_rad, self.turn_rad, 1)
        arm = draws.uniform(-0.05, 0.05, 4) + half.new_tensor(REST[:4])
        fingers = half.new_tensor(REST[4:]).expand(len(half), 2)
        zero = torch.zeros_like(half)
        position = position + position.new_tensor(PLACE_M)
        height = torch.full_like(half, 0.5 * EDGE_M)
        return Start({"qpos": torch.cat((arm, fingers, position, height, half.cos(), zero, zero, half.sin()), 1)})

    def observe(self, now: Moment) -> dict[str, Tensor]:
        """The arm's joints, the cube's position and heading, its position relative to the gripper, and touch."""
        w, x, y, z = now.qpos[:, 9:13].unbind(1)
        heading = torch.stack((1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y + w * z)), 1)
        return {
            "joint_position": now.qpos[:, :6],
            "joint_velocity": now.qvel[:, :6],
            "cube": now.sensor("cube"),
            "cube_heading": heading,
            "error": self._error(now),
            "touch": self._touch(now),
        }

    def reward(self, now: Moment) -> Tensor:
        """Reward for reaching the cube, for holding it between the fingers, and for the height of the held cube."""
        grasp = self._touch(now).amin(1)
        near = torch.exp(-10.0 * self._error(now).norm(dim=1))
        tilt = 1.0 + now.sensor("down")[:, 2]
        height = (self._height(now) / self.lifted_m).clamp(0.0, 1.0)
        rate = (now.action - now.previous).square().sum(1)
        gain = self.reward_reach * near + self.reward_grasp * grasp * near + self.reward_lift * grasp * height
        return gain - self.cost_tilt * tilt - self.cost_action_rate * rate

    def success(self, now: Moment) -> Tensor:
        """Whether the cube is high enough."""
        return self._height(now) >= self.lifted_m

    def metrics(self, now: Moment) -> dict[str, Tensor]:
        """Height of the cube above its initial height."""
        return {"height_m": self._height(now)}

    def _error(self, now: Moment) -> Tensor:
        return now.sensor("cube") - now.sensor("grip")

    def _height(self, now: Moment) -> Tensor:
        return now.sensor("cube")[:, 2] - 0.5 * EDGE_M

    def _touch(self, now: Moment) -> Tensor:
        return torch.cat((now.sensor("left"), now.sensor("right")), 1).clamp_max(1.0)
