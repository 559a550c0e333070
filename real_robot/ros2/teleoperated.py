"""A robot behind ROS 2 topics, and a leader arm, for a program that handles messages while it waits."""

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
"""Time to handle messages that have arrived, in a period that leaves no time to wait."""


@dataclass
class _None:
    """Parameters of a node that has none."""


@contextmanager
def station(
    robot: str,
    contract: Contract,
    options: Mapping[str, Any],
    *,
    prefix: str,
    leader: str = "",
    leader_joints: Sequence[str] = (),
    simulated_time: bool = False,
) -> Iterator[Station]:
    """The `robot` of the tables with its `options`, commanded as by policy_node: on topics with `prefix`.

    `leader` is a topic of a second arm's joint states. `leader_joints` are its joints in the order of the action's
    elements; by default they have the same names.

    Raises:
        UserError: for an unknown robot or option, for a robot that cannot serve the `contract`, and unless there
            is one leader joint for each element of the action.
    """
    arguments = ["--ros-args", "-p", f"use_sim_time:={str(simulated_time).lower()}"]
    rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    node = ManagedNode("record", _None)
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        table = robot_table(robot, contract, options)
        ros_robot = RosRobot(node, table, prefix)
        names = action_names(table.served)
        joints = tuple(leader_joints) or names
        if len(joints) != len(names):
            raise UserError(f"expected leader_joints for {', '.join(names)}, got {list(joints)}")
        leader_arm = _Followed(node, leader, joints) if leader else None

        def alive() -> None:
            _spin(executor, ARRIVED_S)
            ros_robot.beat()

        def begin() -> None:
            ros_robot.reset()
            ros_robot.start()

        lead = leader_arm.positions if leader_arm else lambda: None
        try:
            yield Station(
                ros_robot,
                table.served,
                ros_robot.clock,
                partial(_spin, executor),
                begin,
                has_subscriber=lambda: ros_robot.has_subscriber,
                alive=alive,
                leader=lead,
                translate=table.translate,
                steady=ros_robot.steady,
            )
        finally:
            ros_robot.close()
            _spin(executor, ARRIVED_S)  # deliver the last messages
    finally:
        executor.shutdown()
        node.destroy_node()
        rclpy.shutdown()


class _Followed:
    """Subscribes to the positions of `joints` in the joint states on `topic`."""

    def __init__(self, node: ManagedNode[Any], topic: str, joints: Sequence[str]) -> None:
        self._joints = joints
        self._newest = None
        self._received_s = -np.inf
        subscribe(node, topic, "sensor_msgs/msg/JointState", STATE, self._hear)

    def positions(self) -> Array | None:
        """Newest joint positions [A]; None if older than `LEADER_TIMEOUT_S`."""
        return self._newest if time.monotonic() - self._received_s < LEADER_TIMEOUT_S else None

    def _hear(self, message: JointState) -> None:
        position_of = dict(zip(message.name, message.position, strict=False))
        positions = np.array([position_of.get(joint, np.nan) for joint in self._joints])
        if np.isfinite(positions).all():
            self._newest: Array | None = positions
            self._received_s = time.monotonic()


def _spin(executor: SingleThreadedExecutor, seconds: float) -> None:
    """Handle messages for `seconds`."""
    until = time.monotonic() + seconds
    while (remaining_s := until - time.monotonic()) > 0:
        executor.spin_once(timeout_sec=remaining_s)
