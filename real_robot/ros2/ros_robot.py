"""A robot behind ROS 2 topics, subscribed and published as its table says."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from rclpy.qos import QoSDurabilityPolicy, QoSProfile, QoSReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.saving import checkpoint
from real_robot.firmware.record import CONTRACT, RECORD, exported_contract
from real_robot.robots.robot import Array, Reading
from real_robot.ros2.messages.codecs import BEFORE, ForeignError, fill, installed, read
from real_robot.ros2.nodes.managed import WARN, ManagedNode, Report
from real_robot.ros2.robots.tables import ACTION, Behaviour, Call, Fixed, Qos, Table, Topic
from real_robot.safety.limits import Limits, load_limits

HEARTBEAT = "heartbeat"
"""Topic under the command's prefix with the heartbeat of an active policy node."""
types = cache(installed)


class RosRobot:
    """The robot of `table` as a `real_robot.robots.robot.Robot`, over the topics of `node`.

    A measurement is the newest message of every topic, stamped with the oldest of their stamps; `measured` is called
    when all topics have published since the last call. Lasting topics do not count for either. A message that cannot be
    read invalidates the measurement until a good one arrives; one about something else is ignored.

    Args:
        node: whose namespace, remappings, clock and QoS parameters apply.
        table: the robot's interface.
        prefix: of the command topic. A robot with a prefix is behind a safety node, which engages the robot.
        measured: callback without arguments.
    """

    def __init__(
        self, node: ManagedNode[Any], table: Table, prefix: str = "", measured: Callable[[], None] | None = None
    ) -> None:
        self.contract: Contract = table.contract
        self.stopped = False
        """Whether holding is permanent: the table's emergency takes its place."""
        self._node, self._table, self._measured = node, table, measured
        self.simulated = bool(node.get_parameter("use_sim_time").value)
        """Whether time is a simulator's."""
        self._latest: dict[str, Reading | None] = {topic.name: None for topic in table.states}
        self._current = {topic.name for topic in table.states if not topic.lasting}
        self._due = set(self._current)
        self._reading: Reading | None = None
        self._sequence = 0
        self._newest_s = -np.inf
        self._refused = self._ignored = ""
        self._before: Array | None = None
        self._fault: str | None = f"no message on {table.status.name}" if table.status else None
        self._heard_status = not table.status
        self._behaviour: Behaviour | None = None
        self._holding: Array | None = None
        self._uncalled: list[Call] = []
        self._written = {key: np.resize(table.initial, spec.shape[0]) for key, spec in table.remembered.items()}
        self._engaged = bool(prefix)
        self._started_s = np.inf
        self._publishers: dict[str, Any] = {}
        self._make(prefix)
        node.reports["robot"] = self.report

    def clock(self) -> float:
        """ROS time, s; never earlier than a measurement that arrived before its /clock message."""
        now_s = self._node.get_clock().now().nanoseconds / 1e9
        return max(now_s, self._newest_s) if self.simulated else now_s

    def start(self) -> None:
        """Start the heartbeat that some robots require; the first command engages the robot."""
        self._started_s = self.clock()

    def read(self) -> Reading | None:
        """The newest message of every topic; None before each has arrived, and while one of them cannot be read.

        A robot with a status gives no measurement before its first status, so that a takeover is never missed.
        """
        if self._reading is None and self._heard_status and all(self._latest.values()):
            parts = {name: part for name, part in self._latest.items() if part is not None}
            arrays = {key: value for part in parts.values() for key, value in part.observation.items()}
            observation = self._table.observe(arrays) | self._written
            oldest_s = min(parts[name].stamp_s for name in self._current)
            self._reading = Reading(observation, oldest_s, self._sequence)
        return self._reading

    def write(self, action: Array) -> None:
        """Publish `action` [A]; the first one engages the robot."""
        if self._behaviour is not None:
            self._behaviour, self._uncalled = None, []
        self._engage()
        self._command(action)

    def hold(self) -> None:
        """The table's `hold`, or its `emergency` once `stopped`; call it every period, like `write`.

        Messages may be lost, so they are repeated while the robot follows us. Calls are made once.
        """
        behaviour = self._table.emergency if self.stopped else self._table.hold
        obliged = self.stopped or not self._fault  # a robot that somebody else has taken over is left alone
        self._before = None
        if behaviour is not self._behaviour:
            self._behaviour, self._holding = behaviour, None
            self._uncalled = list(behaviour.calls) if obliged else []
        if obliged:
            self._send_all(behaviour)
        self._call()
        reading = self.read()
        if self._holding is None:
            self._holding = behaviour.chosen(reading.observation if reading else None)
        if self._holding is not None:
            self._command(self._holding)

    def reset(self) -> None:
        """Begin an episode: past actions are forgotten."""
        for key, values in self._written.items():
            self._written[key] = np.resize(self._table.initial, values.shape)

    def close(self) -> None:
        """Hold the robot; everything on the node belongs to the node."""
        self.hold()

    def report(self) -> Report:
        """Report for /diagnostics: missing topics, unreadable messages, whether the robot obeys."""
        missing = [name for name, part in self._latest.items() if part is None]
        values = {
            "measurements": self._sequence, "missing": ", ".join(missing), "unreadable": self._refused,
            "ignored": self._ignored,
        }  # fmt: skip
        if self._fault or missing:
            return Report(self._fault or f"nothing readable on {', '.join(missing)}", WARN, values)
        return Report(f"{self._table.name} measures", values=values)

    def _make(self, prefix: str) -> None:
        table = self._table
        for topic in sorted(table.states, key=lambda topic: not topic.lasting):  # handled before what is waited for
            subscribe(self._node, topic.name, topic.codec.message, topic.qos, partial(self._hear, topic))
        self._publish(prefix + table.command.name, table.command.codec.message, table.command.qos)
        self._command_name = prefix + table.command.name
        behaviours = (table.engage, table.hold, table.emergency)
        fixed = [entry for behaviour in behaviours for entry in behaviour.messages]
        for entry in [*fixed, *([table.heartbeat.message] if table.heartbeat else [])]:
            self._publish(entry.name, entry.type, entry.qos)
        self._clients = {}
        for call in (call for behaviour in behaviours for call in behaviour.calls):
            if call.name not in self._clients:
                self._clients[call.name] = self._node.own(self._node.create_client(types(call.type), call.name))
        if table.status:
            subscribe(self._node, table.status.name, table.status.type, table.status.qos, self._obeys)
        if table.heartbeat and not prefix:
            period_s = 1.0 / table.heartbeat.rate_hz
            self._node.own(self._node.create_timer(period_s, self._beat, clock=self._node.steady))

    def _publish(self, name: str, message: str, qos: Qos) -> None:
        if name not in self._publishers:
            self._publishers[name] = publisher(self._node, name, message, qos)

    def _hear(self, topic: Topic, message: Any) -> None:  # noqa: ANN401 - a ROS message
        try:
            arrays, measured_s = read(topic.codec, message)
        except ForeignError as error:
            self._ignored = f"{topic.name}: {error}"
            return
        except UserError as error:
            self._refused = f"{topic.name}: {error}"
            self._latest[topic.name] = self._reading = None
            self._node.get_logger().error(self._refused, throttle_duration_sec=1.0)
            return
        self._sequence += 1
        self._reading = None
        if measured_s is None:
            measured_s = self._node.get_clock().now().nanoseconds / 1e9
        self._latest[topic.name] = Reading(arrays, measured_s, self._sequence)
        self._newest_s = max(self._newest_s, measured_s)
        self._due.discard(topic.name)
        if not self._due and self._measured:
            self._due = set(self._current)
            self._measured()

    def _obeys(self, message: Any) -> None:  # noqa: ANN401 - a ROS message
        assert self._table.status is not None
        self._heard_status = True
        self._fault = self._table.status.fault(message)

    def _command(self, action: Array) -> None:
        arrays = {ACTION: action} if self._before is None else {ACTION: action, BEFORE: self._before}
        message = self._table.command.codec.encode(arrays, types, self.clock())
        self._publishers[self._command_name].publish(message)
        self._before = action
        for key, values in self._written.items():
            self._written[key] = np.concatenate((values[len(action) :], action)).astype(values.dtype)

    def _engage(self) -> None:
        before_s = self._table.heartbeat.before_s if self._table.heartbeat else 0.0
        if not self._engaged and self.clock() - self._started_s >= before_s:
            self._engaged = True
            self._send_all(self._table.engage)
            self._uncalled = list(self._table.engage.calls)
        self._call()

    def _send_all(self, behaviour: Behaviour) -> None:
        for entry in behaviour.messages:
            self._send(entry)

    def _call(self) -> None:
        """Make pending calls; a missing service is called once it appears."""
        calls, self._uncalled = self._uncalled, []
        for call in calls:
            client = self._clients[call.name]
            if client.service_is_ready():
                client.call_async(fill(types(call.type).Request(), call.fields))
            else:
                self._uncalled.append(call)
                self._node.get_logger().error(f"no service {call.name}: it waits", throttle_duration_sec=1.0)

    def _beat(self) -> None:
        """Send the heartbeat; a holding robot gets none, so that its own failsafe backs ours."""
        holds = self._engaged and self._behaviour is not None
        if np.isfinite(self._started_s) and self._table.heartbeat and not holds:
            self._send(self._table.heartbeat.message)

    def _send(self, entry: Fixed) -> None:
        self._publishers[entry.name].publish(entry.message(types, self.clock()))


def read_contract(path: str) -> Contract:
    """The contract of a run, a checkpoint, an export, or a contract.json.

    Raises:
        UserError: if there is none or it is damaged.
    """
    given = Path(path)
    file = given if given.suffix == ".json" else given / CONTRACT
    if file.name == CONTRACT and (file.parent / RECORD).is_file():
        return exported_contract(file.parent)
    if not file.is_file():
        return checkpoint.load_contract(given)
    try:
        return Contract.from_dict(json.loads(file.read_text()))
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is no JSON ({error}); expected the contract.json of an export") from error


def read_limits(path: str) -> Limits:
    """The limits of the YAML file at `path`; "": only the contract's."""
    return load_limits(Path(path)) if path else Limits()


def subscribe(
    node: ManagedNode[Any], name: str, message: str, qos: Qos, callback: Callable[[Any], None], raw: bool = False
) -> None:
    """Subscribe to `name`; parameters `qos_overrides.*` may change the QoS, incompatible partners are reported.

    `raw` messages are bytes, as they were sent.
    """
    entity = node.create_subscription(
        types(message), name, callback, _profile(qos), event_callbacks=node.qos_events(name)["subscription"],
        raw=raw, qos_overriding_options=QoSOverridingOptions.with_default_policies(),
    )  # fmt: skip
    node.own(entity)


def publisher(node: ManagedNode[Any], name: str, message: str, qos: Qos) -> Any:  # noqa: ANN401 - rclpy's
    """Publish on `name`; QoS as in `subscribe`."""
    entity = node.create_publisher(
        types(message), name, _profile(qos), event_callbacks=node.qos_events(name)["publisher"],
        qos_overriding_options=QoSOverridingOptions.with_default_policies(),
    )  # fmt: skip
    return node.own(entity)


def _profile(qos: Qos) -> QoSProfile:
    return QoSProfile(
        depth=qos.depth,
        reliability=QoSReliabilityPolicy[qos.reliability.upper()],
        durability=QoSDurabilityPolicy[qos.durability.upper()],
    )
