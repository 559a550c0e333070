"""What a node that commands a robot has read until now, from messages alone; see `row_checker`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.row_network import Network
from embodied.errors import UserError
from real_robot.ros2.messages.codecs import ForeignError, read
from real_robot.ros2.nodes.safety import SafetySettings
from real_robot.ros2.robots.tables import ACTION, Table
from real_robot.safety.limits import Limits

CLOSE_S = 1e-6


class Known:
    """What safety_node has read, and may rely on."""

    def __init__(self, graph: Network, table: Table, limits: Limits, settings: SafetySettings) -> None:
        self.graph, self.table, self.limits, self.settings = graph, table, limits, settings
        self.command = settings.prefix + table.command.name
        self.forget()

    def forget(self) -> None:
        """A process that has just started has read nothing."""
        self.gone_s = -math.inf
        """What is stamped until then, and later than a simulator's clock, was on its way when that jumped back."""
        self.stamps: dict[str, float | None] = {}
        """Of the newest message of each topic; None of one that cannot be used."""
        self.position = np.empty(0)
        self._key = "end_effector_position" if self.table.name == "cartesian" else "joint_position"
        self.begun_s = math.inf  # when the first command came, from which on a heartbeat is expected
        self.good_s = self.good_stamp_s = self.beat_s = self.status_s = -math.inf
        self.bad_command = True
        self.status: Any = None
        self.refusals: dict[str, str] = {}

    def jump_back(self, seconds: float) -> None:
        """A simulator's clock has jumped back."""
        self.stamps.clear()
        self.gone_s = self.graph.ros_s + seconds + self.table.control_dt_s

    def read(self, topic: str, message: Any) -> None:  # noqa: ANN401 - a ROS message
        """A message has been handled."""
        now_s = self.graph.now_s
        if topic == self.command:
            self.begun_s = min(self.begun_s, now_s)
            self._take(message)
        elif topic == self.settings.prefix + "heartbeat":
            self.beat_s = now_s
        for state in self.table.states:
            if state.name == topic:
                self._measure(topic, state.codec, message)
        for mode in self.table.modes:
            if mode.name == topic:
                self.refusals[topic] = mode.refusal(message)
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
            self.good_s, self.good_stamp_s = self.graph.now_s, math.nan if stamp_s is None else stamp_s

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
        if self._key in arrays and finite:
            self.position = arrays[self._key].astype(np.float64)

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
        age_s = 0.0 if math.isnan(self.good_stamp_s) else now_s - self.good_stamp_s
        if not -limits.clock_error_s - CLOSE_S <= age_s <= limits.command_timeout_s + CLOSE_S:
            return f"a command of age {age_s:.3f} s"
        if unheard := [mode.name for mode in table.modes if mode.name not in self.refusals]:
            return f"nothing was heard on {unheard}"
        return next(filter(None, self.refusals.values()), "")
