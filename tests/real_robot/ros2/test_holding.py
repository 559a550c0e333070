"""What safety_node publishes to arms and vehicles when something goes wrong: the certified stop, then nothing."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embodied.contract import Contract
from real_robot.ros2 import ros_robot, topics
from real_robot.ros2.nodes import safety
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.robots.tables import ACTION
from real_robot.safety.safety import State
from tests.real_robot.ros2.in_process import Graph, InProcess, heartbeat, interfaces
from tests.real_robot.ros2.robots.test_tables import JOINTS, NAVIGATE, arm

PERIOD_S, SPEED = 0.02, 0.2
ARM_LIMITS = "\n".join(
    [
        "observation_timeout_s: 0.2",
        "command_timeout_s: 0.1",
        "recovery_s: 0.3",
        "commands:",
        *(f"  {name}: {{velocity: 0.5, acceleration: 2.0, measured: joint_position.{name}}}" for name in JOINTS),
    ]
)
VEHICLE_LIMITS = """
observation_timeout_s: 0.2
command_timeout_s: 0.2
commands:
  speed: {kind: VELOCITY, acceleration: 1.0}
  yaw_rate: {kind: VELOCITY, acceleration: 2.0}
"""


SAID = {"safety_mode": ("mode", 1), "robot_program_running": ("data", True), "robot_state": ("robot_mode", 2)}
"""What drivers say of an arm that moves."""


class Node(safety.SafetyNode, InProcess):
    """safety_node, in process."""


class Arm:
    """An arm that follows at once, safety_node, and a policy that moves it at a constant speed."""

    def __init__(
        self,
        directory: Path,
        row: str,
        contract: Contract,
        limits: str,
        rate_hz: float,
        simulated: bool = False,
        **others: Any,
    ) -> None:
        self.graph = Node.graph = Graph()
        self.graph.simulated = simulated
        (directory / "contract.json").write_text(contract.to_json())
        (directory / "limits.yaml").write_text(limits)
        self.node = Node()
        options: dict[str, Any] = {"rate_hz": rate_hz} | ({"joints": JOINTS} if row != "diff_drive" else {}) | others
        self.node.settings = safety.SafetySettings(
            str(directory), row, options, heartbeat_timeout_s=0.2, limits=str(directory / "limits.yaml")
        )
        self.node.configure()
        self.table = self.node._table
        size = len(contract.action.names)
        self.position, self.wanted = np.zeros(size), np.zeros(size)
        self.sent: list[np.ndarray] = []
        self.policy = self.measures = True
        self.blocked = False
        self.said: dict[str, Any] = {}
        self.messages: list[Any] = []
        self.graph.heard[self.table.command.name] += [self._follow, self.messages.append]

    def _follow(self, message: Any) -> None:
        self.sent.append(self.table.command.codec.decode(message)[ACTION])
        if not self.blocked:
            self.position = self.sent[-1].copy()

    def say(self, topic: str, value: Any = None) -> None:
        """The driver's status; None: that the arm moves."""
        (mode,) = (mode for mode in self.table.modes if mode.name == topic)
        field, good = SAID[topic.split("/")[-1]]
        message = interfaces(mode.type)()
        setattr(message, field, good if value is None else value)
        self.graph.publishers[topic] = {("/", "driver")}
        self.said[topic] = message
        self.graph.send(topic, message)

    def run(self, seconds: float) -> int:
        """Let time pass; returns how many commands the robot got."""
        count = len(self.sent)
        for _ in range(round(seconds / PERIOD_S)):
            self.graph.tick(PERIOD_S)
            if self.measures:
                self.measure()
            for mode in self.table.modes:
                if mode.timeout_s and mode.name in self.said:  # such a driver repeats it
                    self.graph.send(mode.name, self.said[mode.name])
            if self.policy:
                self.beat()
                self.wanted = self.wanted + SPEED * PERIOD_S
                self.ask(self.wanted)
        return len(self.sent) - count

    def beat(self) -> None:
        """The policy's heartbeat."""
        self.graph.send("policy/heartbeat", heartbeat(self.graph.ros_s))

    def measure(self, stamp_s: float | None = None) -> None:
        (topic,) = self.table.states
        arrays = {key: np.zeros(spec.shape) for key, spec in topic.codec.specs.items()} | {
            "joint_position": self.position
        }
        self.graph.send(topic.name, topic.codec.encode(arrays, interfaces, stamp_s or self.graph.ros_s))

    def measure_all(self) -> None:
        """Publish all that the robot observes: its joints, or zeros."""
        arrays = {key: np.zeros(spec.shape) for topic in self.table.states for key, spec in topic.codec.specs.items()}
        if "rotation" in arrays:
            arrays["rotation"] = np.eye(3).reshape(9)
        if "joint_position" in arrays:
            arrays["joint_position"] = self.position
        for topic in self.table.states:
            self.graph.send(topic.name, topic.codec.encode(arrays, interfaces, self.graph.ros_s))

    def ask(self, action: np.ndarray, stamp_s: float | None = None) -> None:
        command = self.table.command
        message = command.codec.encode({ACTION: action}, interfaces, stamp_s or self.graph.ros_s)
        self.graph.send(f"policy/{command.name}", message)

    @property
    def state(self) -> State:
        return self.node._safety.state


@pytest.fixture(autouse=True)
def without_ros(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ros_robot, topics):
        monkeypatch.setattr(module, "types", interfaces)


def moving(directory: Path, row: str = "forward_position", simulated: bool = False) -> Arm:
    made = Arm(directory, row, arm(), ARM_LIMITS, 1.0 / PERIOD_S, simulated)
    for mode in made.table.modes:
        made.say(mode.name)
    made.run(0.5)
    assert made.sent == []  # it is only configured
    made.node.activate()
    made.wanted = made.position.copy()
    made.run(1.0)
    assert made.state is State.ACTIVE
    assert len(made.sent) > 45
    return made


def assert_stop(commands: list[np.ndarray], before: list[np.ndarray]) -> None:
    """The commands are a stop within 0.5 rad/s and 2 rad/s^2, after the last two before it."""
    steps = np.diff(np.array([*before[-2:], *commands]), axis=0) / PERIOD_S
    assert np.abs(np.diff(steps, axis=0)).max() <= 2.0 * PERIOD_S * (1 + 1e-4)
    assert (np.diff(np.abs(steps), axis=0) <= 1e-6).all()
    np.testing.assert_allclose(steps[-1], 0.0, atol=1e-6)
    assert np.abs(commands[-1] - before[-1]).max() <= SPEED**2 / (2 * 2.0) + 2 * SPEED * PERIOD_S


@pytest.mark.parametrize("row", ["forward_position", "joint_trajectory"])
@pytest.mark.parametrize("how", ["policy ends", "NaN", "no measurements", "emergency stop", "deactivated"])
def test_an_arm_gets_the_certified_stop_and_then_nothing_whatever_ends_it(tmp_path, row, how):
    robot = moving(tmp_path, row)
    if how == "policy ends":
        robot.policy = False
    elif how == "NaN":
        robot.wanted[:] = np.nan
    elif how == "no measurements":
        robot.measures = False
    elif how == "emergency stop":
        robot.graph.call("safety_node/emergency_stop")
    count = len(robot.sent)
    if how == "deactivated":
        robot.node.deactivate()
    robot.run(0.6)
    if how == "no measurements":  # the policy's commands are good for as long as the last measurement
        count += round(0.2 / PERIOD_S)
    if how == "emergency stop":
        count -= 1  # the stop's first command
    if how != "policy ends" or len(robot.sent) > count:  # else it stands still already where it was commanded to
        assert count < len(robot.sent) < count + 12
        assert_stop(robot.sent[count:], robot.sent[:count])
    assert robot.run(60.0) == 0  # 26 a second before
    assert robot.state is (State.STOPPED if how == "emergency stop" else State.HOLDING)


@pytest.mark.parametrize("back_s", [0.15, 60.0])
def test_a_simulated_clock_that_jumps_back_delays_neither_the_stop_nor_what_comes_after(tmp_path, back_s):
    robot = moving(tmp_path, simulated=True)
    before_s, count, gaps = robot.graph.ros_s, len(robot.sent), []
    robot.node.jump_back(back_s)
    for period in range(12):
        if period == 1:
            robot.measure(before_s)  # a message that was still on its way
        gaps.append(robot.run(PERIOD_S))
    stop = robot.sent[count:]
    assert gaps == [1] * len(stop) + [0] * (12 - len(stop))  # one command a period, then nothing
    assert 4 < len(stop) < 12
    assert_stop(stop, robot.sent[:count])
    robot.wanted = robot.position.copy()
    robot.run(0.4)  # recovery_s has passed
    assert robot.state is State.ACTIVE


def test_no_point_of_a_trajectory_is_outside_the_limits(tmp_path):
    wall = 0.25
    limits = "\n".join(
        [
            "commands:",
            *(f"  {name}: {{high: {wall}, velocity: 1.0, measured: joint_position.{name}}}" for name in JOINTS),
        ]
    )
    robot = Arm(tmp_path, "joint_trajectory", arm(), limits, 1.0 / PERIOD_S)
    robot.node.activate()
    robot.run(3.0)
    points = np.array([[point.positions for point in message.points] for message in robot.messages])
    assert points[-1, 0] == pytest.approx(wall)
    assert points.max() <= wall + 1e-6  # the stop behind the end ended 2 cm farther


def test_teleoperation_after_a_hold_is_not_fought_and_the_policy_goes_on_from_there(tmp_path):
    robot = moving(tmp_path)
    robot.policy = False
    robot.run(0.6)
    for _ in range(100):
        robot.position = robot.position - 0.008  # 0.8 rad
        assert robot.run(PERIOD_S) == 0
    at, robot.policy, robot.wanted = robot.position.copy(), True, np.zeros(7)
    assert robot.run(0.2) == 0  # recovery_s
    count = len(robot.sent)
    assert robot.run(0.4) > 10
    assert np.abs(np.diff(np.array([at, *robot.sent[count:]]), axis=0)).max() <= 0.5 * PERIOD_S * (1 + 1e-4)


def test_a_bad_command_now_and_then_holds_and_does_not_chatter(tmp_path):
    robot = moving(tmp_path)
    begun = 0
    for index in range(60):
        before = robot.state
        robot.run(PERIOD_S)
        if index % 10 == 0:
            robot.ask(np.full(7, np.nan))
        begun += before is not State.ACTIVE and robot.state is State.ACTIVE
    assert begun == 0  # it was ten times a second
    robot.wanted = robot.position.copy()
    robot.run(0.5)
    assert robot.state is State.ACTIVE


def test_a_blocked_arm_stops_with_the_cause_and_is_not_commanded_on(tmp_path):
    robot = moving(tmp_path)
    robot.blocked, at = True, robot.position.copy()
    robot.run(3.0)
    assert robot.state is State.STOPPED
    report = robot.node.reports["safety"]()
    assert "joint1 is" in report.message
    assert "blocked, or moved by somebody else" in report.message
    path = np.array(robot.sent)
    assert (np.diff(path, axis=0) >= -1e-6).all()  # not back to where it is measured
    assert (path[-1] - at).max() <= 0.1 + SPEED * 0.3 + SPEED**2 / (2 * 2.0) + 2 * SPEED * PERIOD_S
    assert robot.run(1.0) == 0


@pytest.mark.parametrize(
    ("row", "topic", "bad", "cause"),
    [
        ("ur", "io_and_status_controller/safety_mode", 3, "protective"),
        ("ur", "io_and_status_controller/robot_program_running", False, "program"),
        ("fr3", "franka_robot_state_broadcaster/robot_state", 4, "reflex"),
    ],
)
def test_what_the_driver_says_stops_the_arm_with_its_cause_until_reset(tmp_path, row, topic, bad, cause):
    robot = moving(tmp_path, row)
    robot.say(topic, bad)
    assert robot.run(0.6) < 12
    assert robot.state is State.STOPPED
    assert cause in robot.node.reports["safety"]().message
    robot.say(topic)
    assert robot.run(1.0) == 0  # whoever put it right says when it may move
    robot.wanted = robot.position.copy()
    robot.graph.call("safety_node/reset")
    assert robot.run(0.2) > 5


def test_an_emergency_calls_a_service_that_is_missing_once_it_is_there(tmp_path):
    robot, called = moving(tmp_path, "ur"), []
    robot.graph.call("safety_node/emergency_stop")
    robot.run(0.5)
    assert "no service dashboard_client/stop: it waits" in robot.graph.logged
    robot.graph.services["dashboard_client/stop"] = answering(robot, called, True)
    robot.run(1.0)
    assert len(called) == 1


def answering(robot: Arm, called: list[float], success: bool) -> Callable[[Any, Any], Any]:
    """A service of the driver that notes when it is called."""

    def answer(request: Any, response: Any) -> Any:
        called.append(robot.graph.now_s)
        return SimpleNamespace(success=success, message="dashboard client is not connected")

    return answer


def test_every_emergency_stop_reaches_the_robots_own(tmp_path):
    robot, called = moving(tmp_path, "ur"), []
    robot.graph.services["dashboard_client/stop"] = answering(robot, called, True)
    robot.graph.call("safety_node/emergency_stop")
    assert len(called) == 1
    robot.run(1.0)
    assert len(called) == 1  # not once for each command of the stop
    robot.graph.call("safety_node/emergency_stop")  # somebody presses it again, and means it
    robot.run(1.0)
    assert len(called) == 2
    robot.policy = False  # somebody else moves the arm after the reset
    robot.graph.call("safety_node/reset")
    robot.run(1.0)
    robot.graph.call("safety_node/emergency_stop")
    robot.run(1.0)
    assert len(called) == 3


def test_a_robot_that_refuses_the_emergency_stop_is_asked_again_and_it_is_told(tmp_path):
    robot, called = moving(tmp_path, "ur"), []
    robot.graph.services["dashboard_client/stop"] = answering(robot, called, False)
    robot.graph.call("safety_node/emergency_stop")
    robot.run(2.5)
    assert len(called) == 3
    assert np.diff(called).min() >= ros_robot.AGAIN_S - 1e-6
    report = robot.node.reports["robot"]()
    assert report.level == ros_robot.ERROR
    assert report.message == "dashboard_client/stop refuses: dashboard client is not connected"
    assert any(line.endswith("is not connected; it is called again") for line in robot.graph.logged)
    robot.graph.services["dashboard_client/stop"] = answering(robot, called, True)
    robot.run(2.0)
    assert len(called) == 4
    assert robot.node.reports["robot"]().level != ros_robot.ERROR


def test_a_stamp_of_another_clock_does_not_become_the_simulators_time(tmp_path):
    robot = moving(tmp_path, simulated=True)
    robot.measure(robot.graph.ros_s + 1e9)  # of a driver without use_sim_time
    assert abs(robot.node._robot.clock() - robot.graph.ros_s) < 1.0
    unreadable = robot.node.reports["robot"]().values["unreadable"]
    assert "1e+09 s after /clock: is its publisher's use_sim_time true?" in unreadable
    robot.run(1.0)
    assert robot.state is State.ACTIVE


@pytest.mark.parametrize("row", ["ur", "fr3"])
def test_an_arm_whose_driver_has_said_nothing_yet_is_not_moved(tmp_path, row):
    robot = Arm(tmp_path, row, arm(), ARM_LIMITS, 1.0 / PERIOD_S)
    robot.node.activate()
    for mode in robot.table.modes:
        assert robot.run(1.0) == 0  # it was only a warning
        assert f"nothing heard on {mode.name}" in robot.node.reports["safety"]().message
        robot.say(mode.name)
    robot.wanted = robot.position.copy()
    assert robot.run(1.0) > 20
    without = robot_table(row, arm(), {"rate_hz": 50.0, "joints": JOINTS, "driver_status": False})
    assert without.modes == ()


def driving(directory: Path, simulated: bool = False, periods: int = 20) -> Arm:
    robot = Arm(directory, "diff_drive", NAVIGATE, VEHICLE_LIMITS, 10.0, simulated)
    robot.node.activate()
    reading = ros_robot.Reading(
        {key: np.zeros(spec.shape, spec.dtype) for key, spec in robot.table.contract.observation.items()}, 0.0, 0
    )
    robot.node._robot.read = lambda: ros_robot.Reading(
        reading.observation, robot.graph.ros_s, round(100 * robot.graph.ros_s)
    )
    for _ in range(periods):
        robot.graph.tick(0.1)
        robot.beat()
        robot.ask(np.array([0.4, 0.2]))
    return robot


def test_a_command_that_waits_for_a_simulated_clock_is_not_carried_out_once_its_policy_is_dead(tmp_path):
    robot = driving(tmp_path, simulated=True, periods=0)
    robot.ask(np.array([0.4, 0.2]), robot.graph.ros_s + 0.35)
    for _ in range(10):  # without heartbeats
        robot.graph.tick(0.1)
    assert robot.sent == []


def test_a_vehicle_brakes_within_its_limits_instead_of_in_one_step(tmp_path):
    robot = driving(tmp_path)
    assert robot.table.at_rest == (0.0, 0.0)
    count = len(robot.sent)
    assert robot.sent[-1] == pytest.approx([0.4, 0.2])
    for _ in range(40):
        robot.graph.tick(0.1)
    speeds = np.array(robot.sent[count - 1 :])
    assert np.abs(np.diff(speeds[:, 0])).max() <= 0.1 * (1 + 1e-6)
    assert np.abs(np.diff(speeds[:, 1])).max() <= 0.2 * (1 + 1e-6)
    np.testing.assert_allclose(speeds[-1], 0.0, atol=1e-9)
    assert len(speeds) < 10
