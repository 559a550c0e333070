"""PX4's commander as a partner in tests: modes, arming, its offboard-loss failsafe, a pilot's radio, what it publishes.

From https://docs.px4.io/main/en/flight_modes/offboard, .../config/safety and the behaviour of its commander: the mode
that was asked for (by command or radio) is kept; while its needs are not met, a failsafe flies instead, and the mode
returns once they are. It does not simulate flight: odometry is what a test says.
"""

from typing import Any

import numpy as np

from tests.real_robot.ros2.in_process import Graph
from tests.real_robot.ros2.messages.definitions import types

MANUAL, ALTITUDE, POSITION, HOLD, RETURN, DESCEND, TERMINATION, OFFBOARD, LAND = 0, 1, 2, 4, 5, 12, 13, 14, 18
ACCEPTED, REJECTED, DENIED = 0, 1, 2
FORCED = 21196
STATUS_EVERY_S, STATUS_AGAIN_S = 0.5, 0.2
"""The status is published at least this often, and at most."""
SETPOINTS = ("actuator_motors", "vehicle_rates_setpoint")
State = tuple[int, int, int, bool]
"""arming_state, nav_state_user_intention, nav_state, failsafe."""
DISARM_PREFLIGHT_S, KILL_DISARM_S = 10.0, 5.0


class Px4:
    """PX4 with its parameters: `loss_s` is COM_OF_LOSS_T, `fallback` the mode that COM_OBL_RC_ACT selects."""

    def __init__(self, graph: Graph, version: str = "_v1", loss_s: float = 1.0, fallback: int = POSITION) -> None:
        self.graph, self.version, self.loss_s, self.fallback = graph, version, loss_s, fallback
        self.preflight, self.warning, self.alive, self.sticks_override = True, False, True, False
        self.beats: list[float] = []
        self.setpoints: list[tuple[float, int, bool]] = []
        """Time, mode and whether armed at each set-point."""
        self.strays = 0
        """Set-points that came although the last status that arrived named another mode than offboard."""
        self.commands: list[tuple[float, int, tuple[int, ...], State]] = []
        """Time, number and parameters of each command, and the last status that had arrived at its sender."""
        self.acknowledged: list[tuple[int, int]] = []
        self.position, self.reset_counter = np.array([0.0, 0.0, -1.0]), 0
        self.left_s = graph.now_s
        """When offboard mode was left for the last time."""
        self.told: State = (1, HOLD, HOLD, False)
        self.boot()
        hear = graph.heard
        hear["fmu/in/offboard_control_mode"].append(self._beat)
        hear["fmu/in/vehicle_command"].append(self._command)
        for name in SETPOINTS:
            hear[f"fmu/in/{name}"].append(lambda message: self._setpoint())

    def boot(self) -> None:
        """Power on: disarmed, in hold mode, knowing nothing."""
        self.wanted = self.mode = HOLD
        self.armed = self.failsafe = self.flying = False
        self.armed_s, self.killed_s, self._beat_s = np.inf, np.inf, -np.inf
        self._said: State | None = None
        self._said_s = -np.inf

    def step(self) -> None:
        """One period: failsafe, then odometry and status."""
        if self.alive:
            self._update()
            self._publish()

    # what a pilot does

    def switch(self, mode: int) -> bool:
        """The radio's mode switch, or a ground station; returns whether it was accepted."""
        allowed = not self.armed or mode != OFFBOARD or self._signal
        if allowed and self.mode != TERMINATION:
            self.wanted = mode
            self._update()
        return allowed and self.mode != TERMINATION

    def sticks(self) -> None:
        """Sticks moved: position mode, in a failsafe or where COM_RC_OVERRIDE says so."""
        if self.failsafe or self.sticks_override:
            self.switch(POSITION)

    def kill(self) -> None:
        """The radio's kill switch: motors off, disarmed some seconds later."""
        self.killed_s = self.graph.now_s

    def arm(self, forced: bool = False) -> bool:
        """Arm; not without what the mode needs."""
        if not forced and (not self.preflight or (self.wanted == OFFBOARD and not self._signal)):
            return False
        if self.wanted == TERMINATION:
            return False
        self.armed, self.armed_s = True, min(self.armed_s, self.graph.now_s)
        self._update()
        return True

    def disarm(self, forced: bool = False) -> bool:
        """Disarm; not in the air unless forced."""
        if self.flying and not forced:
            return False
        self.armed = self.flying = False
        self.armed_s = self.killed_s = np.inf
        self._update()
        return True

    @property
    def _signal(self) -> bool:
        return self.graph.now_s - self._beat_s < self.loss_s

    def _update(self) -> None:
        before = self.mode
        if self.armed and not self.flying and self.graph.now_s - self.armed_s > DISARM_PREFLIGHT_S:
            self.disarm()
        if self.graph.now_s - self.killed_s > KILL_DISARM_S:
            self.disarm(forced=True)
        lost = self.armed and self.wanted == OFFBOARD and not self._signal
        self.mode = self.fallback if lost else self.wanted
        self.failsafe = lost or self.warning
        if before == OFFBOARD and self.mode != OFFBOARD:
            self.left_s = self.graph.now_s

    def _beat(self, message: Any) -> None:
        assert sum((message.direct_actuator, message.body_rate)) == 1
        assert abs(message.timestamp / 1e6 - self.graph.ros_s) < 0.1
        self.beats.append(self.graph.now_s)
        if self.alive:
            self._beat_s = self.graph.now_s
            self._update()

    def _setpoint(self) -> None:
        """Set-points reach the controllers in every mode."""
        self.setpoints.append((self.graph.now_s, self.mode, self.armed))
        self.strays += self.told[2] != OFFBOARD
        self.flying |= self.alive and self.armed and self.mode == OFFBOARD

    def _command(self, message: Any) -> None:
        assert message.from_external
        parameters = tuple(round(value) for value in (message.param1, message.param2, message.param3))
        self.commands.append((self.graph.now_s, message.command, parameters, self.told))
        if not self.alive:
            return
        forced = round(message.param2) == FORCED
        if message.command == 176:
            assert message.param1 == 1.0
            mode = {(6, 0): OFFBOARD, (4, 3): HOLD}[(round(message.param2), round(message.param3))]
            result = ACCEPTED if self.switch(mode) else REJECTED
        elif message.command == 400:
            done = self.arm(forced) if message.param1 else self.disarm(forced)
            result = ACCEPTED if done else REJECTED
        else:
            result = DENIED
        self.acknowledged.append((message.command, result))
        acknowledgement = types("px4_msgs/msg/VehicleCommandAck")()
        acknowledgement.command, acknowledgement.result = message.command, result
        self.graph.send("fmu/out/vehicle_command_ack", acknowledgement)

    def _publish(self) -> None:
        now_s = self.graph.now_s
        odometry = types("px4_msgs/msg/VehicleOdometry")()
        odometry.timestamp = odometry.timestamp_sample = round(self.graph.ros_s * 1e6)  # it follows our clock
        odometry.pose_frame = odometry.velocity_frame = 1
        odometry.position, odometry.q = self.position.astype(np.float32), np.array([1, 0, 0, 0], np.float32)
        odometry.reset_counter = self.reset_counter
        self.graph.send("fmu/out/vehicle_odometry", odometry)
        state: State = (2 if self.armed else 1, self.wanted, self.mode, self.failsafe)
        due_s = STATUS_EVERY_S if state == self._said else STATUS_AGAIN_S
        if now_s - self._said_s < due_s - 1e-9:
            return
        self._said, self._said_s = state, now_s
        status = types("px4_msgs/msg/VehicleStatus")()
        status.timestamp = odometry.timestamp
        status.arming_state, status.nav_state_user_intention, status.nav_state, status.failsafe = state
        if self.graph.send(f"fmu/out/vehicle_status{self.version}", status):
            self.told = state
