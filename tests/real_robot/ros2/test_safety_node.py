"""safety_node alone: this process is both the policy and the robot."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rclpy.duration import Duration
from rclpy.qos import QoSDurabilityPolicy, QoSProfile
from std_msgs.msg import Float64MultiArray, Header, String
from std_srvs.srv import Trigger

from embodied.contract import Contract, TensorSpec
from real_robot.firmware.record import read_contract, write_record
from real_robot.ros2.processes import Processes
from real_robot.ros2.robots.registry import simulation
from real_robot.ros2.robots.tables import ACTION
from real_robot.ros2.topics import types
from tests.real_robot.ros2.runs import untrained

CONTRACT = Contract({"position": TensorSpec((1,), unit="m")}, TensorSpec((1,), unit="m", low=(-1.0,), high=(1.0,)), 0.1)
TIMEOUT_S = 1.0


class Both(Processes):
    """The policy's topics and the robot's, in simulated time."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        (directory / "contract.json").write_text(CONTRACT.to_json())
        settings = {"checkpoint": str(directory), "use_sim_time": True, "heartbeat_timeout_s": TIMEOUT_S}
        settings["liveliness_s"] = 10.0  # a busy machine
        self.start("safety_node", settings)
        self.table = simulation(CONTRACT)
        self.written: list[tuple[float, float]] = []
        self.states: list[str] = []
        self.holds = 0
        node = self.node
        self.observation = node.create_publisher(Float64MultiArray, "/observation", 1)
        signs = QoSProfile(depth=1, liveliness_lease_duration=Duration(seconds=0.1))
        self.command = node.create_publisher(Float64MultiArray, "/policy/action", signs)
        self.heartbeat = node.create_publisher(Header, "/policy/heartbeat", 1)
        node.create_subscription(Float64MultiArray, "/action", self._hear, 1)
        latched = QoSProfile(depth=10, durability=QoSDurabilityPolicy.TRANSIENT_LOCAL)
        node.create_subscription(
            String, "/safety_node/state", lambda message: self.states.append(message.data), latched
        )
        node.create_service(Trigger, "/hold", self._hold)
        self.change("safety_node", "configure", "activate")
        out = (self.observation, self.command, self.heartbeat)
        self.wait(lambda: all(publisher.get_subscription_count() for publisher in out), "safety_node")
        self.wait(lambda: node.count_publishers("/action") > 0, "safety_node")

    def _hear(self, message: Float64MultiArray) -> None:
        action = self.table.command.codec.decode(message)[ACTION]
        self.written.append((message.data[0], float(action[0])))

    def _hold(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self.holds += 1
        response.success = True
        return response

    def measure(self, stamp_s: float) -> None:
        """Publish a measurement."""
        (topic,) = self.table.states
        self.observation.publish(topic.codec.encode({"position": np.zeros(1)}, types, stamp_s))

    def ask(self, stamp_s: float, action: float) -> None:
        """Publish a command of the policy."""
        codec = self.table.command.codec
        self.command.publish(codec.encode({ACTION: np.array([action])}, types, stamp_s))

    def live(self) -> None:
        """Publish the policy's heartbeat."""
        self.heartbeat.publish(Header())

    def spin_for(self, seconds: float) -> None:
        """Handle messages for a while."""
        over = SimpleNamespace(now=False)
        timer = self.node.create_timer(seconds, lambda: setattr(over, "now", True))
        self.wait(lambda: over.now, "a timer")
        self.node.destroy_timer(timer)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with Both(tmp_path_factory.mktemp("safety")) as nodes:
        yield nodes


def test_a_command_that_overtakes_its_measurement_waits_for_it(both: Both):
    both.live()
    both.measure(1.0)
    both.ask(1.0, 0.25)
    both.wait(lambda: both.written == [(1.0, 0.25)], "the first command")
    both.ask(1.1, 0.5)
    both.spin_for(0.2)
    assert both.written == [(1.0, 0.25)]
    both.live()
    both.measure(1.1)
    both.wait(lambda: both.written == [(1.0, 0.25), (1.1, 0.5)], "the second command")
    assert both.holds == 0
    assert both.states[-1] == "active"


def test_a_command_that_is_cut_short_holds_and_the_node_lives(both: Both):
    codec = both.table.command.codec
    message = codec.encode({ACTION: np.zeros(1)}, types, 1.1)
    message.layout.dim[0].stride, message.data = 0, message.data[1:]
    both.live()
    both.command.publish(message)
    both.wait(lambda: both.states[-1] == "holding" and both.holds > 0, "a hold")
    assert "expected one number as the stamp, got 0" in both.output_of("safety_node")


def test_commands_without_a_sign_of_life_are_not_passed_on(both: Both):
    both.spin_for(1.5 * TIMEOUT_S)
    passed = len(both.written)
    for step in range(5):
        both.measure(1.2 + 0.1 * step)
        both.ask(1.2 + 0.1 * step, 0.1)
        both.spin_for(0.1)
    assert len(both.written) == passed
    both.live()
    both.measure(2.0)
    both.ask(2.0, 0.1)
    both.wait(lambda: both.written[-1] == (2.0, pytest.approx(0.1)), "commands of a policy that lives")


def test_a_damaged_contract_of_an_export_is_refused(tmp_path: Path):
    (tmp_path / "contract.json").write_text(CONTRACT.to_json())
    write_record(tmp_path, {"target": "onnx"})
    assert read_contract(str(tmp_path)) == read_contract(str(tmp_path / "contract.json")) == CONTRACT
    (tmp_path / "contract.json").write_text(CONTRACT.to_json().replace("1.0", "9.0"))
    for path in (tmp_path, tmp_path / "contract.json"):
        with pytest.raises(ValueError, match=r"contract\.json is damaged"):
            read_contract(str(path))


def test_what_watches_over_a_robot_starts_without_torch(tmp_path: Path):
    untrained(tmp_path / "run", CONTRACT)
    program = (
        "import sys; import real_robot.ros2.nodes.safety as node;"
        "print(node.read_contract(sys.argv[1]).to_json(), 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program, tmp_path / "run"], capture_output=True, text=True, check=True)
    assert run.stdout == f"{CONTRACT.to_json()} False\n"
