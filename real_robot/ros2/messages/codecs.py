"""Converts between ROS messages and arrays with names, order, units and frames; one codec per use of a message type.

A codec lists the arrays of a message in `specs`. `decode` reads them from a message and `encode` builds the message, so
every codec works in both directions, also for a simulator. This module does not import ROS: messages are read by
attribute, and built from the classes that `Types` returns for names such as "sensor_msgs/msg/JointState". All codecs
raise a one-line UserError for a message that does not match, and `ForeignError` for one that is not about their robot.
Messages from a network are read with `read`, which converts any exception of a codec to a UserError.
"""

from __future__ import annotations

import array
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from embodied.contract import TensorSpec
from embodied.errors import UserError

Message = Any
"""A ROS message of any type, read and written by attribute."""
Arrays = Mapping[str, np.ndarray]
Types = Callable[[str], Callable[[], Message]]
"""Returns the class of a message by the name of its type."""
XYZ = ("x", "y", "z")
MATRIX = tuple(a + b for a in XYZ for b in XYZ)
"""Element names of a rotation matrix, row by row."""


class ForeignError(UserError):
    """Raised for a message to ignore because it is about another device, as a gripper's joint states for an arm."""


class Codec(Protocol):
    """Converts the arrays of `specs` to messages of type `message` and back."""

    message: str
    specs: Mapping[str, TensorSpec]

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """Arrays of `specs`, by key."""
        ...

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """Message with `arrays`, measured or due at `stamp_s`."""
        ...


def read(codec: Codec, message: Message) -> tuple[dict[str, np.ndarray], float | None]:
    """Arrays of a message, and its stamp.

    Raises:
        UserError: for every message that cannot be read, whatever its content; `ForeignError` for one to ignore.
    """
    try:
        arrays = codec.decode(message)
        measured_s = stamp_s(message)
        if measured_s is not None and not math.isfinite(measured_s):
            raise UserError(f"{codec.message}: expected a stamp in s, got {measured_s}")
        return arrays, measured_s
    except UserError:
        raise
    except Exception as error:  # a node must survive any content of a message
        raise UserError(f"{codec.message} cannot be read: {type(error).__name__}: {error}") from error


def installed(name: str) -> Callable[[], Message]:
    """The class of messages (or services) `name`, such as "sensor_msgs/msg/JointState", from the sourced ROS.

    Raises:
        UserError: if its package is not installed.
    """
    package, kind, message = name.split("/")
    try:
        return getattr(importlib.import_module(f"{package}.{kind}"), message)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{name} not found ({error}); install {package}, or build it and source its workspace"
        ) from error


def stamp_s(message: Message) -> float | None:
    """Time of measurement in s: the header's stamp or PX4's timestamp; None without one.

    In ROS a header's stamp of zero means no stamp.
    """
    if hasattr(message, "header"):
        stamp = message.header.stamp
        return (
            10**9 * stamp.sec + stamp.nanosec
        ) / 1e9 or None  # computed like a node's clock, so that times are equal bit for bit
    if hasattr(message, "timestamp"):
        return 1e-6 * (getattr(message, "timestamp_sample", 0) or message.timestamp)
    if hasattr(message, "layout") and message.layout.dim and message.layout.dim[0].label == STAMP:
        return float(message.data[0])
    return None


def set_stamp(message: Message, seconds: float, frame: str = "") -> None:
    """Set the header's stamp and frame, or PX4's timestamp, if the message has one."""
    if hasattr(message, "header"):
        fill_time(message.header.stamp, seconds)
        message.header.frame_id = frame
    elif hasattr(message, "timestamp"):
        message.timestamp = round(1e6 * seconds)


def fill_time(time: Message, seconds: float) -> None:
    """Write `seconds` into a builtin_interfaces Time or Duration."""
    nanoseconds = round(1e9 * seconds)
    time.sec = nanoseconds // 10**9
    time.nanosec = nanoseconds % 10**9


def fill(message: Message, fields: Mapping[str, Any]) -> Message:
    """Set the named fields of a message; dots access nested ones ("twist.linear.x")."""
    for path, value in fields.items():
        *parents, name = path.split(".")
        owner = message
        for parent in parents:
            owner = getattr(owner, parent)
        assert hasattr(owner, name), f"{type(message).__name__} has no {path}"
        setattr(owner, name, value)
    return message


def vector(point: Message) -> np.ndarray:
    """Vector [3] of a message with x, y, z."""
    return np.array([point.x, point.y, point.z])


def set_vector(point: Message, values: Sequence[float] | np.ndarray) -> None:
    """Write a vector [3] into a message with x, y, z."""
    point.x, point.y, point.z = (float(value) for value in values)


def as_spec(key: str, spec: TensorSpec, values: Any) -> np.ndarray:  # noqa: ANN401 - whatever numpy takes
    """Convert `values` to an array of the spec's type, and check its shape.

    Raises:
        UserError: for another shape, or for numbers that are not finite where the spec has no floats.
    """
    array = np.asarray(values)
    if array.ndim != len(spec.shape) or any(
        want not in (-1, got) for want, got in zip(spec.shape, array.shape, strict=True)
    ):
        raise UserError(f"{key}: expected shape {spec.shape}, got {array.shape}")
    if array.dtype.kind == "f" and np.dtype(spec.dtype).kind != "f" and not np.isfinite(array).all():
        raise UserError(f"{key}: expected {spec.dtype}, got numbers that are not finite")
    return array.astype(spec.dtype)


STAMP = "stamp s"


@dataclass
class LabelledArrays:
    """Arrays of a contract on one std_msgs/Float64MultiArray, for data without a ROS type and for simulations.

    Arrays follow each other in `data`; each has an entry of `layout.dim` whose label gives key, element names, unit and
    frame, `size` the length of the first axis and `stride` the number of elements. The first entry is the stamp, in s.
    Doubles represent float32, bool, uint8 (also text) and int64 up to 2^53 exactly. A label that differs is refused, so
    another order, unit or frame is never misread.
    """

    specs: Mapping[str, TensorSpec]
    message: str = "std_msgs/msg/Float64MultiArray"
    labels: list[str] = field(init=False)

    def __post_init__(self) -> None:
        """Raise UserError for a shape with more than one open axis."""
        self.labels = [STAMP, *(label(key, spec) for key, spec in self.specs.items())]
        for key, spec in self.specs.items():
            if -1 in spec.shape[1:]:
                raise UserError(f"{key}: expected at most the first axis of shape {spec.shape} to vary")

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """Arrays by key.

        Raises:
            UserError: for other labels or lengths.
        """
        dims = message.layout.dim
        if [dim.label for dim in dims] != self.labels:
            raise UserError(f"expected arrays {self.labels}, got {[dim.label for dim in dims]}")
        data = np.asarray(message.data, np.float64)
        if dims[0].stride != 1:
            raise UserError(f"expected one number as the stamp, got {dims[0].stride}")
        if sum(dim.stride for dim in dims) != len(data):
            raise UserError(f"expected {sum(dim.stride for dim in dims)} numbers, got {len(data)}")
        arrays = {}
        offset = dims[0].stride
        for (key, spec), dim in zip(self.specs.items(), dims[1:], strict=True):
            part = data[offset : offset + dim.stride]
            offset += dim.stride
            shape = (dim.size, *spec.shape[1:])
            if len(part) != np.prod(shape):
                raise UserError(f"{key}: expected {shape}, got {len(part)} numbers")
            arrays[key] = as_spec(key, spec, part.reshape(shape))
        return arrays

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """Message with `arrays`, which must have every key of `specs`."""
        message = types(self.message)()
        parts = [np.array([stamp_s]), *(as_spec(key, spec, arrays[key]) for key, spec in self.specs.items())]
        make = types("std_msgs/msg/MultiArrayDimension")
        message.layout.dim = [
            fill(make(), {"label": name, "size": len(part), "stride": part.size})
            for name, part in zip(self.labels, parts, strict=True)
        ]
        flat = np.concatenate([part.reshape(-1).astype(np.float64) for part in parts])
        message.data = array.array("d", flat.tobytes())
        return message


def label(key: str, spec: TensorSpec) -> str:
    """Text that describes an array for comparison: key, names, unit, frame and type."""
    return " | ".join((key, ",".join(spec.names), spec.unit, spec.frame, spec.dtype))


@dataclass
class Values:
    """The action of a forward_command_controller: std_msgs/Float64MultiArray, elements in the controller's order."""

    specs: Mapping[str, TensorSpec]
    message: str = "std_msgs/msg/Float64MultiArray"

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """The single array."""
        ((key, spec),) = self.specs.items()
        return {key: as_spec(key, spec, message.data)}

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """The command, which has no stamp."""
        ((key, spec),) = self.specs.items()
        message = types(self.message)()
        message.data = array.array("d", as_spec(key, spec, arrays[key]).astype(np.float64).tobytes())
        return message


@dataclass
class JointState:
    """sensor_msgs/JointState: joints by name, in any order, among others.

    Args:
        joints: names in the contract's order; `ros_joints` are their names in the message.
        fields: observation key -> field of the message ("position", "velocity" or "effort").
        specs: specs of those keys.
    """

    specs: Mapping[str, TensorSpec]
    ros_joints: tuple[str, ...]
    fields: Mapping[str, str]
    message: str = "sensor_msgs/msg/JointState"

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """Arrays by key, in the contract's order.

        Raises:
            ForeignError: if a joint is missing: grippers and bases publish their joints on the same topic.
            UserError: if a field is missing.
        """
        index = {name: offset for offset, name in enumerate(message.name)}
        if missing := [name for name in self.ros_joints if name not in index]:
            raise ForeignError(f"JointState without joints {missing}; it has {list(message.name)}")
        order = [index[name] for name in self.ros_joints]
        arrays = {}
        for key, name in self.fields.items():
            values = np.asarray(getattr(message, name), np.float64)
            if len(values) != len(message.name):
                raise UserError(f"JointState: expected {len(message.name)} elements of {name}, got {len(values)}")
            arrays[key] = as_spec(key, self.specs[key], values[order])
        return arrays

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """The message that a robot would send."""
        message = types(self.message)()
        set_stamp(message, stamp_s)
        message.name = list(self.ros_joints)
        for key, name in self.fields.items():
            values = as_spec(key, self.specs[key], arrays[key]).astype(np.float64)
            setattr(message, name, array.array("d", values.tobytes()))
        return message


BEFORE = "before"
"""Key of the action [A] written one period earlier, for commands that contain the velocity."""
STOP_S = 0.2
"""Time from full speed to rest after a trajectory's first point: at 1 rad/s, 5 rad/s^2."""


@dataclass
class JointTrajectory:
    """trajectory_msgs/JointTrajectory: the joint positions to reach within a period, with the velocity, then a stop.

    The velocity is the difference to the action `BEFORE` divided by the period, or zero without that action. The second
    point brings the velocity to zero with constant deceleration, within the action's limits, so that the robot stops if
    no further command arrives. (joint_trajectory_controller refuses a trajectory that ends in motion, unless
    allow_nonzero_velocity_at_trajectory_end is set.) The stamp stays zero, which the controller reads as now: a stamp
    from another machine's clock could be in the past, and the points would be dropped.
    """

    specs: Mapping[str, TensorSpec]
    ros_joints: tuple[str, ...]
    control_dt_s: float
    message: str = "trajectory_msgs/msg/JointTrajectory"

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """The first point's positions, in the contract's order."""
        ((key, spec),) = self.specs.items()
        names = list(message.joint_names)
        if sorted(names) != sorted(self.ros_joints) or not message.points:
            raise UserError(f"expected a point for {list(self.ros_joints)}, got {len(message.points)} for {names}")
        positions = np.asarray(message.points[0].positions, np.float64)
        if len(positions) != len(names):
            raise UserError(f"JointTrajectory: expected {len(names)} positions, got {len(positions)}")
        return {key: as_spec(key, spec, positions[[names.index(name) for name in self.ros_joints]])}

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """The trajectory."""
        ((key, spec),) = self.specs.items()
        position = as_spec(key, spec, arrays[key]).astype(np.float64)
        # v = (q - q_before) / dt; constant deceleration over STOP_S ends at q_stop = q + v STOP_S / 2
        previous = arrays.get(BEFORE)
        velocity = np.zeros_like(position) if previous is None else (position - previous) / self.control_dt_s
        stop = position + 0.5 * STOP_S * velocity
        if spec.low:
            stop = stop.clip(np.minimum(position, spec.low), np.maximum(position, spec.high))
            velocity = (stop - position) / (0.5 * STOP_S)
        message = types(self.message)()
        message.joint_names = list(self.ros_joints)
        points = (position, velocity, self.control_dt_s), (stop, np.zeros_like(velocity), self.control_dt_s + STOP_S)
        message.points = [_point(types, *point) for point in points]
        return message


def _point(types: Types, position: np.ndarray, velocity: np.ndarray, after_s: float) -> Message:
    point = types("trajectory_msgs/msg/JointTrajectoryPoint")()
    point.positions, point.velocities = (array.array("d", values.tobytes()) for values in (position, velocity))
    fill_time(point.time_from_start, after_s)
    return point
