"""Quadrotors: PX4 over uXRCE-DDS, Crazyflies over Crazyswarm2."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from real_robot.ros2.messages.body_codecs import Odometry, quantities_of
from real_robot.ros2.messages.codecs import Codec
from real_robot.ros2.messages.quadrotor_codecs import (
    PX4_ROTORS,
    ActuatorMotors,
    CmdVelLegacy,
    FullState,
    VehicleOdometry,
    VehicleRatesSetpoint,
    px4_fault,
)
from real_robot.ros2.robots.tables import (
    ACTION,
    COMMAND,
    PX4,
    STATE,
    Behaviour,
    Call,
    Fixed,
    Heartbeat,
    Status,
    Table,
    Topic,
    make_table,
)

PX4_STATUS = {"1.15": "", "1.16": "_v1", "1.17": "_v1", "1.18": "_v4"}
"""Suffix of the topic vehicle_status by PX4's version: from 1.16 on its message's version."""
DO_SET_MODE, ARM_DISARM = 176, 400
CUSTOM_MODE, AUTO, LOITER, OFFBOARD = 1.0, 4.0, 3.0, 6.0
FORCE = 21196.0
"""Makes PX4 disarm in the air: motors off."""


def px4_actuators(wanted: Contract, rate_hz: float, version: str = "1.16", arrays: Sequence[str] = ()) -> Table:
    """PX4 with rotor set-points, -1 to 1, linear in speed, as our quadrotor policies command."""
    order = wanted.action.names if set(wanted.action.names) == set(PX4_ROTORS) else PX4_ROTORS
    codec = ActuatorMotors({ACTION: TensorSpec((4,), unit="1", names=order, low=(-1.0,) * 4, high=(1.0,) * 4)})
    return _px4("px4_actuators", wanted, rate_hz, "actuator_motors", codec, "direct_actuator", version, arrays)


def px4_rates(
    wanted: Contract, rate_hz: float, rate_max_rad_s: float = 3.0, version: str = "1.16", arrays: Sequence[str] = ()
) -> Table:
    """PX4 with body rates (rad/s, FLU) and collective thrust (fraction of full thrust)."""
    high = (rate_max_rad_s,) * 3
    low = tuple(-rate for rate in high)
    names = ("roll_rate", "pitch_rate", "yaw_rate", "thrust")
    spec = TensorSpec((4,), unit=RATES, frame="body", names=names, low=(*low, 0.0), high=(*high, 1.0))
    codec = VehicleRatesSetpoint({ACTION: spec})
    return _px4("px4_rates", wanted, rate_hz, "vehicle_rates_setpoint", codec, "body_rate", version, arrays)


RATES = "rad/s (rates), 1 (thrust)"


def crazyswarm2(
    wanted: Contract, rate_hz: float, tilt_max_rad: float = 0.5, yaw_rate_max_rad_s: float = 3.5,
    frame_id: str = "cf1", arrays: Sequence[str] = (),
) -> Table:  # fmt: skip
    """Crazyswarm2 with attitude, yaw rate and thrust (`cmd_vel_legacy`); use namespace:=/cf1.

    Observes `odom` of the default backend, cpp: in a frame named after the Crazyflie, with velocity in the world's axes
    and without angular velocity. The cflib backend uses other conventions and is refused because of its frame.

    Holding hands over to the Crazyflie's high-level commander, which lands on the spot.
    """
    high = (tilt_max_rad, tilt_max_rad, yaw_rate_max_rad_s, 1.0)
    low = (*(-limit for limit in high[:3]), 0.0)
    unit = "rad (roll, pitch), rad/s (yaw rate), 1 (thrust)"
    spec = TensorSpec((4,), unit=unit, frame="body", names=("roll", "pitch", "yaw_rate", "thrust"), low=low, high=high)
    command = Topic("cmd_vel_legacy", CmdVelLegacy({ACTION: spec}), COMMAND)
    # the firmware starts no motor before it has received a thrust of zero
    unlock = Fixed("cmd_vel_legacy", "geometry_msgs/msg/Twist", {})
    return _crazyswarm2("crazyswarm2", wanted, rate_hz, command, (unlock,), frame_id, arrays)


def crazyswarm2_full_state(
    wanted: Contract, rate_hz: float, position_max_m: float = 2.0, speed_max_m_s: float = 2.0,
    acceleration_max_m_s2: float = 5.0, frame_id: str = "cf1", arrays: Sequence[str] = (),
) -> Table:  # fmt: skip
    """Crazyswarm2 with full-state set-points (`cmd_full_state`): position, velocity, acceleration, yaw, yaw rate.

    Observes the same as `crazyswarm2`.
    """
    bounds = (position_max_m, speed_max_m_s, acceleration_max_m_s2)
    high = (*(bound for bound in bounds for _ in range(3)), np.pi, np.pi)
    names = ("x", "y", "z", "vx", "vy", "vz", "ax", "ay", "az", "yaw", "yaw_rate")
    low = tuple(-bound for bound in high)
    unit = "m, m/s, m/s^2, rad, rad/s"
    spec = TensorSpec((11,), unit=unit, frame="world", names=names, low=low, high=high)
    command = Topic("cmd_full_state", FullState({ACTION: spec}), COMMAND)
    return _crazyswarm2("crazyswarm2_full_state", wanted, rate_hz, command, (), frame_id, arrays)


def _px4(
    name: str, wanted: Contract, rate_hz: float, topic: str, codec: Codec, mode: str, version: str,
    arrays: Sequence[str],
) -> Table:  # fmt: skip
    if version not in PX4_STATUS:
        raise UserError(f"unknown version {version!r} of PX4; expected one of {', '.join(PX4_STATUS)}, in quotes")
    alive = Fixed("fmu/in/offboard_control_mode", "px4_msgs/msg/OffboardControlMode", {mode: True}, PX4)
    states = [Topic("fmu/out/vehicle_odometry", VehicleOdometry(quantities_of(wanted.observation)), PX4)]
    return make_table(
        name,
        wanted,
        rate_hz,
        states,
        Topic(f"fmu/in/{topic}", codec, PX4),
        arrays,
        hold=Behaviour(messages=(_px4_command(DO_SET_MODE, CUSTOM_MODE, AUTO, LOITER),)),
        emergency=Behaviour(messages=(_px4_command(ARM_DISARM, 0.0, FORCE),)),
        engage=Behaviour(messages=(_px4_command(DO_SET_MODE, CUSTOM_MODE, OFFBOARD), _px4_command(ARM_DISARM, 1.0))),
        heartbeat=Heartbeat(alive, rate_hz=10.0, before_s=1.0),
        status=Status(f"fmu/out/vehicle_status{PX4_STATUS[version]}", "px4_msgs/msg/VehicleStatus", PX4, px4_fault),
    )


def _px4_command(command: int, *parameters: float) -> Fixed:
    fields = {f"param{number}": value for number, value in enumerate(parameters, 1)}
    address = {"target_system": 1, "target_component": 1, "source_system": 1, "source_component": 1}
    fields |= {"command": command, **address, "from_external": True}
    return Fixed("fmu/in/vehicle_command", "px4_msgs/msg/VehicleCommand", fields, PX4)


def _crazyswarm2(
    name: str, wanted: Contract, rate_hz: float, command: Topic, first: tuple[Fixed, ...], frame_id: str,
    arrays: Sequence[str],
) -> Table:  # fmt: skip
    seen = {key: spec for key, spec in wanted.observation.items() if key != "angular_velocity" and key not in arrays}
    states = [Topic("odom", Odometry(quantities_of(seen), frame_id, world_velocity=True), STATE)]
    released = Call("notify_setpoints_stop", "crazyflie_interfaces/srv/NotifySetpointsStop")
    land = Call("land", "crazyflie_interfaces/srv/Land", {"height": 0.04, "duration.sec": 3})
    return make_table(
        name,
        wanted,
        rate_hz,
        states,
        command,
        arrays,
        hold=Behaviour(calls=(released, land)),
        emergency=Behaviour(calls=(Call("emergency", "std_srvs/srv/Empty"),)),
        engage=Behaviour(calls=(Call("arm", "crazyflie_interfaces/srv/Arm", {"arm": True}),), messages=first),
    )
