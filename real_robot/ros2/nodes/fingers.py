"""Sends a gripper what the policy's direction of travel means: close, or open."""

from __future__ import annotations

from typing import Any

import numpy as np

from real_robot.ros2.messages.codecs import fill
from real_robot.ros2.messages.grippers import Gripper, GripperKind
from real_robot.ros2.nodes.managed import ManagedNode
from real_robot.ros2.robots.tables import COMMAND
from real_robot.ros2.topics import publisher, types

FINGERS = "fingers"


class Fingers:
    """The gripper of `node`: told only when the direction changes, as its goals last."""

    def __init__(self, node: ManagedNode[Any], gripper: Gripper) -> None:
        self._node, self._gripper = node, gripper
        self._closing: bool | None = None
        self._clients: dict[str, Any] = {}
        if gripper.kind is GripperKind.none:
            return
        if gripper.kind is GripperKind.trajectory:
            self._codec = gripper.codec(FINGERS)
            self._out = publisher(node, gripper.name, self._codec.message, COMMAND)
            return
        from rclpy.action import ActionClient

        for goal in (gripper.goal(closing) for closing in (True, False)):
            if goal.name not in self._clients:
                self._clients[goal.name] = ActionClient(node, types(goal.type), goal.name)

    def travel(self, direction: float) -> None:
        """Make it close (direction > 0) or open (< 0), unless it does so already; 0 changes nothing."""
        closing = direction > 0.0
        if direction == 0.0 or closing == self._closing or self._gripper.kind is GripperKind.none:
            return
        if self._gripper.kind is GripperKind.trajectory:
            goals = np.full(len(self._gripper.fingers), self._gripper.finger_m(closing))
            self._out.publish(self._codec.encode({FINGERS: goals}, types, 0.0))
        elif not self._ask(closing):
            return
        self._closing = closing

    def forget(self) -> None:
        """Whatever it does: the next direction is sent."""
        self._closing = None

    def close(self) -> None:
        """Destroy the action clients, which the node does not own."""
        for client in self._clients.values():
            client.destroy()

    def _ask(self, closing: bool) -> bool:
        goal = self._gripper.goal(closing)
        client = self._clients[goal.name]
        if not client.server_is_ready():
            self._node.get_logger().error(f"no action server {goal.name}: it waits", throttle_duration_sec=1.0)
            return False
        client.send_goal_async(fill(types(goal.type).Goal(), goal.fields))
        return True
