"""policy_node: observation topics -> contract -> policy -> safety -> command topic, as a lifecycle node.

Configuring loads the policy and binds it to the robot, activating starts the loop, deactivating holds, and cleaning up
frees everything. After an error in the loop, the robot holds and the node deactivates.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from std_srvs.srv import Trigger

from embodied.algorithms.off_policy import risk
from embodied.configuration import Configuration
from embodied.contract import Contract
from embodied.execution.chunking import Execution
from embodied.policy import Policy
from real_robot.recording.recorder import Recorder
from real_robot.robots.control_loop import Controller, Executor
from real_robot.robots.reflexive import Reflexive
from real_robot.ros2.nodes.managed import ERROR, OK, WARN, ManagedNode, Report
from real_robot.ros2.nodes.supervision import SAFETY_STATE, watch
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.ros_robot import RosRobot
from real_robot.safety.limits import read_limits
from real_robot.safety.safety import MISSING, Safety, State, Verdict
from real_robot.serving.chunk_executor import ChunkExecutor
from real_robot.serving.policy_client import PolicyClient

HEARTBEAT_HZ = 20.0
SAFETY_TIMEOUT_S = 1.0
"""Time without a sign of life of safety_node after which its absence is reported."""
TIMED_PERIODS = 1000
"""Number of periods covered by /diagnostics."""


class Pace(Enum):
    """Trigger of periods: the control rate in ROS time or in steady time, or every measurement."""

    ros = "ros"
    steady = "steady"
    measurement = "measurement"


@dataclass
class PolicySettings(Configuration):
    """Parameters of policy_node.

    Attributes:
        checkpoint: a run, one of its checkpoints, or an ONNX export; or
        server: a policy server's address, ws://host:port; its token is read from the file `token_file`.
        robot, options: an entry of the robot tables, and its options.
        pace: when periods begin.
        prefix: prefix of the command topic; "policy/" is for safety_node, "" for the robot itself.
        execution, asynchronous: execution of action chunks; see `chunk_executor.ChunkExecutor`.
        reflex: folder of a reflex (reflex.py), which checks every action before safety; "": none.
        limits: YAML file of `limits.Limits` for commands and measurements; "": limits of the contract.
        relocates: whether the robot may change its position at once, so that measurements are not compared with each
            other; None: only in simulated time, in which an episode may begin elsewhere.
        recording: a new MCAP file of the policy's inputs, its decisions and every period, for replay; "": none.
        device: device of the policy.
    """

    checkpoint: str = ""
    server: str = ""
    token_file: str = ""
    robot: str = "simulation"
    options: dict[str, Any] = field(default_factory=dict)
    pace: Pace = Pace.steady
    prefix: str = "policy/"
    execution: Execution = Execution.SYNCHRONOUS
    asynchronous: bool = False
    reflex: str = ""
    limits: str = ""
    relocates: bool | None = None
    recording: str = ""
    device: str = "cpu"


class PolicyNode(ManagedNode[PolicySettings]):
    """Runs a policy on a robot; service `~/reset` begins an episode (memories and chunks restart).

    Args:
        load: loads the policy of the settings.
    """

    def __init__(self, load: Callable[[PolicySettings], Policy]) -> None:
        super().__init__("policy_node", PolicySettings)
        self._load = load
        self._active = self._robot_started = False
        self._executor: ChunkExecutor | None = None
        self._policy: Policy | None = None
        self._recorder: Recorder | None = None

    def configure(self) -> None:
        """Load the policy, bind it to the robot, subscribe and advertise."""
        settings = self.settings
        policy = self._policy = self._load(settings)
        table = robot_table(settings.robot, policy.contract, settings.options)
        if table.advice:
            self.get_logger().warning(table.advice)
        self._robot = RosRobot(self, table, settings.prefix, self._measured, self._repeated)
        self._executor = ChunkExecutor(
            policy,
            table.served,
            execution=settings.execution,
            clock=self._robot.clock,
            asynchronous=settings.asynchronous,
            device=settings.device,
        )
        self._commander = table.translate(self._checked(self._executor, table.served))
        robot = self._robot
        limits = read_limits(settings.limits)
        self._safety = Safety(robot, limits, robot.clock, robot.steady, relocates=robot.relocates(settings.relocates))
        self._timing = _Timing(table.control_dt_s)
        self._passed_on = not settings.prefix
        self._stopped = False
        if settings.prefix:
            watch(self, SAFETY_STATE, SAFETY_TIMEOUT_S, self._hears_safety, self._safety_changes)
        self.on_jump.append(self._jumped_back)
        self.reports["loop"] = self._report
        self.own(self.create_timer(1.0 / HEARTBEAT_HZ, self._beat, clock=self.steady))
        self.own(self.create_service(Trigger, "~/reset", self._reset))
        if settings.pace is not Pace.measurement:
            clock = self.steady if settings.pace is Pace.steady else self.get_clock()
            self.own(self.create_timer(table.control_dt_s, self._tick, clock=clock))
        record = None
        if settings.recording:  # last, because its file would remain if a later step failed
            origin = {"checkpoint": settings.checkpoint or settings.server, "robot": settings.robot}
            path = Path(settings.recording)
            contract = self._robot.contract
            self._recorder = Recorder(path, contract, origin=origin, clock=self._robot.clock)
            self._executor.ask(self._recorder.watch(policy))
            self.reports["recording"], record = self._report_recording, self._recorder.write
        self._controller = Controller(self._robot, self._commander, self._safety, self._robot.clock, record)

    def _checked(self, executor: ChunkExecutor, served: Contract) -> Executor:
        """The executor, behind a reflex if there is one."""
        if not self.settings.reflex:
            return executor
        return Reflexive(executor, risk.load(self.settings.reflex), served)

    def activate(self) -> None:
        """Start the loop with a new episode."""
        self._restart()
        self._safety.reset()
        self._robot.start()
        self._timing.restart()
        self._active = self._robot_started = True
        self._beat()

    def deactivate(self) -> None:
        """Stop the loop; returns when the robot has been stopped."""
        self._active = False
        if self._robot_started:
            self._safety.settle("policy_node was deactivated")
            self._robot_started = False

    def cleanup(self) -> None:
        """Free the policy and finish the recording."""
        if self._executor:
            self._executor.close()
        if isinstance(self._policy, PolicyClient):
            self._policy.close()
        recorder = self._recorder
        self._executor = None
        self._recorder = None
        self._policy = None
        if recorder:
            recorder.close()

    def _restart(self) -> None:
        """Begin an episode: drop earlier decisions, and decide next on a new measurement."""
        self._commander.reset()
        self._robot.reset()
        if self._recorder:
            self._recorder.begin_episode()

    def _measured(self) -> None:
        self._observe()
        if self.settings.pace is Pace.measurement:
            self._tick()

    def _repeated(self) -> None:
        """Process a repeated measurement: in lock-step, a simulator repeats the first one until a motion can start."""
        self._observe()
        if self.settings.pace is Pace.measurement and self._safety.state is State.READY:
            self._tick()

    def _observe(self) -> None:
        if (reading := self._robot.read()) is not None:
            self._safety.observe(reading)

    def _tick(self) -> None:
        if not self._active:
            return
        begin_s = time.perf_counter()
        try:
            stopped = "safety_node has stopped the robot: see its /diagnostics"
            verdict = self._safety.hold(stopped, fault=False) if self._stopped else self._controller.tick()
        except Exception as error:  # any error: a robot must not be left with its last command
            self.get_logger().error(f"the loop failed and the robot holds: {type(error).__name__}: {error}")
            self.trigger_deactivate()
            return
        if verdict.reason == MISSING and (explanation := self._executor.reason if self._executor else ""):
            verdict = replace(verdict, reason=f"{MISSING}: {explanation}")
        self._timing.add(begin_s, time.perf_counter() - begin_s, verdict)
        if verdict.state is not State.ACTIVE:
            self.get_logger().warning(f"the robot holds: {verdict.reason}", throttle_duration_sec=1.0)

    def _beat(self) -> None:
        if self._active:
            self._robot.beat()

    def _reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self._rearm()
        response.success = True
        return response

    def _hears_safety(self, alive: int) -> None:
        self._passed_on = alive > 0

    def _rearm(self) -> None:
        """Begin an episode, and leave a stop that an operator has reset."""
        self._restart()
        if self._safety.state is State.STOPPED:
            self._safety.reset()

    def _safety_changes(self, state: str) -> None:
        """Make no decisions while safety_node has stopped the robot; begin an episode once an operator has reset it."""
        stopped = self._stopped
        self._stopped = state == State.STOPPED.value
        if self._active and stopped and not self._stopped:
            self._rearm()

    def _jumped_back(self, back_s: float) -> None:
        """Begin a new episode, because the simulator has been reset."""
        if self._active:
            self._restart()
            if self._safety.state is not State.STOPPED:
                self._safety.reset()

    def _report(self) -> Report:
        if not self._active:
            return Report("inactive")
        report = self._timing.report()
        report.values = {**report.values, "rejected": self._safety.rejected}
        if not self._passed_on:
            return Report("no active safety_node passes the commands on", ERROR, report.values)
        return report

    def _report_recording(self) -> Report:
        trouble = self._recorder.trouble if self._recorder else ""
        return Report(trouble or self.settings.recording, ERROR if trouble else OK)


class _Timing:
    """Timing of the last `TIMED_PERIODS` periods for /diagnostics."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self.restart()

    def restart(self) -> None:
        self.began: deque[float] = deque(maxlen=TIMED_PERIODS)
        self.worked: deque[float] = deque(maxlen=TIMED_PERIODS)
        self.periods = self.overruns = self.inactive_periods = 0
        self.verdict: Verdict | None = None

    def add(self, began: float, worked: float, verdict: Verdict) -> None:
        self.began.append(began)
        self.worked.append(worked)
        self.periods += 1
        self.overruns += worked > self.period_s
        self.inactive_periods += verdict.state is not State.ACTIVE
        self.verdict = verdict

    def report(self) -> Report:
        if self.verdict is None or len(self.began) < 2:
            return Report("no measurement yet", WARN)
        rate_hz = (len(self.began) - 1) / (self.began[-1] - self.began[0])
        p50, p99, longest = (1e3 * np.quantile(self.worked, (0.5, 0.99, 1.0))).round(3)
        values = {
            "state": self.verdict.state.value,
            "reason": self.verdict.reason,
            "rate_hz": round(rate_hz, 2),
            "periods": self.periods,
            "overruns": self.overruns,
            "held": self.inactive_periods,
            "work_p50_ms": p50,
            "work_p99_ms": p99,
            "work_max_ms": longest,
        }
        level = {State.ACTIVE: OK, State.STOPPED: ERROR}.get(self.verdict.state, WARN)
        return Report(self.verdict.reason or self.verdict.state.value, level, values)
