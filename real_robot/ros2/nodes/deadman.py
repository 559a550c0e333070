"""deadman_node: stops a robot that would follow its last command for ever when safety_node ends or hangs.

A process of its own that does nothing else. It is needed by rows such as `forward_velocity`, whose controllers have no
time-out, and safety_node commands nothing there without it; on all other robots it only watches.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rclpy.duration import Duration

from embodied.errors import UserError
from real_robot.ros2.nodes.managed import ERROR, ManagedNode, Report
from real_robot.ros2.nodes.supervision import DEADMAN_STATE, SAFETY_STATE, signed, watch
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.robots.tables import ACTION
from real_robot.ros2.ros_robot import publisher, read_contract, types

STOPS_FOR_S = 1.0
"""Steady time for which the stop is repeated; then others, such as teleoperation, may command."""

ACKNOWLEDGED_S = 0.2
"""Longest wait for the controller to have received the last stop."""


@dataclass
class DeadmanSettings:
    """Parameters of deadman_node.

    Attributes:
        checkpoint, robot, options: as in safety_node.
        timeout_s: time without a sign of life of safety_node after which the robot is stopped.
    """

    checkpoint: str = ""
    robot: str = "simulation"
    options: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 0.2


class DeadmanNode(ManagedNode[DeadmanSettings]):
    """Publishes the row's stop every period for `STOPS_FOR_S` once safety_node has lived and does no more."""

    def __init__(self) -> None:
        super().__init__("deadman_node", DeadmanSettings)
        self._lived = False

    def configure(self) -> None:
        """Watch safety_node and advertise the robot's commands."""
        settings = self.settings
        table = self._table = robot_table(settings.robot, read_contract(settings.checkpoint), settings.options)
        self._lived, self._since_s = False, math.inf
        self.reports["deadman"] = self._report
        self._state = signed(self, DEADMAN_STATE)
        if not table.keeps_moving:
            return
        if table.at_rest is None or np.isnan(table.at_rest).any():
            raise UserError(f"{table.name} has no constant command that stops it, so nothing can stop it blindly")
        self._stop = np.array(table.at_rest)
        self._out = publisher(self, table.command.name, table.command.codec.message, table.command.qos)
        watch(self, SAFETY_STATE, settings.timeout_s, self._lives)
        self.own(self.create_timer(table.control_dt_s, self._repeat, clock=self.steady))

    def activate(self) -> None:
        """Stop the robot from now on if safety_node ends."""
        self._state("watching")

    def deactivate(self) -> None:
        """Stop the robot, which nobody would afterwards if safety_node has just ended; safety_node holds, too."""
        self._state("inactive")
        if self._lived:
            self._send()
            self._out.wait_for_all_acked(Duration(seconds=ACKNOWLEDGED_S))

    def _lives(self, alive: int) -> None:
        if alive == 0 and self._lived and self.active:
            self.get_logger().error("safety_node gives no sign of life: the robot is stopped")
            self._since_s = time.monotonic()
            self._repeat()
        elif alive:
            self._lived, self._since_s = True, math.inf

    def _repeat(self) -> None:
        if 0.0 <= time.monotonic() - self._since_s <= STOPS_FOR_S:
            self._send()

    def _send(self) -> None:
        now_s = self.get_clock().now().nanoseconds / 1e9
        self._out.publish(self._table.command.codec.encode({ACTION: self._stop}, types, now_s))

    def _report(self) -> Report:
        if not self._table.keeps_moving:
            return Report(f"{self._table.name} stops by itself")
        if self._since_s < math.inf:
            return Report("safety_node gives no sign of life: the robot was stopped", ERROR)
        return Report("watches safety_node" if self._lived else "waits for safety_node")
