"""What goes wrong around safety_node: partners that die, double, or send nonsense, and clocks that stop or jump back.

This process is the policy and the robot: an arm that takes positions.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.duration import Duration
from rclpy.qos import QoSProfile
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray, Header, String

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from real_robot.ros2.processes import Processes

JOINTS = ("shoulder", "elbow")
CONTRACT = Contract(
    {"joint_position": TensorSpec((2,), unit="rad", names=JOINTS)},
    TensorSpec((2,), unit="rad", names=JOINTS, low=(-1.0, -1.0), high=(1.0, 1.0)),
    0.05,
)
PATIENT_S = 5.0
"""For what does not matter to a test: the machine may be busy."""
SIGNED = QoSProfile(depth=1, liveliness_lease_duration=Duration(seconds=0.05))


class Arm(Processes):
    """safety_node between this process as the policy and this process as the robot."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        (directory / "contract.json").write_text(CONTRACT.to_json())
        (directory / "limits.yaml").write_text(f"observation_timeout_s: {PATIENT_S}\ncommand_timeout_s: {PATIENT_S}\n")
        row = {"robot": "forward_position", "options": {"rate_hz": 20.0, "joints": list(JOINTS)}}
        self.common = row | {"checkpoint": str(directory), "use_sim_time": True}
        self.patient = {"liveliness_s": PATIENT_S, "heartbeat_timeout_s": PATIENT_S}
        self.received: list[list[float]] = []
        self.states: list[str] = []
        self.reports: dict[str, str] = {}
        self.now_s, self.wished = 100.0, 0.1
        node = self.node
        self.clock = node.create_publisher(Clock, "/clock", 1)
        self.joints = node.create_publisher(JointState, "/joint_states", 1)
        self.policy = node.create_publisher(Float64MultiArray, "/policy/forward_position_controller/commands", SIGNED)
        self.heartbeat = node.create_publisher(Header, "/policy/heartbeat", 1)
        topic = "/forward_position_controller/commands"
        node.create_subscription(Float64MultiArray, topic, lambda m: self.received.append(list(m.data)), 10)
        node.create_subscription(String, "/safety_node/state", lambda m: self.states.append(m.data), 10)
        node.create_subscription(DiagnosticArray, "/diagnostics", self._hear, 50)
        self.ticking = True
        node.create_timer(0.02, self.tick)

    def launch(self, name: str, **settings: Any) -> None:
        """Start a node and activate it."""
        self.start(name, self.common | settings)
        self.change(name, "configure", "activate")

    def tick(self) -> None:
        """One period of simulated time: the clock, a measurement, a command of the policy."""
        if self.ticking:
            self.now_s += 0.05
            stamp = Time(sec=int(self.now_s), nanosec=round(1e9 * (self.now_s % 1)))
            self.clock.publish(Clock(clock=stamp))
            self.joints.publish(JointState(header=Header(stamp=stamp), name=list(JOINTS), position=[0.0, 0.0]))
            self.policy.publish(Float64MultiArray(data=[self.wished, 0.0]))
        self.heartbeat.publish(Header(stamp=Time(sec=int(self.now_s), nanosec=round(1e9 * (self.now_s % 1)))))

    def _hear(self, message: DiagnosticArray) -> None:
        self.reports |= {status.name: status.message for status in message.status}

    def says(self, words: str) -> None:
        """Wait until safety_node reports `words`."""
        self.wait(lambda: words in self.reports.get("/safety_node: safety", ""), words)

    def obeys(self) -> None:
        """Wait until the robot gets what the policy wishes now."""
        self.wished = 0.5 if self.wished < 0.3 else 0.1
        self.wait(lambda: bool(self.received) and abs(self.received[-1][0] - self.wished) < 1e-6, "an obedient robot")

    def stands(self) -> None:
        """Wait until the robot is held."""
        self.wait(lambda: self.states[-1:] == ["holding"], "a stop")


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arm]:
    with Arm(tmp_path_factory.mktemp("arm")) as nodes:
        nodes.launch("safety_node", limits=str(nodes.directory / "limits.yaml"), **nodes.patient)
        nodes.obeys()
        yield nodes


def test_a_transition_that_is_not_possible_is_refused_and_the_node_lives(arm: Arm):
    for transition in ("configure", "activate"):
        with pytest.raises(UserError, match=f"safety_node failed to {transition}"):
            arm.change("safety_node", transition)
    assert "is not possible while active" in arm.output_of("safety_node")
    arm.obeys()


def test_parameters_that_would_have_no_effect_are_refused(arm: Arm):
    with pytest.raises(UserError, match=r"heartbeat_timeout_s: read when safety_node is configured; clean it up first"):
        arm.set("safety_node", heartbeat_timeout_s=9.0)
    arm.change("safety_node", "deactivate", "cleanup")
    arm.set("safety_node", heartbeat_timeout_s=PATIENT_S + 1.0)
    arm.change("safety_node", "configure", "activate")
    arm.obeys()


def test_nonsense_on_any_topic_ends_no_node(arm: Arm):
    for _ in range(3):
        arm.policy.publish(Float64MultiArray(data=[0.1]))
        arm.joints.publish(JointState(name=[*JOINTS, *JOINTS], position=[0.1]))
    arm.obeys()


def test_a_second_publisher_of_commands_holds_until_it_is_gone(arm: Arm):
    arm.obeys()
    other = arm.node.create_publisher(Float64MultiArray, "/policy/forward_position_controller/commands", SIGNED)
    arm.says("2 processes publish on policy/forward_position_controller/commands")
    arm.stands()
    arm.node.destroy_publisher(other)
    arm.obeys()
    unsigned = arm.node.create_publisher(Float64MultiArray, "/policy/forward_position_controller/commands", 1)
    arm.wait(lambda: "/safety_node: qos" in arm.reports, "a report of a publisher that gives no signs of life")
    arm.node.destroy_publisher(unsigned)
    arm.obeys()


def test_a_clock_that_jumps_back_stops_the_arm_and_it_goes_on_when_all_is_good_again(arm: Arm):
    arm.obeys()
    arm.states.clear()
    arm.now_s = 10.0
    arm.wait(lambda: "holding" in arm.states, "a stop")
    arm.obeys()


def test_a_clock_that_stands_still_holds(arm: Arm):
    arm.change("safety_node", "deactivate", "cleanup")
    arm.set("safety_node", heartbeat_timeout_s=1.0)
    arm.change("safety_node", "configure", "activate")
    arm.obeys()
    arm.ticking = False  # heartbeats go on
    arm.says("the clock stands still")
    arm.stands()
    arm.ticking = True
    arm.obeys()


def test_a_policy_that_dies_holds_within_its_liveliness_whatever_the_heartbeats_time_out(arm: Arm, tmp_path: Path):
    arm.obeys()
    arm.node.destroy_publisher(arm.policy)  # as DDS tells of a process that ends; heartbeats go on
    arm.ticking = False
    arm.says("gives no sign of life")
    arm.stands()
