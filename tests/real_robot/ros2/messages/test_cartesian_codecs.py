"""What arms see and what grippers are told: messages by hand and through serialised bytes."""

import array
import io

import numpy as np
import pytest
from PIL import Image as Pillow
from scipy.spatial.transform import Rotation

from embodied.contract import TensorSpec
from embodied.text import decode
from real_robot.ros2.messages.cartesian_codecs import SCENE, Picture, detected, resized, scene_arrays
from real_robot.ros2.messages.codecs import fill
from real_robot.ros2.messages.grippers import Gripper, GripperKind
from real_robot.ros2.messages.transforms import Frames
from sims.libero.observation import contract
from tests.real_robot.ros2.messages.definitions import on_the_wire, types

COMMAND = "control_msgs/msg/GripperCommand_Goal"
PICTURE = {"front": TensorSpec((4, 4, 3), "uint8")}


def test_a_cameras_picture_is_cut_about_its_middle_and_averaged():
    wide = np.zeros((8, 12, 3), np.uint8)
    wide[:, :2], wide[:, -2:] = 255, 255  # cut away
    wide[:, 2:4] = np.array([[[10, 0, 0], [30, 0, 0]]])  # one column of the result
    small = resized(wide, 4, 4)
    np.testing.assert_array_equal(small[:, 0], [[20, 0, 0]] * 4)
    assert not small[:, 1:].any()
    assert resized(small, 4, 4) is small


@pytest.mark.parametrize("compressed", [False, True])
def test_pictures_survive_the_wire_at_the_contracts_size(compressed):
    codec = Picture(PICTURE, compressed)
    picture = np.random.default_rng(0).integers(0, 255, (4, 4, 3), np.uint8)
    sent = on_the_wire(codec.encode({"front": picture}, types, 1.0))
    np.testing.assert_array_equal(codec.decode(sent)["front"], picture)


def test_jpeg_of_another_size_and_raw_blue_first_are_read():
    even = np.full((48, 64, 3), (200, 100, 50), np.uint8)
    data = io.BytesIO()
    Pillow.fromarray(even).save(data, "JPEG")
    message = types("sensor_msgs/msg/CompressedImage")()
    message.format, message.data = "bgr8; jpeg compressed bgr8", array.array("B", data.getvalue())
    found = Picture(PICTURE, True).decode(on_the_wire(message))["front"]
    np.testing.assert_allclose(found.astype(int), np.full((4, 4, 3), (200, 100, 50)), atol=3)
    raw = types("sensor_msgs/msg/Image")()
    raw.height, raw.width, raw.step, raw.encoding = 48, 64, 64 * 3, "bgr8"
    raw.data = array.array("B", even[..., ::-1].tobytes())
    np.testing.assert_array_equal(
        Picture(PICTURE).decode(on_the_wire(raw))["front"], np.full((4, 4, 3), (200, 100, 50))
    )


def test_a_damaged_picture_is_refused():
    message = types("sensor_msgs/msg/CompressedImage")()
    message.format, message.data = "h264", array.array("B", b"\x00\x01")
    with pytest.raises(ValueError, match="front: expected JPEG or PNG, got 'h264'"):
        Picture(PICTURE, True).decode(message)


def transform(parent, child, position, rotation=None, sec=0):
    message = types("geometry_msgs/msg/TransformStamped")()
    message.header.frame_id, message.child_frame_id, message.header.stamp.sec = parent, child, sec
    x, y, z, w = (rotation or Rotation.identity()).as_quat()
    names = ("x", "y", "z")
    fill(message, {f"transform.translation.{a}": float(v) for a, v in zip(names, position, strict=True)})
    return fill(
        message, {f"transform.rotation.{a}": float(v) for a, v in zip((*names, "w"), (x, y, z, w), strict=True)}
    )


def tf(*transforms):
    message = types("tf2_msgs/msg/TFMessage")()
    message.transforms = list(transforms)
    return on_the_wire(message)


def test_a_pose_is_chained_over_moving_and_static_frames_with_its_oldest_stamp():
    left, frames = Rotation.from_euler("z", 90, degrees=True), Frames()
    frames.take(tf(transform("world", "base", (1, 0, 0), left)), static=True)
    frames.take(tf(transform("base", "wrist", (2, 0, 0), sec=7), transform("world", "table", (0, 5, 0), sec=3)), False)
    frames.take(tf(transform("/wrist", "/hand", (0, 0, 1), left, sec=9)), False)
    pose = frames.pose("world", "hand")
    np.testing.assert_allclose(pose.position, [1, 2, 1], atol=1e-12)
    np.testing.assert_allclose(pose.rotation, (left * left).as_matrix(), atol=1e-12)
    assert pose.stamp_s == 7.0
    np.testing.assert_allclose(frames.pose("hand", "world").then(pose).position, 0.0, atol=1e-12)
    np.testing.assert_allclose(frames.pose("table", "wrist").position, [1, -3, 0], atol=1e-12)
    assert frames.pose("table", "base").stamp_s == 3.0
    assert frames.pose("world", "base").stamp_s == np.inf
    frames.take(tf(transform("base", "wrist", (3, 0, 0), sec=8)), False)
    np.testing.assert_allclose(frames.pose("world", "wrist").position, [1, 3, 0], atol=1e-12)
    frames.forget()  # the clock has jumped back
    assert frames.pose("world", "base").stamp_s == np.inf
    with pytest.raises(ValueError, match="wrist"):
        frames.pose("world", "wrist")


def test_frames_that_are_not_connected_go_round_or_are_not_filled_in_are_refused():
    frames = Frames()
    frames.take(tf(transform("world", "base", (0, 0, 0))), static=True)
    with pytest.raises(ValueError, match=r"no transform from 'cup' to 'world' on /tf; known frames: \['base'\]"):
        frames.pose("world", "cup")
    frames.take(tf(transform("base", "world", (0, 0, 0))), static=True)
    with pytest.raises(ValueError, match="go in a circle"):
        frames.pose("world", "base")
    empty = types("geometry_msgs/msg/TransformStamped")()
    empty.child_frame_id = "base"
    with pytest.raises(ValueError, match="expected unit quaternions"):
        Frames().take(tf(empty), static=False)


def detection(name, score, x, identity=""):
    result = types("vision_msgs/msg/ObjectHypothesisWithPose")()
    result.hypothesis.class_id, result.hypothesis.score = name, score
    result.pose.pose.position.x, result.pose.pose.orientation.w = x, 1.0
    found = types("vision_msgs/msg/Detection3D")()
    found.results, found.id = [result], identity
    return found


def test_detections_are_found_by_their_best_class():
    message = types("vision_msgs/msg/Detection3DArray")()
    both = detection("milk", 0.3, 1.0, identity="17")
    both.results.append(detection("soup", 0.6, 2.0).results[0])
    boxed = types("vision_msgs/msg/Detection3D")()
    boxed.id, boxed.bbox.center.position.y, boxed.bbox.center.orientation.w = "basket", 3.0, 1.0
    message.detections, message.header.stamp.sec = [both, boxed], 4
    found = detected(on_the_wire(message), 7.0)
    assert set(found) == {"soup", "basket"}
    np.testing.assert_allclose(found["soup"].position, [2, 0, 0])
    np.testing.assert_allclose(found["basket"].position, [0, 3, 0])
    assert found["soup"].stamp_s == 4.0
    message.header.stamp.sec = 0
    assert detected(on_the_wire(message), 7.0)["soup"].stamp_s == 7.0


def test_a_scene_becomes_what_liberos_policies_read():
    frames = Frames()
    frames.take(
        tf(transform("world", "can", (0.1, 0.2, 0.3), Rotation.from_euler("z", 90, degrees=True), sec=1)), False
    )
    specs = {key: contract(8, 4).observation[key] for key in SCENE}
    arrays = scene_arrays(specs, ["soup_1"], [frames.pose("world", "can")], "pick up the soup")
    np.testing.assert_allclose(arrays["object_position"], [[0.1, 0.2, 0.3]])
    np.testing.assert_allclose(arrays["object_rotation"], [[0, 1, 0, -1, 0, 0]], atol=1e-12)
    assert decode(arrays["object_names"][0]) == "soup_1"
    assert decode(arrays["instruction"]) == "pick up the soup"
    assert arrays["object_mask"].tolist() == [True]


@pytest.mark.parametrize(
    ("kind", "closing", "message", "wanted"),
    [
        (
            "command",
            True,
            "control_msgs/msg/GripperCommand_Goal",
            {"command.position": 0.0, "command.max_effort": 30.0},
        ),
        ("command", False, COMMAND, {"command.position": 0.04}),
        (
            "franka",
            True,
            "franka_msgs/msg/Grasp_Goal",
            {"width": 0.0, "force": 30.0, "epsilon.outer": 0.08},
        ),
        ("franka", False, "franka_msgs/msg/Move_Goal", {"width": 0.08, "speed": 0.2}),
    ],
)
def test_a_gripper_is_told_in_its_own_words(kind, closing, message, wanted):
    goal = Gripper(GripperKind(kind), "hand", force_n=30.0).goal(closing)
    assert goal.type.split("/")[-1] == message.split("/")[-1].removesuffix("_Goal")
    sent = on_the_wire(fill(types(message)(), goal.fields))
    for path, value in wanted.items():
        found = sent
        for name in path.split("."):
            found = getattr(found, name)
        assert found == pytest.approx(value)
    assert goal.name == {"command": "hand", "franka": "hand/grasp" if closing else "hand/move"}[kind]


def test_the_command_of_a_gripper_travels_as_in_the_simulator():
    gripper = Gripper()
    command = gripper.command_at(0.04)
    assert command == -1.0
    for expected in (-0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0):  # 25 substeps of 0.01 of the range of 2
        command = gripper.command_after(command, 0.3, 0.05)
        assert command == pytest.approx(expected)
    assert gripper.command_after(command, 0.0, 0.05) == 1.0
    assert gripper.command_after(command, -1.0, 0.05) == pytest.approx(0.75)
    assert (gripper.command_at(0.02), gripper.command_at(-1.0), gripper.command_at(0.05)) == (0.0, 1.0, -1.0)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"open_m": 0.0}, "open_m and closed_m to differ"),
        ({"kind": GripperKind.command}, "gripper.name"),
        ({"kind": GripperKind.trajectory, "name": "hand"}, "gripper.fingers"),
    ],
)
def test_impossible_grippers_are_refused(fields, wanted):
    with pytest.raises(ValueError, match=wanted):
        Gripper(**fields)
