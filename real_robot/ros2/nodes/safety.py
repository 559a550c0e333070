"""safety_node: an independent process between a policy's commands and the robot, with the emergency stop.

It checks every command again with its own limits. If the policy's heartbeat or its commands cease, the robot holds: the
node sends the stop that was certified with the last command, then nothing. It runs in steady time, so that a
simulator's clock cannot stop it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from rclpy.duration import Duration
from rclpy.qos import QoSProfile
from std_msgs.msg import Header
from std_srvs.srv import Trigger

from embodied.configuration import Configuration, PositiveFloat
from embodied.errors import UserError
from real_robot.firmware.record import read_contract
from real_robot.ros2.messages.codecs import read
from real_robot.ros2.nodes.managed import ERROR, OK, WARN, ManagedNode, Report
from real_robot.ros2.nodes.supervision import SAFETY_STATE, signed
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.robots.tables import ACTION
from real_robot.ros2.robots.vehicles import WAYPOINTS
from real_robot.ros2.ros_robot import HEARTBEAT, RosRobot
from real_robot.ros2.topics import subscribe
from real_robot.safety.limits import read_limits
from real_robot.safety.safety import Command, Safety, State

CHECKS = 4
"""Number of checks per shortest timeout."""
LIFELESS = "the policy's process gives no sign of life"


@dataclass
class SafetySettings(Configuration):
    """Parameters of safety_node.

    Attributes:
        checkpoint: source of the commanding policy's contract: a run, a checkpoint, an export, or a contract.json.
        robot, options: see policy_node.
        prefix: prefix of the topics of policy_node's commands.
        heartbeat_timeout_s: steady time after which the robot holds without a heartbeat of the policy's loop, or, in
            simulated time, without progress of the clock.
        liveliness_s: time after which the end or suspension of a policy's process is detected.
        limits: see policy_node; their `command_timeout_s`, in ROS time, is also the longest gap between commands.
        relocates: see policy_node.
    """

    checkpoint: str = ""
    robot: str = "simulation"
    options: dict[str, Any] = field(default_factory=dict)
    prefix: str = "policy/"
    heartbeat_timeout_s: PositiveFloat = 0.2
    liveliness_s: PositiveFloat = 0.2
    limits: str = ""
    relocates: bool | None = None


class SafetyNode(ManagedNode[SafetySettings]):
    """Checks commands and passes them on; `~/state` publishes its state.

    Service `~/emergency_stop` latches until `~/reset` or until the node is configured again.
    """

    def __init__(self) -> None:
        super().__init__("safety_node", SafetySettings)
        self._active = self._began = False
        self._early: Command | None = None

    def configure(self) -> None:
        """Subscribe to the policy, advertise the robot's commands and the services."""
        settings = self.settings
        self._limits = read_limits(settings.limits)
        contract = read_contract(settings.checkpoint)
        measured_specs = {
            key: spec for key, spec in contract.observation.items() if key not in WAYPOINTS
        }  # without waypoints no map is computed
        table = robot_table(settings.robot, replace(contract, observation=measured_specs), settings.options)
        self._table = table.within(self._limits)
        longest_age_s = self._limits.observation_timeout_s
        observed = {"measured": self._measured, "repeated": self._measured, "observation_timeout_s": longest_age_s}
        self._robot = RosRobot(self, self._table, **observed)
        robot = self._robot
        self._safety = Safety(
            robot, self._limits, robot.clock, robot.steady, relocates=robot.relocates(settings.relocates)
        )
        self._passed_commands = self._holds = 0
        self._beat_stamp_s = math.nan
        self._complaint = ""
        command = self._table.command
        # before the commands, so that the heartbeat is handled first
        self.own(self.create_subscription(Header, settings.prefix + HEARTBEAT, self._beat, QoSProfile(depth=1)))
        self._supervise()
        qos = replace(command.qos, lease_s=settings.liveliness_s)
        subscribe(self, settings.prefix + command.name, command.codec.message, qos, self._pass_on, alive=self._policies)
        self._state = signed(self, SAFETY_STATE)
        self.own(self.create_service(Trigger, "~/emergency_stop", self._stop))
        self.own(self.create_service(Trigger, "~/reset", self._reset))
        checked_s = min(settings.heartbeat_timeout_s, self._limits.command_timeout_s) / CHECKS
        # a stop is one command per period
        self.own(self.create_timer(min(checked_s, self._table.control_dt_s), self._watch, clock=self.steady))
        self.reports["safety"] = self._report
        self._reported_state = ""
        self._say()

    def _supervise(self) -> None:
        """Check the lease of policies' publishers; raise UserError if it is shorter than their promise."""
        promised_s = self._table.sign_s
        if self.settings.liveliness_s < promised_s:
            raise UserError(f"expected liveliness_s of at least {promised_s}, got {self.settings.liveliness_s}")
        self._commanders = 1

    def _policies(self, alive: int) -> None:
        self._commanders = alive
        self._watch()

    def activate(self) -> None:
        """Start passing commands on."""
        self._robot.start()
        # time-outs count from the first command on, not from the activation
        self._began = False
        self._early = None
        self._active = True
        self._say()

    def deactivate(self) -> None:
        """Stop passing commands on; returns when the robot has been stopped."""
        self._active = False
        if self._began:
            self._robot.leave("safety_node was deactivated")
            self._settle("safety_node was deactivated")
            self._began = False
        self._say()

    def _pass_on(self, message: Any) -> None:  # noqa: ANN401 - a ROS message
        if not self._active:
            return
        if not self._began:
            self._began, self._beat_s, self._commanded_s = True, self.steady_s, self._robot.steady()
        try:
            arrays, stamp_s = read(self._table.command.codec, message)
        except UserError as error:
            self.get_logger().error(f"a command cannot be read: {error}", throttle_duration_sec=1.0)
            self._hold("a command that cannot be read")
            return
        # a command without a stamp is as old as the heartbeat that the same process sends with it
        command = Command(arrays[ACTION], self._beat_stamp_s if stamp_s is None else stamp_s)
        early = self._robot.simulated and not self._reached(command)
        if missing := self._missing(waits=early):
            self._complain(missing)
        elif early:
            self._early = command
        else:
            self._check(command)

    def _check(self, command: Command) -> None:
        self._early = None
        self._complaint = ""
        self._commanded_s = self._robot.steady()
        verdict = self._safety.command(command, self._robot.read())
        self._passed_commands += verdict.state is State.ACTIVE and verdict.action is not None
        if verdict.state is not State.ACTIVE:
            self._holds += 1
            self.get_logger().warning(f"the robot holds: {verdict.reason}", throttle_duration_sec=1.0)
        self._say()

    def _beat(self, message: Header) -> None:
        self._beat_s = self.steady_s
        stamp = message.stamp
        unknown = 0.0 if self._robot.simulated else math.nan  # a simulator's time begins at zero
        self._beat_stamp_s = (10**9 * stamp.sec + stamp.nanosec) / 1e9 or unknown

    def _reached(self, command: Command) -> bool:
        return self._robot.has_subscriber and not (command.stamp_s or 0.0) > self._robot.clock()

    def _measured(self) -> None:
        """Process a new measurement: a motion starts only after several that are consistent."""
        if (reading := self._robot.read()) is not None:
            self._safety.observe(reading)
        self._catch_up()

    def _catch_up(self) -> None:
        """Process a command that arrived here before the /clock message of its time, or before the simulator."""
        if self._active and self._early and self._reached(self._early) and not self._missing(waits=True):
            self._check(self._early)

    def _watch(self) -> None:
        if self._safety.state is State.STOPPED:
            self._hold(self._safety.reason)  # also before the first command
            return
        if not self._active or not self._began:
            return
        self._catch_up()
        if missing := self._missing(waits=self._safety.state is not State.ACTIVE):
            self._complain(missing)
        elif self._robot.steady() - self._commanded_s > self._limits.command_timeout_s:
            self._complain("commands stopped", fault=False)
        else:
            self._safety.watch()
            self._say()

    def _missing(self, waits: bool) -> str:
        """Reason for passing no command on; "" if the policy's process is alive and the clock advances.

        With `waits` the clock may stand still, as a simulator's does in lock-step until the first command.
        """
        if self._commanders == 0 or self.steady_s - self._beat_s > self.settings.heartbeat_timeout_s:
            return LIFELESS
        if self._commanders > 1:
            return f"{self._commanders} processes publish on {self.settings.prefix}{self._table.command.name}"
        stands = not waits and self._robot.stands_s > self.settings.heartbeat_timeout_s
        return "the clock stands still" if stands else ""

    def _complain(self, reason: str, fault: bool = True) -> None:
        if self._safety.state is State.ACTIVE:
            self.get_logger().error(f"{reason}: the robot holds")
        self._complaint = reason
        self._hold(reason, fault)

    def _hold(self, reason: str, fault: bool = True) -> None:
        self._safety.hold(reason, fault)
        if (
            self._robot.stands_s > self._table.control_dt_s
        ):  # a clock that stands still does not time the stop's commands
            self._settle(reason)
        self._holds += 1
        self._say()

    def _settle(self, reason: str) -> None:
        self._safety.settle(reason, lambda seconds: self.steady.sleep_for(Duration(seconds=seconds)))

    def _stop(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self._robot.stop()
        self._safety.trip("emergency stop by service")
        self.get_logger().error("emergency stop")
        self._say()
        response.success = True
        response.message = "stopped until reset"
        return response

    def _reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self._early = None
        self._robot.engage()
        self._safety.reset()
        self._say()
        response.success = True
        response.message = self._safety.state.value
        return response

    def _say(self) -> None:
        """Publish the state if it has changed."""
        state = self._safety.state.value if self._active or self._safety.state is State.STOPPED else "inactive"
        if state != self._reported_state:
            self._reported_state = state
            self._state(state)

    def _report(self) -> Report:
        level = ERROR if self._safety.state is State.STOPPED else WARN if self._safety.reason else OK
        values = {
            "state": self._reported_state,
            "passed": self._passed_commands,
            "held": self._holds,
            "rejected": self._safety.rejected,
            "age_of_commands": "their stamps" if self._table.stamped else "the heartbeat's stamp",
        }
        stopped = self._safety.reason if self._safety.state is State.STOPPED else ""
        return Report(stopped or self._complaint or self._safety.reason or self._reported_state, level, values)
