"""Equations of motion of a batch of vehicles in torch: reference of the compiled code, and used on CUDA.

State [N, 7]: x, y (m, world), yaw (rad, counter-clockwise, not wrapped), forward and lateral velocity (m/s, base, left
positive), yaw rate (rad/s), steering angle (rad).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sims.vehicle.vehicles import PARAMETERS, Model

STATE = ("x", "y", "yaw", "forward", "leftward", "yaw_rate", "steering")
GRAVITY = 9.81
ROLLING_M_S, SLIPPING_M_S = 0.5, 1.0
"""Tyres roll without slip below the first speed, slip above the second, m/s: slip angles are undefined at rest."""


def step(model: Model, state: Tensor, command: Tensor, parameters: Tensor, dt_s: float) -> Tensor:
    """State [N, 7] after `dt_s` of `command` [N, 2] with `parameters` [N, P], by one explicit Euler step.

    Commands are forward speed (m/s) and yaw rate (rad/s) of a differential drive, steering angle (rad) and forward
    speed of a bicycle. Speeds follow with a first-order lag and limited acceleration. The dynamic bicycle is the
    single-track model with longitudinal load transfer (Althoff et al. 2017, CommonRoad); a tyre's lateral force is F =
    mu F_z tanh(C alpha), reduced by the friction used for acceleration.
    """
    p = dict(zip(PARAMETERS, parameters.unbind(1), strict=True))
    x, y, yaw, forward, leftward, rate, steering = state.unbind(1)
    lag = p["lag_s"].clamp_min(dt_s)
    target = command[:, 0] if model is Model.DIFFERENTIAL_DRIVE else command[:, 1]
    acceleration = ((target - forward) / lag).clamp(-p["deceleration_m_s2"], p["acceleration_m_s2"])
    if model is Model.DIFFERENTIAL_DRIVE:
        limit = p["yaw_acceleration_rad_s2"]
        turned = rate + dt_s * ((command[:, 1] - rate) / lag).clamp(-limit, limit)
        slid, driven = torch.zeros_like(leftward), forward + dt_s * acceleration
    else:
        limit = dt_s * p["steering_rate_rad_s"]
        steering = steering + (command[:, 0] - steering).clamp(-limit, limit)
        driven, slid, turned = _bicycle(model, forward, leftward, rate, steering, acceleration, p, dt_s)
    middle = yaw + 0.5 * dt_s * turned
    cos, sin = middle.cos(), middle.sin()
    x, y = x + dt_s * (driven * cos - slid * sin), y + dt_s * (driven * sin + slid * cos)
    return torch.stack((x, y, yaw + dt_s * turned, driven, slid, turned, steering), 1)


def _bicycle(
    model: Model,
    forward: Tensor,
    leftward: Tensor,
    rate: Tensor,
    steering: Tensor,
    acceleration: Tensor,
    p: dict[str, Tensor],
    dt_s: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward velocity, lateral velocity and yaw rate after `dt_s`."""
    base = p["front_axle_m"] + p["rear_axle_m"]
    rolled = forward + dt_s * acceleration
    rolling_rate = rolled * steering.tan() / base
    rolling = rolled, rolling_rate * p["rear_axle_m"], rolling_rate
    if model is Model.KINEMATIC_BICYCLE:
        return rolling
    grip = p["friction"] * GRAVITY
    acceleration = acceleration.clamp(-0.95 * grip, 0.95 * grip)
    share = p["friction"] * p["mass_kg"] / base * (1.0 - (acceleration / grip).square()).sqrt()
    front = share * (GRAVITY * p["rear_axle_m"] - acceleration * p["height_m"])
    rear = share * (GRAVITY * p["front_axle_m"] + acceleration * p["height_m"])
    pace = forward.clamp_min(ROLLING_M_S)
    front = front * (p["front_stiffness"] * (steering - torch.atan2(leftward + p["front_axle_m"] * rate, pace))).tanh()
    rear = rear * (p["rear_stiffness"] * -torch.atan2(leftward - p["rear_axle_m"] * rate, pace)).tanh()
    cos, sin = steering.cos(), steering.sin()
    slipping = (
        forward + dt_s * (acceleration - front * sin / p["mass_kg"] + leftward * rate),
        leftward + dt_s * ((rear + front * cos) / p["mass_kg"] - forward * rate),
        rate + dt_s * (p["front_axle_m"] * front * cos - p["rear_axle_m"] * rear) / p["inertia_kg_m2"],
    )
    weight = ((forward - ROLLING_M_S) / (SLIPPING_M_S - ROLLING_M_S)).clamp(0.0, 1.0)
    driven, slid, turned = (a + weight * (b - a) for a, b in zip(rolling, slipping, strict=True))
    return driven, slid, turned
