"""Detection of dead nodes: signs of life on a topic with the node's state, by DDS's own liveliness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from embodied.errors import UserError
from real_robot.ros2.messages.codecs import fill
from real_robot.ros2.nodes.managed import ManagedNode
from real_robot.ros2.robots.tables import Qos
from real_robot.ros2.topics import publisher, subscribe, types

SAFETY_STATE = "safety_node/state"
"""Topic of safety_node's state, with signs of life."""
STATE_LEASE_S = 0.1
SIGNED = Qos(durability="transient_local", lease_s=STATE_LEASE_S, manual=True)
"""QoS of topics with signs of life; their publishers sign `SIGNS` times per lease."""
SIGNS = 4


def signed(node: ManagedNode[Any], topic: str) -> Callable[[str], None]:
    """Publish the node's state on `topic`, signed while the node is active; returns the function that changes it."""
    out = publisher(node, topic, "std_msgs/msg/String", SIGNED)

    def sign() -> None:
        if node.active:
            out.assert_liveliness()

    node.own(node.create_timer(STATE_LEASE_S / SIGNS, sign, clock=node.steady))
    return lambda state: out.publish(fill(types("std_msgs/msg/String")(), {"data": state}))


def watch(
    node: ManagedNode[Any], topic: str, timeout_s: float, alive: Callable[[int], None], changes: Callable[[str], None]
) -> None:
    """Call `alive` with the number of live publishers of a `signed` topic; after `timeout_s` of silence one is dead.

    `changes` is called with each state.

    Raises:
        UserError: if `timeout_s` is shorter than the publishers' lease.
    """
    if timeout_s < STATE_LEASE_S:
        raise UserError(f"expected a time-out of at least {STATE_LEASE_S} s, got {timeout_s}")
    qos = replace(SIGNED, lease_s=timeout_s)
    subscribe(node, topic, "std_msgs/msg/String", qos, lambda message: changes(message.data), alive=alive)
