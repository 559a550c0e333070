import mujoco
import numpy as np
import pytest
import torch

from sims.libero.assets import STAND_IN
from sims.libero.scene import geometry
from sims.libero.scene.geometry import ArmKinematics, Cloud
from sims.libero.scene.scene import build_scene
from sims.libero.suite import load_tasks

SHAPES = """<mujoco><worldbody>
  <geom type="plane" size="1 1 1"/>
  <body name="object" pos="1 0 0" euler="0 0 90"><freejoint/>
    <geom name="box" type="box" size=".01 .02 .03" pos="0 0 .1" euler="90 0 0"/>
    <geom name="seen" type="box" size="1 1 1" contype="0" conaffinity="0"/></body>
  <body name="can" pos="0 1 0"><freejoint/><geom type="cylinder" size=".03 .05"/></body>
  <body name="ball" pos="0 0 1"><freejoint/><geom type="sphere" size=".04"/></body>
</worldbody></mujoco>"""


def square(half, centre=(0.0, 0.0), yaw=0.0):
    corners = half * np.array([[1, 1], [1, -1], [-1, -1], [-1, 1]])
    return corners @ geometry.planar(yaw).T + centre


def test_rotation_matches_mujoco():
    quaternions = np.random.default_rng(0).normal(size=(20, 4))
    quaternions /= np.linalg.norm(quaternions, axis=1, keepdims=True)
    for quaternion, matrix in zip(quaternions, geometry.rotation(quaternions), strict=True):
        expected = np.empty(9)
        mujoco.mju_quat2Mat(expected, quaternion)
        np.testing.assert_allclose(matrix.ravel(), expected, atol=1e-12)


def test_turning_is_about_the_worlds_vertical():
    tilted = np.array([0.5, 0.5, 0.5, 0.5])
    turned = geometry.rotation(geometry.turned(tilted, 0.3))
    yaw = np.eye(3)
    yaw[:2, :2] = geometry.planar(0.3)
    np.testing.assert_allclose(turned, yaw @ geometry.rotation(tilted), atol=1e-12)


def test_points_fill_what_collides_in_the_world_frame():
    model = mujoco.MjModel.from_xml_string(SHAPES)
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    cloud = Cloud(model, 0.005)
    box = cloud.world(data, cloud.root == model.body("object").id)
    np.testing.assert_allclose(box.min(0), [0.97, -0.01, 0.08], atol=1e-9)
    np.testing.assert_allclose(box.max(0), [1.03, 0.01, 0.12], atol=1e-9)
    nearest = np.linalg.norm(box[:, None] - box, axis=-1) + np.eye(len(box))
    assert nearest.min(1).max() < 0.0051
    can = cloud.world(data, cloud.root == model.body("can").id) - (0, 1, 0)
    assert np.linalg.norm(can[:, :2], axis=1).max() == pytest.approx(0.03)
    assert np.abs(can[:, 2]).max() == pytest.approx(0.05)
    ball = cloud.world(data, cloud.root == model.body("ball").id) - (0, 0, 1)
    assert np.linalg.norm(ball, axis=1).max() == pytest.approx(0.04)
    assert len(cloud.points) == len(box) + len(can) + len(ball)


@pytest.mark.parametrize(
    ("centre", "yaw", "distance"),
    [
        ((0.3, 0.0), 0.0, 0.1),
        ((0.3, 0.0), np.pi / 4, 0.3 - 0.1 - 0.1 * 2**0.5),
        ((0.3, 0.3), 0.0, 0.1 * 2**0.5),
        ((0.15, 0.0), 0.0, -0.05),
    ],
)
def test_the_gap_between_footprints(centre, yaw, distance):
    first, second = geometry.footprint(square(0.1)), geometry.footprint(square(0.1, centre, yaw))
    assert geometry.gap(first, second) == pytest.approx(distance, abs=1e-3)
    assert geometry.gap(second, first) == pytest.approx(distance, abs=1e-3)


def test_the_gap_to_points():
    shape = geometry.footprint(square(0.1))
    assert geometry.points_gap(shape, np.array([[0.3, 0.0], [0.0, 0.15]])) == pytest.approx(0.05)
    assert geometry.points_gap(shape, np.array([[0.3, 0.0], [0.0, 0.0]])) == pytest.approx(-0.1)
    assert geometry.points_gap(shape, np.empty((0, 2))) == np.inf


def test_the_hull_keeps_the_footprint_at_any_yaw():
    points = np.random.default_rng(1).normal(size=(500, 2))
    for yaw in (0.0, 0.4, 2.0):
        whole, few = (geometry.footprint(cloud @ geometry.planar(yaw).T) for cloud in (points, geometry.hull(points)))
        np.testing.assert_allclose(few, whole, atol=0.01)


def test_arm_kinematics_match_mujoco():
    scene = build_scene(load_tasks("libero_object", [0])[0], STAND_IN)
    joints = np.random.default_rng(2).uniform(-1.5, 1.5, (5, 7))
    position, matrix = ArmKinematics([scene] * 5).end_effector(torch.from_numpy(joints))
    data = mujoco.MjData(scene.model)
    for row in range(5):
        data.qpos[scene.arm_qposadr] = joints[row]
        mujoco.mj_kinematics(scene.model, data)
        np.testing.assert_allclose(position[row], data.site_xpos[scene.grip_site], atol=1e-12)
        np.testing.assert_allclose(matrix[row].ravel(), data.site_xmat[scene.grip_site], atol=1e-12)
