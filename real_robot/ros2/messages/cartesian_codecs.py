"""Codecs for arms' perception: camera images of any size, raw or compressed, detections, and scene observations."""

from __future__ import annotations

import array
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from embodied.contract import TensorSpec
from embodied.errors import UserError
from embodied.text import encode_as
from real_robot.ros2.messages.body_codecs import Image, read_pose
from real_robot.ros2.messages.codecs import Arrays, Message, Types, as_spec, set_stamp, stamp_s
from real_robot.ros2.messages.frames import two_columns
from real_robot.ros2.messages.transforms import Transform

SCENE = ("object_position", "object_rotation", "object_names", "object_mask", "instruction")
"""Observations of a scene, other than pictures."""


@dataclass
class Picture:
    """A camera's image, cropped around its centre to the contract's aspect ratio, and resized to its size by averaging.

    sensor_msgs/Image with 8-bit colours or, `compressed`, sensor_msgs/CompressedImage of JPEG or PNG.
    """

    specs: Mapping[str, TensorSpec]
    compressed: bool = False
    message: str = field(init=False)

    def __post_init__(self) -> None:
        """Choose the message."""
        self.message = "sensor_msgs/msg/CompressedImage" if self.compressed else "sensor_msgs/msg/Image"

    def decode(self, message: Message) -> dict[str, np.ndarray]:
        """The image.

        Raises:
            UserError: for an unsupported encoding, or a damaged image.
        """
        ((key, spec),) = self.specs.items()
        picture = self._uncompressed(key, message) if self.compressed else self._raw(key, message)
        return {key: as_spec(key, spec, resized(picture, spec.shape[0], spec.shape[1]))}

    def encode(self, arrays: Arrays, types: Types, stamp_s: float) -> Message:
        """The message that a camera would send; PNG where compressed."""
        if not self.compressed:
            return Image(self.specs).encode(arrays, types, stamp_s)
        ((key, spec),) = self.specs.items()
        message = types(self.message)()
        set_stamp(message, stamp_s, key)
        data = io.BytesIO()
        Pillow.fromarray(as_spec(key, spec, arrays[key])).save(data, "PNG")
        message.format, message.data = "rgb8; png compressed", array.array("B", data.getvalue())
        return message

    def _raw(self, key: str, message: Message) -> np.ndarray:
        whole = TensorSpec((message.height, message.width, 3), "uint8")
        return Image({key: whole}).decode(message)[key]

    def _uncompressed(self, key: str, message: Message) -> np.ndarray:
        try:
            return np.asarray(Pillow.open(io.BytesIO(bytes(message.data))).convert("RGB"))
        except (UnidentifiedImageError, OSError) as error:
            raise UserError(f"{key}: expected JPEG or PNG, got {message.format!r} ({error})") from error


def resized(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """The centre of `picture` [h, w, 3] with the aspect ratio of `height` x `width`, resized to that size."""
    h, w = picture.shape[:2]
    if (h, w) == (height, width):
        return picture
    # the largest centred box with the aspect ratio of the result
    share = min(h / height, w / width)
    top = (h - share * height) / 2
    left = (w - share * width) / 2
    box = (left, top, left + share * width, top + share * height)
    return np.asarray(Pillow.fromarray(picture).resize((width, height), Pillow.Resampling.BOX, box=box))


def detected(message: Message, received_s: float) -> dict[str, Transform]:
    """Pose of each detection by the class of its best hypothesis, or by its `id` and box if it has none.

    Without a stamp, `received_s`, the time at which the message arrived, is the time of measurement.

    Raises:
        UserError: for an orientation that is not set.
    """
    poses = {}
    measured_s = stamp_s(message) or received_s
    for detection in message.detections:
        best = max(detection.results, key=lambda result: result.hypothesis.score, default=None)
        name = best.hypothesis.class_id if best else detection.id
        pose = best.pose.pose if best else detection.bbox.center
        poses[name] = Transform(*read_pose(pose), measured_s)
    return poses


def scene_arrays(
    specs: Mapping[str, TensorSpec], names: Sequence[str], poses: Sequence[Transform], instruction: str
) -> dict[str, np.ndarray]:
    """The observations `specs` of objects `names` [M] at `poses` [M] and of the instruction."""
    values: dict[str, Callable[[TensorSpec], np.ndarray]] = {
        "object_position": lambda _: np.array([pose.position for pose in poses]).reshape(-1, 3),
        "object_rotation": lambda _: np.array([two_columns(pose.rotation) for pose in poses]).reshape(-1, 6),
        "object_names": lambda spec: encode_as(list(names), spec.shape),
        "object_mask": lambda _: np.ones(len(names), bool),
        "instruction": lambda spec: encode_as(instruction, spec.shape),
    }
    return {key: values[key](spec) for key, spec in specs.items()}
