"""recorder_node: records a robot's topics as they were sent into MCAP files that rosbag2 and Foxglove read.

It is a separate process, so that the other nodes never wait for a disk. The policy's observations and decisions, which
a replay needs, are recorded by policy_node (parameter `recording`). QoS follows the publishers', as rosbag2's does: a
topic is reliable if all of its publishers are, and its last messages are recorded if all of them keep those.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rclpy.qos import QoSDurabilityPolicy, QoSProfile, QoSReliabilityPolicy

from embodied.errors import UserError
from real_robot.recording.recorder import Recorder
from real_robot.ros2.nodes.managed import OK, WARN, ManagedNode, Report
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.ros_robot import read_contract, types

DEPTH = 50
"""Messages of a topic that wait while the node is busy."""
LOOK_EVERY_S = 0.1
"""Steady time after which publishers are looked for, as rosbag2 does."""
FRAMES = {name: "tf2_msgs/msg/TFMessage" for name in ("/tf", "/tf_static")}
"""Recorded wherever tf2_msgs is installed."""
BREAK = "\n" + "=" * 80 + "\n"
PRIMITIVES = {"double": "float64", "float": "float32", "boolean": "bool", "octet": "byte"}
"""Types whose names in Python's message classes differ from those in .msg files."""


@dataclass
class RecorderSettings:
    """Parameters of recorder_node.

    Attributes:
        checkpoint, robot, options, prefix: as in safety_node.
        directory: of the files, one per activation, named by time.
        topics: further topics to record, each as "/tf tf2_msgs/msg/TFMessage".
            `FRAMES` always are.
    """

    checkpoint: str = ""
    robot: str = "simulation"
    options: dict[str, Any] = field(default_factory=dict)
    prefix: str = "policy/"
    directory: str = "."
    topics: list[str] = field(default_factory=lambda: ["/diagnostics diagnostic_msgs/msg/DiagnosticArray"])


class RecorderNode(ManagedNode[RecorderSettings]):
    """Records while it is active."""

    def __init__(self) -> None:
        super().__init__("recorder_node", RecorderSettings)
        self._recorder: Recorder | None = None
        self._topics: dict[str, _Topic] = {}

    def configure(self) -> None:
        """Find the types of the robot's topics, the policy's commands, and the requested topics."""
        settings = self.settings
        table = robot_table(settings.robot, read_contract(settings.checkpoint), settings.options)
        self._contract = table.contract
        command = table.command
        spoken = [(topic.name, topic.codec.message) for topic in (*table.states, command)]
        spoken.append((settings.prefix + command.name, command.codec.message))
        for entry in settings.topics:
            if len(entry.split()) != 2:
                raise UserError(f"expected a topic and its type, such as '/tf tf2_msgs/msg/TFMessage', got {entry!r}")
            spoken.append(tuple(entry.split()))
        self._topics = {name: _Topic(kind, definition(kind)) for name, kind in spoken}
        try:
            self._topics |= {name: _Topic(kind, definition(kind)) for name, kind in FRAMES.items()}
        except UserError as error:
            self.get_logger().warning(f"{' and '.join(FRAMES)} are not recorded: {error}")
        self._directory = Path(settings.directory)
        if not self._directory.is_dir():
            raise UserError(f"expected a directory for recordings, got {self._directory}")
        self._messages = 0
        self.own(self.create_timer(LOOK_EVERY_S, self._listen, clock=self.steady))
        self.reports["recording"] = self._report

    def activate(self) -> None:
        """Begin a file, and listen: what publishers keep of the time before is in every file."""
        path = self._directory / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{time.time_ns() % 10**9:09d}.mcap"
        origin = {"checkpoint": self.settings.checkpoint, "robot": self.settings.robot}
        self._recorder = Recorder(path, self._contract, origin=origin, clock=self._now_s)
        self.get_logger().info(f"records into {path}")
        self._listen()

    def deactivate(self) -> None:
        """Finish the file."""
        recorder, self._recorder = self._recorder, None
        for topic in self._topics.values():
            self._drop(topic)
        if recorder:
            recorder.close()

    def _listen(self) -> None:
        """Subscribe to every topic that is published, with the QoS that all of its publishers offer."""
        for name, topic in self._topics.items() if self._recorder else ():
            profile = matching([each.qos_profile for each in self.get_publishers_info_by_topic(name)])
            if profile is None or profile == topic.profile:
                continue
            self._drop(topic)
            events = self.qos_events(name)["subscription"]
            events.message_lost = partial(self._miss, topic)
            hear = partial(self._hear, self.resolve_topic_name(name), topic)
            kind = types(topic.type)
            topic.subscription = self.create_subscription(kind, name, hear, profile, event_callbacks=events, raw=True)
            topic.profile = profile

    def _drop(self, topic: _Topic) -> None:
        if topic.subscription:
            self.destroy_subscription(topic.subscription)
        topic.subscription = topic.profile = None

    def _now_s(self) -> float:
        return self.get_clock().now().nanoseconds / 1e9

    def _hear(self, name: str, topic: _Topic, data: bytes) -> None:
        if self._recorder:
            self._recorder.message(name, topic.type, topic.definition, data, self._now_s())
            self._messages += 1

    def _miss(self, topic: _Topic, event: Any) -> None:  # noqa: ANN401 - rclpy's
        topic.lost += event.total_count_change

    def _report(self) -> Report:
        if self._recorder is None:
            return Report("inactive")
        lost = {f"lost {name}": topic.lost for name, topic in self._topics.items() if topic.lost}
        silent = ", ".join(name for name, topic in self._topics.items() if not topic.subscription)
        values = {"file": self._recorder.path, "messages": self._messages, "dropped": self._recorder.dropped}
        values |= {"not published": silent, **lost}
        trouble = self._recorder.trouble
        if lost and not trouble:
            remedy = "publish them with reliable QoS, or raise net.core.rmem_max"
            trouble = f"{sum(lost.values())} messages were lost on their way here; {remedy}"
        return Report(trouble or "recording", WARN if trouble else OK, values)


@dataclass
class _Topic:
    """A recorded topic: messages `lost` since the node was configured, and how it is subscribed."""

    type: str
    definition: str
    lost: int = 0
    subscription: Any = None
    profile: QoSProfile | None = None


def matching(offered: list[QoSProfile]) -> QoSProfile | None:
    """The strictest QoS with which all publishers that `offered` theirs are heard; None without any."""
    if not offered:
        return None
    reliable = all(each.reliability == QoSReliabilityPolicy.RELIABLE for each in offered)
    lasting = all(each.durability == QoSDurabilityPolicy.TRANSIENT_LOCAL for each in offered)
    return QoSProfile(
        depth=DEPTH,
        reliability=QoSReliabilityPolicy.RELIABLE if reliable else QoSReliabilityPolicy.BEST_EFFORT,
        durability=QoSDurabilityPolicy.TRANSIENT_LOCAL if lasting else QoSDurabilityPolicy.VOLATILE,
    )


def definition(kind: str) -> str:
    """The ros2msg text of message `kind` ("sensor_msgs/msg/Imu") and all its types, from its Python class."""
    parts, waiting, seen = [], [kind], {kind}
    while waiting:
        current = waiting.pop(0)
        rows = []
        for name, given in types(current).get_fields_and_field_types().items():
            element, suffix = _element(given)
            rows.append(f"{PRIMITIVES.get(element, element)}{suffix} {name}")
            nested = element.replace("/", "/msg/")
            if "/" in element and nested not in seen:
                seen.add(nested)
                waiting.append(nested)
        heading = "" if current == kind else f"MSG: {current.replace('/msg/', '/')}\n"
        parts.append(heading + "\n".join(rows))
    return BREAK.join(parts)


def _element(given: str) -> tuple[str, str]:
    """Element type and its suffix in a .msg file: "sequence<double, 3>" gives float64 and "[<=3]"."""
    if given.startswith("sequence<"):
        element, _, bound = given[len("sequence<") : -1].rpartition(", ")
        return (element, f"[<={bound}]") if element else (bound, "[]")
    if given.endswith("]"):
        element, _, size = given[:-1].rpartition("[")
        return element, f"[{size}]"
    if given.startswith(("string<", "wstring<")):
        element, _, bound = given[:-1].partition("<")
        return element, f"<={bound}"
    return given, ""
