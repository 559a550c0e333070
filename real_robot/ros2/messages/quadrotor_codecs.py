"""Codecs for quadrotors: PX4 over uXRCE-DDS (px4_msgs).

Actions and observations are ENU and FLU, as everywhere here. PX4's NED and FRD are used on the wire only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from embodied.contract import TensorSpec
from embodied.errors import UserError
from real_robot.ros2.messages import frames
from real_robot.ros2.messages.body_codecs import Motion, motion_of, motion_specs, observed
from real_robot.ros2.messages.codecs import Arrays, Message, Types, as_spec, set_stamp

POSE_FRAMES = {1: "NED", 2: "FRD"}
"""Values of pose_frame in px4_msgs/VehicleOdometry: both frames are z down; FRD has an arbitrary heading."""
BODY_FRD = 3
PX4_ROTORS = ("front_right", "back_left", "front_left", "back_right")
"""Motors 1 to 4 of PX4's quadrotor x."""
MOTORS = 12
JUMP_M = 0.05
JUMP_M_S = 0.3
JUMP_RAD = 0.05
"""Largest changes of position, velocity and attitude by an estimator's reset that do not count as a jump."""
JUMP_M_S2 = 20.0
"""Largest acceleration to which a change of velocity is attributed."""
LONGEST_GAP_S = 0.1
"""Longest time for which changes are attributed to motion."""


@dataclass
class VehicleOdometry:
    """px4_msgs/VehicleOdometry: PX4's estimate of pose and velocity."""

    quantities: Mapping[str, str]
    message: str = "px4_msgs/msg/VehicleOdometry"
    specs: Mapping[str, TensorSpec] = field(init=False)

    def __post_init__(self) -> None:
        """Raise UserError for an unknown quantity."""
        self.specs = motion_specs(self.quantities)

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """Observations by key.

        Raises:
            UserError: for unknown frames, or if PX4 has no attitude or reports that its estimate has failed.
        """
        if message.quality < 0:
            raise UserError(f"PX4 says that its estimate has failed (quality {message.quality} of VehicleOdometry)")
        if message.pose_frame not in POSE_FRAMES or message.velocity_frame not in (message.pose_frame, BODY_FRD):
            frame_values = f"pose_frame={message.pose_frame}, velocity_frame={message.velocity_frame}"
            raise UserError(
                f"VehicleOdometry in unknown frames ({frame_values}); expected NED or FRD: is the estimator running?"
            )
        rotation = frames.matrix(frames.attitude_ned_enu(message.q))
        if message.velocity_frame == BODY_FRD:
            velocity = frames.to_world(rotation, frames.body_frd_flu(message.velocity))
        else:
            velocity = frames.world_ned_enu(message.velocity)
        rate = frames.body_frd_flu(message.angular_velocity)
        return observed(Motion(frames.world_ned_enu(message.position), rotation, velocity, rate), self.quantities)

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """The message that PX4 would send."""
        motion = motion_of(arrays, self.quantities)
        message = types(self.message)()
        set_stamp(message, stamp_s)
        message.timestamp_sample = message.timestamp
        message.pose_frame = message.velocity_frame = 1
        message.position = frames.world_ned_enu(motion.position).astype(np.float32)
        message.q = frames.attitude_ned_enu(frames.quaternion(motion.rotation)).astype(np.float32)
        message.velocity = frames.world_ned_enu(motion.velocity).astype(np.float32)
        message.angular_velocity = frames.body_frd_flu(motion.angular_velocity).astype(np.float32)
        return message


@dataclass
class VehicleRatesSetpoint:
    """px4_msgs/VehicleRatesSetpoint: body rates, and collective thrust upwards as a fraction of full thrust."""

    specs: Mapping[str, TensorSpec]
    message: str = "px4_msgs/msg/VehicleRatesSetpoint"

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """The action (roll_rate, pitch_rate, yaw_rate, thrust)."""
        ((key, spec),) = self.specs.items()
        rates = frames.body_frd_flu((message.roll, message.pitch, message.yaw))
        return {key: as_spec(key, spec, [*rates, frames.body_frd_flu(message.thrust_body)[2]])}

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """The set-point."""
        ((key, spec),) = self.specs.items()
        action = as_spec(key, spec, arrays[key])
        message = types(self.message)()
        set_stamp(message, stamp_s)
        message.roll, message.pitch, message.yaw = frames.body_frd_flu(action[:3]).tolist()
        message.thrust_body = frames.body_frd_flu((0.0, 0.0, action[3])).astype(np.float32)
        return message


@dataclass
class ActuatorMotors:
    """px4_msgs/ActuatorMotors: normalised thrust of each rotor, in PX4's order; motors that do not exist are NaN.

    An action is linear in speed, from -1 (standstill) to 1; its thrust grows with the square. PX4 turns thrust into a
    motor signal with its THR_MDL_FAC.
    """

    specs: Mapping[str, TensorSpec]
    message: str = "px4_msgs/msg/ActuatorMotors"

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """The action, by rotor."""
        ((key, spec),) = self.specs.items()
        thrust: dict[str, float] = dict(zip(PX4_ROTORS, message.control[: len(PX4_ROTORS)], strict=True))
        return {key: as_spec(key, spec, frames.rotor_of_thrust([thrust[name] for name in spec.names]))}

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """The set-point."""
        ((key, spec),) = self.specs.items()
        thrust = dict(zip(spec.names, frames.thrust_of_rotor(as_spec(key, spec, arrays[key])), strict=True))
        message = types(self.message)()
        set_stamp(message, stamp_s)
        message.timestamp_sample = message.timestamp
        control = np.full(MOTORS, np.nan, np.float32)
        control[: len(PX4_ROTORS)] = [thrust[name] for name in PX4_ROTORS]
        message.control = control
        return message


def px4_jump(before: Message, after: Message) -> str:
    """Describe a jump of px4_msgs/VehicleOdometry by a reset of PX4's estimator or another frame; "" if there is none.

    A reset is no jump if it changes the estimate by at most `JUMP_*` beyond the possible motion.
    """
    if before.pose_frame != after.pose_frame:
        return f"PX4's odometry went from frame {POSE_FRAMES.get(before.pose_frame)} to another"
    if before.reset_counter == after.reset_counter:
        return ""
    gap_s = min(max((after.timestamp_sample - before.timestamp_sample) / 1e6, 0.0), LONGEST_GAP_S)
    speed, rate = (max(_length(getattr(each, name)) for each in (before, after)) for name in MOTION)
    distance = _length(np.subtract(after.position, before.position))
    velocity_change = _length(np.subtract(after.velocity, before.velocity))
    # angle between two attitudes: 2 acos |q1 . q2|
    angle = 2.0 * np.arccos(np.clip(abs(np.dot(before.q, after.q)), 0.0, 1.0))
    small = distance <= JUMP_M + speed * gap_s and velocity_change <= JUMP_M_S + JUMP_M_S2 * gap_s
    if small and angle <= JUMP_RAD + rate * gap_s:  # false for nan
        return ""
    return f"PX4's estimate jumped by {distance:.3g} m, {velocity_change:.3g} m/s, {angle:.3g} rad (reset_counter)"


MOTION = ("velocity", "angular_velocity")


def _length(vector: ArrayLike) -> float:
    return float(np.linalg.norm(np.asarray(vector, np.float64)))
