"""A ROS graph within one process with programmed faults of messages, clocks and processes; see `safety_faults_rows`.

Nodes are the real ones and messages are serialised (`tests/real_robot/ros2/in_process.py`). In addition to that graph,
processes are killed and suspended: messages to a suspended process are queued as its QoS defines; missing signs of life
of publishers are detected after their lease.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from rclpy.qos import QoSProfile

from real_robot.ros2.nodes.managed import ManagedNode
from tests.real_robot.ros2.in_process import Graph, InProcess

TROUBLES = ("late", "lost", "NaN", "reordered")
"""Faults of a topic's messages."""
VERY_LATE_S = 2.0
"""Delay that is longer than any time-out, s."""


@dataclass
class Watcher:
    """A subscription that is notified of its topic's live publishers."""

    topic: str
    lease_s: float
    host: Hosted
    tell: Callable[[Any], None]
    alive: int | None = None


class Network(Graph):
    """The graph, its faults, and the messages that our nodes have sent and read."""

    def __init__(self, rng: np.random.Generator, simulated: bool, period_s: float) -> None:
        super().__init__()
        self.rng, self.simulated, self.period_s = rng, simulated, period_s
        self.troubled: dict[str, str] = {}
        """The trouble of topics' messages."""
        self.frozen_s: float | None = None
        """ROS time at which a simulator's clock stands still."""
        self.signs: dict[str, float] = {}
        """When the publisher of a topic gave its last sign of life."""
        self.troubles = Counter[str]()
        self.sent: Callable[[str, Any, str], None] = lambda topic, message, sender: None
        self.read: Callable[[str, Any, str], None] = lambda topic, message, reader: None
        self.settled: Callable[[str], None] = lambda name: None
        """Called after each callback of a node."""
        self.watchers: list[Watcher] = []
        self._travelling: list[tuple[float, str, Any]] = []

    @property
    def ros_s(self) -> float:
        """ROS time."""
        return super().ros_s if self.frozen_s is None else self.frozen_s

    def send(self, topic: str, message: Any) -> bool:  # noqa: ANN401 - a ROS message
        """Deliver a message, subject to the topic's fault; returns whether it arrived at once."""
        trouble = self.troubled.get(topic, "")
        if not trouble or topic not in self.heard:
            return super().send(topic, message)
        self.troubles[trouble] += 1
        if trouble == "lost":
            return False
        if trouble == "NaN":
            return super().send(topic, corrupted(message, self.rng))
        if trouble == "very late":
            delay_s = VERY_LATE_S
        else:
            delay_s = 3.0 * self.period_s if trouble == "late" else float(self.rng.choice([0.0, 1.6])) * self.period_s
        if delay_s == 0.0:
            return super().send(topic, message)
        self._travelling.append((self.now_s + delay_s, topic, copy.deepcopy(message)))
        return False

    def tick(self, period_s: float) -> None:
        """Advance the clock, deliver delayed messages, report dead publishers, and run the timers that are due."""
        self.now_s += period_s
        arrived = [each for each in self._travelling if each[0] <= self.now_s]
        self._travelling = [each for each in self._travelling if each[0] > self.now_s]
        for _, topic, message in arrived:
            super().send(topic, message)
        for watcher in self.watchers:
            alive = int(self.now_s - self.signs.get(watcher.topic, -math.inf) <= watcher.lease_s)
            if watcher.host.runs and alive != watcher.alive and (alive or watcher.alive is not None):
                watcher.alive = alive
                watcher.tell(SimpleNamespace(alive_count=alive))
        super().tick(0.0)


class Hosted(InProcess):
    """Base class after a node's class, instead of rclpy's node: one process, which can be killed."""

    graph: Network  # type: ignore[assignment]
    active = False

    def __init__(self, name: str, settings: type) -> None:
        super().__init__(name, settings)
        self.alive, self.paused = True, False
        self._inboxes: list[tuple[deque[Any], Callable[[Any], None]]] = []
        self._removers: list[Callable[[], None]] = []

    @property
    def runs(self) -> bool:
        """Whether the process executes."""
        return self.alive and not self.paused

    def start(self, settings: Any) -> None:  # noqa: ANN401 - of the node
        """Configure and activate the node."""
        self.settings = settings
        self.configure()
        self.active = True
        self.activate()

    def kill(self) -> None:
        """End the process without cleanup, as SIGKILL does."""
        self.alive = self.active = False
        self.graph.watchers = [watcher for watcher in self.graph.watchers if watcher.host is not self]
        for remove in self._removers:
            remove()

    def resume(self) -> None:
        """Resume the process, which handles the messages that its subscriptions have queued."""
        self.paused = False
        for inbox, hear in self._inboxes:
            queued = list(inbox)
            inbox.clear()
            for message in queued:
                hear(message)

    def get_parameter(self, name: str) -> Any:  # noqa: ANN401 - as rclpy's
        """Parameter use_sim_time: whether the node uses a simulator's time."""
        return SimpleNamespace(value=self.graph.simulated)

    def create_subscription(
        self, kind: type, name: str, callback: Callable[[Any], None], qos: QoSProfile, **others: object
    ) -> None:
        """Subscribe; messages wait while the process is suspended."""
        inbox: deque[Any] = deque(maxlen=qos.depth)

        def hear(message: Any) -> None:  # noqa: ANN401 - a ROS message
            if self.paused:
                inbox.append(message)
            elif self.alive:
                self.graph.read(name, message, self.name)
                self._run(lambda: callback(message))

        self.graph.heard[name].append(hear)
        self._removers.append(lambda: self.graph.heard[name].remove(hear))
        self._inboxes.append((inbox, hear))
        tell = getattr(others.get("event_callbacks"), "liveliness", None)
        if tell:
            lease_s = qos.liveliness_lease_duration.nanoseconds / 1e9
            watcher = Watcher(name, lease_s, self, lambda event: self._run(lambda: tell(event)))
            self.graph.watchers.append(watcher)

    def create_publisher(self, kind: Any, name: str, *_: Any, **__: Any) -> Any:  # noqa: ANN401 - as rclpy's
        """Create a publisher."""
        self.graph.publishers.setdefault(name, set()).add((self.get_namespace(), self.name))

        def publish(message: Any) -> None:  # noqa: ANN401 - a ROS message
            self.graph.sent(name, message, self.name)
            self.graph.send(name, message)

        def sign() -> None:
            self.graph.signs[name] = self.graph.now_s

        return SimpleNamespace(
            publish=publish, assert_liveliness=sign, wait_for_all_acked=lambda _: True, get_subscription_count=lambda: 1
        )

    def create_service(self, kind: Any, name: str, callback: Callable[[Any, Any], Any]) -> Any:  # noqa: ANN401
        """Create a service that answers while the process runs."""

        def answer(request: Any, response: Any) -> Any:  # noqa: ANN401 - of ROS
            if self.runs:
                self._run(lambda: callback(request, response))

        super().create_service(kind, name, answer)

    def create_timer(self, period_s: float, callback: Callable[[], None], clock: Any = None) -> Any:  # noqa: ANN401
        """Create a timer that runs while the process runs."""
        super().create_timer(period_s, lambda: self._run(callback) if self.runs else None)
        timer = self.graph.timers[-1]
        self._removers.append(lambda: self.graph.timers.remove(timer))

    def _run(self, callback: Callable[[], Any]) -> None:
        callback()
        self.graph.settled(self.name)


def hosted(node: type[ManagedNode[Any]], graph: Network) -> Any:  # noqa: ANN401 - both a node and Hosted
    """Make a process of `node` in `graph`."""
    return type(node.__name__, (node, Hosted), {"graph": graph})()


def corrupted(message: Any, rng: np.random.Generator) -> Any:  # noqa: ANN401 - a ROS message
    """Copy of a message in which one number is NaN or infinite, or one array too short."""
    message = copy.deepcopy(message)
    places = list(_numbers(message)) if is_dataclass(message) else []
    if not places:
        return message
    owner, name = places[int(rng.integers(len(places)))]
    value = getattr(owner, name)
    if isinstance(value, float):
        setattr(owner, name, float(rng.choice([math.nan, math.inf])))
        return message
    values = np.array(value, np.float64)
    if rng.random() < 0.3 and not isinstance(value, np.ndarray):
        values = values[:-1]
    else:
        values[int(rng.integers(len(values)))] = rng.choice([math.nan, math.inf])
    setattr(owner, name, values.astype(value.dtype) if isinstance(value, np.ndarray) else values)
    return message


def _numbers(message: Any) -> Any:  # noqa: ANN401 - pairs of an owner and a field
    for each in fields(message):
        value = getattr(message, each.name)
        if is_dataclass(value):
            yield from _numbers(value)
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            yield from (numbers for entry in value for numbers in _numbers(entry))
        elif isinstance(value, float) or (
            hasattr(value, "__len__") and len(value) and not isinstance(value, str) and _floating(value)
        ):
            yield message, each.name


def _floating(values: Any) -> bool:  # noqa: ANN401 - an array of any library
    return getattr(values, "typecheck", None) is None and np.asarray(values).dtype.kind == "f"
