"""Builds a launch description from the table of nodes; needs ROS's `launch` and `launch_ros`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch import LaunchContext, LaunchDescription  # type: ignore[import-not-found]
from launch.actions import (  # type: ignore[import-not-found]
    DeclareLaunchArgument,
    EmitEvent,
    OpaqueFunction,
    RegisterEventHandler,
)
from launch.events import matches_action  # type: ignore[import-not-found]
from launch_ros.actions import LifecycleNode  # type: ignore[import-not-found]
from launch_ros.event_handlers import OnStateTransition  # type: ignore[import-not-found]
from launch_ros.events.lifecycle import ChangeState  # type: ignore[import-not-found]

from real_robot.ros2.nodes.table import ACTIVATE, CONFIGURE, LAUNCHES, PACKAGE, Launch, Node


def description(name: str, directory: Path) -> LaunchDescription:
    """The launch description of launch file `name` in `directory`: its arguments, and its nodes up to active."""
    launch = LAUNCHES[name]
    arguments = [
        DeclareLaunchArgument(argument.name, default_value=argument.default, description=argument.description)
        for argument in launch.arguments
    ]
    config = directory / "config"
    files = {"parameters": str(config / f"{name}.yaml"), "limits": str(config / f"{name}_limits.yaml")}
    return LaunchDescription([*arguments, OpaqueFunction(function=_start, args=[launch, files])])


def _start(context: LaunchContext, launch: Launch, files: dict[str, str]) -> list[Any]:
    """All nodes; arguments of the same names may replace `files`."""
    names = [argument.name for argument in launch.arguments]
    given = {name: context.launch_configurations[name] or files.get(name, "") for name in names}
    return [action for node in launch.nodes for action in _managed(node, given)]


def _managed(node: Node, given: dict[str, str]) -> list[Any]:
    """The node, configured once it runs, and activated once it is configured."""
    overrides = {parameter: _value(given[name]) for name, parameter in node.parameters.items() if given.get(name)}
    process = LifecycleNode(
        package=PACKAGE,
        executable=node.executable,
        name=node.executable,
        namespace=given["namespace"],
        parameters=[given["parameters"], *([overrides] if overrides else [])],
        output="screen",
    )
    actions = [process, EmitEvent(event=_change(process, CONFIGURE))]
    if not node.waits or given.get("activate") == "true":
        activate = EmitEvent(event=_change(process, ACTIVATE))
        configured = OnStateTransition(
            target_lifecycle_node=process, start_state="configuring", goal_state="inactive", entities=[activate]
        )
        actions.insert(1, RegisterEventHandler(configured))
    return actions


def _change(process: LifecycleNode, transition: int) -> ChangeState:
    return ChangeState(lifecycle_node_matcher=matches_action(process), transition_id=transition)


def _value(text: str) -> bool | float | str:
    """A parameter's value: ROS does not turn text into numbers."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text
