"""Settings of a node from its parameters."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.srv import ChangeState
from rclpy.lifecycle import LifecycleNode
from rclpy.parameter import Parameter

from real_robot.ros2.nodes.managed import read_settings
from real_robot.ros2.processes import TRANSITIONS, Processes, claim_domain


class Colour(Enum):
    red = "red"


@dataclass
class Inner:
    rate_hz: float = 10.0


@dataclass
class Settings:
    name: str = "x"
    colour: Colour = Colour.red
    inner: Inner = field(default_factory=Inner)
    numbers: list[float] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def context() -> Iterator[rclpy.Context]:
    context = rclpy.Context()
    rclpy.init(context=context, domain_id=claim_domain()[1])
    yield context
    context.try_shutdown()


def settings(context: rclpy.Context, **parameters: Any) -> Settings:
    given = [Parameter(name, value=value) for name, value in parameters.items()]
    node = LifecycleNode(
        "node", context=context, parameter_overrides=given, automatically_declare_parameters_from_overrides=True
    )
    try:
        found = read_settings(node, Settings)
        assert node.get_parameter("inner.rate_hz").value == found.inner.rate_hz  # reported if missing
        return found
    finally:
        node.destroy_node()


def test_nested_parameters_become_a_dataclass(context: rclpy.Context):
    parameters = {"inner.rate_hz": 20.0, "numbers": [1.0, 2.0], "options.joints": ["a", "b"], "options.rate_hz": 5.0}
    assert settings(context, **parameters) == Settings(
        inner=Inner(20.0), numbers=[1.0, 2.0], options={"joints": ["a", "b"], "rate_hz": 5.0}
    )
    assert settings(context, use_sim_time=True) == Settings()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"nmae": "x"}, "nmae"), ({"inner.rate_hz": "fast"}, "fast"), ({"colour": "green"}, "green")],
)
def test_wrong_parameters_are_reported(context: rclpy.Context, parameters: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        settings(context, **parameters)


FAILING = """
from dataclasses import dataclass
from real_robot.ros2.nodes.managed import ManagedNode, spin

@dataclass
class Nothing:
    pass

class Failing(ManagedNode):
    def __init__(self):
        super().__init__("failing", Nothing)

    def activate(self):
        self.own(self.create_timer(0.01, self.fail_now))

    def fail_now(self):
        raise RuntimeError("a bug")

    def deactivate(self):
        print("holds", flush=True)

spin(Failing)
"""


def test_a_node_that_fails_holds_says_so_and_lives(tmp_path: Path):
    reports: dict[str, str] = {}
    with Processes(tmp_path) as nodes:
        nodes.node.create_subscription(
            DiagnosticArray, "/diagnostics", lambda m: reports.update({s.name: s.message for s in m.status}), 10
        )
        nodes.spawn("failing", [sys.executable, "-c", FAILING])
        nodes.change("failing", "configure", "activate")
        nodes.wait(lambda: nodes.state("failing") == "inactive", "the node to deactivate")
        nodes.wait(lambda: "/failing: node" in reports, "a report")
        assert reports["/failing: node"] == "deactivated by RuntimeError: a bug; activate it to try again"
        log = (tmp_path / "failing.log").read_text()
        assert "holds" in log
        assert "RuntimeError: a bug" in log


SLOW_STOP = """
import time
from dataclasses import dataclass
from real_robot.ros2.nodes.managed import ManagedNode, spin

@dataclass
class Nothing:
    pass

class Slow(ManagedNode):
    def __init__(self):
        super().__init__("slow", Nothing)

    def deactivate(self):
        print("begins to stop", flush=True)
        for _ in range(100):
            time.sleep(0.01)
        print("has stopped", flush=True)

spin(Slow)
"""


@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGINT, signal.SIGTERM)])
def test_a_signal_does_not_interrupt_the_stop_that_a_deactivation_makes(tmp_path: Path, signals: tuple[int, ...]):
    """The second one does, and the node then stops once more, from the beginning, before it ends."""
    log = tmp_path / "slow.log"
    with Processes(tmp_path) as nodes:
        nodes.spawn("slow", [sys.executable, "-c", SLOW_STOP])
        nodes.change("slow", "configure", "activate")
        request = ChangeState.Request()
        request.transition.id = TRANSITIONS["deactivate"]
        client = nodes.node.create_client(ChangeState, "/slow/change_state")
        nodes.wait(client.service_is_ready, "the service")
        client.call_async(request)
        nodes.wait(lambda: "begins to stop" in log.read_text(), "the stop to begin")
        process = nodes.running.pop("slow")
        for number in signals:
            process.send_signal(number)
        assert process.wait(30.0) == 0
    said = log.read_text().splitlines()
    assert said.count("begins to stop") == len(signals)
    assert [line for line in said if line.startswith(("begins", "has"))][-1] == "has stopped"


KILLED = """
import sys, time
from pathlib import Path
from real_robot.ros2.processes import Processes

with Processes(Path(sys.argv[1])) as nodes:
    node = nodes.start("safety_node", {})
    nodes.state("safety_node")
    print(node.pid, flush=True)
    time.sleep(600)
"""


def test_no_node_outlives_whoever_started_it(tmp_path: Path):
    """Nobody would stop the robot: trials that are killed at once would leave a policy that goes on."""
    client = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        node = Path("/proc") / str(int(client.stdout.readline()))
        assert node.is_dir()
    finally:
        client.kill()
        client.wait()
    deadline = time.monotonic() + 30.0
    while node.is_dir() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not node.is_dir()
