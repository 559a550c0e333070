"""The few standard ROS 2 messages used in recordings, encoded and decoded without ROS.

Arrays are std_msgs/*MultiArray, camera images sensor_msgs/Image, everything else JSON in std_msgs/String: any ROS 2
tool reads them without our packages. Encoding: little-endian CDR (OMG DDS-XTypes 1.3, XCDR1); numbers are aligned to
their own size, counted from the end of the four-byte header.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import numpy as np

from embodied.errors import UserError

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
"""Message type and element type by dtype."""
_ELEMENTS = {np.dtype(dtype): np.dtype(element) for dtype, (_, element) in _ARRAYS.items()}
_HEADER = b"\x00\x01\x00\x00"
_ENCODINGS = {1: "mono8", 3: "rgb8"}
_BREAK = "\n" + "=" * 80 + "\nMSG: "
_LAYOUT = (
    "std_msgs/MultiArrayLayout layout\n{element}[] data"
    + _BREAK
    + "std_msgs/MultiArrayLayout\nstd_msgs/MultiArrayDimension[] dim\nuint32 data_offset"
    + _BREAK
    + "std_msgs/MultiArrayDimension\nstring label\nuint32 size\nuint32 stride"
)
_IMAGE_DEFINITION = (
    "std_msgs/Header header\nuint32 height\nuint32 width\nstring encoding\nuint8 is_bigendian\nuint32 step\n"
    + "uint8[] data"
    + _BREAK
    + "std_msgs/Header\nbuiltin_interfaces/Time stamp\nstring frame_id"
    + _BREAK
    + "builtin_interfaces/Time\nint32 sec\nuint32 nanosec"
)


def array_type(dtype: str, shape: tuple[int, ...]) -> str:
    """Message type for arrays of `dtype` and `shape`: Image for images (uint8, [height, width, 1 or 3]).

    Raises:
        UserError: for a dtype that no message can carry.
    """
    if dtype not in _ARRAYS:
        raise UserError(f"cannot record arrays of {dtype}; expected one of {', '.join(_ARRAYS)}")
    return IMAGE if dtype == "uint8" and _is_picture(shape) else _ARRAYS[dtype][0]


def definition(message_type: str) -> str:
    """The ros2msg schema text of one of the types above."""
    if message_type == STRING:
        return "string data"
    if message_type == IMAGE:
        return _IMAGE_DEFINITION
    return _LAYOUT.format(element=next(element for name, element in _ARRAYS.values() if name == message_type))


def encode_string(text: str) -> bytes:
    """`text` as std_msgs/String."""
    writer = _Writer()
    writer.string(text)
    return bytes(writer.data)


def decode_string(data: bytes) -> str:
    """The inverse of `encode_string`.

    Raises:
        UserError: for bytes of another message.
    """
    return _Reader(data).string()


def encode_array(array: np.ndarray, stamp_ns: int = 0, frame: str = "") -> bytes:
    """`array` as the message of `array_type`; an image carries its stamp and `frame`.

    Raises:
        UserError: for a dtype that no message can carry.
    """
    if array.dtype not in _ELEMENTS:
        array_type(str(array.dtype), array.shape)  # says what is wrong
    writer = _Writer()
    if array.dtype == np.uint8 and _is_picture(array.shape):
        height, width, channels = array.shape
        writer.numbers("iI", *divmod(stamp_ns, 10**9))
        writer.string(frame)
        writer.numbers("II", height, width)
        writer.string(_ENCODINGS[channels])
        writer.numbers("B", 0)  # not big-endian
        writer.numbers("I", width * channels)
    else:
        writer.data = bytearray(_layout(array.shape))
    writer.elements(array.astype(_ELEMENTS[array.dtype], copy=False))
    return bytes(writer.data)


def _is_picture(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[2] in _ENCODINGS


@lru_cache
def _layout(shape: tuple[int, ...]) -> bytes:
    """The MultiArray's header, before its elements."""
    writer, stride = _Writer(), math.prod(shape)
    writer.numbers("I", len(shape))
    for size in shape:
        writer.string("")
        writer.numbers("II", size, stride)
        stride //= max(1, size)
    writer.numbers("I", 0)
    return bytes(writer.data)


def decode_array(data: bytes, message_type: str, dtype: str) -> np.ndarray:
    """The inverse of `encode_array`.

    Raises:
        UserError: for bytes of another message.
    """
    reader = _Reader(data)
    if message_type == IMAGE:
        reader.numbers("iI")
        reader.string()
        height, width = reader.numbers("II")
        encoding = reader.string()
        reader.numbers("B")
        (step,) = reader.numbers("I")
        if encoding not in _ENCODINGS.values() or step % max(1, width):
            raise UserError(f"expected an image of {' or '.join(_ENCODINGS.values())} without padding, got {encoding}")
        shape = height, width, step // max(1, width)
    else:
        (dimensions,) = reader.numbers("I")
        sizes = []
        for _ in range(dimensions):
            reader.string()
            sizes.append(reader.numbers("II")[0])
        reader.numbers("I")
        shape = tuple(sizes)
    values = reader.elements(_ARRAYS[dtype][1])
    if values.size != math.prod(shape):
        raise UserError(f"expected {math.prod(shape)} elements in a {message_type}, got {values.size}")
    return values.reshape(shape).astype(dtype)


class _Writer:
    """Appends values, each aligned to its own size after the header."""

    def __init__(self) -> None:
        self.data = bytearray(_HEADER)

    def numbers(self, kinds: str, *values: int) -> None:
        for kind, value in zip(kinds, values, strict=True):
            self.align(struct.calcsize(kind))
            self.data += struct.pack("<" + kind, value)

    def string(self, text: str) -> None:
        encoded = text.encode() + b"\x00"
        self.numbers("I", len(encoded))
        self.data += encoded

    def elements(self, array: np.ndarray) -> None:
        self.numbers("I", array.size)
        if array.size:
            self.align(array.itemsize)
            self.data += array.tobytes()

    def align(self, size: int) -> None:
        self.data += bytes(-(len(self.data) - len(_HEADER)) % size)


class _Reader:
    """Reads what `_Writer` wrote; raises UserError for truncated or other bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, len(_HEADER)
        if data[: self.place] != _HEADER:
            raise UserError(f"expected a little-endian CDR message, got bytes that begin with {data[: self.place]!r}")

    def numbers(self, kinds: str) -> tuple[int, ...]:
        found = []
        for kind in kinds:
            size = struct.calcsize(kind)
            found.append(struct.unpack("<" + kind, self._take(size, size))[0])
        return tuple(found)

    def string(self) -> str:
        (length,) = self.numbers("I")
        return self._take(length, 1)[:-1].decode()

    def elements(self, kind: str) -> np.ndarray:
        (count,) = self.numbers("I")
        size = np.dtype(kind).itemsize
        return np.frombuffer(self._take(count * size, size if count else 1), kind)

    def _take(self, count: int, alignment: int) -> bytes:
        start = self.place + -(self.place - len(_HEADER)) % alignment
        self.place = start + count
        if self.place > len(self.data):
            raise UserError(f"expected a message of at least {self.place} bytes, got {len(self.data)}")
        return self.data[start : self.place]
