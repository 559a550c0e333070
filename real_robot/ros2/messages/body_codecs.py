"""Codecs for bodies and sensors: odometry, poses, inertial units, laser scanners, cameras, velocity commands."""

from __future__ import annotations

import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from embodied.contract import TensorSpec
from embodied.errors import UserError
from real_robot.ros2.messages import frames
from real_robot.ros2.messages.codecs import MATRIX, XYZ, Arrays, Message, Types, as_spec, set_stamp, set_vector, vector


@dataclass
class Motion:
    """Pose and velocity of a rigid body: ENU world, FLU body."""

    position: np.ndarray  # [3] m, world
    rotation: np.ndarray  # [3, 3] body -> world
    velocity: np.ndarray  # [3] m/s, world
    angular_velocity: np.ndarray  # [3] rad/s, body


Quantity = tuple[TensorSpec, Callable[[Motion], np.ndarray]]


def _spec(size: int, unit: str, frame: str, names: tuple[str, ...]) -> TensorSpec:
    return TensorSpec((size,), unit=unit, frame=frame, names=names)


TWO_COLUMNS = ("r11", "r21", "r31", "r12", "r22", "r32")
QUANTITIES: dict[str, Quantity] = {
    "position": (_spec(3, "m", "world", XYZ), lambda m: m.position),
    "rotation": (_spec(9, "1", "world", MATRIX), lambda m: m.rotation.reshape(9)),
    "rotation.two_columns": (_spec(6, "", "world", TWO_COLUMNS), lambda m: frames.two_columns(m.rotation)),
    "rotation.quaternion": (_spec(4, "1", "world", ("w", *XYZ)), lambda m: frames.quaternion(m.rotation)),
    "velocity": (_spec(3, "m/s", "world", XYZ), lambda m: m.velocity),
    "velocity.body": (_spec(3, "m/s", "body", XYZ), lambda m: _forward(m)),
    "velocity.base": (_spec(2, "m/s", "base", ("x", "y")), lambda m: _forward(m)[:2]),
    "velocity.drive": (
        _spec(2, "m/s, rad/s", "base", ("speed", "yaw_rate")),
        lambda m: np.array([_forward(m)[0], m.angular_velocity[2]]),
    ),
    "angular_velocity": (_spec(3, "rad/s", "body", XYZ), lambda m: m.angular_velocity),
    "yaw_rate": (_spec(1, "rad/s", "base", ()), lambda m: m.angular_velocity[2:]),
}
"""Observable quantities of a motion: spec and function. A suffix after a dot distinguishes variants."""


def _forward(motion: Motion) -> np.ndarray:
    return frames.to_body(motion.rotation, motion.velocity)


def quantities_of(specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Quantity of each observation in `specs` whose key is a quantity, in the variant that fits its spec."""
    quantities = {}
    for key, spec in specs.items():
        variants = [name for name in QUANTITIES if name.split(".")[0] == key]
        if variants:
            fits = [name for name in variants if not spec.differences(QUANTITIES[name][0])]
            quantities[key] = (fits or variants)[0]
    return quantities


def motion_specs(quantities: Mapping[str, str]) -> dict[str, TensorSpec]:
    """Specs of observations by key, from the quantity of each.

    Raises:
        UserError: for an unknown quantity.
    """
    if unknown := [name for name in quantities.values() if name not in QUANTITIES]:
        raise UserError(f"unknown quantities {unknown}; expected some of {', '.join(QUANTITIES)}")
    return {key: QUANTITIES[name][0] for key, name in quantities.items()}


def observed(motion: Motion, quantities: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Observations by key."""
    specs = motion_specs(quantities)
    return {key: as_spec(key, specs[key], QUANTITIES[name][1](motion)) for key, name in quantities.items()}


def motion_of(arrays: Arrays, quantities: Mapping[str, str]) -> Motion:
    """The motion observed as `arrays`, the inverse of `observed`; missing vectors are zero, a missing rotation is 1."""
    values = {name: np.asarray(arrays[key], np.float64) for key, name in quantities.items()}
    rotation = np.eye(3)
    rate = values.get("angular_velocity", np.zeros(3))
    if "rotation" in values:
        rotation = values["rotation"].reshape(3, 3)
    elif "rotation.two_columns" in values:
        rotation = frames.from_two_columns(values["rotation.two_columns"])
    elif "rotation.quaternion" in values:
        rotation = frames.matrix(values["rotation.quaternion"])
    forward = values.get("velocity.body", np.zeros(3))
    if "velocity.base" in values:
        forward[:2] = values["velocity.base"]
    if "yaw_rate" in values:
        rate[2] = values["yaw_rate"][0]
    if "velocity.drive" in values:
        forward[0], rate[2] = values["velocity.drive"]
    velocity = values["velocity"] if "velocity" in values else frames.to_world(rotation, forward)
    return Motion(values.get("position", np.zeros(3)), rotation, velocity, rate)


def read_pose(pose: Message) -> tuple[np.ndarray, np.ndarray]:
    """Position [3] and rotation matrix [3, 3] of a geometry_msgs/Pose."""
    q = pose.orientation
    return vector(pose.position), frames.matrix(frames.wxyz((q.x, q.y, q.z, q.w)))


def write_pose(pose: Message, position: np.ndarray, rotation: np.ndarray) -> None:
    """Fill in a geometry_msgs/Pose."""
    set_vector(pose.position, position)
    x, y, z, w = frames.xyzw(frames.quaternion(rotation)).tolist()
    pose.orientation.x = x
    pose.orientation.y = y
    pose.orientation.z = z
    pose.orientation.w = w


def check_frame(message: Message, expected: str) -> None:
    """Raise UserError if the message is not in frame `expected`."""
    if message.header.frame_id != expected:
        raise UserError(f"expected a message in frame {expected!r}, got {message.header.frame_id!r}")


@dataclass
class Odometry:
    """nav_msgs/Odometry: pose in `frame_id`, the contract's world; the twist is in the body's axes on the wire."""

    quantities: Mapping[str, str]
    frame_id: str = "odom"
    message: str = "nav_msgs/msg/Odometry"
    specs: Mapping[str, TensorSpec] = field(init=False)

    def __post_init__(self) -> None:
        """Raise UserError for an unknown quantity."""
        self.specs = motion_specs(self.quantities)

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """Observations by key."""
        check_frame(message, self.frame_id)
        position, rotation = read_pose(message.pose.pose)
        twist = message.twist.twist
        velocity = frames.to_world(rotation, vector(twist.linear))
        return observed(Motion(position, rotation, velocity, vector(twist.angular)), self.quantities)

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """The message that a robot would send."""
        motion = motion_of(arrays, self.quantities)
        message = types(self.message)()
        set_stamp(message, stamp_s, self.frame_id)
        message.child_frame_id = "base_link"
        write_pose(message.pose.pose, motion.position, motion.rotation)
        set_vector(message.twist.twist.linear, frames.to_body(motion.rotation, motion.velocity))
        set_vector(message.twist.twist.angular, motion.angular_velocity)
        return message


@dataclass
class Pose:
    """geometry_msgs/PoseStamped: position and attitude in `frame_id`, the contract's world."""

    quantities: Mapping[str, str]
    frame_id: str
    message: str = "geometry_msgs/msg/PoseStamped"
    specs: Mapping[str, TensorSpec] = field(init=False)

    def __post_init__(self) -> None:
        """Raise UserError for a quantity that a pose does not have."""
        if moving := [name for name in self.quantities.values() if not name.startswith(("position", "rotation"))]:
            raise UserError(f"a pose has no {', '.join(moving)}; take them from odometry")
        self.specs = motion_specs(self.quantities)

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """Observations by key."""
        check_frame(message, self.frame_id)
        position, rotation = read_pose(message.pose)
        return observed(Motion(position, rotation, np.zeros(3), np.zeros(3)), self.quantities)

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """The message that a robot would send."""
        motion = motion_of(arrays, self.quantities)
        message = types(self.message)()
        set_stamp(message, stamp_s, self.frame_id)
        write_pose(message.pose, motion.position, motion.rotation)
        return message


IMU = {
    "angular_velocity": _spec(3, "rad/s", "body", XYZ),
    "linear_acceleration": _spec(3, "m/s^2", "body", XYZ),
}


@dataclass
class Imu:
    """sensor_msgs/Imu: body rate and specific force, as far as they are in `specs`.

    `frame_id` is the sensor's frame, which must have the body's axes. A covariance that begins with -1 marks a quantity
    that the sensor does not measure (REP 145).
    """

    specs: Mapping[str, TensorSpec]
    frame_id: str
    message: str = "sensor_msgs/msg/Imu"

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """Observations by key.

        Raises:
            UserError: for another frame, or a quantity that is not measured.
        """
        check_frame(message, self.frame_id)
        if unknown := [key for key in self.specs if getattr(message, f"{key}_covariance")[0] == -1.0]:
            raise UserError(f"this Imu does not measure {', '.join(unknown)}")
        return {key: as_spec(key, spec, vector(getattr(message, key))) for key, spec in self.specs.items()}

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """The message that a robot would send; quantities outside `specs` are marked as not measured."""
        message = types(self.message)()
        set_stamp(message, stamp_s, self.frame_id)
        for key in ("orientation", *(key for key in IMU if key not in self.specs)):
            getattr(message, f"{key}_covariance")[0] = -1.0
        for key in self.specs:
            set_vector(getattr(message, key), arrays[key])
        return message


NEAREST_M = 1e-6
"""Blind zone of a simulator's lidar, practically none."""
FINEST_RAD = 1e-5
"""Smallest accepted angle between rays; lidars have a hundred times as much."""


@dataclass
class LaserScan:
    """sensor_msgs/LaserScan: ranges at `angles_rad` (anticlockwise from the lidar's front), each from the nearest ray.

    Ranges are read as REP 117 and the message define them, on the safe side: no return (infinite, or beyond the lidar's
    range_max) is read as `range_m`, too close (minus infinity) as 0, and a positive range within the blind zone, below
    range_min, unchanged. Only 0 below range_min is no obstacle, because many drivers send it for no return. Readings
    are clipped to `range_m`, the policy's range. `frame_id` is the lidar's frame, whose x axis must point forward.
    """

    specs: Mapping[str, TensorSpec]
    angles_rad: np.ndarray
    range_m: float
    frame_id: str
    message: str = "sensor_msgs/msg/LaserScan"

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """Ranges [beams], m.

        Raises:
            UserError: if the scan is in another frame, does not cover an angle, or contains NaN.
        """
        ((key, spec),) = self.specs.items()
        check_frame(message, self.frame_id)
        ranges = np.asarray(message.ranges, np.float64)[self._rays(message)]
        if np.isnan(ranges).any():
            raise UserError("LaserScan holds NaN; filter broken rays out in the driver")
        no_return = (ranges == 0.0) & (message.range_min > 0.0)
        if message.range_max > 0.0:  # zero if the driver does not fill it in
            no_return |= ranges > message.range_max
        return {key: as_spec(key, spec, np.where(no_return, self.range_m, ranges.clip(0.0, self.range_m)))}

    def _rays(self, message: Message) -> np.ndarray:
        """Indices [beams] of the rays nearest to the wanted angles."""
        count = len(message.ranges)
        step = message.angle_increment
        if not count or not FINEST_RAD < abs(step) <= 2 * np.pi or not np.isfinite(message.angle_min):
            raise UserError(f"LaserScan of {count} rays from {message.angle_min} rad, {step} rad apart; expected some")
        # rays are equal modulo whole turns: drivers count from 0 to 2 pi or from -pi to pi
        # index = round(((angle - angle_min) sign(step) mod 2 pi) / |step|)
        turns = (self.angles_rad - message.angle_min) * np.sign(step) % (2 * np.pi)
        index = np.rint(turns / abs(step)).astype(int)
        index = np.where(index >= count, index - round(2 * np.pi / abs(step)), index)
        if ((index < 0) | (index >= count)).any():
            raise UserError(f"LaserScan from {message.angle_min} rad, {count} rays, misses some of the policy's angles")
        return index

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """The message that a robot would send; angles have to be evenly spaced."""
        ((key, spec),) = self.specs.items()
        message = types(self.message)()
        set_stamp(message, stamp_s, self.frame_id)
        message.angle_min, message.angle_max = float(self.angles_rad[0]), float(self.angles_rad[-1])
        message.angle_increment = float(np.diff(self.angles_rad).mean())
        message.range_min = NEAREST_M
        message.range_max = self.range_m
        ranges = as_spec(key, spec, arrays[key]).astype(np.float32)
        message.ranges = array.array("f", np.where(ranges < NEAREST_M, np.float32(-np.inf), ranges).tobytes())
        return message


@dataclass
class Image:
    """sensor_msgs/Image with 8-bit colours: [height, width, 3], red first; the first row is the top."""

    specs: Mapping[str, TensorSpec]
    message: str = "sensor_msgs/msg/Image"

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """The image.

        Raises:
            UserError: for another size or encoding.
        """
        ((key, spec),) = self.specs.items()
        if message.encoding not in ("rgb8", "bgr8"):
            raise UserError(f"{key}: expected an image in rgb8 or bgr8, got {message.encoding!r}")
        # rows may be padded: step >= 3 width bytes
        rows = np.frombuffer(message.data, np.uint8).reshape(message.height, message.step)
        picture = rows[:, : 3 * message.width].reshape(message.height, message.width, 3)
        return {key: as_spec(key, spec, picture[..., ::-1] if message.encoding == "bgr8" else picture)}

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """The message that a robot would send."""
        ((key, spec),) = self.specs.items()
        picture = as_spec(key, spec, arrays[key])
        message = types(self.message)()
        set_stamp(message, stamp_s, key)
        message.height = len(picture)
        message.width = picture.shape[1]
        message.step = 3 * picture.shape[1]
        message.encoding = "rgb8"
        message.data = array.array("B", picture.tobytes())
        return message


@dataclass
class Fields:
    """An action whose elements are fields of one message, in SI units: Twist, TwistStamped, AckermannDriveStamped.

    `paths` maps element names to fields ("linear.x"); all others stay zero.
    """

    specs: Mapping[str, TensorSpec]
    message: str
    paths: Mapping[str, str]

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """The action."""
        ((key, spec),) = self.specs.items()
        return {key: as_spec(key, spec, [_read(message, self.paths[name]) for name in spec.names])}

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """The command."""
        ((key, spec),) = self.specs.items()
        message = types(self.message)()
        set_stamp(message, stamp_s, "base_link")
        for name, value in zip(spec.names, as_spec(key, spec, arrays[key]).tolist(), strict=True):
            *parents, last = self.paths[name].split(".")
            owner = message
            for parent in parents:
                owner = getattr(owner, parent)
            setattr(owner, last, value)
        return message


def _read(message: Message, path: str) -> float:
    for name in path.split("."):
        message = getattr(message, name)
    return message
