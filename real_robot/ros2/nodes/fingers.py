"""Sends a gripper goals by the policy's direction of travel, close or open, and monitors the answers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from real_robot.ros2.messages.codecs import fill
from real_robot.ros2.messages.grippers import Gripper, GripperKind
from real_robot.ros2.nodes.managed import ManagedNode
from real_robot.ros2.robots.tables import COMMAND
from real_robot.ros2.topics import publisher, types

FINGERS = "fingers"
ANSWER_S = 1.0
"""Steady time within which an action server has to answer a goal, and after which an unaccepted goal is resent."""
ABORTED = 6
"""Status of an aborted goal in action_msgs/GoalStatus."""


class Fingers:
    """Sends goals to the gripper of `node` only when the direction changes, because goals persist.

    A goal that is rejected, or not answered within `ANSWER_S`, is sent again until the direction changes; call `watch`
    periodically.
    """

    def __init__(self, node: ManagedNode[Any], gripper: Gripper) -> None:
        self._node = node
        self._gripper = gripper
        self._closing: bool | None = None
        self._clients: dict[str, Any] = {}
        self._goal_s = -math.inf
        self._accepted = True
        self._refusal = ""
        self.aborted = 0
        """Number of goals that the gripper aborted after it had accepted them."""
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
        """Close (direction > 0) or open (< 0) the gripper, unless it does so already; no-op for 0."""
        closing = direction > 0.0
        if direction == 0.0 or closing == self._closing or self._gripper.kind is GripperKind.none:
            return
        if self._gripper.kind is GripperKind.trajectory:
            goals = np.full(len(self._gripper.fingers), self._gripper.finger_m(closing))
            self._out.publish(self._codec.encode({FINGERS: goals}, types, 0.0))
        else:
            self._ask(closing)
        self._closing = closing

    @property
    def fault(self) -> str:
        """Description of the gripper's fault, with a remedy; "" if there is none."""
        gripper = self._gripper
        if gripper.kind is GripperKind.trajectory and not self._out.get_subscription_count():
            return f"nobody listens on {gripper.name}: start the gripper's controller"
        if missing := [name for name, client in self._clients.items() if not client.server_is_ready()]:
            return f"no action server {', '.join(missing)}: start the gripper's driver"
        return self._refusal

    def watch(self) -> None:
        """Resend a goal that was not accepted in time."""
        overdue = self._node.steady_s - self._goal_s > ANSWER_S
        if self._accepted or not overdue or self._closing is None:
            return
        if not self._refusal:
            self._refuse(f"has not answered a goal for {ANSWER_S:g} s")
        self._ask(self._closing)

    def forget(self) -> None:
        """Send the next direction even if it does not change; a goal that was not accepted remains due."""
        if self._accepted:
            self._closing = None

    def abandon(self) -> None:
        """Drop every goal."""
        self._closing = None
        self._accepted = True
        self._refusal = ""

    def close(self) -> None:
        """Destroy the action clients, which the node does not own."""
        for client in self._clients.values():
            client.destroy()

    def _ask(self, closing: bool) -> None:
        goal = self._gripper.goal(closing)
        client = self._clients[goal.name]
        self._goal_s = self._node.steady_s
        self._accepted = False
        if not client.server_is_ready():
            self._node.get_logger().error(f"no action server {goal.name}: it waits", throttle_duration_sec=1.0)
            return
        future = client.send_goal_async(fill(types(goal.type).Goal(), goal.fields))
        future.add_done_callback(partial(self._answered, self._goal_s))

    def _answered(self, goal_s: float, future: Any) -> None:  # noqa: ANN401 - rclpy's
        """Process the answer to the goal that was sent at `goal_s`, unless another goal has been sent since."""
        if goal_s != self._goal_s or future.cancelled():
            return
        handle = future.result()
        if not handle.accepted:
            self._refuse("rejects the goal")
            return
        self._accepted = True
        self._refusal = ""
        handle.get_result_async().add_done_callback(self._ended)

    def _refuse(self, why: str) -> None:
        closing = "close" if self._closing else "open"
        self._refusal = f"the gripper {self._gripper.name} {why} to {closing}, which is sent again: see its driver"
        self._node.get_logger().error(self._refusal, throttle_duration_sec=1.0)

    def _ended(self, future: Any) -> None:  # noqa: ANN401 - rclpy's
        """Log an aborted goal, which is not resent: a gripper that holds an object may end with this status."""
        if not future.cancelled() and future.result().status == ABORTED:
            self.aborted += 1
            name = self._gripper.name
            self._node.get_logger().warning(f"the gripper {name} gave up a goal", throttle_duration_sec=1.0)
