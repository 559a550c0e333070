"""Checks that the nodes that a robot's commands rely on exist, and that nobody else commands the robot."""

from __future__ import annotations

import math
from typing import Any

from real_robot.ros2.messages.codecs import Message
from real_robot.ros2.nodes.managed import ManagedNode
from real_robot.ros2.robots.tables import Mode, Table

LOOK_S = 0.25
"""Steady time between two queries of the ROS graph. DDS itself reports the death of a process after up to 20 s."""
ENDED = "has the robot's driver ended? Start it again"


class Partners:
    """Monitors the driver of the robot of `table` and other publishers of its commands in the ROS graph.

    Args:
        node: the node that queries the graph.
        table: interface of the robot.
        command: topic of commands.
        commands: whether `node` commands the robot directly, not through a safety node.
    """

    def __init__(self, node: ManagedNode[Any], table: Table, command: str, commands: bool) -> None:
        self._node = node
        self._table = table
        self._command = command
        self._refusals: dict[str, str] = {}
        self._received_s = dict.fromkeys((mode.name for mode in table.modes), -math.inf)
        self._graph_fault = ""
        if commands:
            node.own(node.create_timer(LOOK_S, self._look, clock=node.steady))

    def hear(self, mode: Mode, message: Message) -> None:
        """Process the driver's message on the topic of `mode`."""
        self._refusals[mode.name], self._received_s[mode.name] = mode.refusal(message), self._node.steady_s

    @property
    def refusal(self) -> str:
        """Reason for not commanding the robot, with a remedy; "" if all nodes exist and none reports a refusal."""
        if missing := [name for name in self._received_s if name not in self._refusals]:
            return f"nothing heard on {', '.join(missing)}: is that the robot's driver? (options.driver_status)"
        for mode in self._table.modes:
            silent_s = self._node.steady_s - self._received_s[mode.name]
            if mode.timeout_s is not None and silent_s > mode.timeout_s:
                return f"nothing heard on {mode.name} for {silent_s:.1f} s: {ENDED}"
        return next(filter(None, self._refusals.values()), "") or self._graph_fault

    def _look(self) -> None:
        """Query the graph for other publishers of the robot's commands, and for the driver's publishers."""
        us = self._node.get_namespace(), self._node.get_name()
        # an entry with our own name is this node, or a dead one that is still in the graph
        others = sorted(
            f"{entry.node_namespace.rstrip('/')}/{entry.node_name}"
            for entry in self._node.get_publishers_info_by_topic(self._name(self._command))
            if (entry.node_namespace, entry.node_name) != us
        )
        gone = [
            mode.name
            for mode in self._table.modes
            if mode.timeout_s is None and not self._node.get_publishers_info_by_topic(self._name(mode.name))
        ]
        self._graph_fault = ""
        if others:
            self._graph_fault = f"{', '.join(others)} publishes on {self._command}, too: end it, only one may command"
        elif gone:
            self._graph_fault = f"nobody publishes on {', '.join(gone)}: {ENDED}"

    def _name(self, topic: str) -> str:
        """The topic's name after remapping."""
        return self._node.resolve_topic_name(topic)
