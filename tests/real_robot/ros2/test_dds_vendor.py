"""Our nodes drive a robot with another vendor's DDS: names, types, QoS and bytes are ROS's."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from real_robot.ros2.processes import Processes
from tests.real_robot.ros2 import dds_robot
from tests.real_robot.ros2.runs import untrained

JOINTS = ("shoulder", "elbow")
ARM = Contract(
    {"joint_position": TensorSpec((2,), unit="rad", names=JOINTS)},
    TensorSpec((2,), unit="rad", names=JOINTS, low=(-1.0, -1.5), high=(1.0, 1.5)),
    0.02,
)
DRIVE = ("speed", "yaw_rate")
BASE = Contract(
    {"velocity": TensorSpec((2,), unit="m/s, rad/s", frame="base", names=DRIVE)},
    TensorSpec((2,), unit="m/s, rad/s", frame="base", names=DRIVE, low=(-0.5, -1.0), high=(0.5, 1.0)),
    0.02,
)
ROWS = [
    ("joint_trajectory", ARM, {"joints": list(JOINTS)}, "trajectory_msgs::msg::dds_::JointTrajectory_"),
    ("forward_position", ARM, {"joints": list(JOINTS)}, "std_msgs::msg::dds_::Float64MultiArray_"),
    ("diff_drive", BASE, {}, "geometry_msgs::msg::dds_::TwistStamped_"),
]
COMMANDS = 50


def read(log: Path, kind: str) -> list[Any]:
    if not log.exists():
        return []
    entries = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [entry[kind] for entry in entries if kind in entry]


@pytest.mark.parametrize(("row", "contract", "options", "type_name"), ROWS, ids=[row[0] for row in ROWS])
def test_a_robot_of_another_dds_vendor_follows_the_policy(row, contract, options, type_name, tmp_path):
    policy = untrained(tmp_path / "run", contract)
    log, limits = tmp_path / "robot.jsonl", tmp_path / "limits.yaml"
    limits.write_text("observation_timeout_s: 1.0\ncommand_timeout_s: 1.0\n")  # a busy machine
    settings = {"checkpoint": str(tmp_path / "run"), "robot": row, "limits": str(limits)}
    settings["options"] = {"rate_hz": 50.0} | options
    with Processes(tmp_path) as nodes:
        nodes.spawn("robot", [sys.executable, dds_robot.__file__, str(nodes.domain), row, str(log)])
        nodes.start("safety_node", settings | {"heartbeat_timeout_s": 2.0, "liveliness_s": 2.0})
        nodes.start("policy_node", settings)
        for name in ("safety_node", "policy_node"):
            nodes.change(name, "configure", "activate")
        nodes.wait(lambda: len(read(log, "received")) >= COMMANDS, f"{COMMANDS} commands")

    (offered,) = {json.dumps(entry) for entry in read(log, "offered")}
    assert json.loads(offered)["type"] == type_name
    qos = json.loads(offered)["qos"]
    assert any("Reliability.Reliable" in policy for policy in qos)
    assert any("Durability.Volatile" in policy for policy in qos)
    received = read(log, "received")
    assert all(command["names"] == list(contract.action.names) for command in received)
    if row == "joint_trajectory":
        assert all(command["time_from_start_s"] == pytest.approx([0.02, 0.22]) for command in received)
        assert all(command["speeds"][1] == [0.0, 0.0] for command in received)
        assert any(command["speeds"][0] != [0.0, 0.0] for command in received)
    if row == "diff_drive":
        assert all(0.0 <= command["age_s"] < 5.0 for command in received)
    # Every command is what the policy answers to a state that the robot has sent, or a hold, as before the first
    # measurement and when a busy machine is late: the loop is closed over both vendors.
    sent = torch.tensor(read(log, "sent")).unique(dim=0)
    (key,) = contract.observation
    answers = policy.act(TensorDict({key: sent}, batch_size=[len(sent)]), deterministic=True).actions[:, 0]
    holds = torch.zeros(1, 2) if row == "diff_drive" else sent
    commands = torch.tensor([command["action"] for command in received])
    answered, held = (torch.cdist(commands, known).amin(1) < 1e-4 for known in (answers, holds))
    assert bool((answered | held).all())
    assert len(commands[answered].unique(dim=0)) > COMMANDS // 2
