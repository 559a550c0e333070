"""A quadruped of twelve joints follows velocity commands, on flat or rough ground.

Observation and reward follow Rudin et al. 2021 (arXiv 2109.11978), without the terms that need a map of the ground.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import mujoco
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from embodied.configuration import FiniteFloat, NonNegativeFloat, PositiveFloat
from embodied.contract import TensorSpec
from sims.counter_rng import uniform
from sims.mjcf.mdp import Draws, Mdp, Moment, Start

LEGS = ("FL", "FR", "RL", "RR")
JOINTS = tuple(f"{leg}_{part}" for leg in LEGS for part in ("hip", "thigh", "calf"))
STANCE = (0.0, 0.75, -1.5) * 4
HEIGHT_M = 0.31
GROUND_M = 15.0
CELL_M = 0.1
"""Half the width of rough ground, and the width of its cells."""
XYZ = ("x", "y", "z")


@dataclass(frozen=True)
class Quadruped(Mdp):
    """Walking by command: forward and leftward speed and yaw rate, each constant for `command_s`.

    An episode succeeds if the robot did not fall and followed its commands: from one second after each command's
    beginning on, the mean error was at most `speed_error_m_s` (norm of the horizontal velocity's) and
    `turn_error_rad_s`. It falls when the torso touches the ground or is tilted by more than `tilt_rad`.

    Heights of rough ground are uniform in [0, `rough_m`], drawn every `CELL_M` and smoothed. With `friction_range` the
    friction of the feet is drawn per episode from 0.8 less and more that; with `push_m_s` the robot is pushed, its
    velocity changed by up to that, every `push_every_s`.
    """

    forward_m_s: NonNegativeFloat = 1.0
    backward_m_s: NonNegativeFloat = 0.5
    sideways_m_s: NonNegativeFloat = 0.3
    turn_rad_s: NonNegativeFloat = 0.8
    command_s: PositiveFloat = 5.0
    speed_error_m_s: PositiveFloat = 0.25
    turn_error_rad_s: PositiveFloat = 0.3
    tilt_rad: PositiveFloat = 1.0
    rough_m: NonNegativeFloat = 0.0
    friction_range: NonNegativeFloat = 0.0
    push_m_s: NonNegativeFloat = 0.0
    push_every_s: PositiveFloat = 2.5
    reward_speed: FiniteFloat = 1.0
    reward_turn: FiniteFloat = 0.5
    reward_air: FiniteFloat = 1.0
    cost_bounce: NonNegativeFloat = 2.0
    cost_roll: NonNegativeFloat = 0.05
    cost_tilt: NonNegativeFloat = 2.0
    cost_torque: NonNegativeFloat = 2e-4
    cost_action_rate: NonNegativeFloat = 0.05

    MODEL = Path(__file__).with_name("quadruped.xml")
    INSTRUCTION = "walk as commanded"
    SUBSTEPS = 4
    STEP_LIMIT = 500
    ACTION_UNIT = "rad"
    READS = ("actuator_force",)
    OBSERVED: ClassVar = {
        "linear_velocity": TensorSpec((3,), unit="m/s", frame="base", names=XYZ),
        "angular_velocity": TensorSpec((3,), unit="rad/s", frame="base", names=XYZ),
        "gravity": TensorSpec((3,), unit="1", frame="base", names=XYZ),
        "command": TensorSpec((3,), unit="m/s, rad/s", frame="base", names=("forward", "leftward", "yaw_rate")),
        "joint_position": TensorSpec((12,), unit="rad", names=JOINTS),
        "joint_velocity": TensorSpec((12,), unit="rad/s", names=JOINTS),
        "previous_action": TensorSpec((12,), unit="1", names=JOINTS),
        "contact": TensorSpec((4,), unit="1", names=LEGS, privileged=True),
    }

    def load(self) -> mujoco.MjModel:
        """Compile the model, on a plane or on rough ground."""
        if not self.rough_m:
            return super().load()
        spec = mujoco.MjSpec.from_file(str(self.MODEL))
        heights = terrain()
        size = [GROUND_M, GROUND_M, self.rough_m, 0.1]
        spec.add_hfield(name="ground", size=size, nrow=len(heights), ncol=len(heights), userdata=heights.ravel())
        ground = spec.geom("ground")
        ground.type = mujoco.mjtGeom.mjGEOM_HFIELD
        ground.hfieldname = "ground"
        return spec.compile()

    def reset(self, model: mujoco.MjModel, draws: Draws) -> Start:
        """The robot stands at a random place on the ground, in a random direction."""
        place = draws.uniform(-0.4 * GROUND_M, 0.4 * GROUND_M, 2)
        count = len(place)
        yaw = draws.uniform(-torch.pi, torch.pi, 1)
        height = torch.full_like(yaw, HEIGHT_M + self.rough_m)
        zero = torch.zeros_like(yaw)
        joints = torch.tensor(STANCE, device=yaw.device) + draws.uniform(-0.1, 0.1, 12)
        qpos = torch.cat((place, height, (0.5 * yaw).cos(), zero, zero, (0.5 * yaw).sin(), joints), 1)
        memory = {
            "command": self._command(draws),
            "air_s": zero.repeat(1, 4),
            "landed": zero[:, 0],
            "errors": zero.repeat(1, 3),
        }
        friction = torch.from_numpy(model.geom_friction).to(yaw.device).repeat(count, 1, 1)
        feet = [model.geom(f"{leg}_foot").id for leg in LEGS]
        friction[:, feet, 0] += draws.uniform(-self.friction_range, self.friction_range, 1)
        model_fields = {"geom_friction": friction.clamp_min(0.05)} if self.friction_range else {}
        return Start({"qpos": qpos}, model_fields, memory)

    def observe(self, now: Moment) -> dict[str, Tensor]:
        """Measurements of the robot and its command; for the critic, which feet touch the ground."""
        return {
            "linear_velocity": now.sensor("linear_velocity"),
            "angular_velocity": now.sensor("angular_velocity"),
            "gravity": gravity(now.qpos[:, 3:7]),
            "command": now.memory["command"],
            "joint_position": now.qpos[:, 7:] - now.qpos.new_tensor(STANCE),
            "joint_velocity": now.qvel[:, 6:],
            "previous_action": now.action,
            "contact": self._contact(now),
        }

    def disturb(self, now: Moment) -> Tensor | None:
        """Random changes of the horizontal velocity every `push_every_s`."""
        if not self.push_m_s:
            return None
        pushed = (now.steps % round(self.push_every_s / now.dt_s) == 0) & (now.steps > 0)
        if not bool(pushed.any()):  # skip the draws, which take longer than the rest of the step
            return None
        push = now.draws(1).uniform(-self.push_m_s, self.push_m_s, 2) * pushed.unsqueeze(1)
        return functional.pad(push.to(now.qvel), (0, now.qvel.shape[1] - 2))

    def update(self, now: Moment) -> dict[str, Tensor]:
        """Time in the air of each foot, reward of landing, sums of errors, and the next command."""
        memory = now.memory
        every = round(self.command_s / now.dt_s)
        touching = self._contact(now) > 0
        air = memory["air_s"] + now.dt_s
        # Feet that land are rewarded for their time in the air: sum over feet of (t_air - 0.25 s) at touchdown.
        landed = ((air - 0.25) * (touching & (memory["air_s"] > 0))).sum(1)
        moving = memory["command"].norm(dim=1) > 0.1
        settled = (now.steps - 1) % every >= round(1.0 / now.dt_s)
        speed, turn = self._errors(now)
        errors = torch.stack((speed, turn, torch.ones_like(turn)), 1) * settled.unsqueeze(1)
        entries = {"air_s": air * ~touching, "landed": landed * moving, "errors": memory["errors"] + errors}
        new = now.steps % every == 0
        if bool(new.any()):  # skip the draws, which take longer than the rest of the step
            entries["command"] = torch.where(new.unsqueeze(1), self._command(now.draws(0)), memory["command"])
        return entries

    def reward(self, now: Moment) -> Tensor:
        """Reward for following the command, smoothly and upright; never below 0, so that falling never pays off."""
        speed, turn = self._errors(now)
        linear = now.sensor("linear_velocity")
        angular = now.sensor("angular_velocity")
        # exp(-error^2 / 0.25) for velocity and yaw rate, as in Rudin et al.
        gain = self.reward_speed * torch.exp(-4.0 * speed.square()) + self.reward_turn * torch.exp(-4.0 * turn.square())
        cost = (
            self.cost_bounce * linear[:, 2].square()
            + self.cost_roll * angular[:, :2].square().sum(1)
            + self.cost_tilt * (1.0 - upright(now.qpos[:, 3:7]).square())
            + self.cost_torque * now.actuator_force.square().sum(1)
            + self.cost_action_rate * (now.action - now.previous).square().sum(1)
        )
        return (gain + self.reward_air * now.memory["landed"] - cost).clamp_min(0.0)

    def terminated(self, now: Moment) -> Tensor:
        """Whether the robot has fallen."""
        return (now.sensor("torso")[:, 0] > 0) | (upright(now.qpos[:, 3:7]) < math.cos(self.tilt_rad))

    def success(self, now: Moment) -> Tensor:
        """Whether the robot followed its commands to the step limit."""
        speed, turn = self._mean_errors(now)
        close = (speed <= self.speed_error_m_s) & (turn <= self.turn_error_rad_s)
        return close & (now.steps >= now.limit) & ~self.terminated(now)

    def failures(self, now: Moment) -> dict[str, Tensor]:
        """Cause of failure: a fall."""
        return {"fell": self.terminated(now)}

    def metrics(self, now: Moment) -> dict[str, Tensor]:
        """Mean errors so far, NaN in the first second."""
        speed, turn = self._mean_errors(now)
        return {"speed_error_m_s": speed, "turn_error_rad_s": turn}

    def _command(self, draws: Draws) -> Tensor:
        forward = draws.uniform(-self.backward_m_s, self.forward_m_s, 1)
        sideways = draws.uniform(-self.sideways_m_s, self.sideways_m_s, 1)
        turn = draws.uniform(-1.0, 1.0, 1)
        return torch.cat((forward, sideways, self.turn_rad_s * turn), 1)

    def _contact(self, now: Moment) -> Tensor:
        return torch.cat([now.sensor(f"{leg}_foot") for leg in LEGS], 1).clamp_max(1.0)

    def _errors(self, now: Moment) -> tuple[Tensor, Tensor]:
        """Errors of horizontal velocity (norm) and yaw rate, [N] each."""
        command = now.memory["command"]
        speed = (now.sensor("linear_velocity")[:, :2] - command[:, :2]).norm(dim=1)
        return speed, (now.sensor("angular_velocity")[:, 2] - command[:, 2]).abs()

    def _mean_errors(self, now: Moment) -> tuple[Tensor, Tensor]:
        speed, turn, count = now.memory["errors"].unbind(1)
        return speed / count, turn / count


def gravity(quaternion: Tensor) -> Tensor:
    """Direction [N, 3] of gravity in the frame that `quaternion` [N, 4] (w, x, y, z) rotates into the world."""
    w, x, y, z = quaternion.unbind(1)
    return torch.stack((2.0 * (w * y - x * z), -2.0 * (y * z + w * x), 2.0 * (x * x + y * y) - 1.0), 1)


def upright(quaternion: Tensor) -> Tensor:
    """Cosine [N] of the tilt of the frame that `quaternion` [N, 4] (w, x, y, z) rotates into the world."""
    return 1.0 - 2.0 * quaternion[:, 1:3].square().sum(1)


def terrain() -> np.ndarray:
    """Heights [R, R] in [0, 1] of rough ground, the same in every run."""
    size = round(2.0 * GROUND_M / CELL_M) + 1
    noise = torch.from_numpy(uniform((17, 4), 0, np.arange(size * size)).reshape(1, 1, size, size))
    smooth = functional.avg_pool2d(functional.pad(noise, (1, 1, 1, 1), mode="replicate"), 3, 1)[0, 0].numpy()
    return (smooth - smooth.min()) / (smooth.max() - smooth.min())
