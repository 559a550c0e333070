"""Quadrotors with PX4 over uXRCE-DDS. Policies for Crazyflies run on board (`real_robot/firmware`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from real_robot.ros2.messages.body_codecs import quantities_of
from real_robot.ros2.messages.codecs import Codec, Message
from real_robot.ros2.messages.quadrotor_codecs import (
    PX4_ROTORS,
    ActuatorMotors,
    VehicleOdometry,
    VehicleRatesSetpoint,
    px4_jump,
)
from real_robot.ros2.robots.tables import (
    ACTION,
    PX4,
    PX4_COMMAND,
    Behaviour,
    Condition,
    Fixed,
    Heartbeat,
    Pause,
    Status,
    Table,
    Topic,
    make_table,
)

PX4_STATUS = {"1.15": "", "1.16": "_v1", "1.17": "_v1", "1.18": "_v4"}
"""Suffix of the topic vehicle_status by PX4's version; from 1.16 on it is the version of the message."""
DO_SET_MODE = 176
ARM_DISARM = 400
CUSTOM_MODE = 1.0
AUTO = 4.0
LOITER = 3.0
OFFBOARD = 6.0
FORCE = 21196.0
"""Parameter that lets PX4 disarm in the air and switch its motors off."""
PX4_ARMED = 2
"""Value of arming_state in px4_msgs/VehicleStatus."""
PX4_HOLD = 4
PX4_TERMINATION = 13
PX4_OFFBOARD = 14
PX4_MODES = {
    0: "Manual",
    1: "Altitude",
    2: "Position",
    3: "Mission",
    PX4_HOLD: "Hold",
    5: "Return",
    6: "Position Slow",
    10: "Acro",
    12: "Descend",
    PX4_TERMINATION: "Termination",
    PX4_OFFBOARD: "Offboard",
    15: "Stabilized",
    17: "Takeoff",
    18: "Land",
}
"""Names of nav_state in px4_msgs/VehicleStatus."""
PX4_STATUS_TIMEOUT_S = 1.5
"""PX4 publishes its status twice a second, and when it changes."""


def px4_actuators(contract: Contract, rate_hz: float, version: str = "1.16", arrays: Sequence[str] = ()) -> Table:
    """PX4 with rotor set-points, -1 to 1, linear in speed, as our quadrotor policies command."""
    order = contract.action.names if set(contract.action.names) == set(PX4_ROTORS) else PX4_ROTORS
    codec = ActuatorMotors({ACTION: TensorSpec((4,), unit="1", names=order, low=(-1.0,) * 4, high=(1.0,) * 4)})
    # without new set-points the rotors keep their speed, which is acceptable for a moment only
    return _px4("px4_actuators", contract, rate_hz, codec, "direct_actuator", Pause(0.1), version, arrays)


def px4_rates(
    contract: Contract, rate_hz: float, rate_max_rad_s: float = 3.0, version: str = "1.16", arrays: Sequence[str] = ()
) -> Table:
    """PX4 with body rates (rad/s, FLU) and collective thrust (fraction of full thrust)."""
    high = (rate_max_rad_s,) * 3
    low = tuple(-rate for rate in high)
    names = ("roll_rate", "pitch_rate", "yaw_rate", "thrust")
    spec = TensorSpec((4,), unit=RATES, frame="body", names=names, low=(*low, 0.0), high=(*high, 1.0))
    codec = VehicleRatesSetpoint({ACTION: spec})
    # with rates of zero, PX4's rate controller keeps the attitude meanwhile
    return _px4("px4_rates", contract, rate_hz, codec, "body_rate", Pause(0.25, _no_rates), version, arrays)


RATES = "rad/s (rates), 1 (thrust)"


def _px4(
    name: str,
    contract: Contract,
    rate_hz: float,
    codec: Codec,
    control: str,
    pause: Pause,
    version: str,
    arrays: Sequence[str],
) -> Table:
    if version not in PX4_STATUS:
        raise UserError(f"unknown version {version!r} of PX4; expected one of {', '.join(PX4_STATUS)}, in quotes")
    alive = Fixed("fmu/in/offboard_control_mode", "px4_msgs/msg/OffboardControlMode", {control: True}, PX4_COMMAND)
    odometry = VehicleOdometry(quantities_of(contract.observation))
    return make_table(
        name,
        contract,
        rate_hz,
        [Topic("fmu/out/vehicle_odometry", odometry, PX4, jump=px4_jump)],
        Topic(f"fmu/in/{PX4_SETPOINTS[control]}", codec, PX4_COMMAND),
        arrays,
        stops_after_s=None,  # its own failsafe continues the flight
        hold=_px4_command(DO_SET_MODE, CUSTOM_MODE, AUTO, LOITER),
        emergency=_px4_command(ARM_DISARM, 0.0, FORCE),
        heartbeat=Heartbeat(alive, rate_hz=20.0, before_s=1.2),  # PX4 requires more than 2 Hz for more than 1 s
        status=Status(
            f"fmu/out/vehicle_status{PX4_STATUS[version]}",
            "px4_msgs/msg/VehicleStatus",
            PX4,
            px4_condition,
            (TO_OFFBOARD, ARM),
            PX4_STATUS_TIMEOUT_S,
        ),
        pause=pause,
    )


PX4_SETPOINTS = {"direct_actuator": "actuator_motors", "body_rate": "vehicle_rates_setpoint"}


def _px4_command(command: int, *parameters: float) -> Behaviour:
    fields = {f"param{number}": value for number, value in enumerate(parameters, 1)}
    address = {"target_system": 1, "target_component": 1, "source_system": 1, "source_component": 1}
    fields |= {"command": command, **address, "from_external": True}
    return Behaviour(messages=(Fixed("fmu/in/vehicle_command", "px4_msgs/msg/VehicleCommand", fields, PX4_COMMAND),))


TO_OFFBOARD = _px4_command(DO_SET_MODE, CUSTOM_MODE, OFFBOARD)
ARM = _px4_command(ARM_DISARM, 1.0)


def px4_condition(message: Message) -> Condition:
    """Condition of PX4 by its px4_msgs/VehicleStatus: whether it follows external set-points.

    PX4 forwards set-points to its controllers in every mode, so that they may be sent in offboard mode only
    (https://docs.px4.io/main/en/flight_modes/offboard). If PX4 lost the heartbeat in offboard mode, it returns to that
    mode by itself when the heartbeat resumes. Its flag `failsafe` is also set by warnings without consequences, so only
    the mode counts.
    """
    armed = message.arming_state == PX4_ARMED
    mode = message.nav_state
    if mode == PX4_OFFBOARD:
        return Condition(True, "" if armed else "PX4 is disarmed", not armed, None if armed else ARM)
    would_return = message.nav_state_user_intention == PX4_OFFBOARD
    state = "" if armed else ", disarmed"
    fault = f"PX4 is in {PX4_MODES.get(mode, f'nav_state {mode}')} mode{state}"
    if armed:
        fault += ": its failsafe flies" if message.failsafe else ": somebody else flies"
    idle = not armed or (mode == PX4_HOLD and not message.failsafe)
    request = TO_OFFBOARD if idle and mode != PX4_TERMINATION else None
    return Condition(False, fault, not armed or mode == PX4_TERMINATION, request, beat=not would_return)


def _no_rates(last: np.ndarray) -> np.ndarray:
    return np.concatenate((np.zeros_like(last[:3]), last[3:]))
