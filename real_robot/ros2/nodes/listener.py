"""Subscribes a node to /tf and /tf_static."""

from __future__ import annotations

from functools import partial
from typing import Any

from embodied.errors import UserError
from real_robot.ros2.messages.transforms import Frames
from real_robot.ros2.nodes.managed import ManagedNode
from real_robot.ros2.robots.tables import Qos
from real_robot.ros2.topics import subscribe

TF = "tf2_msgs/msg/TFMessage"
MOVING = Qos(depth=100, reliability="best_effort")
STATIC = Qos(depth=100, durability="transient_local")
"""Deep, because every message contains only some of the frames."""


class Listener(Frames):
    """The frames that are published to `node`; messages that cannot be read are logged and ignored."""

    def __init__(self, node: ManagedNode[Any]) -> None:
        super().__init__()
        self._log = node.get_logger()
        for topic, qos in (("/tf", MOVING), ("/tf_static", STATIC)):
            subscribe(node, topic, TF, qos, partial(self._hear, topic))
        node.on_jump.append(lambda _: self.forget())

    def _hear(self, topic: str, message: Any) -> None:  # noqa: ANN401 - a ROS message
        try:
            self.take(message, static=topic == "/tf_static")
        except UserError as error:
            self._log.error(f"{topic}: {error}", throttle_duration_sec=1.0)
