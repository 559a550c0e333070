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
ROLLING_M_S = 0.5
SLIPPING_M_S = 1.0
"""Below the first speed tyres roll without slip, above the second they slip, m/s: slip angles are undefined at rest."""


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
        new_rate = rate + dt_s * ((command[:, 1] - rate) / lag).clamp(-limit, limit)
        new_leftward = torch.zeros_like(leftward)
        new_forward = forward + dt_s * acceleration
    else:
        limit = dt_s * p["steering_rate_rad_s"]
        steering = steering + (command[:, 0] - steering).clamp(-limit, limit)
        new_forward, new_leftward, new_rate = _bicycle(model, forward, leftward, rate, steering, acceleration, p, dt_s)
    # Velocities are rotated into the world by the heading in the middle of the step.
    middle = yaw + 0.5 * dt_s * new_rate
    cos = middle.cos()
    sin = middle.sin()
    x = x + dt_s * (new_forward * cos - new_leftward * sin)
    y = y + dt_s * (new_forward * sin + new_leftward * cos)
    return torch.stack((x, y, yaw + dt_s * new_rate, new_forward, new_leftward, new_rate, steering), 1)


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
    rolling_speed = forward + dt_s * acceleration
    # Rolling: yaw rate v tan(delta) / L, lateral velocity of the centre of mass l_r times that.
    rolling_rate = rolling_speed * steering.tan() / base
    rolling = rolling_speed, rolling_rate * p["rear_axle_m"], rolling_rate
    if model is Model.KINEMATIC_BICYCLE:
        return rolling
    grip = p["friction"] * GRAVITY
    # Friction circle: F_y,max = mu F_z sqrt(1 - (a / (mu g))^2), with loads F_z = m (g l_r - a h) / L in front and
    # m (g l_f + a h) / L in the rear.
    acceleration = acceleration.clamp(-0.95 * grip, 0.95 * grip)
    share = p["friction"] * p["mass_kg"] / base * (1.0 - (acceleration / grip).square()).sqrt()
    front = share * (GRAVITY * p["rear_axle_m"] - acceleration * p["height_m"])
    rear = share * (GRAVITY * p["front_axle_m"] + acceleration * p["height_m"])
    # Slip angles: delta - atan((v_y + l_f r) / v_x) in front, -atan((v_y - l_r r) / v_x) in the rear.
    pace = forward.clamp_min(ROLLING_M_S)
    front = front * (p["front_stiffness"] * (steering - torch.atan2(leftward + p["front_axle_m"] * rate, pace))).tanh()
    rear = rear * (p["rear_stiffness"] * -torch.atan2(leftward - p["rear_axle_m"] * rate, pace)).tanh()
    cos = steering.cos()
    sin = steering.sin()
    # m (dv_x/dt - v_y r) = m a - F_f sin, m (dv_y/dt + v_x r) = F_r + F_f cos, I dr/dt = l_f F_f cos - l_r F_r.
    slipping = (
        forward + dt_s * (acceleration - front * sin / p["mass_kg"] + leftward * rate),
        leftward + dt_s * ((rear + front * cos) / p["mass_kg"] - forward * rate),
        rate + dt_s * (p["front_axle_m"] * front * cos - p["rear_axle_m"] * rear) / p["inertia_kg_m2"],
    )
    weight = ((forward - ROLLING_M_S) / (SLIPPING_M_S - ROLLING_M_S)).clamp(0.0, 1.0)
    new_forward, new_leftward, new_rate = (a + weight * (b - a) for a, b in zip(rolling, slipping, strict=True))
    return new_forward, new_leftward, new_rate
