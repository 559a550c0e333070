"""The one table of nodes and of what is launched together: it feeds the launch files and their tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PACKAGE = "embodied_ros2"


@dataclass(frozen=True)
class Argument:
    """A launch argument: given as name:=value. An empty default leaves the parameter to the YAML file."""

    name: str
    default: str
    description: str


ARGUMENTS = {
    argument.name: argument
    for argument in (
        Argument("namespace", "", "prefix of all topics and services, such as cf1"),
        Argument("use_sim_time", "false", "take time from /clock"),
        Argument("parameters", "", "YAML file of parameters in place of config/<launch>.yaml"),
        Argument("checkpoint", "", "directory of a run of train.py, or one of its checkpoints"),
        Argument("robot", "", "row of real_robot/ros2/robots.py"),
    )
}


@dataclass(frozen=True)
class Node:
    """One node: its executable, which is its name too, and which launch arguments it takes as parameters.

    `remappings` are topics by the name that the node knows.
    """

    executable: str
    parameters: tuple[str, ...] = ()
    remappings: Mapping[str, str] = field(default_factory=dict)


NODES = {
    node.executable: node
    for node in (
        Node("policy_node", ("checkpoint", "robot")),
        Node("safety_node", ("robot",)),
        Node("recorder_node", ("robot",)),
        Node("sim_node", ("checkpoint",)),
    )
}

LAUNCHES: dict[str, tuple[str, ...]] = {
    "arm": ("policy_node", "safety_node", "recorder_node"),
    "quadrotor": ("policy_node", "safety_node", "recorder_node"),
    "vehicle": ("policy_node", "safety_node", "recorder_node"),
    "sim": ("sim_node",),
    "sim_to_real_eval": ("sim_node", "policy_node", "safety_node", "recorder_node"),
}
"""What each launch file starts, in order."""
