"""Information that a node has read before it commands a robot, from messages alone; see `row_checker`."""

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
from real_robot.ros2.robots.tables import ACTION, Table, Topic
from real_robot.safety.limits import Limits

CLOSE_S = 1e-6
HAND_SPEED, FOLLOWING_RAD, START_READINGS = 3.0, 0.1, 3
"""Speed in rad/s at which somebody may move an arm that is not commanded; allowed deviation, rad; number of consistent
measurements from which a motion may start."""


class Known:
    """Messages that safety_node has read and may rely on."""

    def __init__(self, graph: Network, table: Table, limits: Limits, settings: SafetySettings) -> None:
        self.graph, self.table, self.limits, self.settings = graph, table, limits, settings
        self.command = settings.prefix + table.command.name
        self._long = max(math.ceil(limits.recovery_s / table.control_dt_s), START_READINGS)
        self._convincing = START_READINGS + math.ceil(limits.lag_s / table.control_dt_s)
        self.tracks: list[Track] = []
        """Recent commands by element; set by `row_checker`."""
        self.passed_s, self._clock_s = 0.0, math.inf
        """Elapsed time, which does not decrease when the clock jumps back."""
        self.forget()

    def forget(self) -> None:
        """Reset everything for a process that has just started."""
        self.moving = False
        """Whether safety_node commands a motion or a stop; set by `row_checker`."""
        self.gone_s = -math.inf
        """Messages stamped up to this time, but after the simulator's clock, were in flight when it jumped back."""
        self.stamps: dict[str, float | None] = {}
        """Stamp of the newest message of each topic; None for an unusable message."""
        self._newest_s = -math.inf  # newest stamp of a measurement
        self.position, self._position_s = np.empty(0), -math.inf
        """The last measured position that is possible after the earlier ones."""
        self.consistent = 0
        """Number of consistent measurements in a row."""
        self.needed = START_READINGS
        """Number of consistent measurements from which a motion may start."""
        self.sent_s = -math.inf
        """Time of the last command, in `passed_s`; set by `row_checker`."""
        self._astray = self._followed = 0  # rejected measurements; those in a row that are where commands led
        self._newest: tuple[np.ndarray, float] | None = None  # position that waits for the other topics
        self._stamp_s = -math.inf  # of the newest position
        self._trusted = self._rejected = False  # enough consistent measurements were read; the newest one is impossible
        self._since_s = self._commanded_s = self._idle_s = 0.0  # since the last possible position
        self.reset_s = -math.inf
        self._ros_s = -math.inf
        self.resumed_s = -math.inf
        """When the process was last suspended until."""
        self.heard_s: dict[str, float] = {}
        """Time of the last message of each of the driver's modes."""
        self.beat_stamp_s = math.nan
        self._graph_s = dict[str, float]()  # time since which the graph has shown each fault
        self._key = "end_effector_position" if self.table.name == "cartesian" else "joint_position"
        self.begun_s = math.inf  # time of the first command, after which a heartbeat is expected
        self.good_s = self.good_stamp_s = self.beat_s = self.status_s = -math.inf
        self.bad_command = True
        self.status: Any = None
        self.refusals: dict[str, str] = {}

    @property
    def clock_s(self) -> float:
        """ROS time; a measurement may contain a simulator's time before its /clock message arrives."""
        return max(self.graph.ros_s, self._newest_s) if self.graph.simulated else self.graph.ros_s

    def reset(self) -> None:
        """Process a reset of safety_node by an operator: only later commands count."""
        self.reset_s = self.graph.ros_s

    def jump_back(self, seconds: float) -> None:
        """Process a backward jump of a simulator's clock."""
        self.gone_s = max(self.clock_s, self.graph.ros_s + seconds) + self.table.control_dt_s
        self.stamps.clear()
        self._newest_s = -math.inf

    def look(self) -> None:
        """Store the clock and the graph's state, as often as safety_node can."""
        graph, now_s = self.graph, self.graph.now_s
        clock_s = self.clock_s if graph.simulated else now_s
        self.passed_s += max(clock_s - self._clock_s, 0.0)
        self._clock_s = clock_s
        if graph.ros_s < self._ros_s:
            self.reset_s = -math.inf
        self._ros_s = graph.ros_s
        faults = {
            f"nobody publishes on {mode.name}": not graph.publishers.get(mode.name)
            for mode in self.table.modes
            if mode.timeout_s is None
        }
        command = self.table.command.name
        faults[f"somebody else publishes on {command}"] = len(graph.publishers.get(command, ())) > 1
        self._graph_s = {fault: self._graph_s.get(fault) or now_s for fault, is_so in faults.items() if is_so}

    def read(self, topic: str, message: Any) -> None:  # noqa: ANN401 - a ROS message
        """Process a message that safety_node has handled."""
        now_s = self.graph.now_s
        self.look()
        if topic == self.command:
            self.begun_s = min(self.begun_s, now_s)
            self._take(message)
        elif topic == self.settings.prefix + "heartbeat":
            self.beat_s = now_s
            self.beat_stamp_s = message.stamp.sec + 1e-9 * message.stamp.nanosec
        for state in self.table.states:
            if state.name == topic:
                self._measure(state, message)
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

    def _measure(self, state: Topic, message: Any) -> None:  # noqa: ANN401 - a ROS message
        topic = state.name
        try:
            arrays, stamp_s = read(state.codec, message)
        except ForeignError:
            return
        except UserError:
            self.stamps[topic] = None
            return
        ahead_s = -math.inf if stamp_s is None else stamp_s - self.graph.ros_s
        if self.graph.simulated and ahead_s > self.table.control_dt_s and self.graph.ros_s + ahead_s <= self.gone_s:
            return
        if stamp_s is not None and not state.lasting:
            self._newest_s = max(self._newest_s, stamp_s)
        specs = self.table.contract.observation
        finite = all(
            np.isfinite(values).all() for key, values in arrays.items() if key in specs and not specs[key].privileged
        )
        self.stamps[topic] = (self.graph.ros_s if stamp_s is None else stamp_s) if finite else None
        if self.graph.simulated and self._key not in arrays and self.stamps[topic] == self._position_s:
            self.consistent += 1  # of a clock that stands still: repetitions count, too
        if self._key in arrays and finite:
            self._newest = arrays[self._key].astype(np.float64), self.stamps[topic] or 0.0
        if self._newest is not None and all(self.stamps.get(state.name) is not None for state in self.table.states):
            self._place(*self._newest)
            self._newest = None

    def _place(self, position: np.ndarray, stamp_s: float) -> None:
        """Accept a measured position if it is possible after the last one, or if none has been trusted yet.

        After an impossible one the robot has to be at its old position, or, if it was commanded meanwhile, at the
        commanded one: it may have refused or been blocked, and then have moved there at once. After several it has to
        be there several times in a row, as a sensor that stands still is where commands lead, too, when they pass by.
        """
        elapsed_s = max(stamp_s - self._stamp_s, 0.0) if len(self.position) else 0.0
        self._stamp_s = stamp_s
        if elapsed_s > self.limits.observation_timeout_s + CLOSE_S:
            self.consistent = min(self.consistent, self.needed - START_READINGS)
        idle_s = 0.0 if self.moving else min(self.passed_s - self.sent_s, elapsed_s)
        self._since_s += elapsed_s
        self._commanded_s += elapsed_s - idle_s
        self._idle_s += idle_s * (not self._rejected)
        if self.table.name == "cartesian" or not self.limits.commands or not len(self.position):
            possible = True
        elif self._rejected and self._commanded_s:
            led = self._led(position)
            self._astray, self._followed = self._astray + (not led), (self._followed + 1) * led
            possible = self._followed >= (1 if self._astray == 1 else self._convincing)
        else:
            possible = self._reachable(position)
            self._astray, self._followed = int(not possible), 0
        self._rejected = not possible and self._trusted
        self.needed = self.needed if possible else self._long
        self.consistent = self.consistent + 1 if possible else int(not self._trusted)
        self._trusted = self._trusted or self.consistent >= self.needed
        if not self._rejected:
            self.position, self._position_s = position, stamp_s
            self._since_s = self._commanded_s = self._idle_s = 0.0

    def _reachable(self, position: np.ndarray) -> bool:
        """Whether every joint may have moved to `position` since the last possible position, by commands or by hand."""
        for value, before, name in zip(position, self.position, self.table.contract.action.names, strict=False):
            given = self.limits.commands[name]
            distance = given.velocity * self._commanded_s + max(given.velocity, HAND_SPEED) * self._idle_s
            if abs(value - before) > distance + (given.following or FOLLOWING_RAD) + CLOSE_S:
                return False
        return True

    def _led(self, position: np.ndarray) -> bool:
        """Whether every joint is near its recent commands."""
        return all(
            min(track.past) - allowed <= value <= max(track.past) + allowed
            for value, track in zip(position, self.tracks, strict=True)
            for allowed in [(track.given.following or FOLLOWING_RAD) + CLOSE_S]
        )

    def objections(self) -> str:
        """Reasons against a new command now; "" if there are none."""
        table, limits, graph = self.table, self.limits, self.graph
        now_s = self.clock_s
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
        age_s = max(now_s - self._position_s, self._since_s) if len(self.position) else 0.0
        if age_s > limits.observation_timeout_s + CLOSE_S:
            return f"the last possible position was measured {age_s:.3f} s ago"
        for mode in table.modes:
            silent_s = graph.now_s - self.heard_s.get(mode.name, -math.inf)
            if mode.timeout_s is not None and silent_s > mode.timeout_s + CLOSE_S:
                return f"nothing was heard on {mode.name} for {silent_s:.3f} s"
        if fault := self._graph_fault():
            return fault
        age_s = now_s - self.good_stamp_s
        if self.good_stamp_s <= self.reset_s:
            return f"the last command was issued {self.reset_s - self.good_stamp_s:.3f} s before the reset"
        if not -limits.clock_error_s - CLOSE_S <= age_s <= limits.command_timeout_s + CLOSE_S:
            return f"a command of age {age_s:.3f} s"
        if unheard := [mode.name for mode in table.modes if mode.name not in self.refusals]:
            return f"nothing was heard on {unheard}"
        return next(filter(None, self.refusals.values()), "")

    def _graph_fault(self) -> str:
        """Fault that the graph has shown for longer than safety_node's query period; "" if there is none."""
        looked_s = self.graph.now_s - LOOK_S - 2.0 * self.table.control_dt_s
        return next((fault for fault, since_s in self._graph_s.items() if max(since_s, self.resumed_s) < looked_s), "")
