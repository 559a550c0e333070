"""Protocol between policy client and server: msgpack with arrays, in openpi's encoding.

Source: github.com/Physical-Intelligence/openpi, packages/openpi-client. An array is a map {b"__ndarray__": true,
b"data", b"dtype", b"shape"}, a NumPy scalar {b"__npgeneric__": true, b"data", b"dtype"}. A server greets with a map of
metadata; then every observation, a flat map, is answered by a map with "actions" [H, A], or by an error text. Text of
the contract (`embodied.text`) may be sent as a string or a list of strings; an instruction also under openpi's name for
it, PROMPT.

Our server adds "contract", and if they apply "initial_memory" and "inpaints", to the metadata. Our client adds the key
OPTIONS to an observation, a map of "deterministic", "seed", "running" and "deadline_s", the seconds for which it waits
for the answer. Other clients and servers ignore or omit these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from embodied.errors import UserError
from embodied.extras import needs_extra

OPTIONS = "__options__"
PROMPT = "prompt"
KINDS = "biuf"
"""Supported dtype kinds: bool, integers, floats. Never objects, which could execute code."""
CLOSE_REFUSED = 1003
CLOSE_LATER = 1013
"""Close codes (RFC 6455): after an error response; if there are too many clients."""


def pack(message: dict[str, Any], encode: Callable[[object], Any] | None = None) -> bytes:
    """Encode `message`, which consists of arrays, numbers, text, lists and maps; `encode` replaces openpi's encoding.

    Raises:
        UserError: if it contains anything else.
    """
    with needs_extra("robot"):
        import msgpack
    try:
        return bytes(msgpack.Packer(default=encode or _encode).pack(message))
    except TypeError as error:
        raise UserError(f"cannot send this: {error}") from error


def unpack(data: bytes, decode: Callable[[dict[Any, Any]], Any] | None = None) -> dict[str, Any]:
    """Decode bytes of `pack`; arrays are writable copies. `decode` reads maps in place of openpi's encoding.

    Raises:
        UserError: for invalid bytes. Their content is never executed.
    """
    with needs_extra("robot"):
        import msgpack
    try:
        message = msgpack.unpackb(data, object_hook=decode or _decode, ext_hook=_refuse_extension)
    except (
        ValueError,
        TypeError,
        KeyError,
        OverflowError,
        RecursionError,
        SyntaxError,
        msgpack.UnpackException,
    ) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"not a message of a policy client or server: {reason}") from error
    if not isinstance(message, dict):
        raise UserError(f"not a message of a policy client or server: expected a map, got {type(message).__name__}")
    return message


def array(dtype: object, shape: object, data: object) -> np.ndarray:
    """Array of a client's or server's message, a writable copy.

    Raises:
        UserError: for other dtypes than numbers, and for shapes that do not fit the data.
    """
    kind = _dtype(dtype)
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise UserError(f"an array of shape {shape!r}")
    if not isinstance(data, bytes) or len(data) != math.prod(shape) * kind.itemsize:
        raise UserError(f"an array of {kind} and shape {shape} with other data")
    return np.frombuffer(data, kind).reshape(shape).copy()  # frombuffer is read-only


def _encode(value: object) -> Any:  # noqa: ANN401 - what msgpack takes
    if isinstance(value, np.ndarray | np.generic):
        _check_dtype(value.dtype)
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"a {type(value).__name__}; expected arrays, numbers, text, lists and maps")


def _decode(fields: dict[Any, Any]) -> Any:  # noqa: ANN401 - any message
    if b"__ndarray__" in fields:
        return array(fields[b"dtype"], fields[b"shape"], fields[b"data"])
    if b"__npgeneric__" in fields:
        return _dtype(fields[b"dtype"]).type(fields[b"data"])
    return fields


def _dtype(name: object) -> np.dtype:
    if not isinstance(name, str):
        raise UserError(f"a dtype {name!r}")
    dtype = np.dtype(name)
    _check_dtype(dtype)
    return dtype


def _check_dtype(dtype: np.dtype) -> None:
    if dtype.kind not in KINDS or dtype.itemsize > 8:
        raise UserError(f"an array of {dtype}; expected bool, integers or floats of up to 64 bits")


def _refuse_extension(code: int, _: bytes) -> Any:  # noqa: ANN401 - msgpack's
    raise UserError(f"an extension type {code}")
