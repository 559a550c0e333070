"""policy_node, safety_node and sim_node as processes that talk over DDS; what policy_node records, in one process."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.srv import GetParameters
from rclpy.qos import QoSDurabilityPolicy, QoSProfile, QoSReliabilityPolicy
from std_msgs.msg import Float64MultiArray, String

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.execution.chunking import Execution
from real_robot.recording.recording import Decided, Episode, Recording, Tick
from real_robot.recording.replay import replay
from real_robot.ros2 import ros_robot, topics
from real_robot.ros2.embodied_ros2.parts import load_policy
from real_robot.ros2.nodes import supervision
from real_robot.ros2.nodes.managed import ERROR, Report
from real_robot.ros2.nodes.policy import PolicyNode, PolicySettings
from real_robot.ros2.processes import Processes
from real_robot.safety.safety import State
from tests.real_robot.ros2.in_process import Graph, InProcess, interfaces
from tests.real_robot.ros2.runs import untrained

HEARTBEAT_TIMEOUT_S = 0.5
CONTRACT = Contract({"position": TensorSpec((1,), unit="m")}, TensorSpec((1,), unit="m", low=(-1.0,), high=(1.0,)), 0.1)
LATCHED = QoSProfile(depth=10, durability=QoSDurabilityPolicy.TRANSIENT_LOCAL)


class Robot(Processes):
    """A hovering drone, slower than real time so that a busy machine keeps up, and its nodes' messages."""

    def __init__(self, run: Path, directory: Path) -> None:
        super().__init__(directory)
        self.states: list[str] = []
        self.reports: dict[str, tuple[bytes, str, dict[str, str]]] = {}
        self.stamp_s: dict[str, float] = {}
        self.node.create_subscription(String, "/safety_node/state", lambda m: self.states.append(m.data), LATCHED)
        self.node.create_subscription(DiagnosticArray, "/diagnostics", self._hear, 50)
        self.settings = {"checkpoint": str(run), "use_sim_time": True}
        self.start("sim_node", {"checkpoint": str(run), "lock_step": False, "real_time_factor": 0.2})
        self.start("safety_node", self.settings | {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, "liveliness_s": 0.5})
        self.start("policy_node", self.policy("first"))

    def policy(self, recording: str) -> dict[str, Any]:
        """Parameters of policy_node, which writes into `recording`."""
        return self.settings | {"pace": "measurement", "recording": str(self.directory / f"{recording}.mcap")}

    def _hear(self, message: DiagnosticArray) -> None:
        for status in message.status:
            values = {entry.key: entry.value for entry in status.values}
            self.reports[status.name] = status.level, status.message, values
            self.stamp_s[status.name] = message.header.stamp.sec + 1e-9 * message.header.stamp.nanosec

    def number(self, report: str, key: str) -> float:
        """A number that is reported on /diagnostics."""
        return float(self.reports.get(report, (b"", "", {}))[2].get(key, 0))

    def flying(self) -> bool:
        """Whether commands go through."""
        return bool(self.states) and self.states[-1] == "active"


@pytest.fixture(scope="module")
def robot(hover: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Robot]:
    with Robot(hover, tmp_path_factory.mktemp("nodes")) as nodes:
        for name in ("sim_node", "safety_node", "policy_node"):
            nodes.change(name, "configure", "activate")
        yield nodes


def test_commands_reach_the_robot_and_diagnostics_say_how_fast(robot: Robot):
    robot.wait(robot.flying, "commands")
    robot.wait(lambda: robot.number("/policy_node: loop", "periods") > 100, "a hundred periods")
    level, message, values = robot.reports["/policy_node: loop"]
    assert (level, message) == (b"\x00", "active")
    assert {"rate_hz", "overruns", "held", "work_p50_ms", "work_p99_ms", "reason"} <= set(values)
    robot.wait(lambda: robot.number("/safety_node: safety", "passed") > 100, "a hundred commands")


def test_time_is_the_simulators(robot: Robot):
    robot.wait(lambda: robot.number("/sim_node: simulator", "simulated_s") > 1.0, "a second")
    simulated_s = robot.number("/sim_node: simulator", "simulated_s")
    robot.stamp_s.clear()
    robot.wait(lambda: "/policy_node: loop" in robot.stamp_s, "diagnostics")
    assert abs(robot.stamp_s["/policy_node: loop"] - simulated_s) < 30.0  # the time of day is a billion away


def test_parameters_come_from_yaml(robot: Robot):
    request = GetParameters.Request(names=["heartbeat_timeout_s", "prefix", "use_sim_time"])
    timeout_s, prefix, simulated = robot.call(GetParameters, "/safety_node/get_parameters", request).values
    assert timeout_s.double_value == HEARTBEAT_TIMEOUT_S
    assert prefix.string_value == "policy/"
    assert simulated.bool_value


def test_a_partner_of_incompatible_qos_is_reported(robot: Robot):
    best_effort = QoSProfile(depth=1, reliability=QoSReliabilityPolicy.BEST_EFFORT)
    deaf = robot.node.create_publisher(Float64MultiArray, "/observation", best_effort)
    robot.wait(lambda: "/policy_node: qos" in robot.reports, "a report of incompatible QoS")
    level, _, values = robot.reports["/policy_node: qos"]
    assert level == b"\x02"
    assert "RELIABILITY" in values["observation"]
    assert "incompatible QoS" in robot.output_of("policy_node")
    robot.node.destroy_publisher(deaf)


def test_the_emergency_stop_latches(robot: Robot):
    robot.wait(robot.flying, "commands")
    robot.trigger("/safety_node/emergency_stop")
    robot.wait(lambda: robot.states[-1] == "stopped", "the stop")
    robot.wait(lambda: robot.reports["/safety_node: safety"][0] == b"\x02", "the stop in diagnostics")
    passed, periods = (
        robot.number("/safety_node: safety", "passed"),
        robot.number("/policy_node: loop", "periods"),
    )
    robot.wait(lambda: robot.number("/policy_node: loop", "periods") > periods + 20, "more commands of the policy")
    robot.change("safety_node", "deactivate")
    robot.wait(
        lambda: robot.reports["/policy_node: loop"][1] == "no active safety_node passes the commands on", "a report"
    )
    robot.change("safety_node", "activate")
    robot.wait(lambda: robot.number("/policy_node: loop", "periods") > periods + 60, "more commands of the policy")
    assert robot.number("/safety_node: safety", "passed") == passed
    assert robot.states[-1] == "stopped"
    robot.trigger("/safety_node/reset")
    robot.wait(robot.flying, "commands after the reset")


def test_a_policy_that_is_killed_leaves_a_robot_that_holds(robot: Robot):
    robot.wait(robot.flying, "commands")
    holds = robot.number("/sim_node: simulator", "holds")
    robot.stop("policy_node", signal.SIGKILL)
    killed = time.monotonic()
    robot.wait(lambda: robot.states[-1] == "holding", "a hold")
    assert time.monotonic() - killed < HEARTBEAT_TIMEOUT_S + 1.0  # a busy machine
    robot.wait(lambda: robot.number("/sim_node: simulator", "holds") > holds, "the robot to hold")
    robot.start("policy_node", robot.policy("second"))
    robot.change("policy_node", "configure", "activate")
    robot.wait(robot.flying, "commands of the new process")


def test_what_was_recorded_until_the_kill_replays_bit_for_bit(robot: Robot):
    recording = Recording(robot.directory / "first.mcap")
    found = replay(recording, load_policy(PolicySettings(checkpoint=robot.settings["checkpoint"])))
    assert found.exact
    assert found.compared > 100
    ticks = [item for item in recording if isinstance(item, Tick)]
    assert not recording.complete
    assert all(
        np.array_equal(tick.proposed_action, tick.verdict.action) for tick in ticks if tick.verdict.action is not None
    )
    assert {tick.verdict.state for tick in ticks} <= {State.ACTIVE, State.HOLDING}


def test_lifecycle_there_and_back(robot: Robot):
    assert robot.state("policy_node") == "active"
    robot.change("policy_node", "deactivate")
    assert robot.state("policy_node") == "inactive"
    robot.wait(lambda: robot.states[-1] == "holding", "a hold")
    robot.change("policy_node", "cleanup")
    assert robot.state("policy_node") == "unconfigured"
    assert Recording(robot.directory / "second.mcap").contract.control_dt_s == 0.01
    robot.set("policy_node", recording="")
    robot.change("policy_node", "configure", "activate")
    robot.wait(robot.flying, "commands")


def test_what_a_node_cannot_be_made_of_is_reported(robot: Robot):
    robot.start("other", robot.settings | {"checkpoint": "/nowhere"}, "policy_node")
    with pytest.raises(ValueError, match="no checkpoint in /nowhere"):
        robot.change("other", "configure")
    robot.set("other", checkpoint=robot.settings["checkpoint"], robot="toaster")
    with pytest.raises(ValueError, match="unknown robot 'toaster'"):
        robot.change("other", "configure")
    assert robot.state("other") == "unconfigured"
    robot.set("other", robot="simulation")
    robot.change("other", "configure")
    robot.stop("other")


class Alone(PolicyNode, InProcess):
    """policy_node, in process."""

    def measure(self, stamp_s: float) -> None:
        """The robot publishes a measurement."""
        (topic,) = self._robot._table.states
        self.graph.send(topic.name, topic.codec.encode({"position": np.zeros(1)}, interfaces, stamp_s))

    def run(self, periods: int) -> None:
        """Let the robot be measured, and what is recorded be written."""
        for _ in range(periods):
            self.measure(self.graph.ros_s)
            self.graph.tick(CONTRACT.control_dt_s)
            while self._recorder._waiting_bytes:
                time.sleep(0.001)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Alone]:
    """Makes a policy_node that records into r.mcap."""
    for module in (ros_robot, topics, supervision):
        monkeypatch.setattr(module, "types", interfaces)
    untrained(tmp_path, CONTRACT)

    def make(**settings: Any) -> Alone:
        Alone.graph = Graph()
        node = Alone(load_policy)
        node.settings = PolicySettings(str(tmp_path), recording=str(tmp_path / "r.mcap"), **settings)
        return node

    return make


def test_a_recording_begins_once_everything_else_is_right(alone: Callable[..., Alone], tmp_path: Path):
    limits, path = tmp_path / "limits.yaml", tmp_path / "r.mcap"
    limits.write_text("command_timeout_s: -1")
    for wrong, said in (({"limits": str(limits)}, "command_timeout_s"), ({"execution": Execution.INPAINT}, "inpaint")):
        node = alone(**wrong)
        with pytest.raises(ValueError, match=said):
            node.configure()
        node.cleanup()
        assert not path.exists()
    limits.write_text("command_timeout_s: 0.3")
    node = alone(limits=str(limits))
    node.configure()
    node.activate()
    node.run(5)
    assert node.reports["recording"]() == Report(str(path))
    node.cleanup()
    assert {Episode, Decided, Tick} == {type(item) for item in Recording(path)}


def test_a_recording_that_misses_something_is_an_error_in_diagnostics(alone: Callable[..., Alone]):
    node = alone()
    node.configure()
    node.activate()
    node.run(5)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), node._recorder._file.stream.fileno())
    node.run(100)
    report = node.reports["recording"]()
    assert report.level == ERROR
    assert "items were dropped: [Errno 28] No space left on device" in report.message
    with pytest.raises(OSError, match="No space left"):
        node.cleanup()


def test_why_nothing_is_commanded_is_told(alone: Callable[..., Alone], monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise TimeoutError("no answer of the policy server")

    node = alone()
    policy = load_policy(node.settings)
    monkeypatch.setattr(policy, "act", fail)
    node._load = lambda settings: policy
    node.configure()
    node.activate()
    node.run(5)
    said = "no command: inference failed: TimeoutError: no answer of the policy server"
    assert node.reports["loop"]().values["reason"] == said
    assert f"the robot holds: {said}" in node.graph.logged
    node.cleanup()


def test_a_stop_that_a_second_signal_interrupts_is_made_before_the_end(alone: Callable[..., Alone]):
    node = alone()
    node.configure()
    node.activate()
    node.run(5)
    settled: list[str] = []

    def interrupted(reason: str) -> None:
        settled.append(reason)
        if len(settled) == 1:
            raise KeyboardInterrupt

    node._safety.settle = interrupted
    with pytest.raises(KeyboardInterrupt):
        node.deactivate()
    node.deactivate()  # as `end` does
    node.deactivate()
    assert settled == ["policy_node was deactivated"] * 2
    node.cleanup()


def test_a_policy_decides_nothing_while_the_robot_is_stopped_and_anew_after_the_reset(alone: Callable[..., Alone]):
    node = alone()
    node.configure()
    node.activate()
    commands: list[Any] = []
    node.graph.heard["policy/action"].append(commands.append)
    node.run(5)
    assert len(commands) > 2
    count = len(commands)
    node.graph.send("safety_node/state", String(data="stopped"))
    node.run(5)
    assert len(commands) == count
    assert node.reports["loop"]().values["reason"] == "safety_node has stopped the robot: see its /diagnostics"
    before_s = node.graph.ros_s
    node.graph.tick(0.5 * CONTRACT.control_dt_s)
    node.graph.send("safety_node/state", String(data="ready"))
    for _ in range(5):
        node.measure(before_s)  # it was on its way
        node.graph.tick(CONTRACT.control_dt_s)
    assert len(commands) == count
    node.run(5)
    decided = [message.data[0] for message in commands[count:]]
    assert len(decided) > 2
    assert min(decided) > before_s
    node.cleanup()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"heartbeat_timeout_s": float("nan")}, "heartbeat_timeout_s"),
        ({"liveliness_s": float("inf")}, "liveliness_s"),
        ({"heartbeat_timeout_s": -1.0}, "heartbeat_timeout_s=-1: expected a number above 0"),
        ({"options.rate_hz": float("nan")}, "option rate_hz of forward_position"),
    ],
)
def test_a_parameter_that_is_not_finite_or_out_of_range_is_refused(robot: Robot, settings: dict[str, float], said: str):
    others = {"checkpoint": robot.settings["checkpoint"], "robot": "forward_position"}
    robot.start("refused", others | settings, program="safety_node")
    with pytest.raises(UserError, match="failed to configure"):
        robot.change("refused", "configure")
    assert said in robot.output_of("refused")
    robot.stop("refused")
