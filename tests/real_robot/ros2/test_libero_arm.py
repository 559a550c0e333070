"""The arm that benchmarks/libero_over_ros2.py measures with: it follows trajectories and poses, and is what it says."""

import numpy as np
import pytest

pytest.importorskip("mink")

from benchmarks.libero_arm import MODEL_JOINTS, SITE, Hardware, write_arm_model
from real_robot.robots.kinematics import Kinematics


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return Hardware(0, "official")


def test_the_arm_follows_a_trajectory_and_rests_at_its_end(hardware, tmp_path):
    hardware.reset(0)
    write_arm_model(tmp_path / "arm.xml")
    model = Kinematics(tmp_path / "arm.xml", SITE, MODEL_JOINTS, 2.0)
    start = hardware.joints()[0].copy()
    np.testing.assert_allclose(model.pose(start)[0], hardware.hand()[0], atol=1e-9)
    goal = start + np.array([0.05, -0.03, 0.02, 0.04, 0.0, 0.05, -0.1])
    hardware.follow([(0.2, goal, (goal - start) / 0.2), (0.4, goal + 0.5 * (goal - start), np.zeros(7))])
    hardware.step(0.2)
    np.testing.assert_allclose(hardware.joints()[0], goal, atol=8e-3)  # of up to 0.1: joints have friction
    hardware.step(0.6)
    np.testing.assert_allclose(hardware.joints()[0], goal + 0.5 * (goal - start), atol=8e-3)
    np.testing.assert_allclose(hardware.joints()[1], 0.0, atol=1e-3)


def test_a_trajectory_that_replaces_another_goes_on_without_a_jump(hardware):
    hardware.reset(1)
    start = hardware.joints()[0].copy()
    hardware.follow([(0.1, start + 0.03, np.full(7, 0.3)), (0.2, start + 0.045, np.zeros(7))])
    hardware.step(0.1)
    before = hardware.joints()[1].copy()
    hardware.follow([(0.1, start + 0.06, np.full(7, 0.3)), (0.2, start + 0.075, np.zeros(7))])
    hardware.step(0.002)
    np.testing.assert_allclose(hardware.joints()[1], before, atol=0.02)


def test_fingers_travel_from_open_to_closed_in_four_tenths_of_a_second(hardware):
    hardware.reset(0)
    hardware.grip(0.0)
    hardware.step(0.2)
    assert ((hardware.fingers() > 0.015) & (hardware.fingers() < 0.035)).all()  # they lag behind their servos
    hardware.step(0.4)
    assert (hardware.fingers() < 0.003).all()


def test_an_impedance_controller_pulls_the_hand_to_a_pose(hardware):
    hardware.reset(0)
    position, rotation = hardware.hand()
    goal = position + np.array([0.03, -0.02, 0.02])
    hardware.reach(goal, rotation)
    hardware.step(2.0)
    assert np.linalg.norm(hardware.hand()[0] - goal) < 0.01  # joint friction holds it off the rest of the way
