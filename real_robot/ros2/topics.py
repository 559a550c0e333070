"""Creates subscriptions and publishers that a node owns, with their QoS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

from rclpy.duration import Duration, Infinite
from rclpy.qos import QoSDurabilityPolicy, QoSLivelinessPolicy, QoSProfile, QoSReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions

from real_robot.ros2.messages.codecs import installed
from real_robot.ros2.nodes.managed import ManagedNode
from real_robot.ros2.robots.tables import Qos

_LEASES = count(1)
types = cache(installed)


def subscribe(
    node: ManagedNode[Any],
    name: str,
    message: str,
    qos: Qos,
    callback: Callable[[Any], None],
    alive: Callable[[int], None] | None = None,
) -> None:
    """Subscribe to `name`; parameters `qos_overrides.*` may change the QoS, and incompatible partners are reported.

    `alive` is called with the number of live publishers whenever it changes; it needs a lease in `qos`.
    """
    events = node.qos_events(name)["subscription"]
    if alive:
        events.liveliness = lambda event: alive(event.alive_count)
        # Fast DDS counts readers of one lease together, so a node that is configured again would get no changes
        qos = replace(qos, lease_s=qos.lease_s + 1e-6 * next(_LEASES))
    node.own(
        node.create_subscription(
            types(message),
            name,
            callback,
            _profile(qos),
            event_callbacks=events,
            qos_overriding_options=QoSOverridingOptions.with_default_policies(),
        )
    )


def publisher(node: ManagedNode[Any], name: str, message: str, qos: Qos) -> Any:  # noqa: ANN401 - rclpy's
    """Create a publisher on `name`; for the QoS, see `subscribe`."""
    entity = node.create_publisher(
        types(message),
        name,
        _profile(qos),
        event_callbacks=node.qos_events(name)["publisher"],
        qos_overriding_options=QoSOverridingOptions.with_default_policies(),
    )
    return node.own(entity)


def _profile(qos: Qos) -> QoSProfile:
    return QoSProfile(
        depth=qos.depth,
        reliability=QoSReliabilityPolicy[qos.reliability.upper()],
        durability=QoSDurabilityPolicy[qos.durability.upper()],
        liveliness=QoSLivelinessPolicy.MANUAL_BY_TOPIC if qos.manual else QoSLivelinessPolicy.AUTOMATIC,
        liveliness_lease_duration=Duration(seconds=qos.lease_s) if qos.lease_s else Infinite,
    )
