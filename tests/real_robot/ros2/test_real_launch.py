"""Launch files under ROS's own `launch` and command line: what happens when each process ends.

They are not on PyPI. ROS_LAUNCH_PATH names the folders with Python packages launch, launch_ros, ros2cli, ros2launch,
ros2lifecycle and ros2param, as /opt/ros/jazzy/lib/python3.12/site-packages; without it these tests are skipped.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from embodied.contract import Contract, TensorSpec
from real_robot.ros2.processes import Processes
from tests.real_robot.ros2.launching.recorder import PACKAGE
from tests.real_robot.ros2.runs import untrained

ROS = os.environ.get("ROS_LAUNCH_PATH", "")
pytestmark = pytest.mark.skipif(not ROS, reason="ROS_LAUNCH_PATH does not say where ROS's launch is")
ROOT = PACKAGE.parents[1]
JOINTS = ("shoulder", "elbow")
CONTRACT = Contract(
    {"joint_position": TensorSpec((2,), unit="rad", names=JOINTS)},
    TensorSpec((2,), unit="rad", names=JOINTS, low=(-1.0, -1.0), high=(1.0, 1.0)),
    0.05,
)
NODES = {"safety_node": "active", "policy_node": "inactive"}
STARTED = re.compile(r"\[(\w+)-\d+\]: process started with pid \[(\d+)\]")


class Launched(Processes):
    """`ros2 launch embodied_ros2 arm.launch.py` of the installed package."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        untrained(directory / "run", CONTRACT)
        shutil.copytree(PACKAGE, directory / "source")
        install = [sys.executable, "setup.py", "install", "--prefix", str(directory / "install")]
        install += ["--single-version-externally-managed", "--record", str(directory / "files")]
        subprocess.run(install, cwd=directory / "source", check=True, capture_output=True)
        (site,) = (directory / "install").glob("lib/python*/site-packages")
        self.limits = directory / "limits.yaml"
        self.limits.write_text("command_timeout_s: 1.0\n")
        options = {"rate_hz": 20.0, "joints": list(JOINTS)}
        common = {"robot": "forward_position", "options": options}
        sections = {"/**": common, "/**/safety_node": {"liveliness_s": 1.0}}
        parameters = directory / "parameters.yaml"
        parameters.write_text(yaml.safe_dump({name: {"ros__parameters": each} for name, each in sections.items()}))
        self.arguments = [f"checkpoint:={directory / 'run'}", f"parameters:={parameters}", f"limits:={self.limits}"]
        self._environment |= {
            "AMENT_PREFIX_PATH": str(directory / "install"),
            "PYTHONPATH": ":".join((str(site), str(ROOT), ROS)),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ROS_HOME": str(directory / "ros"),
        }

    def ros2(self, *words: str) -> list[str]:
        return [sys.executable, "-c", "import sys; from ros2cli.cli import main; sys.exit(main())", *words]

    def say(self, *words: str) -> str:
        """The output of a ros2 command."""
        done = subprocess.run(
            self.ros2(*words), env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    def launch(self) -> None:
        self._log("launch").unlink(missing_ok=True)
        self.spawn("launch", self.ros2("launch", "embodied_ros2", "arm.launch.py", *self.arguments))
        for name, state in NODES.items():
            self.comes(name, state)

    def comes(self, name: str, state: str) -> None:
        self.wait(lambda: self.state(name) == state, f"{name} {state}")

    def process(self, name: str) -> list[int]:
        """Process numbers of a node, the newest last."""
        said = STARTED.findall(self._log("launch").read_text())
        return [int(number) for node, number in said if node == name]

    def gone(self) -> bool:
        """Whether none of the nodes' processes lives."""
        return not any(Path(f"/proc/{number}/exe").exists() for name in NODES for number in self.process(name))


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    with Launched(tmp_path_factory.mktemp("launch")) as nodes:
        nodes.launch()
        yield nodes


@pytest.mark.parametrize("name", [name for name in NODES if name != "safety_node"])
def test_a_process_that_is_killed_comes_back_in_the_state_it_was_launched_in(launched: Launched, name: str):
    before = launched.process(name)
    os.kill(before[-1], signal.SIGKILL)
    launched.wait(lambda: len(launched.process(name)) > len(before), f"a new {name}")
    launched.comes(name, NODES[name])


def test_the_command_line_speaks_with_the_nodes(launched: Launched):
    alone = ("--no-daemon", "--spin-time", "5")
    said = launched.say("param", "set", *alone, "/safety_node", "heartbeat_timeout_s", "9.0")
    assert "read when safety_node is configured; clean it up first" in said
    impossible = launched.say("lifecycle", "set", *alone, "/safety_node", "activate")
    assert "Unknown transition requested, available ones are" in impossible
    assert launched.state("safety_node") == "active"
    for transition in ("activate", "deactivate"):
        said = launched.say("lifecycle", "set", *alone, "/policy_node", transition)
        assert "Transitioning successful" in said


def test_the_end_of_safety_node_ends_everything(launched: Launched):
    os.kill(launched.process("safety_node")[-1], signal.SIGKILL)
    launched.running.pop("launch").wait(60)
    launched.wait(launched.gone, "the nodes to end")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_no_node_outlives_its_launch(launched: Launched, how: signal.Signals):
    launched.launch()
    launched.running["launch"].send_signal(how)
    launched.running.pop("launch").wait(60)
    launched.wait(launched.gone, "the nodes to end")
