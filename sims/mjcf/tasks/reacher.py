"""Bring the tip of a planar arm of two joints to a target, by torques."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from embodied.configuration import PositiveFloat
from embodied.contract import TensorSpec
from sims.mjcf.mdp import Draws, Mdp, Moment, Start


@dataclass(frozen=True)
class Reacher(Mdp):
    """Reaching with a planar arm; an episode succeeds if the tip is within `reached_m` of the target at its end."""

    reached_m: PositiveFloat = 0.02

    MODEL = Path(__file__).with_name("reacher.xml")
    INSTRUCTION = "reach the green ball"
    SUBSTEPS = 2
    STEP_LIMIT = 100
    ACTION_UNIT = "N m"
    READS = ("site_xpos", "mocap_pos")
    OBSERVED: ClassVar = {
        "elbow": TensorSpec((2,), unit="1", names=("cos", "sin")),
        "velocity": TensorSpec((2,), unit="rad/s", names=("shoulder", "elbow")),
        "target": TensorSpec((2,), unit="m", frame="upper", names=("x", "y")),
        "error": TensorSpec((2,), unit="m", frame="upper", names=("x", "y")),
    }

    def reset(self, model: mujoco.MjModel, draws: Draws) -> Start:
        """A random posture at rest, and a random target within reach."""
        qpos = torch.cat((draws.uniform(-torch.pi, torch.pi, 1), draws.uniform(-2.5, 2.5, 1)), 1)
        angle = draws.uniform(-torch.pi, torch.pi)
        radius = draws.uniform(0.06, 0.22)
        height = torch.full_like(angle, 0.01)
        target = torch.stack((radius * angle.cos(), radius * angle.sin(), height), 1)
        return Start({"qpos": qpos, "mocap_pos": target.unsqueeze(1)})

    def observe(self, now: Moment) -> dict[str, Tensor]:
        """The elbow's angle, velocities, the target, and the vector from the tip to it, in the frame of the upper arm.

        In this frame observations are invariant to a rotation of arm and target together, as the best torques are.
        """
        elbow = now.qpos[:, 1:]
        return {
            "elbow": torch.cat((elbow.cos(), elbow.sin()), 1),
            "velocity": now.qvel,
            "target": _rotated(now.qpos[:, 0], now.mocap_pos[:, 0, :2]),
            "error": _rotated(now.qpos[:, 0], self._error(now)),
        }

    def reward(self, now: Moment) -> Tensor:
        """Reward for a small distance, with little torque."""
        distance = self._error(now).norm(dim=1)
        # r = exp(-20 d) - d - 0.01 |a|^2: steep at the target, and a slope everywhere.
        return torch.exp(-20.0 * distance) - distance - 0.01 * now.action.square().sum(1)

    def success(self, now: Moment) -> Tensor:
        """Whether the tip is at the target."""
        return self._error(now).norm(dim=1) < self.reached_m

    def metrics(self, now: Moment) -> dict[str, Tensor]:
        """Distance of the tip from the target."""
        return {"distance_m": self._error(now).norm(dim=1)}

    def _error(self, now: Moment) -> Tensor:
        return now.mocap_pos[:, 0, :2] - now.site_xpos[:, 0, :2]


def _rotated(angle: Tensor, vector: Tensor) -> Tensor:
    """Vectors [N, 2] of the world in frames that are turned by `angle` [N]."""
    (x, y), cos, sin = vector.unbind(1), angle.cos(), angle.sin()
    return torch.stack((cos * x + sin * y, cos * y - sin * x), 1)
