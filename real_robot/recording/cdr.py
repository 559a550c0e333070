"""Encodes and decodes the standard ROS 2 messages of recordings with rosbags, without ROS.

Arrays are std_msgs/*MultiArray, camera images sensor_msgs/Image, everything else JSON in std_msgs/String: any ROS 2
tool reads them without our packages.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np

from embodied.errors import UserError
from embodied.extras import needs_extra

STRING = "std_msgs/msg/String"
IMAGE = "sensor_msgs/msg/Image"
_ARRAYS = {
    "float32": ("std_msgs/msg/Float32MultiArray", "float32"),
    "float64": ("std_msgs/msg/Float64MultiArray", "float64"),
    "int32": ("std_msgs/msg/Int32MultiArray", "int32"),
    "int64": ("std_msgs/msg/Int64MultiArray", "int64"),
    "uint8": ("std_msgs/msg/UInt8MultiArray", "uint8"),
    "bool": ("std_msgs/msg/UInt8MultiArray", "uint8"),
}
"""Message type and element type, by dtype."""
_ENCODINGS = {1: "mono8", 3: "rgb8"}


@cache
def _store() -> Any:  # noqa: ANN401 - rosbags' type store
    with needs_extra("robot"):
        from rosbags.typesys import Stores, get_typestore
    return get_typestore(Stores.ROS2_JAZZY)


def array_type(dtype: str, shape: tuple[int, ...]) -> str:
    """Message type for arrays of `dtype` and `shape`: Image for images (uint8, [height, width, 1 or 3]).

    Raises:
        UserError: for a dtype that no message can carry.
    """
    if dtype not in _ARRAYS:
        raise UserError(f"cannot record arrays of {dtype}; expected one of {', '.join(_ARRAYS)}")
    return IMAGE if dtype == "uint8" and len(shape) == 3 and shape[2] in _ENCODINGS else _ARRAYS[dtype][0]


@cache
def definition(message_type: str) -> str:
    """The ros2msg schema text of a message type."""
    return _store().generate_msgdef(message_type, ros_version=2)[0]


def encode_string(text: str) -> bytes:
    """Encode `text` as std_msgs/String."""
    return _encode(STRING, text)


def decode_string(data: bytes) -> str:
    """Decode a message of `encode_string`.

    Raises:
        UserError: for bytes of another message.
    """
    return _decode(data, STRING).data


def encode_array(array: np.ndarray, stamp_ns: int = 0, frame: str = "") -> bytes:
    """Encode `array` as a message of its `array_type`; an image contains its stamp and `frame`.

    Raises:
        UserError: for a dtype that no message can carry.
    """
    dtype = str(array.dtype)
    message_type = array_type(dtype, array.shape)
    # bool is sent as uint8
    flat = np.ascontiguousarray(array).reshape(-1).view(_ARRAYS[dtype][1])
    if message_type != IMAGE:
        return _encode(message_type, _layout(array.shape), flat)
    height, width, channels = array.shape
    types = _store().types
    header = types["std_msgs/msg/Header"](types["builtin_interfaces/msg/Time"](*divmod(stamp_ns, 10**9)), frame)
    return _encode(IMAGE, header, height, width, _ENCODINGS[channels], 0, width * channels, flat)


def decode_array(data: bytes, message_type: str, dtype: str) -> np.ndarray:
    """Decode a message of `encode_array`.

    Raises:
        UserError: for bytes of another message.
    """
    if dtype not in _ARRAYS or message_type not in {_ARRAYS[dtype][0], IMAGE if dtype == "uint8" else ""}:
        raise UserError(f"a {message_type} cannot hold an array of {dtype}")
    message = _decode(data, message_type)
    if message_type == IMAGE:
        channels = message.step // max(1, message.width)
        if message.encoding != _ENCODINGS.get(channels) or message.step != channels * message.width:
            encodings = " or ".join(_ENCODINGS.values())
            raise UserError(f"expected an image of {encodings} without padding, got {message.encoding}")
        shape = message.height, message.width, channels
    else:
        shape = tuple(dimension.size for dimension in message.layout.dim)
    if message.data.size != math.prod(shape):
        raise UserError(f"expected {math.prod(shape)} elements in a {message_type}, got {message.data.size}")
    return message.data.reshape(shape).astype(dtype)


def decode_number(data: bytes, message_type: str, text: str, field: str) -> float:
    """Number in the `field` of a message; `text` is the ros2msg schema of its type.

    Raises:
        UserError: for other bytes, types that are not defined, and fields that are no numbers.
    """
    from rosbags.typesys import TypesysError, get_types_from_msg

    store = _store()
    try:
        if message_type not in store.types:
            store.register(get_types_from_msg(text, message_type))
        value = _decode(data, message_type)
        for name in field.split("."):
            value = getattr(value, name)
        return float(value)
    except (AttributeError, TypeError, ValueError, KeyError, TypesysError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"a {message_type} has no number in its field {field} ({reason}); add TOPIC:FIELD") from error


@lru_cache
def _layout(shape: tuple[int, ...]) -> Any:  # noqa: ANN401 - rosbags' message
    types = _store().types
    dimension = types["std_msgs/msg/MultiArrayDimension"]
    dimensions = [dimension("", size, math.prod(shape[axis:])) for axis, size in enumerate(shape)]
    return types["std_msgs/msg/MultiArrayLayout"](dimensions, 0)


def _encode(message_type: str, *fields: Any) -> bytes:  # noqa: ANN401 - the message's
    store = _store()
    return bytes(store.serialize_cdr(store.types[message_type](*fields), message_type))


def _decode(data: bytes, message_type: str) -> Any:  # noqa: ANN401 - rosbags' message
    store = _store()
    from rosbags.serde import SerdeError

    try:
        return store.deserialize_cdr(data, message_type)
    except SerdeError as error:
        raise UserError(f"expected a {message_type}, got other bytes: {error}") from error
