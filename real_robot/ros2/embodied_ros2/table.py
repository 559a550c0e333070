"""The table of nodes and launch files, used by the launch files and their tests.

It imports nothing: `ros2 launch` runs under ROS's own Python, where embodied-rl does not have to be installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

PACKAGE = "embodied_ros2"


@dataclass(frozen=True)
class Argument:
    """A launch argument name:=value; an empty value leaves the choice to the parameter file."""

    name: str
    default: str
    description: str


NAMESPACE = Argument("namespace", "", "prefix of all relative topics and services, such as robot1")
PARAMETERS = Argument("parameters", "", "parameter file instead of the one in config/")
ACTIVATED = Argument("activate", "false", "activate policy_node at once, instead of by ros2 lifecycle set")
USE_SIM_TIME = Argument("use_sim_time", "false", "use the time of /clock")
LIMITS = Argument("limits", "", "safety limits file instead of the one in config/")
RECORD = Argument("record", "", "folder in which ros2 bag record writes all topics, a bag for every start; empty: none")
CHECKPOINT = Argument("checkpoint", "", "a run of train.py, or one of its checkpoints")
ROBOT = Argument("robot", "", "the robot's interface: a row of the README's table")
RATE = Argument("rate_hz", "", "rate of commands, which must be the policy's")


@dataclass(frozen=True)
class Node:
    """A lifecycle node, named like its program.

    `parameters` are the parameters that launch arguments set, by argument. A node that `waits` is activated by the
    operator, unless activate:=true. When its process ends, it is restarted if it `respawns`; otherwise all nodes end.
    Topics are remapped by the namespace only, because the robot tables have the robots' topic names.
    """

    executable: str
    parameters: Mapping[str, str]
    waits: bool = False
    respawns: bool = True


ALL = {name: name for name in ("use_sim_time", "checkpoint", "robot")} | {"rate_hz": "options.rate_hz"}
NODES = {
    node.executable: node
    for node in (
        Node("policy_node", ALL | {"limits": "limits"}, waits=True),
        # the cause of its end, and a latched emergency stop, are unknown: a person has to check first
        Node("safety_node", ALL | {"limits": "limits"}, respawns=False),
        Node("sim_node", {"checkpoint": "checkpoint"}, respawns=False),
        Node("cartesian_node", ALL),
        Node("scene_node", ALL),
    )
}


@dataclass(frozen=True)
class Launch:
    """The nodes and arguments of a launch file, in order."""

    nodes: tuple[Node, ...]
    arguments: tuple[Argument, ...]


def _launch(nodes: tuple[str, ...], *arguments: Argument) -> Launch:
    return Launch(tuple(NODES[name] for name in nodes), (NAMESPACE, PARAMETERS, CHECKPOINT, RECORD, *arguments))


ON_A_ROBOT = (LIMITS, ACTIVATED, USE_SIM_TIME, ROBOT, RATE)
SIMULATED = (LIMITS, replace(ACTIVATED, default="true"), replace(USE_SIM_TIME, default="true"))
CONTROLLER = ("safety_node", "policy_node")
LAUNCHES = {
    "arm": _launch(CONTROLLER, *ON_A_ROBOT),
    "arm_cartesian": _launch(("cartesian_node", "scene_node", *CONTROLLER), *ON_A_ROBOT),
    "quadrotor": _launch(CONTROLLER, *ON_A_ROBOT),
    "vehicle": _launch(CONTROLLER, *ON_A_ROBOT),
    "sim": _launch(("sim_node", *CONTROLLER), *SIMULATED),
    "sim_to_real_eval": _launch(("sim_node", *CONTROLLER), *SIMULATED),
}
"""Launches by name: launch/<name>.launch.py, with parameters in launch/config/<name>.yaml."""
