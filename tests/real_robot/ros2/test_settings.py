"""Every number among the parameters of the nodes has a declared range."""

import pytest

from embodied.configuration import Configuration
from real_robot.ros2.messages.grippers import Gripper
from real_robot.ros2.nodes.cartesian import CartesianSettings
from real_robot.ros2.nodes.policy import PolicySettings
from real_robot.ros2.nodes.safety import SafetySettings
from real_robot.ros2.nodes.scene import SceneSettings
from real_robot.ros2.nodes.sim import SimSettings
from tests.test_option_ranges import check_accepts_what_it_declares, numbers_of

EXAMPLES = (
    *(Gripper(), PolicySettings(), SafetySettings(), SceneSettings(), SimSettings()),
    CartesianSettings(model="arm.xml", joints=["joint1"]),
)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_parameters_accept_what_they_declare(example):
    assert isinstance(example, Configuration)
    assert [name for name, accepted, _ in numbers_of(type(example)) if accepted is None] == []
    check_accepts_what_it_declares(type(example), example)


def test_the_walk_reaches_parameters():
    reached = {(type(example).__name__, name) for example in EXAMPLES for name, _, _ in numbers_of(type(example))}
    assert reached >= {("CartesianSettings", "leash_m"), ("SimSettings", "start"), ("SafetySettings", "liveliness_s")}
