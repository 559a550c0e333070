"""recorder_node: records a robot's topics as they were sent into MCAP files that rosbag2 and Foxglove read.

It is a separate process, so that the other nodes never wait for a disk. The policy's observations and decisions, which
a replay needs, are recorded by policy_node (parameter `recording`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from embodied.errors import UserError
from real_robot.recording.recorder import Recorder
from real_robot.ros2.nodes.managed import OK, WARN, ManagedNode, Report
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.robots.tables import Qos
from real_robot.ros2.ros_robot import read_contract, subscribe, types

LISTENED = Qos(depth=50, reliability="best_effort")
"""Receives from publishers of any QoS."""
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

    def configure(self) -> None:
        """Subscribe to the robot's topics, the policy's commands, and the requested topics."""
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
        for name, kind in dict(spoken).items():
            hear = partial(self._hear, self.resolve_topic_name(name), kind, definition(kind))
            subscribe(self, name, kind, LISTENED, hear, raw=True)
        self._directory = Path(settings.directory)
        if not self._directory.is_dir():
            raise UserError(f"expected a directory for recordings, got {self._directory}")
        self._messages = 0
        self.reports["recording"] = self._report

    def activate(self) -> None:
        """Begin a file."""
        path = self._directory / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{time.time_ns() % 10**9:09d}.mcap"
        origin = {"checkpoint": self.settings.checkpoint, "robot": self.settings.robot}
        self._recorder = Recorder(path, self._contract, origin=origin, clock=self._now_s)
        self.get_logger().info(f"records into {path}")

    def deactivate(self) -> None:
        """Finish the file."""
        recorder, self._recorder = self._recorder, None
        if recorder:
            recorder.close()

    def _now_s(self) -> float:
        return self.get_clock().now().nanoseconds / 1e9

    def _hear(self, topic: str, kind: str, text: str, data: bytes) -> None:
        if self._recorder:
            self._recorder.message(topic, kind, text, data, self._now_s())
            self._messages += 1

    def _report(self) -> Report:
        if self._recorder is None:
            return Report("inactive")
        dropped = self._recorder.dropped
        values = {"file": self._recorder.path, "messages": self._messages, "dropped": dropped}
        return Report("recording", WARN if dropped else OK, values)


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
