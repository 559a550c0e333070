"""Swing up a hanging pole, and balance it."""

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


@dataclass(frozen=True)
class Cartpole(Mdp):
    """Swing-up of a pole on a cart; the angle is 0 where the pole is upright.

    An episode succeeds if the pole was within `upright_rad` of upright, and the cart's middle within the rail's, for
    the last `held_s` seconds of it.
    """

    upright_rad: PositiveFloat = 0.2
    held_s: NonNegativeFloat = 2.0

    MODEL = Path(__file__).with_name("cartpole.xml")
    INSTRUCTION = "swing the pole up and balance it"
    SUBSTEPS = 2
    STEP_LIMIT = 400
    ACTION_UNIT = "N"
    OBSERVED: ClassVar = {
        "position": TensorSpec((1,), unit="m", frame="world", names=("cart",)),
        "angle": TensorSpec((2,), unit="1", names=("cos", "sin")),
        "velocity": TensorSpec((2,), unit="m/s, rad/s", names=("cart", "pole")),
    }

    def reset(self, model: mujoco.MjModel, draws: Draws) -> Start:
        """The pole hangs, nearly at rest."""
        cart = draws.uniform(-0.5, 0.5, 1)
        pole = torch.pi + draws.uniform(-0.5, 0.5, 1)
        velocity = draws.uniform(-0.1, 0.1, 2)
        zeros = torch.zeros(len(cart), device=cart.device)
        return Start({"qpos": torch.cat((cart, pole), 1), "qvel": velocity}, memory={"held_s": zeros})

    def observe(self, now: Moment) -> dict[str, Tensor]:
        """Position of the cart, angle of the pole, and their velocities."""
        angle = now.qpos[:, 1:]
        return {"position": now.qpos[:, :1], "angle": torch.cat((angle.cos(), angle.sin()), 1), "velocity": now.qvel}

    def update(self, now: Moment) -> dict[str, Tensor]:
        """Time for which the pole has been upright."""
        up = now.qpos[:, 1].cos() > torch.cos(torch.tensor(self.upright_rad))
        return {"held_s": torch.where(up, now.memory["held_s"] + now.dt_s, 0.0)}

    def reward(self, now: Moment) -> Tensor:
        """Reward, highest for a pole that is upright and still in the middle, with little force."""
        # r = (1 + cos theta) / 2 (1 - x^2 / 4) / (1 + theta_dot^2 / 10) - a^2 / 50.
        upright = 0.5 * (1.0 + now.qpos[:, 1].cos())
        centred = 1.0 - 0.25 * now.qpos[:, 0].square()
        calm = 1.0 / (1.0 + 0.1 * now.qvel[:, 1].square())
        return upright * centred * calm - 0.02 * now.action[:, 0].square()

    def success(self, now: Moment) -> Tensor:
        """Whether the pole has been upright for `held_s`."""
        return now.memory["held_s"] >= self.held_s - 1e-4

    def metrics(self, now: Moment) -> dict[str, Tensor]:
        """Time for which the pole has been upright."""
        return {"held_s": now.memory["held_s"]}
