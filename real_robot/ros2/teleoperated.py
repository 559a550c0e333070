"""A robot behind ROS 2 topics, and a leader arm, for a program that is no node: messages are handled while it waits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import JointState

from embodied.contract import Contract
from embodied.errors import UserError
from real_robot.robots.robot import Array
from real_robot.robots.teleoperation import Station
from real_robot.ros2.nodes.managed import ManagedNode
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.robots.tables import STATE
from real_robot.ros2.ros_robot import RosRobot
from real_robot.ros2.topics import subscribe
from real_robot.safety.filters import action_names

LEADER_TIMEOUT_S = 0.2
ARRIVED_S = 1e-3
"""For what has arrived, in a period that leaves no time to wait."""


@dataclass
class _None:
    """A node without parameters."""


@contextmanager
def station(
    robot: str,
    wanted: Contract,
    options: Mapping[str, Any],
    *,
    prefix: str,
    leader: str = "",
    leader_joints: Sequence[str] = (),
    simulated_time: bool = False,
) -> Iterator[Station]:
    """The `robot` of the tables with its `options`, driven as policy_node does: on topics with `prefix`.

    `leader` is a topic of a second arm's joint states, whose `leader_joints` are the action's, in its order; by default
    they have the same names.

    Raises:
        UserError: for an unknown robot or option, one that cannot serve the contract `wanted`, and for leader joints
            that are not one for each element of the action.
    """
    arguments = ["--ros-args", "-p", f"use_sim_time:={str(simulated_time).lower()}"]
    rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    node = ManagedNode("record", _None)
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        table = robot_table(robot, wanted, options)
        made, names = RosRobot(node, table, prefix), action_names(table.served)
        joints = tuple(leader_joints) or names
        if len(joints) != len(names):
            raise UserError(f"expected leader_joints for {', '.join(names)}, got {list(joints)}")
        followed = _Followed(node, leader, joints) if leader else None

        def alive() -> None:
            _spin(executor, ARRIVED_S)
            made.beat()

        def begin() -> None:
            made.reset()
            made.start()

        lead = followed.positions if followed else lambda: None
        try:
            yield Station(
                made,
                table.served,
                made.clock,
                partial(_spin, executor),
                begin,
                heard=lambda: made.heard,
                alive=alive,
                leader=lead,
                translate=table.translate,
            )
        finally:
            made.close()
            _spin(executor, ARRIVED_S)  # what was sent last
    finally:
        executor.shutdown()
        node.destroy_node()
        rclpy.shutdown()


class _Followed:
    """The newest positions of `joints` on the joint states of `topic`."""

    def __init__(self, node: ManagedNode[Any], topic: str, joints: Sequence[str]) -> None:
        self._joints, self._newest, self._heard_s = joints, None, -np.inf
        subscribe(node, topic, "sensor_msgs/msg/JointState", STATE, self._hear)

    def positions(self) -> Array | None:
        """They, unless they are older than `LEADER_TIMEOUT_S`."""
        return self._newest if time.monotonic() - self._heard_s < LEADER_TIMEOUT_S else None

    def _hear(self, message: JointState) -> None:
        at = dict(zip(message.name, message.position, strict=False))
        found = np.array([at.get(joint, np.nan) for joint in self._joints])
        if np.isfinite(found).all():
            self._newest: Array | None = found
            self._heard_s = time.monotonic()


def _spin(executor: SingleThreadedExecutor, seconds: float) -> None:
    """Handle messages for `seconds`."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        executor.spin_once(timeout_sec=left)
