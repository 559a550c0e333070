"""An arm's driver and a policy that misbehave, over real rclpy: what safety_node sends the arm then.

This process is the policy and the arm, which does at once what it is commanded to.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rclpy
from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.duration import Duration
from rclpy.qos import QoSProfile
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray, Header, String
from std_srvs.srv import Trigger

from embodied.contract import Contract, TensorSpec
from real_robot.ros2.processes import Processes

JOINTS = ("shoulder", "elbow", "wrist")
CONTRACT = Contract(
    {"joint_position": TensorSpec((3,), unit="rad", names=JOINTS)},
    TensorSpec((3,), unit="rad", names=JOINTS, low=(-3.0,) * 3, high=(3.0,) * 3),
    0.05,
)
PERIOD_S, SPEED, FASTEST, ACCELERATION = 0.05, 0.2, 0.5, 2.0
START = np.array([-1.4, 0.3, 0.2])
CERTIFIED = SPEED**2 / (2 * ACCELERATION) + 2 * SPEED * PERIOD_S
"""Largest distance of a stop from full speed, rad."""
TIMEOUT_S = 0.5
SIGNED = QoSProfile(depth=1, liveliness_lease_duration=Duration(seconds=0.05))
TOPIC = "forward_position_controller/commands"
LIMITS = "\n".join(
    [
        f"observation_timeout_s: {TIMEOUT_S}",
        f"command_timeout_s: {TIMEOUT_S}",
        "commands:",
        *(
            f"  {name}: {{velocity: {FASTEST}, acceleration: {ACCELERATION}, measured: joint_position.{name}}}"
            for name in JOINTS
        ),
    ]
)


class Arm(Processes):
    """safety_node between a policy that moves the first joint at a constant speed, and an arm, in simulated time."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        (directory / "contract.json").write_text(CONTRACT.to_json())
        (directory / "limits.yaml").write_text(LIMITS)
        node = self.node
        self.now_s, self.position, self.measured = 100.0, START.copy(), START.copy
        self.received: list[np.ndarray] = []
        self.policy, self.late_s, self.wanted = False, 0.0, START.copy()
        self.states: list[str] = []
        self.reports: dict[str, tuple[str, dict[str, str]]] = {}
        self.clock = node.create_publisher(Clock, "/clock", 1)
        self.joints = node.create_publisher(JointState, "/joint_states", 1)
        self.command = node.create_publisher(Float64MultiArray, f"/policy/{TOPIC}", SIGNED)
        self.heartbeat = node.create_publisher(Header, "/policy/heartbeat", 1)
        node.create_subscription(Float64MultiArray, f"/{TOPIC}", self._follow, 10)
        node.create_subscription(String, "/safety_node/state", lambda m: self.states.append(m.data), 10)
        node.create_subscription(DiagnosticArray, "/diagnostics", self._hear, 50)

    def begin(self, robot: str = "forward_position", **options: Any) -> None:
        """Start safety_node anew."""
        if "safety_node" in self.running:
            self.stop("safety_node")
        settings = {
            "robot": robot,
            "options": {"rate_hz": 1 / PERIOD_S, "joints": list(JOINTS)} | options,
            "checkpoint": str(self.directory),
            "use_sim_time": True,
            "relocates": False,
            "limits": str(self.directory / "limits.yaml"),
            "liveliness_s": 10.0,
            "heartbeat_timeout_s": 10.0,  # of a busy machine
        }
        self.start("safety_node", settings)
        self.change("safety_node", "configure", "activate")
        outs = [self.clock, self.joints, *([self.command, self.heartbeat] if robot == "forward_position" else [])]
        self.wait(lambda: all(out.get_subscription_count() for out in outs), "safety_node's subscriptions")

    def _follow(self, message: Float64MultiArray) -> None:
        self.received.append(np.array(message.data))
        self.position = self.received[-1].copy()

    def _hear(self, message: DiagnosticArray) -> None:
        for status in message.status:
            self.reports[status.name] = status.message, {entry.key: entry.value for entry in status.values}

    def stamp(self, seconds: float) -> Time:
        nanoseconds = round(1e9 * seconds)
        return Time(sec=nanoseconds // 10**9, nanosec=nanoseconds % 10**9)

    def period(self, measured: np.ndarray | None = None) -> None:
        """One period: the clock, a measurement, a command if the policy lives; then the answer is awaited."""
        self.now_s += PERIOD_S
        stamp = self.stamp(self.now_s)
        self.clock.publish(Clock(clock=stamp))
        position = self.position if measured is None else measured
        self.joints.publish(JointState(header=Header(stamp=stamp), name=list(JOINTS), position=list(position)))
        self.spin_for(0.01)
        if self.policy:
            self.wanted = self.wanted + np.array([SPEED * PERIOD_S, 0.0, 0.0])
            self.heartbeat.publish(Header(stamp=self.stamp(self.now_s - self.late_s)))
            self.spin_for(0.003)
            self.command.publish(Float64MultiArray(data=self.wanted.tolist()))
        self.spin_for(0.04)

    def run(self, periods: int, measured: np.ndarray | None = None) -> np.ndarray:
        """Let time pass; returns the commands [periods, 3] that the arm got."""
        count = len(self.received)
        for _ in range(periods):
            self.period(measured)
        return np.array(self.received[count:]).reshape(-1, 3)

    def spin_for(self, seconds: float) -> None:
        """Handle messages for a while."""
        until = self.node.get_clock().now().nanoseconds + round(1e9 * seconds)
        while (left := until - self.node.get_clock().now().nanoseconds) > 0:
            self.spin(left / 1e9)

    def move(self) -> None:
        """Bring the arm into motion from `START`, where it is put before safety_node is started anew."""
        self.policy, self.late_s = False, 0.0
        self.begin()
        self.position, self.wanted = START.copy(), START.copy()
        self.run(5)
        self.policy = True
        assert len(self.run(30)) > 15
        assert self.states[-1] == "active"

    def report(self, name: str) -> str:
        """The newest message on /diagnostics of one of safety_node's reports."""
        self.reports.clear()
        self.wait(lambda: f"/safety_node: {name}" in self.reports, f"a report of {name}")
        return self.reports[f"/safety_node: {name}"][0]

    def number(self, key: str) -> int:
        """A number on /diagnostics."""
        self.report("safety")
        return int(self.reports["/safety_node: safety"][1][key])


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arm]:
    with Arm(tmp_path_factory.mktemp("arm")) as nodes:
        nodes.begin()
        yield nodes


def assert_within_limits(path: np.ndarray) -> None:
    """The commands [T, 3] move no faster than the limits, and never back."""
    steps = np.diff(path, axis=0)
    assert np.abs(steps).max(initial=0.0) <= FASTEST * PERIOD_S + 4e-7  # measured in single precision
    assert steps.min(initial=0.0) >= -1e-9


def assert_ended(arm: Arm, before: np.ndarray, after: np.ndarray) -> None:
    """The commands after an event were a stop within the certified distance, and nothing comes any more."""
    assert_within_limits(np.concatenate((before[-1:], after)))
    assert np.abs(after - before[-1]).max(initial=0.0) <= CERTIFIED
    assert len(arm.run(20)) == 0


@pytest.mark.parametrize("wrong", [np.zeros(3), np.full(3, -np.pi)], ids=["zeros", "-pi"])
def test_one_wrong_measurement_is_rejected_and_the_arm_goes_on(arm: Arm, wrong: np.ndarray):
    arm.move()
    rejected = arm.number("rejected")
    path = [arm.run(5), arm.run(1, wrong), arm.run(20)]  # 155 periods towards zero before
    assert_within_limits(np.concatenate(path))
    assert arm.number("rejected") == rejected + 1
    assert np.abs(arm.position[0] - arm.wanted[0]) < 0.05
    np.testing.assert_allclose(arm.position[1:], START[1:], atol=1e-6)


@pytest.mark.parametrize("wrong", [np.zeros(3), np.full(3, -np.pi)], ids=["zeros", "-pi"])
def test_a_measurement_that_stays_wrong_stops_the_arm_where_it_is(arm: Arm, wrong: np.ndarray):
    arm.move()
    before = arm.run(5)
    after = arm.run(25, wrong)
    longest = CERTIFIED + SPEED * (TIMEOUT_S + 2 * PERIOD_S)  # commands go on until the last good one is too old
    assert_within_limits(np.concatenate((before[-1:], after)))
    assert (after[-1] - before[-1]).max() <= longest
    assert arm.states[-1] == "stopped"
    assert "check the sensor" in arm.report("safety")
    assert len(arm.run(20, wrong)) == 0
    assert len(arm.run(20)) == 0  # and not on its own when all is well again


def test_a_motion_does_not_begin_from_a_wrong_measurement(arm: Arm):
    arm.move()
    arm.policy = False
    arm.run(15)
    arm.trigger("/safety_node/emergency_stop")
    arm.run(2)
    at = arm.position.copy()
    arm.trigger("/safety_node/reset")
    arm.policy, arm.wanted = True, at.copy()
    path = np.concatenate((at[None], arm.run(1, np.zeros(3)), arm.run(20)))
    assert len(path) > 5
    assert_within_limits(path)  # 1.4 rad in a period


@pytest.mark.parametrize("how", ["emergency stop", "deactivated", "policy ends"])
def test_whatever_ends_a_motion_it_ends_within_the_certified_distance(arm: Arm, how: str):
    arm.move()
    before = arm.run(10)
    count = len(arm.received)
    if how == "emergency stop":
        assert arm.trigger("/safety_node/emergency_stop") == "stopped until reset"
    elif how == "deactivated":
        arm.change("safety_node", "deactivate")
    else:
        arm.policy = False
    arm.run(30)
    assert_ended(arm, before, np.array(arm.received[count:]).reshape(-1, 3))
    if how == "deactivated":
        arm.change("safety_node", "activate")


def test_an_emergency_stop_while_wrong_measurements_come_ends_there_too(arm: Arm):
    arm.move()
    arm.run(5)
    before = arm.run(3, np.zeros(3))
    count = len(arm.received)
    arm.trigger("/safety_node/emergency_stop")
    arm.run(30, np.zeros(3))
    assert_ended(arm, before, np.array(arm.received[count:]).reshape(-1, 3))  # 104 more before


def test_after_a_reset_the_arm_moves_by_no_command_of_before(arm: Arm):
    arm.move()
    arm.trigger("/safety_node/emergency_stop")
    arm.run(15)
    at = arm.position.copy()
    arm.trigger("/safety_node/reset")
    reset_s = arm.now_s
    arm.wanted = at + 0.3
    for _ in range(20):  # 0.44 rad in 1 s before
        arm.late_s = arm.now_s + PERIOD_S - reset_s
        arm.period()
    np.testing.assert_array_equal(arm.position, at)
    arm.late_s, arm.wanted = 0.0, at.copy()
    path = arm.run(25)
    assert len(path) > 10
    assert_within_limits(np.concatenate((at[None], path)))


def test_commands_without_a_stamp_that_come_two_seconds_late_are_not_carried_out(arm: Arm):
    arm.move()
    arm.late_s = 2.0
    before = arm.run(1)
    count = len(arm.received)
    arm.run(100)
    after = np.array(arm.received[count:]).reshape(-1, 3)
    assert np.abs(after - np.concatenate((before, after))[0]).max(initial=0.0) <= CERTIFIED
    assert len(after) < 12  # the stop's; 199 of 199 before
    assert "stale command: 2 s old" in arm.report("safety")


def test_another_publisher_of_the_arms_commands_stops_it_and_is_named(arm: Arm):
    arm.move()
    other = rclpy.create_node("teleop", context=arm._context)
    publisher = other.create_publisher(Float64MultiArray, f"/{TOPIC}", 1)
    arm.wait(lambda: (arm.period(), arm.states[-1] == "stopped")[1], "a stop", patience_s=10.0)
    assert f"/teleop publishes on {TOPIC}" in arm.report("robot")
    assert len(arm.run(20)) <= 6  # of the stop
    other.destroy_publisher(publisher)
    other.destroy_node()
    arm.wait(lambda: "teleop" not in arm.report("robot"), "the other node to be gone")


def test_an_emergency_service_that_hangs_is_called_again_and_reported(arm: Arm):
    hanging = rclpy.create_node("dashboard", context=arm._context)  # nobody handles its requests
    service = hanging.create_service(Trigger, "/dashboard_client/stop", lambda request, response: response)
    arm.begin("ur", driver_status=False, pose=["", ""])
    arm.trigger("/safety_node/emergency_stop")
    arm.wait(lambda: "dashboard_client/stop has not answered for 1 s" in arm.report("robot"), "a report")
    hanging.destroy_service(service)
    hanging.destroy_node()
    arm.begin()
