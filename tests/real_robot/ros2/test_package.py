"""The ament_python package as colcon installs it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from real_robot.ros2.nodes.table import LAUNCHES, NODES

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `setup.py install`, which is what colcon runs, puts it."""
    directory = tmp_path_factory.mktemp("package")
    source = directory / "source" / "real_robot" / "ros2"
    shutil.copytree(ROOT / "real_robot" / "ros2", source)
    shutil.copytree(ROOT / "launch", directory / "source" / "launch")
    command = [sys.executable, "setup.py", "install", "--prefix", str(directory / "install")]
    options = ["--single-version-externally-managed", "--record", str(directory / "files")]
    subprocess.run([*command, *options], cwd=source, check=True, capture_output=True)
    return directory / "install"


def test_ros_finds_the_package(prefix: Path):
    assert (prefix / "share/ament_index/resource_index/packages/embodied_ros2").is_file()
    assert (prefix / "share/embodied_ros2/package.xml").is_file()
    launch = {path.name for path in (ROOT / "launch").rglob("*.*") if path.suffix in (".py", ".yaml")}
    assert {path.name for path in (prefix / "share/embodied_ros2/launch").rglob("*.*")} == launch >= {"arm.launch.py"}
    assert {path.name for path in (prefix / "lib/embodied_ros2").iterdir()} == set(NODES)
    installed = prefix / "share/embodied_ros2/launch"
    assert {path.name for path in installed.glob("*.py")} == {f"{name}.launch.py" for name in LAUNCHES}
    assert {path.stem for path in (installed / "config").iterdir()} >= {*LAUNCHES, "arm_limits"}


def test_an_installed_program_starts(prefix: Path):
    (site,) = prefix.glob("lib/python*/site-packages")
    environment = os.environ | {"PYTHONPATH": f"{site}:{ROOT}", "ROS_AUTOMATIC_DISCOVERY_RANGE": "OFF"}
    program = [str(prefix / "lib/embodied_ros2/safety_node"), "--ros-args", "-r", "__node:=watch"]
    process = subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "[watch]: waits to be configured" in process.stderr.readline()
    process.terminate()
    assert process.wait(30) == 0, process.stderr.read()
