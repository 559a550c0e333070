"""What a node that commands a robot has read until now, from messages alone; see `row_checker`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.row_network import Network
from benchmarks.safety_checker import Track
from embodied.errors import UserError
from real_robot.ros2.messages.codecs import ForeignError, read
from real_robot.ros2.nodes.safety import SafetySettings
from real_robot.ros2.partners import LOOK_S
from real_robot.ros2.robots.tables import ACTION, Table
from real_robot.safety.limits import Limits

CLOSE_S = 1e-6
HAND_SPEED, FOLLOWING_RAD = 3.0, 0.1
"""Speed in rad/s at which somebody may move an arm that is not commanded, and what it may be off by."""


class Known:
    """What safety_node has read, and may rely on."""

    def __init__(self, graph: Network, table: Table, limits: Limits, settings: SafetySettings) -> None:
        self.graph, self.table, self.limits, self.settings = graph, table, limits, settings
        self.command = settings.prefix + table.command.name
        self.state, self.moving = "inactive", False
        """safety_node's state as it publishes it, and whether it commands a motion or a stop; `row_checker` knows."""
        self.tracks: list[Track] = []
        """What has been commanded lately, by element; `row_checker` knows."""
        self.forget()

    def forget(self) -> None:
        """A process that has just started has read nothing."""
        self.gone_s = -math.inf
        """What is stamped until then, and later than a simulator's clock, was on its way when that jumped back."""
        self.stamps: dict[str, float | None] = {}
        """Of the newest message of each topic; None of one that cannot be used."""
        self.begin_anew()
        self._ros_s = -math.inf
        self.resumed_s = -math.inf
        """When the process was last suspended until."""
        self.heard_s: dict[str, float] = {}
        """When each of the driver's modes was heard last."""
        self.beat_stamp_s = math.nan
        self._graph_s = dict[str, float]()  # since when the graph has shown each fault
        self._key = "end_effector_position" if self.table.name == "cartesian" else "joint_position"
        self.begun_s = math.inf  # when the first command came, from which on a heartbeat is expected
        self.good_s = self.good_stamp_s = self.beat_s = self.status_s = -math.inf
        self.bad_command = True
        self.status: Any = None
        self.refusals: dict[str, str] = {}

    def reset(self) -> None:
        """An operator has reset safety_node: the newest measurement is the first one."""
        self.position, self._position_s = self._newest
        self.consistent = int(len(self.position) > 0)

    def begin_anew(self) -> None:
        """Measurements begin anew."""
        self.position, self._position_s = np.empty(0), -math.inf
        """The last measured position that the one before makes possible."""
        self.consistent = 0
        """Number of consistent measurements in a row."""
        self._newest = self.position, self._position_s
        self._rejected = self._commanded = False
        """Whether the newest measurement was impossible, and whether the robot was commanded since a possible one."""

    def jump_back(self, seconds: float) -> None:
        """A simulator's clock has jumped back."""
        self.stamps.clear()
        self.begin_anew()
        self.gone_s = self.graph.ros_s + seconds + self.table.control_dt_s

    def read(self, topic: str, message: Any) -> None:  # noqa: ANN401 - a ROS message
        """A message has been handled."""
        now_s = self.graph.now_s
        if self.graph.ros_s < self._ros_s:
            self.begin_anew()
        self._ros_s = self.graph.ros_s
        if topic == self.command:
            self.begun_s = min(self.begun_s, now_s)
            self._take(message)
        elif topic == self.settings.prefix + "heartbeat":
            self.beat_s = now_s
            self.beat_stamp_s = message.stamp.sec + 1e-9 * message.stamp.nanosec
        for state in self.table.states:
            if state.name == topic:
                self._measure(topic, state.codec, message)
        for mode in self.table.modes:
            if mode.name == topic:
                self.refusals[topic], self.heard_s[topic] = mode.refusal(message), now_s
        if self.table.status and topic == self.table.status.name:
            self.status, self.status_s = message, now_s

    def _take(self, message: Any) -> None:  # noqa: ANN401 - a ROS message
        try:
            arrays, stamp_s = read(self.table.command.codec, message)
            self.bad_command = not np.isfinite(arrays[ACTION]).all()
        except UserError:
            self.bad_command = True
            return
        if not self.bad_command:
            self.good_s = self.graph.now_s
            self.good_stamp_s = self.beat_stamp_s if stamp_s is None else stamp_s

    def _measure(self, topic: str, codec: Any, message: Any) -> None:  # noqa: ANN401 - of ROS
        try:
            arrays, stamp_s = read(codec, message)
        except ForeignError:
            return
        except UserError:
            self.stamps[topic] = None
            return
        ahead_s = -math.inf if stamp_s is None else stamp_s - self.graph.ros_s
        if self.graph.simulated and ahead_s > self.table.control_dt_s and self.graph.ros_s + ahead_s <= self.gone_s:
            return
        seen = self.table.contract.observation
        finite = all(
            np.isfinite(values).all() for key, values in arrays.items() if key in seen and not seen[key].privileged
        )
        self.stamps[topic] = (self.graph.ros_s if stamp_s is None else stamp_s) if finite else None
        if self.graph.simulated and self._key not in arrays and self.stamps[topic] == self._position_s:
            self.consistent += 1  # of a clock that stands still: repetitions count, too
        if self._key in arrays and finite:
            self._place(arrays[self._key].astype(np.float64), self.stamps[topic] or 0.0)

    def _place(self, position: np.ndarray, stamp_s: float) -> None:
        """Take a measured position if it is possible after the last one, or nothing moves yet.

        After an impossible one the robot is also known again where commands have led it meanwhile: it may have refused
        or been held up, and then have gone there at once.
        """
        self._newest = position, stamp_s
        elapsed_s = max(stamp_s - self._position_s, 0.0)
        self._commanded = self._commanded or self.moving
        possible = True
        if self.table.name != "cartesian" and self.limits.commands:
            for at, before, name in zip(position, self.position, self.table.contract.action.names, strict=False):
                given = self.limits.commands[name]
                speed, allowed = given.velocity, given.following or FOLLOWING_RAD
                fastest = speed if self.moving else max(speed, HAND_SPEED)
                possible = possible and abs(at - before) <= fastest * elapsed_s + allowed + CLOSE_S
            possible = possible or (self._rejected and self._commanded and self._led(position))
        if possible or self.state == "ready":
            self.position, self._position_s, self._commanded = position, stamp_s, self.moving
        self._rejected = not possible
        self.consistent = self.consistent + 1 if possible else int(self.state == "ready")

    def _led(self, position: np.ndarray) -> bool:
        """Whether every joint is where it was commanded to lately."""
        return all(
            min(track.past) - allowed <= at <= max(track.past) + allowed
            for at, track in zip(position, self.tracks, strict=True)
            for allowed in [(track.given.following or FOLLOWING_RAD) + CLOSE_S]
        )

    def objections(self) -> str:
        """Why nothing new may be commanded now; "" if nothing speaks against it."""
        table, limits, graph = self.table, self.limits, self.graph
        now_s = graph.ros_s
        if graph.simulated:  # a measurement may tell the time before the clock does
            now_s = max(now_s, *(stamp for stamp in self.stamps.values() if stamp is not None), -math.inf)
        if self.bad_command:
            return "the last command was bad"
        beat_s = max(self.beat_s, self.begun_s)
        if not graph.now_s - beat_s <= self.settings.heartbeat_timeout_s + CLOSE_S:
            return f"no heartbeat for {graph.now_s - beat_s:.3f} s"
        waiting = [topic.name for topic in table.states if self.stamps.get(topic.name) is None]
        if waiting:
            return f"nothing usable on {waiting}"
        ages = [now_s - (self.stamps[topic.name] or 0.0) for topic in table.states if not topic.lasting]
        if max(ages) > limits.observation_timeout_s + CLOSE_S or min(ages) < -limits.clock_error_s - CLOSE_S:
            return f"measurements of age {min(ages):.3f} to {max(ages):.3f} s"
        if len(self.position) and now_s - self._position_s > limits.observation_timeout_s + CLOSE_S:
            return f"the last possible position was measured {now_s - self._position_s:.3f} s ago"
        for mode in table.modes:
            silent_s = graph.now_s - self.heard_s.get(mode.name, -math.inf)
            if mode.timeout_s is not None and silent_s > mode.timeout_s + CLOSE_S:
                return f"nothing was heard on {mode.name} for {silent_s:.3f} s"
        if fault := self._graph_fault():
            return fault
        age_s = now_s - self.good_stamp_s
        if not -limits.clock_error_s - CLOSE_S <= age_s <= limits.command_timeout_s + CLOSE_S:
            return f"a command of age {age_s:.3f} s"
        if unheard := [mode.name for mode in table.modes if mode.name not in self.refusals]:
            return f"nothing was heard on {unheard}"
        return next(filter(None, self.refusals.values()), "")

    def _graph_fault(self) -> str:
        """What the graph has shown for longer than safety_node may look away; "" if nothing."""
        graph, now_s = self.graph, self.graph.now_s
        shown = {
            f"nobody publishes on {mode.name}": not graph.publishers.get(mode.name)
            for mode in self.table.modes
            if mode.timeout_s is None
        }
        command = self.table.command.name
        shown[f"somebody else publishes on {command}"] = len(graph.publishers.get(command, ())) > 1
        self._graph_s = {fault: self._graph_s.get(fault, now_s) for fault, is_so in shown.items() if is_so}
        looked_s = now_s - LOOK_S - 2.0 * self.table.control_dt_s
        return next((fault for fault, since_s in self._graph_s.items() if max(since_s, self.resumed_s) < looked_s), "")
