"""Launch files: nodes as in the table of nodes, existing files, and arguments that reach the nodes."""

import ast
import compileall
from pathlib import Path

import pytest
import yaml

from real_robot.ros2.embodied_ros2.table import LAUNCHES, NODES
from real_robot.ros2.robots.registry import ROBOTS
from real_robot.safety.limits import load_limits
from tests.real_robot.ros2.launching.recorder import LAUNCH, kind, launched

each_launch = pytest.mark.parametrize("name", sorted(LAUNCHES))


def test_every_file_is_in_the_table_and_compiles():
    assert {path.name.removesuffix(".launch.py") for path in LAUNCH.glob("*.launch.py")} == set(LAUNCHES)
    assert compileall.compile_dir(LAUNCH, quiet=1, force=True, maxlevels=0)


@each_launch
def test_launch_files_import_launch_and_the_table_alone(name):
    tree = ast.parse((LAUNCH / f"{name}.launch.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"pathlib", "launch", "embodied_ros2.launching"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]


@each_launch
def test_a_description_is_the_tables(name):
    started = launched(name, {"checkpoint": "/run"})
    assert started.arguments == {argument.name: argument.default for argument in LAUNCHES[name].arguments}
    assert [node.executable for node in started.nodes] == [node.executable for node in LAUNCHES[name].nodes]
    for node in started.nodes:
        file, overrides = node.parameters
        assert Path(file).is_file()
        assert overrides["checkpoint"] == "/run"
        assert Path(overrides.get("limits", file)).is_file()
        assert set(overrides) <= {"autostart", *NODES[node.executable].parameters.values()}


@each_launch
def test_parameter_files_are_of_nodes_that_are_launched(name):
    sections = yaml.safe_load((LAUNCH / "config" / f"{name}.yaml").read_text())
    assert set(sections) <= {"/**", *(f"/**/{node.executable}" for node in LAUNCHES[name].nodes)}
    parameters = sections["/**"]["ros__parameters"]
    assert parameters["robot"] in ROBOTS
    assert all(set(section) == {"ros__parameters"} for section in sections.values())


@each_launch
def test_safety_limits_can_be_read(name):
    limits = load_limits(LAUNCH / "config" / f"{name}_limits.yaml")
    assert limits.command_timeout_s > 0


def test_arguments_reach_the_nodes_they_are_for():
    given = {
        "checkpoint": "/run",
        "namespace": "drone1",
        "robot": "px4_rates",
        "rate_hz": "50",
        "use_sim_time": "true",
        "parameters": "/mine.yaml",
        "limits": "/limits.yaml",
    }
    safety, policy = launched("quadrotor", given).nodes
    assert {node.namespace for node in (safety, policy)} == {"drone1"}
    overrides = {"checkpoint": "/run", "robot": "px4_rates", "options.rate_hz": 50.0, "use_sim_time": True}
    assert safety.parameters == ["/mine.yaml", overrides | {"limits": "/limits.yaml", "autostart": "active"}]
    assert policy.parameters == ["/mine.yaml", overrides | {"limits": "/limits.yaml", "autostart": "inactive"}]


@each_launch
def test_a_bag_is_recorded_if_a_folder_is_given(name):
    *nodes, bag = launched(name, {"record": "/bags"}).nodes
    assert len(nodes) == len(LAUNCHES[name].nodes)
    assert kind(bag) == "ExecuteProcess"
    assert bag.cmd[:4] == ["ros2", "bag", "record", "--all"]
    assert bag.cmd[-1].startswith("/bags/20")
    assert not hasattr(bag, "on_exit")


def test_what_is_not_given_is_left_to_the_file():
    safety, *_ = launched("vehicle", {}).nodes
    assert set(safety.parameters[1]) == {"autostart", "use_sim_time", "limits"}


def starts(name: str, given: dict[str, str]) -> dict[str, str]:
    """The state that each node takes itself to, in order."""
    return {node.executable: node.parameters[1]["autostart"] for node in launched(name, given).nodes}


def test_on_a_robot_the_policy_waits_for_the_operator():
    for name in ("arm", "quadrotor", "vehicle"):
        states = starts(name, {})
        assert states.pop("policy_node") == "inactive"
        assert set(states.values()) == {"active"}
    assert starts("vehicle", {"activate": "true"})["policy_node"] == "active"
    assert set(starts("sim_to_real_eval", {}).values()) == {"active"}


@each_launch
def test_processes_that_end_are_started_again_but_for_safety_and_the_simulator(name):
    for node in launched(name, {}).nodes:
        if node.executable in ("safety_node", "sim_node"):
            assert kind(node.on_exit) == "Shutdown"
            assert not hasattr(node, "respawn")
        else:
            assert node.respawn
            assert node.respawn_max_retries > 0
            assert not hasattr(node, "on_exit")
