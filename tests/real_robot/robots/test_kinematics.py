"""Forward and inverse kinematics of an arm, and targets that stay near it."""

from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from real_robot.robots.kinematics import Kinematics
from real_robot.robots.servo import Servo

ARM = """<mujoco><compiler angle="radian"/><worldbody><body name="link1" pos="0 0 0.3">
{links}
</body></worldbody></mujoco>"""
AXES = ("0 0 1", "0 1 0", "0 0 1", "0 -1 0", "0 0 1", "0 -1 0", "0 0 1")
JOINTS = [f"j{number}" for number in range(1, 8)]
BENT = np.array([0.1, 0.4, -0.2, -1.5, 0.3, 1.6, 0.5])


def arm_file(path: Path) -> Path:
    """Write a model of seven joints as a Panda's, a finger, and a site before it."""
    links = ""
    for name, axis in zip(JOINTS, AXES, strict=True):
        links += f'<joint name="{name}" axis="{axis}" range="-2.8 2.8" limited="true"/><geom size="0.02"/>'
        links += f'<body name="after_{name}" pos="0 0 0.2">'
    links += '<geom size="0.02"/><site name="grip" pos="0 0 0.1" quat="0 1 0 0"/>'
    links += '<body name="finger"><joint name="f" type="slide" axis="0 1 0" range="0 0.04"/><geom size="0.01"/></body>'
    path.write_text(ARM.format(links=links + "</body>" * len(JOINTS)))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The file of an arm."""
    pytest.importorskip("mink")
    return arm_file(tmp_path_factory.mktemp("arm") / "arm.xml")


def test_the_hand_reaches_the_pose_and_the_joints_are_found_by_name(model):
    shuffled = JOINTS[::-1]
    arm, other = Kinematics(model, "grip", JOINTS, 3.0), Kinematics(model, "grip", shuffled, 3.0)
    position, rotation = arm.pose(BENT)
    np.testing.assert_allclose(other.pose(BENT[::-1])[0], position, atol=1e-12)
    goal = position + np.array([0.02, -0.01, 0.015])
    turned = Rotation.from_rotvec([0.0, 0.05, -0.04]).as_matrix() @ rotation
    found = arm.toward(BENT, goal, turned, BENT, 0.05)
    reached, turn = arm.pose(found)
    np.testing.assert_allclose(reached, goal, atol=2e-4)
    np.testing.assert_allclose(turn, turned, atol=2e-3)
    assert (np.abs(found - BENT) <= 3.0 * 0.05 + 1e-9).all()
    np.testing.assert_allclose(other.toward(BENT[::-1], goal, turned, BENT[::-1], 0.05)[::-1], found, atol=1e-6)


def test_joints_that_are_not_commanded_do_not_help(model):
    arm = Kinematics(model, "grip", JOINTS[:6], 3.0)
    position, rotation = arm.pose(BENT[:6])
    turned = Rotation.from_rotvec([0.0, 0.05, -0.04]).as_matrix() @ rotation
    joints = BENT[:6]
    for _ in range(4):
        joints = arm.toward(joints, position, turned, joints, 0.05)
    np.testing.assert_allclose(arm.pose(joints)[1], turned, atol=1e-3)


def test_no_joint_moves_faster_than_allowed_or_beyond_its_range(model):
    arm = Kinematics(model, "grip", JOINTS, 0.5)
    position, rotation = arm.pose(BENT)
    joints = BENT
    for _ in range(60):
        after = arm.toward(joints, position + np.array([0.0, 0.0, 2.0]), rotation, BENT, 0.05)
        assert (np.abs(after - joints) <= 0.5 * 0.05 + 1e-9).all()
        assert (after >= arm.low).all()
        assert (after <= arm.high).all()
        joints = after


@pytest.mark.parametrize(
    ("site", "joints", "wanted"),
    [("hand", JOINTS, "neither a site nor a body 'hand'"), ("grip", ["j1", "elbow"], r"no joints \['elbow'\]")],
)
def test_names_that_the_model_lacks_are_reported(model, site, joints, wanted):
    with pytest.raises(ValueError, match=wanted):
        Kinematics(model, site, joints, 1.0)


def test_files_that_are_no_models_are_reported(tmp_path):
    pytest.importorskip("mink")
    (tmp_path / "arm.xml").write_text("<mujoco><worldbody><body/>")
    with pytest.raises(ValueError, match="XML"):
        Kinematics(tmp_path / "arm.xml", "grip", JOINTS, 1.0)


def test_a_target_adds_up_and_turns_about_the_worlds_axes():
    servo, here = Servo(1.0, 1.0), (np.array([0.5, 0.0, 0.3]), Rotation.from_euler("x", np.pi).as_matrix())
    for _ in range(4):
        position, rotation = servo.advance(np.array([0.2, 0.0, -0.1, 0.0, 0.0, 1.0]), 0.05, here)
    np.testing.assert_allclose(position, [0.54, 0.0, 0.28])
    np.testing.assert_allclose(rotation, Rotation.from_rotvec([0.0, 0.0, 0.2]).as_matrix() @ here[1], atol=1e-12)
    servo.stop()
    np.testing.assert_allclose(servo.advance(np.zeros(6), 0.05, here)[0], here[0])


def test_the_target_of_a_blocked_hand_stays_within_the_leash():
    servo, here = Servo(0.02, 0.1), (np.zeros(3), np.eye(3))
    for _ in range(100):
        position, rotation = servo.advance(np.array([0.0, 0.0, -0.3, 2.0, 0.0, 0.0]), 0.05, here)
    np.testing.assert_allclose(position, [0.0, 0.0, -0.02])
    np.testing.assert_allclose(Rotation.from_matrix(rotation).as_rotvec(), [0.1, 0.0, 0.0], atol=1e-9)
    # freed, it goes back at once when asked to
    assert servo.advance(np.array([0.0, 0.0, 0.3, 0.0, 0.0, 0.0]), 0.05, here)[0][2] > -0.02
