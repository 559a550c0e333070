"""record.py in place of policy_node: a person drives a vehicle over ROS topics, through safety_node, and records it."""

import os
from pathlib import Path

import numpy as np
import pytest
import rclpy
from sensor_msgs.msg import JointState

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from real_robot.recording.recording import Recording, Tick
from real_robot.ros2.processes import Processes, claim_domain
from real_robot.ros2.teleoperated import station
from real_robot.safety.safety import State
from tests.test_record import Typist, drive, program

ARM = Contract(
    {"joint_position": TensorSpec((2,), unit="rad", names=("shoulder", "elbow"))},
    TensorSpec((2,), unit="rad", names=("shoulder", "elbow"), low=(-2.0, -2.0), high=(2.0, 2.0)),
    control_dt_s=0.1,
)


def test_a_vehicle_is_driven_through_safety_node_and_stopped(
    navigating: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recording = tmp_path / "drive/recording.mcap"
    limits = tmp_path / "limits.yaml"
    limits.write_text("observation_timeout_s: 1.0\ncommand_timeout_s: 1.0\n")
    row = {"checkpoint": str(navigating), "robot": "diff_drive", "options": {"rate_hz": 10.0}}
    common = row | {"use_sim_time": True, "limits": str(limits)}
    with Processes(tmp_path) as nodes:
        nodes.start("sim_node", row | {"lock_step": False, "start": 5})
        nodes.start("safety_node", common | {"heartbeat_timeout_s": 1.0, "liveliness_s": 1.0})
        for name in ("sim_node", "safety_node"):
            nodes.change(name, "configure", "activate")
        monkeypatch.setenv("ROS_DOMAIN_ID", str(nodes.domain))
        with program(
            "task=vehicle_navigate",
            "robot=diff_drive",
            "options.rate_hz=10",
            "simulated_time=true",
            f"limits={limits}",
            f"output={tmp_path / 'drive'}",
            "lerobot=false",
        ) as person:
            person.wait("episode 0: success or go begins it")
            person.type("\n")
            with Typist(person, "w"):
                drive(person, recording, 20)
            person.type("\x1b")
            person.wait("episode 0: ended: stopped by a person")
            person.wait("episode 1: success or go")
            person.type("\x1b")
            assert person.end() == 0, person.said
    ticks = [item for item in Recording(recording) if isinstance(item, Tick)]
    moved = [tick.reading.observation["velocity"][0] for tick in ticks if tick.reading]
    assert max(moved) > 0.05  # what safety_node passed on, and the simulator did
    assert ticks[-1].verdict.state is State.STOPPED


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    claim, number = claim_domain()
    monkeypatch.setenv("ROS_DOMAIN_ID", str(number))
    yield
    os.close(claim)


def test_a_leader_arm_is_followed_until_it_is_silent(domain):
    options = {"rate_hz": 10.0, "joints": ["shoulder", "elbow"]}
    with station("joint_trajectory", ARM, options, prefix="policy/", leader="leader/joint_states") as arm:
        assert arm.contract.action.names == ("shoulder", "elbow")
        other = rclpy.create_node("leader")
        out = other.create_publisher(JointState, "leader/joint_states", 1)
        message = JointState(name=["elbow", "gripper", "shoulder"], position=[0.2, 9.0, 0.1])
        assert arm.leader() is None
        for _ in range(200):
            out.publish(message)
            arm.sleep(0.05)
            if arm.leader() is not None:
                break
        np.testing.assert_allclose(arm.leader(), [0.1, 0.2])
        arm.sleep(0.5)
        assert arm.leader() is None  # it is old
        other.destroy_node()
    with (
        pytest.raises(UserError, match="expected leader_joints for shoulder, elbow, got"),
        station("joint_trajectory", ARM, options, prefix="policy/", leader="x", leader_joints=["a"]),
    ):
        pytest.fail("it drives")
