"""A robot behind ROS 2 topics, subscribed and published as its table says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from embodied.contract import Contract
from embodied.errors import UserError
from real_robot.robots.robot import Array, Reading
from real_robot.ros2.engagement import Engagement, Phase
from real_robot.ros2.messages.codecs import BEFORE, ForeignError, fill_time, read, set_stamp, stamp_s
from real_robot.ros2.nodes.managed import ERROR, WARN, ManagedNode, Report
from real_robot.ros2.partners import Partners
from real_robot.ros2.robots.tables import ACTION, Behaviour, Condition, Fixed, Heartbeat, Mode, Qos, Table, Topic
from real_robot.ros2.topics import publisher, subscribe, types

HEARTBEAT = "heartbeat"
"""Topic under the command's prefix with the stamped heartbeat of an active policy node."""
HEADER = "std_msgs/msg/Header"
TRIGGER = "std_srvs/srv/Trigger"
FRESH = 0.5
"""Share of the time-out up to which measurements may be old before a robot with a status is asked to follow."""
STANDSTILL_S = 1.0
"""Steady time after which a clock that stands still is reported."""
AGAIN_S = 1.0
AHEAD_S = 3600.0
"""Steady time after which a service that refuses or is silent is called again; how far stamps are never ahead of a
simulator's clock."""


class RosRobot:
    """The robot of `table` as a `real_robot.robots.robot.Robot`, over the topics of `node`.

    A measurement is the newest message of every topic, stamped with the oldest of their stamps; `measured` is called
    when all topics have published since the last call, repetitions aside. Lasting topics do not count for either. A
    message that cannot be read invalidates the measurement until a good one arrives; one about something else is
    ignored.

    A robot with a status gets commands while it follows, as `Engagement` decides.

    Args:
        node: whose namespace, remappings, clock and QoS parameters apply.
        table: the robot's interface.
        prefix: of the command topic. A robot with a prefix is behind a safety node, which alone talks to the robot, and
            takes commands of one process at a time, which gives signs of life (`Table.sign_s`).
        measured: callback without arguments.
        repeated: the same for a measurement that a simulator in lock-step repeats.
        observation_timeout_s: age of measurements from which on commands are refused.
    """

    def __init__(
        self,
        node: ManagedNode[Any],
        table: Table,
        prefix: str = "",
        measured: Callable[[], None] | None = None,
        repeated: Callable[[], None] = lambda: None,
        observation_timeout_s: float = np.inf,
    ) -> None:
        self.contract: Contract = table.contract
        self.at_rest = table.at_rest
        self.stops_after_s = table.stops_after_s
        self.stopped = False
        """Whether holding is permanent: the table's emergency takes its place; see `stop`."""
        self._node = node
        self._table = table
        self._prefix = prefix
        self._measured = measured
        self._repeated = repeated
        self._old_s = FRESH * observation_timeout_s
        self.simulated = bool(node.get_parameter("use_sim_time").value)
        """Whether time is a simulator's."""
        self._latest: dict[str, Reading | None] = {topic.name: None for topic in table.states}
        self._current = {topic.name for topic in table.states if not topic.lasting}
        self._due = set(self._current)
        self._period_stamps = dict[str, float]()
        self._began_s = -np.inf
        self._since_reset_s = -np.inf
        self._reading: Reading | None = None
        self._sequence = 0
        self._newest_s = -np.inf
        self._gone_s = -np.inf
        self._back_s = 0.0
        self._refused = self._ignored = self._jumped = self._logged_reason = ""
        self._before: Array | None = None
        self._last_messages: dict[str, Any] = {}
        self._condition: Condition | None = None
        self._engagement = Engagement(table, lambda: node.steady_s) if table.status and not prefix else None
        self._behaviour: Behaviour | None = None
        self._uncalled: list[str] = []
        self._refusing = dict[str, str]()
        self._again_s = -np.inf
        self._called_s = dict[str, float]()
        self._written = {key: np.resize(table.initial, spec.shape[0]) for key, spec in table.remembered.items()}
        self._publishers: dict[str, Any] = {}
        self._partners = Partners(node, table, prefix + table.command.name, commands=not prefix)
        self._make(prefix)
        self._advanced_s = -np.inf
        self._since_s = node.steady_s
        node.reports["robot"] = self.report
        node.on_jump.append(self._forget)

    def clock(self) -> float:
        """ROS time, s; never earlier than a measurement that arrived before its /clock message."""
        return max(self._now(), self._newest_s) if self.simulated else self._now()

    def relocates(self, option: bool | None) -> bool:
        """Whether the robot may be put elsewhere at once; if the `option` is None, in simulated time."""
        return self.simulated if option is None else option

    def steady(self) -> float:
        """Time in s for what lasts: steady time, or a simulator's without what its clock has jumped back by."""
        return self.clock() + self._back_s if self.simulated else self._node.steady_s

    @property
    def has_subscriber(self) -> bool:
        """Whether anybody is there for the commands: a simulator in lock-step would wait for a lost one for ever."""
        return self._publishers[self._command_name].get_subscription_count() > 0

    @property
    def stands_s(self) -> float:
        """Steady time in s for which a simulator's clock has stood still, as far as this was called; otherwise 0."""
        now_s = self.clock()
        if not self.simulated or now_s != self._advanced_s:
            self._advanced_s, self._since_s = now_s, self._node.steady_s
        return self._node.steady_s - self._since_s

    def start(self) -> None:
        """The node has been activated; a robot that others may steer too does not follow commands that came already."""
        self._before = None
        self._period_stamps = {}
        if self._engagement and not self.stopped:
            self._engagement.begin()

    def engage(self) -> None:
        """An operator wants a robot that others may steer too to follow, from the next command on; see `Engagement`."""
        self.stopped = False
        self._before = None
        self._behave(None)
        if self._engagement:
            self._engagement.reset()

    def stop(self) -> None:
        """Holding is permanent until `engage`; every call makes the robot's own emergency stop anew."""
        self.stopped = True
        self._behave(None)

    def read(self) -> Reading | None:
        """The newest message of every topic; None before each has arrived, and while one of them cannot be read.

        A robot with a status gives no measurement before its first status, so that a takeover is never missed.
        """
        refusal = self._partners.refusal
        if self._reading is not None and self._reading.refusal != refusal:
            self._reading = replace(self._reading, refusal=refusal)
        driver_reports = self._condition is not None or not self._table.status
        if self._reading is None and driver_reports and all(self._latest.values()):
            parts = {name: part for name, part in self._latest.items() if part is not None}
            arrays = {key: value for part in parts.values() for key, value in part.observation.items()}
            observation = self._table.observe(arrays) | self._written
            current = [parts[name] for name in self._current]
            stamps = [part.stamp_s for part in current]
            by_key = {key: part.stamp_s for part in current for key in part.observation}
            self._reading = Reading(
                observation, min(stamps), self._sequence, refusal=refusal, newest_s=max(stamps), stamps=by_key
            )
        return self._reading

    def write(self, action: Array) -> None:
        """Publish `action` [A]; a robot with a status gets it only while it follows."""
        if not self.stopped:
            self._behave(None)
        if self._engagement:
            self._engagement.command(self._late())
        self.beat()
        if not self._engagement or self._engagement.commands:
            self._command(action)

    def hold(self) -> None:
        """The table's `hold`, or its `emergency` once `stopped`: messages and calls, no commands.

        A robot with a status bridges a short gap with the table's `pause`. It holds afterwards, and until `engage`.
        """
        if self._table.status:
            self._interrupt()
            return
        behaviour = self._table.emergency if self.stopped else self._table.hold
        self._before = None
        if behaviour is not self._behaviour:
            self._behave(behaviour)
        self._send(*behaviour.messages)
        self._call()

    def leave(self, reason: str) -> None:
        """Make a robot with a status hold at once, for good, if it follows."""
        if self._engagement:
            self._engagement.lose(reason)
            self._pursue()

    def beat(self) -> None:
        """Give the safety node a sign of life of this process, whose stamp is the age of commands without one."""
        if self._prefix:
            message = types(HEADER)()
            fill_time(message.stamp, self.clock())
            message.frame_id = self._node.get_name()
            self._publishers[self._prefix + HEARTBEAT].publish(message)

    def reset(self) -> None:
        """Begin an episode: past actions and measurements are forgotten; the first measurement is made from now on."""
        self._since_reset_s = self.clock()
        self._latest |= dict.fromkeys(self._current)
        self._due = set(self._current)
        self._period_stamps = {}
        self._reading = None
        for key, values in self._written.items():
            self._written[key] = np.resize(self._table.initial, values.shape)

    def close(self) -> None:
        """Does nothing: everything on the node belongs to the node."""

    def report(self) -> Report:
        """Report for /diagnostics: missing topics, unreadable messages, whether the robot follows."""
        missing = [name for name, part in self._latest.items() if part is None]
        values = {
            "measurements": self._sequence,
            "missing": ", ".join(missing),
            "unreadable": self._refused,
            "ignored": self._ignored,
        }
        if self._table.status:
            values["jumped"] = self._jumped
        if self._engagement and self._engagement.phase is Phase.LOST:
            return Report(self._lost(self._engagement), ERROR, values)
        if self._engagement and self._engagement.objection:
            return Report(self._engagement.objection, WARN, values)
        if self._table.status and (fault := self._unfollowed()):
            return Report(fault, WARN, values)
        if self._refusing:
            refused = "; ".join(f"{name} {why}" for name, why in self._refusing.items())
            return Report(refused, ERROR, values)
        if (stands_s := self.stands_s) > STANDSTILL_S:
            return Report(f"the clock has stood still for {stands_s:.1f} s", WARN, values)
        if missing:
            return Report(f"nothing readable on {', '.join(missing)}", WARN, values)
        if refusal := self._partners.refusal:
            return Report(refusal, WARN, values)
        return Report(f"{self._table.name} measures", values=values)

    def _make(self, prefix: str) -> None:
        table = self._table
        for topic in sorted(table.states, key=lambda topic: not topic.lasting):  # handled before what is waited for
            subscribe(self._node, topic.name, topic.codec.message, topic.qos, partial(self._hear, topic))
        qos = replace(table.command.qos, lease_s=table.sign_s) if prefix else table.command.qos
        self._publish(prefix + table.command.name, table.command.codec.message, qos)
        self._command_name = prefix + table.command.name
        if prefix:
            self._publish(prefix + HEARTBEAT, HEADER, Qos())
        behaviours = (*(table.status.requests if table.status else ()), table.hold, table.emergency)
        fixed = [entry for behaviour in behaviours for entry in behaviour.messages]
        for entry in [*fixed, *([table.heartbeat.message] if table.heartbeat else [])]:
            self._publish(entry.name, entry.type, entry.qos)
        self._clients = {}
        for name in {name for behaviour in behaviours for name in behaviour.services}:
            self._clients[name] = self._node.own(self._node.create_client(types(TRIGGER), name))
        for mode in table.modes:
            subscribe(self._node, mode.name, mode.type, mode.qos, partial(self._hear_mode, mode))
        if table.status:
            subscribe(self._node, table.status.name, table.status.type, table.status.qos, self._hear_status)
        if self._engagement and table.heartbeat:
            beat = partial(self._beat, table.heartbeat)
            self._node.own(self._node.create_timer(1.0 / table.heartbeat.rate_hz, beat, clock=self._node.steady))

    def _now(self) -> float:
        return self._node.get_clock().now().nanoseconds / 1e9

    def _forget(self, back_s: float) -> None:
        """Start anew after the clock has jumped back: what is known seems to come from the future."""
        before_s = max(self.clock(), self._now() + back_s)
        self._gone_s, self._back_s = before_s + self._table.control_dt_s, self._back_s + before_s - self._now()
        self._latest = dict.fromkeys(self._latest)
        self._due = set(self._current)
        self._period_stamps = {}
        self._reading = None
        self._before = None
        self._newest_s = self._since_reset_s = -np.inf
        self._last_messages.clear()

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
            self._refuse(topic, str(error))
            return
        measured_s = self._now() if measured_s is None else measured_s
        if self.simulated and not topic.lasting and 0.0 < self._now() < measured_s - AHEAD_S:
            ahead_s = measured_s - self._now()
            self._refuse(topic, f"stamped {ahead_s:.3g} s after /clock: is its publisher's use_sim_time true?")
            return
        if self.simulated and self._now() + self._table.control_dt_s < measured_s <= self._gone_s:
            self._ignored = f"{topic.name}: on its way since before the clock jumped back"
            return
        if not topic.lasting and measured_s < self._since_reset_s:
            self._ignored = f"{topic.name}: measured before the episode began"
            return
        self._sequence += 1
        self._reading = None
        if topic.jump:
            self._compare(topic.jump, self._last_messages.get(topic.name, message), message)
            self._last_messages[topic.name] = message
        self._latest[topic.name] = Reading(arrays, measured_s, self._sequence)
        if not topic.lasting:
            self._newest_s = max(self._newest_s, measured_s)
        if self.simulated and measured_s == self._period_stamps.get(topic.name) and self._now() <= self._began_s:
            self._repeated()  # by a simulator in lock-step, whose clock stands still until it gets an answer
            return
        self._due.discard(topic.name)
        if not self._due and self._measured and (self.has_subscriber or not self.simulated):
            self._due = set(self._current)
            self._period_stamps = {name: part.stamp_s for name in self._current if (part := self._latest[name])}
            self._began_s = self.clock()
            self._measured()

    def _refuse(self, topic: Topic, why: str) -> None:
        self._refused = f"{topic.name}: {why}"
        self._latest[topic.name] = self._reading = None
        self._node.get_logger().error(self._refused, throttle_duration_sec=1.0)

    def _hear_status(self, message: Any) -> None:  # noqa: ANN401 - a ROS message
        assert self._table.status is not None
        self._condition = self._table.status.read(message)
        if self._engagement:
            self._engagement.hear(self._condition)

    def _hear_mode(self, mode: Mode, message: Any) -> None:  # noqa: ANN401 - a ROS message
        self._partners.hear(mode, message)

    def _late(self) -> str:
        """Why the measurements leave too little time to engage; "" if they do not."""
        reading = self.read()
        age_s = 0.0 if reading is None else self.clock() - reading.stamp_s
        if age_s <= self._old_s:
            return ""
        return (
            f"measurements are {age_s:.3g} s old, at most {self._old_s:.3g} is enough to begin: synchronise the clocks"
            " (PX4: UXRCE_DDS_SYNCT), or raise observation_timeout_s"
        )

    def _compare(self, jump: Callable[[Any, Any], str], before: Any, after: Any) -> None:  # noqa: ANN401 - ROS messages
        """A policy that sees a jump as motion would answer it: the robot holds, by means of its own estimate."""
        if what := jump(before, after):
            self._jumped = what
            self._node.get_logger().error(what)
            self.leave(what)

    def _interrupt(self) -> None:
        """No command for now to a robot with a status; one behind a safety node gets nothing from here."""
        if not self._engagement:
            return
        self._engagement.interrupt()
        pause = self._table.pause.action
        if self.stopped:
            self._engagement.stop()
        elif pause and self._before is not None and self._engagement.bridges:
            self._command(pause(self._before))
        self._pursue()

    def _pursue(self) -> None:
        """Send what is due, and log what the robot does."""
        assert self._engagement is not None
        behaviour = self._engagement.due
        reason = self._engagement.reason
        if reason != self._logged_reason:
            self._logged_reason = reason
            if reason:
                self._node.get_logger().error(self._lost(self._engagement))
        if behaviour:
            self._send(*behaviour.messages)

    def _beat(self, heartbeat: Heartbeat) -> None:
        engagement = self._engagement
        assert engagement is not None
        self._pursue()
        if engagement.beats:
            self._send(heartbeat.message)
        if engagement.unconfirmed:
            self._node.get_logger().error(self._lost(engagement), throttle_duration_sec=1.0)

    def _lost(self, engagement: Engagement) -> str:
        if engagement.unconfirmed:
            return "the robot does not confirm the emergency stop, which is repeated: use another one"
        return f"{engagement.reason}; it gets nothing from here before ~/reset"

    def _unfollowed(self) -> str:
        if self._condition is None:
            return f"no message on {self._table.status.name}" if self._table.status else ""
        return self._condition.fault

    def _command(self, action: Array) -> None:
        arrays = {ACTION: action} if self._before is None else {ACTION: action, BEFORE: self._before}
        message = self._table.command.codec.encode(arrays, types, self.clock())
        if self._prefix and self._table.stamped and stamp_s(message) is None:
            set_stamp(message, self.clock())  # a trajectory's, which means now to the robot
        self._publishers[self._command_name].publish(message)
        self._before = action
        if self._table.status and self._unfollowed():
            self.reset()  # what the robot did not do is no past action of it
            return
        for key, values in self._written.items():
            self._written[key] = np.concatenate((values[len(action) :], action)).astype(values.dtype)

    def _behave(self, behaviour: Behaviour | None) -> None:
        """Begin `behaviour`, whose services are yet to be called; None: nothing."""
        self._behaviour, self._uncalled = behaviour, list(behaviour.services) if behaviour else []
        self._refusing = {}
        self._again_s = -np.inf
        self._called_s = {}

    def _call(self) -> None:
        """Make pending calls; a missing service is called once it appears, one that refuses or is silent again."""
        now_s = self._node.steady_s
        for name in [name for name, called_s in self._called_s.items() if now_s - called_s > AGAIN_S]:
            del self._called_s[name]
            self._fail(name, f"has not answered for {AGAIN_S:g} s: use the robot's own emergency stop")
        if now_s < self._again_s:
            return
        names = self._uncalled
        self._uncalled = []
        for name in names:
            client = self._clients[name]
            if client.service_is_ready():
                answered = partial(self._answered, name, self._behaviour)
                self._called_s[name] = now_s
                client.call_async(types(TRIGGER).Request()).add_done_callback(answered)
            else:
                self._uncalled.append(name)
                self._node.get_logger().error(f"no service {name}: it waits", throttle_duration_sec=1.0)

    def _answered(self, name: str, behaviour: Behaviour | None, future: Any) -> None:  # noqa: ANN401 - rclpy's
        """Repeat a call that the robot has refused, for as long as it is wanted."""
        if behaviour is not self._behaviour or future.cancelled():
            return
        self._called_s.pop(name, None)
        self._refusing.pop(name, None)
        if future.result().success:
            self._uncalled = [each for each in self._uncalled if each != name]  # a late answer to an earlier call
        else:
            self._fail(name, f"refuses: {future.result().message}")
            self._again_s = self._node.steady_s + AGAIN_S

    def _fail(self, name: str, why: str) -> None:
        """The service `name` has not done what it was called for; it is called again."""
        self._refusing[name] = why
        self._node.get_logger().error(f"{name} {why}; it is called again")
        if name not in self._uncalled:
            self._uncalled.append(name)

    def _send(self, *messages: Fixed) -> None:
        for entry in messages:
            self._publishers[entry.name].publish(entry.message(types, self.clock()))
