"""The nodes of launch files start with real rclpy and can be configured from the parameter files."""

import re
from pathlib import Path

import pytest
import yaml
from rcl_interfaces.srv import GetParameters

from embodied.contract import Contract, TensorSpec
from real_robot.ros2.embodied_ros2.table import LAUNCHES
from real_robot.ros2.processes import Processes
from sims.libero.observation import contract
from sims.vehicle.environment import VehicleEnvironment
from sims.vehicle.navigate import Navigate
from sims.vehicle.vehicles import JACKAL
from tests.real_robot.ros2.launching.recorder import LAUNCH, argv, launched
from tests.real_robot.ros2.runs import untrained, untrained_flow

JOINTS = tuple(f"joint{number}" for number in range(1, 8))
FR3 = Contract(
    {"joint_position": TensorSpec((7,), unit="rad", names=JOINTS)},
    TensorSpec((7,), unit="rad", names=JOINTS, low=(-2.0,) * 7, high=(2.0,) * 7),
    0.05,
)
CONTRACTS = {"arm": FR3, "vehicle": VehicleEnvironment(1, mdp=Navigate(), vehicle=JACKAL, mapped=True).contract}
REPORTED = {
    "cartesian_node": r"mink is not installed|/path/to/fr3.urdf",
    "scene_node": "tf2_msgs/msg/TFMessage not found",
    "quadrotor": "px4_msgs/msg/VehicleOdometry not found",
    "arm safety_node": "franka_msgs/msg/FrankaRobotState not found",
    "arm policy_node": "franka_msgs/msg/FrankaRobotState not found",
}
"""On one line, of the nodes and launches that need a model or messages that are not on PyPI."""


@pytest.mark.parametrize("name", sorted(LAUNCHES))
def test_everything_that_is_launched_starts(name: str, tmp_path: Path, hover: Path):
    run = hover
    if name in CONTRACTS:
        run = tmp_path / "run"
        untrained(run, CONTRACTS[name])
    if name == "arm_cartesian":
        run = tmp_path / "run"
        untrained_flow(run, contract(8, 4))
    started = launched(name, {"checkpoint": str(run), "namespace": "robot1"})
    (tmp_path / "robot1").mkdir()
    with Processes(tmp_path) as nodes:
        for node in started.nodes:
            nodes.spawn(f"robot1/{node.name}", argv(node, tmp_path))
        for full in list(nodes.running):
            node = full.split("/")[-1]
            if report := REPORTED.get(name, REPORTED.get(node, REPORTED.get(f"{name} {node}"))):
                nodes.wait(
                    lambda full=full, report=report: re.search(report, nodes.output_of(full)) is not None, "a report"
                )
                assert nodes.state(full) == "unconfigured"
            else:
                waits = full.endswith("policy_node") and name in ("arm", "arm_cartesian", "vehicle")
                wanted = "inactive" if waits else "active"
                nodes.wait(lambda full=full, wanted=wanted: nodes.state(full) == wanted, f"{full} {wanted}")
        request = GetParameters.Request(names=["heartbeat_timeout_s", "robot"])
        timeout_s, robot = nodes.call(GetParameters, "/robot1/safety_node/get_parameters", request).values
        given = yaml.safe_load((LAUNCH / "config" / f"{name}.yaml").read_text())
        assert robot.string_value == given["/**"]["ros__parameters"]["robot"]
        assert timeout_s.double_value == given["/**/safety_node"]["ros__parameters"]["heartbeat_timeout_s"]
