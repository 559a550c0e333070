"""A ROS 2 graph within one process and a time that only tests advance: real nodes of ours, and robots that are classes.

Messages of packages that are not installed are made from their .msg text and go through their bytes. Nothing is lost
or late unless a test says so.
"""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rclpy.time import Time
from std_msgs.msg import Header

from real_robot.ros2.messages.codecs import fill_time
from real_robot.ros2.nodes.managed import ManagedNode
from tests.real_robot.ros2.messages.definitions import on_the_wire, types


class Graph:
    """Topics, services, timers and the clock. `lost` decides by topic which messages do not arrive."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        """Steady time; ROS time is `jumped_s` later."""
        self.jumped_s = 0.0
        self.lost: Callable[[str], bool] = lambda topic: False
        self.heard: dict[str, list[Callable[[Any], None]]] = defaultdict(list)
        self.simulated = False
        """Whether ROS time is a simulator's, which nodes then keep to."""
        self.publishers: dict[str, set[tuple[str, str]]] = {}
        """Namespaces and names of the nodes that publish on each topic."""
        self.services: dict[str, Callable[[Any, Any], Any]] = {}
        self.timers: list[list[Any]] = []
        self.logged: list[str] = []

    @property
    def ros_s(self) -> float:
        """ROS time."""
        return self.now_s + self.jumped_s

    def send(self, topic: str, message: Any) -> bool:
        """Deliver a message; returns whether it arrived."""
        if self.lost(topic):
            return False
        received = on_the_wire(message) if hasattr(message, "__msgtype__") else message
        for callback in list(self.heard[topic]):
            callback(received)
        return True

    def call(self, service: str, request: Any = None) -> Any:
        return self.services[service](request, SimpleNamespace())

    def tick(self, period_s: float) -> None:
        """Advance the clock and run the timers that are due."""
        self.now_s += period_s
        for timer in list(self.timers):
            while timer in self.timers and timer[0] <= self.now_s + 1e-9:
                timer[0] += timer[1]
                timer[2]()


class InProcess(ManagedNode[Any]):
    """Comes after a node's class among the bases of a test's class, and takes the place of rclpy's node.

    The test's class has a `graph`.
    """

    graph: Graph
    active = True

    def __init__(self, name: str, settings: type) -> None:
        self.name, self.reports = name, {}
        self.steady = _clock(lambda: self.graph.now_s)
        self.steady.sleep_for = self.sleep_for
        self.on_jump: list[Any] = []

    def sleep_for(self, duration: Any) -> None:
        """The node waits: time passes, and nothing else happens."""
        self.graph.now_s += duration.nanoseconds / 1e9

    def get_name(self) -> str:
        return self.name

    def get_parameter(self, name: str) -> Any:
        return SimpleNamespace(value=self.graph.simulated)

    def jump_back(self, seconds: float) -> None:
        """The clock jumps back."""
        self.graph.jumped_s -= seconds
        for forget in self.on_jump:
            forget(seconds)

    def get_clock(self) -> Any:
        return _clock(lambda: self.graph.ros_s)

    def get_logger(self) -> Any:
        def log(text: str, **_: Any) -> None:
            self.graph.logged.append(text)

        return SimpleNamespace(error=log, warning=log, info=log)

    def get_namespace(self) -> str:
        return "/"

    def resolve_topic_name(self, name: str) -> str:
        return name

    def get_publishers_info_by_topic(self, name: str) -> list[Any]:
        entries = self.graph.publishers.get(name, set())
        return [SimpleNamespace(node_namespace=namespace, node_name=node) for namespace, node in sorted(entries)]

    def own(self, entity: Any) -> Any:
        return entity

    def qos_events(self, topic: str) -> dict[str, Any]:
        return {"subscription": SimpleNamespace(), "publisher": None}

    def create_subscription(self, kind: Any, name: str, callback: Callable[[Any], None], *_: Any, **__: Any) -> Any:
        self.graph.heard[name].append(callback)

    def create_publisher(self, kind: Any, name: str, *_: Any, **__: Any) -> Any:
        self.graph.publishers.setdefault(name, set()).add(("/", self.name))
        return SimpleNamespace(
            publish=lambda message: self.graph.send(name, message),
            assert_liveliness=lambda: None,
            get_subscription_count=lambda: 1,
        )

    def create_service(self, kind: Any, name: str, callback: Callable[[Any, Any], Any]) -> Any:
        self.graph.services[name.replace("~", self.name)] = callback

    def create_client(self, kind: Any, name: str) -> Any:
        return SimpleNamespace(
            service_is_ready=lambda: name in self.graph.services, call_async=lambda r: _Call(self.graph.call(name, r))
        )

    def create_timer(self, period_s: float, callback: Callable[[], None], clock: Any = None) -> Any:
        self.graph.timers.append([self.graph.now_s + period_s, period_s, callback])


class _Call:
    """The future of a call that has been answered, or never is if the answer is None."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self.answer is not None:
            callback(self)

    def cancelled(self) -> bool:
        return False

    def result(self) -> Any:
        return self.answer


def _clock(now_s: Callable[[], float]) -> Any:
    return SimpleNamespace(now=lambda: Time(nanoseconds=round(now_s() * 1e9)))


class _Request:
    """A request of any service; fields are made when they are set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Request())
        return getattr(self, name)


def heartbeat(seconds: float) -> Header:
    """The heartbeat of a policy's process."""
    message = Header()
    fill_time(message.stamp, seconds)
    return message


def interfaces(name: str) -> Any:
    """Replaces ROS's `installed`: message classes from .msg text, and services with a request that takes any field."""
    return SimpleNamespace(Request=_Request) if "/srv/" in name else types(name)
