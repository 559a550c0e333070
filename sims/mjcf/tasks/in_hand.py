"""A hand of four fingers, palm up, turns a cube about the vertical."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from embodied.configuration import NonNegativeFloat, PositiveFloat
from embodied.contract import TensorSpec
from sims.mjcf.mdp import Draws, Mdp, Moment, Start

JOINTS = tuple(f"{part}_{finger}" for finger in range(4) for part in ("swing", "base", "tip"))
REST = (0.0, 0.0, 0.5) * 4
"""Joint angles of fingers next to the cube, which they do not touch."""
HEIGHT_M = 0.026
"""Height of the cube's middle when it lies on the palm."""
XYZ = ("x", "y", "z")


@dataclass(frozen=True)
class InHand(Mdp):
    """In-hand rotation; an episode succeeds if the cube did not drop and was turned left by `turned_rad` in all.

    The cube has dropped when its middle is more than `slid_m` from the palm's, or lower than the palm's surface, or its
    top is tilted by more than `tilt_rad`. Turning faster than `rate_rad_s` earns no more.
    """

    turned_rad: PositiveFloat = 3.1416
    slid_m: PositiveFloat = 0.04
    tilt_rad: PositiveFloat = 0.7
    rate_rad_s: PositiveFloat = 1.5
    cost_slid: NonNegativeFloat = 5.0
    cost_speed: NonNegativeFloat = 0.5
    cost_torque: NonNegativeFloat = 0.05
    cost_action_rate: NonNegativeFloat = 0.005
    cost_drop: NonNegativeFloat = 5.0

    MODEL = Path(__file__).with_name("in_hand.xml")
    INSTRUCTION = "turn the cube to the left"
    SUBSTEPS = 8
    STEP_LIMIT = 200
    ACTION_UNIT = "rad"
    READS = ("actuator_force",)
    OBSERVED: ClassVar = {
        "joint_position": TensorSpec((12,), unit="rad", names=JOINTS),
        "joint_velocity": TensorSpec((12,), unit="rad/s", names=JOINTS),
        "previous_action": TensorSpec((12,), unit="1", names=JOINTS),
        "place": TensorSpec((3,), unit="m", frame="palm", names=XYZ),
        "side": TensorSpec((2,), unit="1", frame="palm", names=("cos_4", "sin_4")),
        "top": TensorSpec((3,), unit="1", frame="palm", names=XYZ),
        "velocity": TensorSpec((3,), unit="m/s", frame="palm", names=XYZ),
        "rate": TensorSpec((3,), unit="rad/s", frame="palm", names=XYZ),
    }

    def reset(self, model: mujoco.MjModel, draws: Draws) -> Start:
        """The cube lies near the palm's middle with a random heading; the fingers are open."""
        position = draws.uniform(-0.004, 0.004, 2)
        half = 0.5 * draws.uniform(-torch.pi, torch.pi, 1)
        fingers = draws.uniform(-0.05, 0.05, 12) + half.new_tensor(REST)
        zero = torch.zeros_like(half)
        cube = torch.cat((position, zero + HEIGHT_M, half.cos(), zero, zero, half.sin()), 1)
        memory = {"heading": 2.0 * half[:, 0], "rate": zero[:, 0], "turned": zero[:, 0]}
        return Start({"qpos": torch.cat((fingers, cube), 1)}, memory=memory)

    def observe(self, now: Moment) -> dict[str, Tensor]:
        """The fingers' joints, and the cube's pose; equal sides are observed as equal, by four times the heading."""
        heading = 4.0 * self._heading(now)
        return {
            "joint_position": now.qpos[:, :12],
            "joint_velocity": now.qvel[:, :12],
            "previous_action": now.action,
            "place": now.sensor("place"),
            "side": torch.stack((heading.cos(), heading.sin()), 1),
            "top": now.sensor("top"),
            "velocity": now.sensor("velocity"),
            "rate": now.sensor("rate"),
        }

    def update(self, now: Moment) -> dict[str, Tensor]:
        """Heading, yaw rate in this step, and total rotation of the cube."""
        heading = self._heading(now)
        # The change of heading, wrapped to [-pi, pi).
        change = torch.remainder(heading - now.memory["heading"] + torch.pi, 2.0 * torch.pi) - torch.pi
        return {"heading": heading, "rate": change / now.dt_s, "turned": now.memory["turned"] + change}

    def reward(self, now: Moment) -> Tensor:
        """Reward for turning, with the cube in the middle and little force; dropping it has a cost."""
        # r = clip(rate) - c_slid |xy| - c_speed |v| - c_torque |tau|^2 - c_rate |da|^2 - c_drop [dropped].
        cost = (
            self.cost_slid * now.sensor("place")[:, :2].norm(dim=1)
            + self.cost_speed * now.sensor("velocity").norm(dim=1)
            + self.cost_torque * now.actuator_force.square().sum(1)
            + self.cost_action_rate * (now.action - now.previous).square().sum(1)
            + self.cost_drop * self.terminated(now)
        )
        return now.memory["rate"].clamp(-self.rate_rad_s, self.rate_rad_s) - cost

    def terminated(self, now: Moment) -> Tensor:
        """Whether the cube has dropped."""
        place = now.sensor("place")
        tilted = now.sensor("top")[:, 2] < torch.cos(place.new_tensor(self.tilt_rad))
        return (place[:, :2].norm(dim=1) > self.slid_m) | (place[:, 2] < 0.0) | tilted

    def success(self, now: Moment) -> Tensor:
        """Whether the cube was turned far enough, and has not dropped."""
        return (now.memory["turned"] >= self.turned_rad) & ~self.terminated(now)

    def failures(self, now: Moment) -> dict[str, Tensor]:
        """Cause of failure: a dropped cube."""
        return {"dropped": self.terminated(now)}

    def metrics(self, now: Moment) -> dict[str, Tensor]:
        """Total rotation of the cube."""
        return {"turned_rad": now.memory["turned"]}

    def _heading(self, now: Moment) -> Tensor:
        side = now.sensor("side")
        return torch.atan2(side[:, 1], side[:, 0])
