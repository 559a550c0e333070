"""Checks messages of nodes to a robot against limits and modes, from messages alone; see `safety_faults_rows`.

Its inputs are the messages to the robot, the messages that safety_node has read until then, and the state that
safety_node publishes; it is independent of the nodes' decisions.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.row_known import CLOSE_S, FOLLOWING_RAD, Known
from benchmarks.safety_checker import Track, ViolationError
from real_robot.robots.robot import Array
from real_robot.ros2.robots.quadrotors import PX4_ARMED, PX4_HOLD, PX4_OFFBOARD
from real_robot.ros2.robots.tables import ACTION
from real_robot.safety.limits import ElementLimits, Kind

ROUNDING = 2.0**-23
"""Tolerance, because messages contain actions of 32 bits."""


class RowChecker:
    """Checks of every row: commands only without objections, and never after an emergency stop."""

    def __init__(self, known: Known, command: str) -> None:
        self.known, self.graph, self.table, self.limits = known, known.graph, known.table, known.limits
        self.command_topic = command
        self.state = self.before = "inactive"
        self.stopped = False
        """Whether an emergency stop was called, and no reset since."""
        self.values: list[Array] = []
        self.count = Counter[str]()
        spec = self.table.contract.action
        self.low, self.high = np.array(spec.low), np.array(spec.high)
        for index, name in enumerate(spec.names):
            if (given := self.limits.commands.get(name)) is not None:
                position = given.kind is Kind.POSITION
                low, high = (given.low, given.high) if position else (-given.velocity, given.velocity)
                self.low[index], self.high[index] = max(self.low[index], low), min(self.high[index], high)

    def send(self, topic: str, message: Any, sender: str) -> None:  # noqa: ANN401 - a ROS message
        """Process a message that a node has sent."""
        if topic == "safety_node/state":
            self.state = message.data
        elif topic == self.command_topic:
            self.values.append(self.decoded(message))
        elif sender == "safety_node":
            self.request(topic, message)

    def settle(self, name: str) -> None:
        """Check the messages of a node's callback that has ended."""
        if name != "safety_node":
            return
        self.known.look()
        values, self.values = self.values, []
        before, self.before = self.before, self.state
        if self.stopped and self.state == "active":
            raise ViolationError("active after an emergency stop")
        if self.state == "active" and before != "active":
            self.count["begun"] += 1
        if before == "active" and self.state != "active":
            self.count["held"] += 1
        self.count["commands"] += len(values)
        self.check(before, values)

    def begin(self) -> None:
        """Process a restart of safety_node."""
        self.known.forget()
        self.state = self.before = "inactive"
        self.stopped = False

    def decoded(self, message: Any) -> Array:  # noqa: ANN401 - a ROS message
        """Decode the action, and check that all elements are numbers within contract and limits."""
        if message.__msgtype__ == "trajectory_msgs/msg/JointTrajectory":
            return self._trajectory(message)
        decode = _DECODE.get(message.__msgtype__)
        values = decode(message) if decode else self.table.command.codec.decode(message)[ACTION].astype(np.float64)
        self._allowed(values)
        return values

    def _allowed(self, values: Array) -> None:
        rounding = 4 * ROUNDING * np.maximum(1.0, np.abs(values))
        inside = (values >= self.low - rounding) & (values <= self.high + rounding)  # false for NaN
        if values.shape != self.low.shape or not inside.all():
            raise ViolationError(f"commanded {values}, allowed {self.low} to {self.high}")

    def _trajectory(self, message: Any) -> Array:  # noqa: ANN401 - a ROS message
        names = list(self.table.command.codec.ros_joints)  # type: ignore[attr-defined]
        order = [list(message.joint_names).index(name) for name in names]
        first, last = message.points
        first_positions, ends, speed = (
            np.asarray(each)[order] for each in (first.positions, last.positions, first.velocities)
        )
        after_s = [point.time_from_start.sec + 1e-9 * point.time_from_start.nanosec for point in message.points]
        if np.any(last.velocities) or not 0.0 < after_s[0] < after_s[1] or message.header.stamp.sec:
            raise ViolationError("a trajectory that does not end at rest")
        self._allowed(first_positions)
        self._allowed(ends)
        if (np.abs(ends - first_positions) > 0.5 * (after_s[1] - after_s[0]) * np.abs(speed) + 1e-6).any():
            raise ViolationError("a trajectory that goes on farther than its velocity carries it")
        return first_positions

    def check(self, before: str, values: list[Array]) -> None:
        """Check the commands of one callback of safety_node, whose state was `before`."""
        raise NotImplementedError

    def request(self, topic: str, message: Any) -> None:  # noqa: ANN401 - a ROS message
        """Check a message of safety_node that is no command."""


class StoppedByCommands(RowChecker):
    """Checks of arms and vehicles: every derivative within its limit, every stop within its distance, then silence."""

    def __init__(self, known: Known, command: str) -> None:
        super().__init__(known, command)
        spec, dt_s = self.table.contract.action, self.table.control_dt_s
        self.dt_s = dt_s
        self.tracks: list[Track] = []
        for name, low, high in zip(spec.names, spec.low, spec.high, strict=True):
            given = self.limits.commands.get(name, ElementLimits(low=low, high=high))
            scale = dt_s if given.kind is Kind.VELOCITY else 1.0
            self.tracks.append(Track(given, dt_s, 0.0, (low * scale, high * scale), 4 * ROUNDING))
        known.tracks = self.tracks
        self.rates = np.array([dt_s if track.given.kind is Kind.VELOCITY else 1.0 for track in self.tracks])
        self.fresh, self.silent = True, False
        self.ran_s = self.idle_s = -math.inf
        self.commands = 0
        self.bounds: list[tuple[float, float, float]] = []

    def begin(self) -> None:
        """Process a restart, after which the robot stands still."""
        super().begin()
        self.fresh = True

    def check(self, before: str, values: list[Array]) -> None:
        """See the class."""
        if self.now_s - self.ran_s > 1.01 * self.dt_s:  # the process was suspended
            self.idle_s = self.now_s
        self.ran_s = self.now_s
        if self.state == "active":
            if values and (objection := self.known.objections()):
                raise ViolationError(f"commanded although {objection}")
            for each in values:
                self._active(each)
            return
        if before == "active" or (before == "holding" and self.state == "stopped"):
            self._begin_stop()
        self.commands += len(values)
        self._rest()
        if not values:
            self.silent = self.silent or self.now_s - self.idle_s > 2.01 * self.dt_s
        self.known.moving = not (self.silent or all(track.still for track in self.tracks))
        for each in values:
            if self.silent:
                raise ViolationError("commanded after the stop")
            self._take(each)
            self._within()

    @property
    def now_s(self) -> float:
        """Time that has passed."""
        return self.known.passed_s

    @property
    def _gap_s(self) -> float:
        return self.now_s - self.known.sent_s

    def _active(self, values: Array) -> None:
        self.silent, self.known.moving = False, True
        rests = all(track.still for track in self.tracks)
        self._rest()
        paused = self._gap_s > self.limits.command_timeout_s and all(track.position for track in self.tracks)
        if self.fresh or rests or paused:
            self._start(values)
        self._follows()
        self._take(values)
        self.fresh = False

    def _rest(self) -> None:
        """Process a standstill by the robot's own time-out, which may be commanded once.

        Just at the time-out the robot may stand or move, and commands may continue from either state.
        """
        stops_after_s = self.table.stops_after_s
        for track in self.tracks:
            rests_s = self.limits.command_timeout_s if track.position else stops_after_s
            if rests_s is None or self._gap_s < rests_s - CLOSE_S:
                continue
            self.silent = False
            if self._gap_s > rests_s + CLOSE_S:
                track.w, track.b, track.unknown = 0.0, 0.0, 0
            else:
                track.unknown = 3

    def _start(self, values: Array) -> None:
        """Check that a motion begins at the measured position, or continues from the commanded one."""
        measured = any(track.position and track.given.measured for track in self.tracks)
        # one less, because with a clock that stands still or jumps, repeated measurements are ambiguous
        if measured and self.known.consistent < self.known.needed - 1:
            raise ViolationError(f"begun after {self.known.consistent} consistent measurements")
        for index, track in enumerate(self.tracks):
            value = values[index] * self.rates[index]
            if track.position and track.given.measured:
                measured = self.known.position[index]
                follows = not self.fresh and abs(measured - track.p) <= self._following(track)
                track.rest(track.p if follows else min(max(measured, track.low), track.high))
            elif track.position and not track.given.measured and self.fresh:
                track.rest(value if not track.given.limited else track.given.rest)
            else:
                track.rest(track.p)

    def _begin_stop(self) -> None:
        self.commands, self.silent, self.bounds = 0, False, []
        for track in self.tracks:
            if math.isinf(track.fastest):  # only its range is limited
                self.bounds.append((-math.inf, math.inf, 0.0))
                continue
            distance, periods = track.stop()
            distance += 4 * ROUNDING * (periods + 1) ** 2  # accumulated rounding
            self.bounds.append((track.p - distance, track.p + distance, periods))

    def _within(self) -> None:
        longest = 2.0 * max((periods for _, _, periods in self.bounds), default=0.0) + 3.0
        for index, (track, (low, high, _)) in enumerate(zip(self.tracks, self.bounds, strict=True)):
            if not low - 1e-6 <= track.p <= high + 1e-6:
                raise ViolationError(f"element {index} stopped at {track.p:.6g}, certified {low:.6g} to {high:.6g}")
        if self.commands > longest:
            raise ViolationError(f"not silent after {self.commands} commands of a stop, {longest:.0f} allowed")

    def _follows(self) -> None:
        for index, track in enumerate(self.tracks):
            if not (track.position and track.given.measured):
                continue
            allowed = self._following(track)
            measured_position = self.known.position[index]
            deviation = max(min(track.past) - measured_position, measured_position - max(track.past))
            if deviation > allowed + 1e-6:
                raise ViolationError(f"commanded on, {deviation:.4g} from where the robot is")

    @staticmethod
    def _following(track: Track) -> float:
        """Allowed deviation of a joint, rad."""
        return FOLLOWING_RAD if track.given.following is None else track.given.following

    def _take(self, values: Array) -> None:
        length = round(self.limits.following_s / self.dt_s) + 2
        for index, (track, value) in enumerate(zip(self.tracks, values * self.rates, strict=True)):
            if broken := track.take(float(value), length):
                raise ViolationError(f"element {index}: {broken}")
        self.known.sent_s = self.idle_s = self.now_s


class StoppedByItself(RowChecker):
    """Checks of quadrotors and simulations: commands only while the robot takes them and nobody else steers it."""

    def __init__(self, known: Known, command: str) -> None:
        super().__init__(known, command)
        self.followed = self.lost = False
        self.asked_for_us = False

    def begin(self) -> None:
        """Process a restart: a new process sends its requests again."""
        super().begin()
        self.reset()

    def reset(self) -> None:
        """Process an operator's request to follow."""
        self.followed = self.lost = False

    def check(self, before: str, values: list[Array]) -> None:
        """See the class."""
        condition = self._condition()
        if condition is False and self.followed:
            self.lost = True
        if not values:
            return
        if self.table.status:
            self._may_follow(condition)
        if self.state == "active" and not (self.table.status and self.graph.now_s - self.known.good_s > CLOSE_S):
            if objection := self.known.objections():
                raise ViolationError(f"commanded although {objection}")
        elif self.table.status is None:
            raise ViolationError(f"commanded while {self.state}")

    def _may_follow(self, condition: bool | None) -> None:
        assert self.table.status is not None
        known, now_s = self.known, self.graph.now_s
        if not condition:
            raise ViolationError("commanded while its status says that it does not take commands")
        if now_s - known.status_s > self.table.status.timeout_s + CLOSE_S:
            raise ViolationError(f"commanded {now_s - known.status_s:.3f} s after its last status")
        if now_s - known.good_s > self.table.pause.longest_s + self.table.control_dt_s + CLOSE_S:
            raise ViolationError(f"commanded {now_s - known.good_s:.3f} s after the last good command")
        if self.lost:
            raise ViolationError("commanded again, without an operator's reset")
        self.followed = True

    def request(self, topic: str, message: Any) -> None:  # noqa: ANN401 - a ROS message
        """Check PX4's messages: a heartbeat while commands arrive; offboard mode and arming if nobody else flies."""
        if topic == "fmu/in/offboard_control_mode":
            self._beats()
        elif topic == "fmu/in/vehicle_command":
            self._asks(message)

    def _beats(self) -> None:
        age_s = self.graph.now_s - self.known.good_s
        if age_s > self.table.pause.longest_s + self.table.control_dt_s + CLOSE_S:
            raise ViolationError(f"a heartbeat {age_s:.3f} s after the last good command")
        if self.lost or self.stopped:
            raise ViolationError("a heartbeat after offboard mode was lost")
        self.count["heartbeats"] += 1

    def _asks(self, message: Any) -> None:  # noqa: ANN401 - a ROS message
        self.count["requests"] += 1
        status = self.known.status
        parameters = round(message.param1), round(message.param2), round(message.param3)
        if (message.command, parameters) == (400, (0, 21196, 0)):
            if not self.stopped:
                raise ViolationError("motors off without an emergency stop")
        elif (message.command, parameters) == (176, (1, 4, 3)):
            if status.nav_state != PX4_OFFBOARD:
                raise ViolationError("hold mode was asked for while somebody else flew")
        else:
            free = status.arming_state != PX4_ARMED or status.nav_state in (PX4_HOLD, PX4_OFFBOARD)
            if not free or self.lost or self.stopped:
                raise ViolationError(f"asked for {message.command} {parameters} while somebody else flew")

    def _condition(self) -> bool | None:
        """Whether PX4's newest status is in offboard mode; None before the first status."""
        return None if self.known.status is None else self.known.status.nav_state == PX4_OFFBOARD


_DECODE = {
    "geometry_msgs/msg/TwistStamped": lambda message: np.array([message.twist.linear.x, message.twist.angular.z]),
    "ackermann_msgs/msg/AckermannDriveStamped": lambda message: np.array(
        [message.drive.steering_angle, message.drive.speed]
    ),
}
"""Decoders independent of the codecs, to reveal a codec's symmetric errors; otherwise the row's codec is used."""
