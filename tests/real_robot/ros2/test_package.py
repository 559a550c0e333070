"""The ament_python package as colcon installs it, with and without colcon, and in an environment like the README's."""

import importlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from embodied.contract import Contract, TensorSpec
from real_robot.ros2.embodied_ros2.table import LAUNCHES, NODES
from real_robot.ros2.processes import Processes

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "real_robot" / "ros2"
COLCON = os.environ.get("COLCON", "")
"""A colcon, such as `.venv/bin/colcon`: from PyPI with colcon-ros and setuptools below 80, or the distribution's."""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `setup.py install`, which is what colcon runs, puts it."""
    directory = tmp_path_factory.mktemp("package")
    source = directory / "source"
    shutil.copytree(PACKAGE, source)
    command = [sys.executable, "setup.py", "install", "--prefix", str(directory / "install")]
    options = ["--single-version-externally-managed", "--record", str(directory / "files")]
    subprocess.run([*command, *options], cwd=source, check=True, capture_output=True)
    return directory / "install"


def complete(prefix: Path) -> None:
    """Check what ros2 launch and ros2 run need."""
    assert (prefix / "share/ament_index/resource_index/packages/embodied_ros2").is_file()
    assert (prefix / "share/embodied_ros2/package.xml").is_file()
    assert {path.name for path in (prefix / "lib/embodied_ros2").iterdir()} == set(NODES)
    installed = prefix / "share/embodied_ros2/launch"
    assert {path.name for path in installed.glob("*.py")} == {f"{name}.launch.py" for name in LAUNCHES}
    config = {path.name for path in (PACKAGE / "launch" / "config").iterdir()}
    assert {path.name for path in (installed / "config").iterdir()} == config >= {"arm.yaml", "arm_limits.yaml"}


def test_ros_finds_the_package(prefix: Path):
    complete(prefix)


def test_an_installed_program_runs_under_the_python_of_the_environment_it_is_started_in(prefix: Path):
    (site,) = prefix.glob("lib/python*/site-packages")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": f"{site}:{ROOT}", "PATH": path, "ROS_AUTOMATIC_DISCOVERY_RANGE": "OFF"}
    script = prefix / "lib/embodied_ros2/safety_node"
    assert script.read_text().startswith("#!/usr/bin/env python3\n")
    program = [str(script), "--ros-args", "-r", "__node:=watch"]
    process = subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "[watch]: waits to be configured" in process.stderr.readline()
    process.terminate()
    assert process.wait(30) == 0
    assert process.stderr.read() == ""


def test_importing_the_packages_setup_builds_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["setup.py", "--no-such-command"])
    assert set(importlib.import_module("real_robot.ros2.setup").NODES) == set(NODES)


@pytest.mark.skipif(not COLCON, reason="COLCON names no colcon")
@pytest.mark.parametrize("options", [(), ("--symlink-install",)], ids=["", "symlinks"])
def test_colcon_builds_it_and_leaves_nothing_elsewhere(tmp_path: Path, options: tuple[str, ...]):
    shutil.copytree(PACKAGE, tmp_path / "src" / "clone" / "real_robot" / "ros2")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "src" / "clone")
    source = {path for path in (tmp_path / "src").rglob("*") if "__pycache__" not in path.parts}
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    command = [COLCON, "build", *options, "--packages-select", "embodied_ros2"]
    built = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    complete(tmp_path / "install" / "embodied_ros2")
    assert {path.name for path in tmp_path.iterdir()} == {"build", "install", "log", "src"}
    now = {path for path in (tmp_path / "src").rglob("*") if "__pycache__" not in path.parts}
    assert {path for path in now - source if "egg-info" not in str(path)} == set()


WITHOUT_TORCH = """
import sys
for name in ("torch", "tensordict", "hydra", "matplotlib", "gymnasium"):
    sys.modules[name] = None  # as if it were not installed
from real_robot.ros2.embodied_ros2.safety_node import main
main()
"""


def test_what_watches_over_a_robot_runs_where_torch_is_not_installed(tmp_path: Path):
    joint = TensorSpec((1,), unit="rad", names=("joint",))
    contract = Contract({"joint_position": joint}, replace(joint, low=(-1.0,), high=(1.0,)), 0.05)
    (tmp_path / "contract.json").write_text(contract.to_json())
    options = ["-p", f"checkpoint:={tmp_path}", "-p", "robot:=forward_position"]
    options += ["-p", "options.rate_hz:=20.0", "-p", "options.joints:=[joint]"]
    with Processes(tmp_path) as nodes:
        nodes.spawn("safety_node", [sys.executable, "-c", WITHOUT_TORCH, "--ros-args", *options])
        nodes.change("safety_node", "configure", "activate")
        assert nodes.state("safety_node") == "active"
