"""Nonlinear dynamics of a quadrotor for torch, NumPy and C, as pure functions of rows.

Frames: world z up; body x forward, y left, z up. Quaternions (w, x, y, z) rotate body vectors into the world. Model and
integration follow Learning to Fly in Seconds (arXiv 2311.13081): rigid body, rotors with first-order lag, yaw
reaction torque, RK4. Drag, ground effect, wind and delay are optional; effects that are off are not in the kernels at
all.

Rotor speeds are fractions of the highest. The state holds them minus the hover speed, and thrusts are computed minus a
quarter of the weight: small numbers have small rounding errors, and a torque is a difference of thrusts, which for a
crazyflie amplifies the seventh digit of a rotor's speed to the fourth of the angular velocity within a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

from embodied.errors import UserError
from sims.quadrotor.physics.airframes import GRAVITY, PARAMETERS, Airframe, hover_speed
from sims.quadrotor.physics.rotors import MOST, Rotors
from sims.tracer.arithmetic import Rows, Value, clip, sqrt, squares, where

DT_S = 0.01
"""Time step of integration and control."""
ROTOR_NAMES = ("front_right", "back_right", "back_left", "front_left")
"""The reaction torques of these rotors about z have the signs -, +, -, +."""
BODY_ROWS = 17
SENSED_ROWS = 13
"""Rows of the body without its rotors; the state keeps their values of one step ago."""
AIR_ROWS = 5
"""States of the turbulence, see `air`."""
SAG_S = 0.3
"""Time constant with which a battery's voltage follows its load."""


@dataclass(frozen=True)
class Options:
    """Optional effects of the dynamics, besides thrust, weight, lag, and a constant force and torque.

    Attributes:
        drag: linear drag along body axes, relative to the air.
        wind: the air moves with a constant velocity per episode; needs drag.
        ground_effect: more thrust near the plane z = `ground_z_m` (Cheeseman and Bennett 1955, ARC R&M 3021).
        delay_steps: the longest delay of commands in control steps; limits the airframe's `delay_s`.
        ground_z_m: height of the ground in the world, unless episodes have their own.
        floor: each episode has a ground of its own height, on which the drone comes to rest; needs wind, because its
            height follows the wind's rows.
        sag: the battery's voltage, and with it the thrust, falls under load; see the airframe's `sag`.
        senses: measurements lag (the airframe's `observation_delay_s`, at most `DT_S`) and the air is turbulent; the
            state then has additional rows, see `episode.Episode`.
        many_rotors: drones may have more than four rotors. The body's rows then have the speeds of four rotors with the
            same effect, and the speeds of all rotors follow at the end.
    """

    drag: bool = False
    wind: bool = False
    ground_effect: bool = False
    delay_steps: int = 0
    ground_z_m: float = -0.65
    floor: bool = False
    sag: bool = False
    senses: bool = False
    many_rotors: bool = False

    def __post_init__(self) -> None:
        """Raise UserError for effects that lack another, or an impossible delay."""
        if self.wind and not self.drag:
            raise UserError("wind acts through drag; set drag=true too")
        if (self.floor or self.senses) and not self.wind:
            raise UserError("a floor and turbulence follow the wind's rows; set wind=true too")
        if not 0 <= self.delay_steps <= 8:
            raise UserError(f"expected delay_steps from 0 to 8, got {self.delay_steps}")

    def of_rotors(self, count: int) -> Options:
        """These options for drones of up to `count` rotors."""
        return replace(self, many_rotors=count > 4)

    @property
    def state_rows(self) -> int:
        """Number of rows of the state: of the dynamics, and of the senses."""
        return self.dynamic_rows + (SENSED_ROWS + AIR_ROWS if self.senses else 0)

    @property
    def dynamic_rows(self) -> int:
        """Number of rows of the state that `step` reads and writes."""
        return BODY_ROWS + 4 * self.past_actions + self.sag + MOST * self.many_rotors

    @property
    def past_actions(self) -> int:
        """Number of past commands in the state."""
        return max(1, self.delay_steps)

    @property
    def disturbance_rows(self) -> int:
        """Number of rows: force and torque, wind if it is on, and the ground's height with a floor."""
        return (9 if self.wind else 6) + self.floor


@dataclass
class Body:
    """Position (m, world), quaternion, velocity (m/s, world), angular velocity (rad/s, body), rotors' excess speeds."""

    position: Rows
    quaternion: Rows
    velocity: Rows
    angular_velocity: Rows
    rotor_speed: Rows

    @classmethod
    def of(cls, rows: Sequence[Value], rotors: int = 4) -> Self:
        """Read the first rows of a state, `BODY_ROWS` with four `rotors`."""
        return cls(list(rows[:3]), list(rows[3:7]), list(rows[7:10]), list(rows[10:13]), list(rows[13 : 13 + rotors]))

    def rows(self) -> Rows:
        """The rows of the state; the inverse of `of`."""
        return [value for field in fields(self) for value in getattr(self, field.name)]

    def rotation(self) -> Rows:
        """Rotation matrix from body to world, row by row."""
        w, x, y, z = self.quaternion
        return [
            *(1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y - w * z), 2.0 * (x * z + w * y)),
            *(2.0 * (x * y + w * z), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z - w * x)),
            *(2.0 * (x * z - w * y), 2.0 * (y * z + w * x), 1.0 - 2.0 * (x * x + y * y)),
        ]


def parameters(rows: Sequence[Value]) -> Airframe:
    """Airframe from rows in the order of `PARAMETERS`; the values may be tensors or nodes."""
    airframe = object.__new__(Airframe)  # without __post_init__: it compares numbers, which nodes are not
    for name, value in zip(PARAMETERS, rows, strict=True):
        object.__setattr__(airframe, name, value)
    return airframe


def sound(state: Rows) -> Value:
    """Whether the norm of the body's rows, in SI units, is below 2000, so that the integration remains finite.

    Rotation has no drag, so that the angular velocity of an uncontrolled drone would grow until it is NaN.
    """
    return squares(state[:BODY_ROWS]) < 4e6


def step(state: Rows, action: Rows, disturbance: Rows, airframe: Airframe, options: Options) -> Rows:
    """The state after `DT_S`.

    Args:
        state: `options.dynamic_rows`: the body's rows, then the last `options.past_actions` commands, newest first,
            then the share of thrust that the battery lacks if `options.sag`, and the speeds of `MOST` rotors if
            `options.many_rotors`.
        action: rotor set-points in [-1, 1] (clipped), from standstill to the highest speed.
        disturbance: force (N, world), torque (N m, body), wind (m/s, world) if it is on, the ground's height (m) with
            a floor.
        airframe: parameters, from `parameters`.
        options: active effects.
    """
    action = [clip(a, -1.0, 1.0) for a in action]
    past = state[BODY_ROWS : BODY_ROWS + 4 * options.past_actions]
    thrust_loss = state[BODY_ROWS + len(past)] if options.sag else 0.0
    hover = 2.0 * hover_speed(airframe) - 1.0
    reaching = _delayed(action, past, airframe, options)
    body = Body.of(state)
    joined = list
    if options.many_rotors:
        # The speeds of all rotors are integrated; forces and the body's rows use four rotors with the same effect.
        rotors = Rotors.of(airframe.rotors)
        reaching = [clip(a, -1.0, 1.0) for a in rotors.mixed(reaching)]
        body.rotor_speed = list(state[-MOST:])
        joined = rotors.joined
    # Set-points in [-1, 1] as speed fractions in [0, 1], minus the hover speed.
    command = [(a - hover) * 0.5 for a in reaching]
    # A first-order lag approaches its command from one side, so its direction is known for the whole step.
    rate = [
        where(u < c, 1.0 / airframe.lag_rise_s, 1.0 / airframe.lag_fall_s)
        for u, c in zip(body.rotor_speed, command, strict=True)
    ]

    def slope(rows: Rows) -> Rows:
        return _derivative(
            Body.of(rows, len(command)), command, rate, disturbance, airframe, options, thrust_loss, joined
        )

    after = Body.of(_runge_kutta(body.rows(), slope), len(command))
    scale = 1.0 / sqrt(_dot(after.quaternion, after.quaternion))  # RK4 does not preserve the norm
    after.quaternion = [q * scale for q in after.quaternion]
    if options.floor:
        after = _standing(after, disturbance[9])
    battery = [_sagged(thrust_loss, body, airframe, joined)] if options.sag else []
    speeds = after.rotor_speed if options.many_rotors else []
    after.rotor_speed = joined(after.rotor_speed)
    return [*after.rows(), *action, *past[: 4 * (options.past_actions - 1)], *battery, *speeds]


def _standing(body: Body, ground_z_m: Value) -> Body:
    """The body, placed on the ground and at rest if it is below it."""
    below = body.position[2] < ground_z_m
    x, y, z = body.position
    still = [[where(below, 0.0, rate) for rate in rates] for rates in (body.velocity, body.angular_velocity)]
    return Body([x, y, where(below, ground_z_m, z)], body.quaternion, *still, body.rotor_speed)


def _sagged(thrust_loss: Value, body: Body, airframe: Airframe, joined: Callable[[Rows], Rows]) -> Value:
    """Share of thrust that the battery lacks after a step; the power of a rotor grows with the cube of its speed."""
    speeds = [excess + hover_speed(airframe) for excess in body.rotor_speed]
    cubes = joined([u * u * u for u in speeds])
    load = sum(cubes[1:], start=cubes[0]) * 0.25
    # Euler step of d thrust_loss / dt = (sag * load - thrust_loss) / SAG_S.
    return thrust_loss + (airframe.sag * load - thrust_loss) * (DT_S / SAG_S)


def _runge_kutta(x: Rows, slope: Callable[[Rows], Rows]) -> Rows:
    """One step of the classical fourth-order method."""

    def ahead(by: float, k: Rows) -> Rows:
        return [a + by * b for a, b in zip(x, k, strict=True)]

    k1 = slope(x)
    k2 = slope(ahead(DT_S / 2.0, k1))
    k3 = slope(ahead(DT_S / 2.0, k2))
    k4 = slope(ahead(DT_S, k3))
    mean = [a + 2.0 * (b + c) + d for a, b, c, d in zip(k1, k2, k3, k4, strict=True)]
    return ahead(DT_S / 6.0, mean)


def _delayed(action: Rows, past: Rows, airframe: Airframe, options: Options) -> Rows:
    """The commands that reach the rotors now: interpolated between the steps around the airframe's delay."""
    if not options.delay_steps:
        return action
    delay = clip(airframe.delay_s * (1.0 / DT_S), 0.0, float(options.delay_steps))
    # Linear interpolation as a sum over all ages with triangular weights max(0, 1 - |age - delay|).
    sums: Rows = [0.0, 0.0, 0.0, 0.0]
    for age, command in enumerate([action, *(past[4 * k : 4 * k + 4] for k in range(options.delay_steps))]):
        distance = where(delay < age, age - delay, delay - age)
        weight = where(distance < 1.0, 1.0 - distance, 0.0)
        sums = [total + weight * value for total, value in zip(sums, command, strict=True)]
    return sums


def _derivative(
    body: Body,
    command: Rows,
    rate: Rows,
    disturbance: Rows,
    airframe: Airframe,
    options: Options,
    thrust_loss: Value,
    joined: Callable[[Rows], Rows],
) -> Rows:
    """Time derivative of the body's rows.

    `thrust_loss` is the share of the thrust that the battery lacks; `joined` reduces rows of all rotors to four, see
    `Rotors.joined`.
    """
    w, x, y, z = body.quaternion
    p, q, r = body.angular_velocity
    ground_z_m = disturbance[9] if options.floor else options.ground_z_m
    thrust = joined(_excess_thrust(body, airframe, options, ground_z_m))
    if options.sag:
        quarter = airframe.mass_kg * (GRAVITY / 4.0)
        thrust = [t - thrust_loss * (t + quarter) for t in thrust]
    # dq/dt = 1/2 q * (0, omega), with omega in the body frame.
    quaternion = [
        *(-0.5 * (x * p + y * q + z * r), 0.5 * (w * p + y * r - z * q)),
        *(0.5 * (w * q + z * p - x * r), 0.5 * (w * r + x * q - y * p)),
    ]
    lift = (thrust[0] + thrust[1] + thrust[2] + thrust[3]) / airframe.mass_kg
    up = [2.0 * (x * z + w * y), 2.0 * (y * z - w * x), 1.0 - 2.0 * (x * x + y * y)]
    force = disturbance[:3]
    if options.drag:
        force = [f + d for f, d in zip(force, _drag(body, disturbance, airframe, options), strict=True)]
    # Thrust is T = m g + dT along `up`, weight -m g along z: dv/dt = up dT / m + (up - z) g + f / m.
    weightless = [
        up[0],
        up[1],
        -2.0 * (x * x + y * y),
    ]  # up - (0, 0, 1)
    acceleration = [
        u * lift + v * GRAVITY + f / airframe.mass_kg for u, v, f in zip(up, weightless, force, strict=True)
    ]
    # First-order lag of rotor speeds: du/dt = (c - u) / lag.
    rotors = [(c - u) * k for c, u, k in zip(command, body.rotor_speed, rate, strict=True)]
    return [*body.velocity, *quaternion, *acceleration, *_spin(body, thrust, disturbance, airframe), *rotors]


def _excess_thrust(body: Body, airframe: Airframe, options: Options, ground_z_m: Value) -> Rows:
    """Thrust of each rotor minus a quarter of the weight, N, as if there were four."""
    # T(h + e) - T(h) = e (T'(h) + thrust_2 e) for the hover speed h and the excess e, and T(h) = m g / 4.
    slope = airframe.thrust_1_n + 2.0 * hover_speed(airframe) * airframe.thrust_2_n
    thrust = [excess * (slope + excess * airframe.thrust_2_n) for excess in body.rotor_speed]
    if options.ground_effect:
        height = body.position[2] - ground_z_m
        height = where(height < 0.5 * airframe.rotor_radius_m, 0.5 * airframe.rotor_radius_m, height)
        # Cheeseman and Bennett: thrust grows by 1 / (1 - (R / 4 z)^2).
        ratio = airframe.rotor_radius_m / (4.0 * height)
        gain = 1.0 / (1.0 - ratio * ratio)
        quarter = airframe.mass_kg * (GRAVITY / 4.0)
        thrust = [t * gain + quarter * (gain - 1.0) for t in thrust]
    return thrust


def _drag(body: Body, disturbance: Rows, airframe: Airframe, options: Options) -> Rows:
    """Drag force in the world: -R D R^T (v - wind)."""
    air = [v - w for v, w in zip(body.velocity, disturbance[6:9], strict=True)] if options.wind else body.velocity
    R = body.rotation()
    coefficients = airframe.drag_x, airframe.drag_y, airframe.drag_z
    along = [_dot([R[axis], R[3 + axis], R[6 + axis]], air) * c for axis, c in enumerate(coefficients)]
    return [-_dot(R[3 * row : 3 * row + 3], along) for row in range(3)]


def _spin(body: Body, thrust: Rows, disturbance: Rows, airframe: Airframe) -> Rows:
    """Angular acceleration from Euler's equations, rad/s^2, body."""
    p, q, r = body.angular_velocity
    front_right, back_right, back_left, front_left = thrust
    # Torque of rotor i is (x, y, 0) x (0, 0, T) = (y T, -x T, 0), and its reaction about z.
    roll = airframe.arm_y_m * ((back_left + front_left) - (front_right + back_right)) + disturbance[3]
    pitch = airframe.arm_x_m * ((back_right + back_left) - (front_right + front_left)) + disturbance[4]
    yaw = airframe.torque_per_thrust_m * ((back_right + front_left) - (front_right + back_left)) + disturbance[5]
    a = airframe.inertia_x
    b = airframe.inertia_y
    c = airframe.inertia_z
    # I domega/dt = torque - omega x I omega.
    return [(roll - (c - b) * q * r) / a, (pitch - (a - c) * r * p) / b, (yaw - (b - a) * p * q) / c]


def _dot(first: Sequence[Value], second: Sequence[Value]) -> Value:
    total = first[0] * second[0]
    for a, b in zip(first[1:], second[1:], strict=True):
        total = total + a * b
    return total
