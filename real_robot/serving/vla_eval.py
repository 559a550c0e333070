"""vla-eval's protocol, so that its benchmarks evaluate a served policy; version 1, of vla-eval 0.8.0.

Source: github.com/allenai/vla-evaluation-harness. A message is msgpack, {type, payload, seq, timestamp}; an array is a
map {"__ndarray__": true, data, dtype, shape}, a picture {"__image__": true, format, data, shape} with png, jpeg or raw
data. The client begins with hello, which is answered by hello. Between episode_start and episode_end every observation
is answered by one action of the same seq, {"actions": [A]}, or by an error, {"error": text}.

An observation has "images" by camera, "task_description", and "states" or "state", and may have further entries.
"""

from __future__ import annotations

import io
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from PIL import Image

from embodied.contract import TensorSpec
from embodied.data.pictures import averaged, decode
from embodied.errors import UserError
from embodied.policy import MEMORY
from embodied.task import Convention
from real_robot.serving.answerer import Answerer, Options, explanation
from real_robot.serving.wire import array, pack, unpack

PATH = "/vla-eval"
"""Path of the server's address at which this protocol is spoken; the others begin with the server's greeting."""
VERSION = 1
PIXELS = 1 << 24
"""Largest number of pixels of a picture."""
STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
"""LeRobot's names of features, which conventions use."""


class VlaEvalSession:
    """One client's episodes: the running chunk, of which the contract's K actions are executed, and the memory.

    Entries of an observation are taken under the contract's names. A picture is also found in "images", by its
    observation's or camera's name, and may be larger by a whole factor. With the task's `convention`, "states" and
    "images" are those of its published datasets, as vla-eval's LIBERO sends them.
    """

    greeting = None

    def __init__(self, answerer: Answerer, convention: Callable[[], Convention | None]) -> None:
        self._answerer = answerer
        self._convention = convention
        self._memory: np.ndarray | None = None
        self._chunk = deque[np.ndarray]()
        self._sent: list[np.ndarray] | None = None  # actions of the episode; None: there is none

    def answer(self, request: bytes | str, received_s: float, others_wait: Callable[[], bool]) -> bytes | str:
        """Message for `request`, b"" if it needs none; a one-line text ends the connection. There are no deadlines."""
        del received_s, others_wait
        try:
            kind, payload, seq = _message(request)
        except Exception as error:
            return explanation(error)
        try:
            reply = self._reply(kind, payload)
        except Exception as error:
            reply = "error", {"error": explanation(error)}
        if reply is None:
            return b""
        message = {"type": reply[0], "payload": reply[1], "seq": seq, "timestamp": time.time()}
        return pack(message, _encode)

    def _reply(self, kind: str, payload: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Type and payload of the answer to a message, None if it needs none."""
        if kind == "hello":
            return "hello", self._hello(payload)
        if kind == "observation":
            return "action", {"actions": self._action(payload)}
        if kind == "episode_start":
            self._memory = self._answerer.initial_memory
            self._chunk.clear()
            self._sent = []
        elif kind == "episode_end":
            self._sent = None
        elif kind != "error":
            raise UserError(f"unknown message type {kind!r:.40}")
        return None

    def _hello(self, payload: dict[str, Any]) -> dict[str, Any]:
        if (version := payload.get("protocol_version")) != VERSION:
            raise UserError(f"expected vla-eval's protocol_version {VERSION}, got {version!r:.40}")
        name = type(self._answerer.policy).__name__
        hello = {"harness_version": "embodied", "protocol_version": VERSION, "model_server": name, "capabilities": {}}
        if convention := self._convention():
            wrist = len(self._answerer.specs.keys() & convention.cameras.keys()) > 1
            hello["observation_params"] = {"send_state": True, "send_wrist_image": wrist}
        return hello

    def _action(self, payload: dict[str, Any]) -> np.ndarray:
        """Next action [A]: of the running chunk, or of a new one once K actions of it have been sent."""
        if self._sent is None:
            raise UserError("expected episode_start before an observation; a new connection has no episode")
        if not self._chunk:
            memory = {} if self._memory is None else {MEMORY: self._memory}
            reply = self._answerer.reply(dict(self._entries(payload)) | memory, Options())
            self._memory = reply.get(MEMORY)
            self._chunk.extend(reply["actions"][: self._answerer.policy.contract.executed])
        action = self._chunk.popleft()
        self._sent.append(action)
        return action

    def _entries(self, payload: dict[str, Any]) -> Iterator[tuple[str, object]]:
        """Entries of the contract, by name, from those of an observation."""
        convention = self._convention()
        converted = self._converted(payload, convention)
        for key, spec in self._answerer.specs.items():
            if key == MEMORY:
                continue
            value = payload.get(key, converted.get(key))
            if spec.is_picture:
                value = _picture(key, spec, payload, convention)
            elif spec.is_text and value is None and len(spec.shape) == 1:
                value = payload.get("task_description")
            elif isinstance(value, np.ndarray) and value.dtype.kind == np.dtype(spec.dtype).kind == "f":
                value = value.astype(spec.dtype)  # simulators send float64
            if value is None and convention and key in convention.absent:
                raise UserError(f"{key}: not in this benchmark's observations; train with {convention.absent[key]}")
            yield key, value

    def _converted(self, payload: dict[str, Any], convention: Convention | None) -> dict[str, np.ndarray]:
        """Observations that the task's `convention` makes of the state and the actions of the episode so far."""
        state = payload.get("states", payload.get("state"))
        if convention is None or not isinstance(state, np.ndarray) or state.ndim != 1:
            return {}
        assert self._sent is not None
        # rows are steps; the present one has no action yet, which no observation before it depends on
        actions = np.stack([*self._sent, np.full(self._answerer.policy.contract.action.shape, -1.0)])
        columns = {STATE: np.broadcast_to(state, (len(actions), *state.shape)), ACTION: actions}
        return {key: rows[-1] for key, rows in convention.convert(columns).items() if key != ACTION}


def _picture(key: str, spec: TensorSpec, payload: dict[str, Any], convention: Convention | None) -> object:
    """Picture of `spec` from an observation; None if it has none."""
    if key in payload:
        return payload[key]
    images = payload.get("images")
    features = convention.cameras.get(key, ()) if convention else ()
    names = [key, key.removesuffix("_image"), spec.camera, *(name.removeprefix(IMAGES) for name in features)]
    picture = next((images[name] for name in names if name in images), None) if isinstance(images, dict) else None
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        return picture
    height, width = (want if want > 0 else have for want, have in zip(spec.shape[:2], picture.shape[:2], strict=True))
    try:
        picture = averaged(picture[None], height, width)[0]
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    return np.ascontiguousarray(picture[:, ::-1]) if convention and convention.mirrored else picture


def _message(request: bytes | str) -> tuple[str, dict[str, Any], int]:
    """Type, payload and number of a message; raise UserError for anything else."""
    if isinstance(request, str):
        raise UserError("expected a binary message of vla-eval, got text")
    message = unpack(request, _decode)
    kind, payload, seq = (message.get(name) for name in ("type", "payload", "seq"))
    if not isinstance(kind, str) or not isinstance(payload, dict) or type(seq) is not int:
        raise UserError("not a message of vla-eval: expected a type, a payload and a seq")
    return kind, payload, seq


def _encode(value: object) -> Any:  # noqa: ANN401 - what msgpack takes
    if isinstance(value, np.ndarray):
        return {"__ndarray__": True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": list(value.shape)}
    raise TypeError(f"a {type(value).__name__}; expected arrays, numbers, text, lists and maps")


def _decode(fields: Mapping[Any, Any]) -> Any:  # noqa: ANN401 - any message
    if "__image__" in fields and fields["format"] != "raw":
        return _decoded_picture(fields["data"], fields["shape"])
    if "__image__" in fields or "__ndarray__" in fields:
        return array(fields["dtype"], fields["shape"], fields["data"])
    return fields


def _decoded_picture(data: object, shape: object) -> np.ndarray:
    """RGB picture [height, width, 3] of PNG or JPEG data, decoded only if its header has the declared `shape`."""
    if not isinstance(data, bytes) or not isinstance(shape, list) or len(shape) != 3:
        raise UserError(f"a picture of shape {shape!r:.40}")
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as picture:
            size = picture.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError("a damaged picture, or no PNG or JPEG") from error
    if size != (shape[1], shape[0]) or math.prod(size) > PIXELS:
        raise UserError(f"a picture of {size[1]}x{size[0]} with shape {shape!r:.40}")
    return decode(data)
