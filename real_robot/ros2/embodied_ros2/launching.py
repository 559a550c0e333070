"""Builds a launch description from the table of nodes; needs ROS's `launch` and `launch_ros`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from launch import LaunchContext, LaunchDescription  # type: ignore[import-not-found]
from launch.actions import (  # type: ignore[import-not-found]
    DeclareLaunchArgument,
    ExecuteProcess,
    OpaqueFunction,
    Shutdown,
)
from launch_ros.actions import Node as Process  # type: ignore[import-not-found]

from .table import LAUNCHES, PACKAGE, Launch, Node

RESPAWN_DELAY_S = 2.0
RESPAWNS = 5
"""Delay before a process that has ended is restarted, and number of restarts."""


def description(name: str, directory: Path) -> LaunchDescription:
    """Build the launch description of launch file `name` in `directory`: its arguments and its nodes."""
    launch = LAUNCHES[name]
    arguments = [
        DeclareLaunchArgument(argument.name, default_value=argument.default, description=argument.description)
        for argument in launch.arguments
    ]
    config = directory / "config"
    files = {"parameters": str(config / f"{name}.yaml"), "limits": str(config / f"{name}_limits.yaml")}
    return LaunchDescription([*arguments, OpaqueFunction(function=_start, args=[launch, files])])


def _start(context: LaunchContext, launch: Launch, files: dict[str, str]) -> list[Any]:
    """Start all nodes, and the recorder; arguments with the same names replace `files`."""
    names = [argument.name for argument in launch.arguments]
    values = {name: context.launch_configurations[name] or files.get(name, "") for name in names}
    recorders = [_recorder(Path(values["record"]))] if values["record"] else []
    return [*(_process(node, values) for node in launch.nodes), *recorders]


def _recorder(folder: Path) -> ExecuteProcess:
    """Process of rosbag2, whose QoS follows the publishers'; its failure ends no other process."""
    bag = folder / time.strftime("%Y-%m-%d_%H-%M-%S")
    return ExecuteProcess(cmd=["ros2", "bag", "record", "--all", "--storage", "mcap", "--output", str(bag)])


def _process(node: Node, arguments: dict[str, str]) -> Process:
    """Process of a node. It configures and activates itself, also after a restart."""
    overrides = {
        parameter: _value(arguments[name]) for name, parameter in node.parameters.items() if arguments.get(name)
    }
    overrides["autostart"] = "inactive" if node.waits and arguments.get("activate") != "true" else "active"
    ending = {"respawn": True, "respawn_delay": RESPAWN_DELAY_S, "respawn_max_retries": RESPAWNS}
    return Process(
        package=PACKAGE,
        executable=node.executable,
        name=node.executable,
        namespace=arguments["namespace"],
        parameters=[arguments["parameters"], overrides],
        output="screen",
        **(ending if node.respawns else {"on_exit": Shutdown(reason=f"{node.executable} has ended")}),
    )


def _value(text: str) -> bool | float | str:
    """Convert text to a parameter's value, because ROS does not convert text to numbers."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text
