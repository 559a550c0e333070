"""sim_node: any of our simulators as a robot on ROS topics, with /clock.

In lock-step every command is one control period: the simulator publishes a measurement, waits for the command, steps
and measures again, so nothing depends on speed. In real time it steps at the control rate, with the last command while
it is fresh; otherwise the robot holds.
"""

from __future__ import annotations

import array
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticStatus, KeyValue
from rclpy.qos import QoSDurabilityPolicy, QoSProfile
from rosgraph_msgs.msg import Clock
from std_msgs.msg import Float64MultiArray
from std_srvs.srv import Trigger

from embodied.configuration import Configuration, FiniteFloat, NonNegativeInt, PositiveFloat, Range
from embodied.environment import NumberedStarts, Transition
from embodied.errors import UserError
from real_robot.robots.robot import SimulatedRobot
from real_robot.ros2.messages.codecs import read
from real_robot.ros2.nodes.managed import ManagedNode, Report
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.robots.tables import ACTION
from real_robot.ros2.topics import publisher, subscribe, types

AGAIN_S = 0.2
"""Wall time after which a measurement without an answer is published again. With best effort, a message is lost if the
subscriber's process has not discovered this one yet, even if this one has discovered the subscriber."""


@dataclass
class SimSettings(Configuration):
    """Parameters of sim_node.

    Attributes:
        checkpoint: a run; its task is simulated.
        overrides: changed options of the run, separated by spaces: "task.suite=libero_goal task.tasks=[3]".
        distribution: distribution of initial states; "" is the training distribution.
        robot, options: an entry of the robot tables that fits the simulator; the node takes the robot's side.
        lock_step: lock-step, see the module; otherwise real time, `real_time_factor` times as fast.
        hold_action: action [A] of the robot's own controller while it holds; zeros if empty.
        command_timeout_s: simulated time for which a command is valid in real time.
        silence_s: wall time without a command after which, in lock-step, a robot that is stopped by commands continues
            without a command.
        listeners: nodes that have to be connected before an episode begins in lock-step.
        start: initial state that `~/reset` begins from; -1: the next one. May be set at any time.
    """

    checkpoint: str = ""
    overrides: str = ""
    distribution: str = ""
    robot: str = "simulation"
    options: dict[str, Any] = field(default_factory=dict)
    lock_step: bool = True
    real_time_factor: PositiveFloat = 1.0
    hold_action: list[FiniteFloat] = field(default_factory=list)
    command_timeout_s: PositiveFloat = 0.1
    silence_s: PositiveFloat = 10.0
    listeners: NonNegativeInt = 1
    start: Annotated[int, Range(at_least=-1)] = -1


class SimNode(ManagedNode[SimSettings]):
    """One simulated robot; service `~/reset` begins an episode, `~/episode` publishes the outcome of each episode.

    Before the outcome, `~/trace` publishes one row [1 + A] per control step: the wall time in seconds from measurement
    to command (NaN if the robot held by itself) and the action. In lock-step nothing runs before the first `~/reset`;
    in real time an episode begins at once, and each is followed by the next.

    Args:
        load: makes the environment of the settings, with N = 1 and single actions.
    """

    live = ("start",)

    def __init__(self, load: Callable[[SimSettings], NumberedStarts]) -> None:
        super().__init__("sim_node", SimSettings)
        self._load = load
        self._active = self._running = False
        self._stamp_s = self._earlier_s = self._period_s = 0.0

    def configure(self) -> None:
        """Build the simulator and its topics."""
        settings = self.settings
        self._environment = self._load(settings)
        contract = self._environment.contract
        hold = self._hold_action = np.array(settings.hold_action or np.zeros(contract.action.shape), np.float32)
        if hold.shape != contract.action.shape:
            raise UserError(f"expected hold_action of {contract.action.shape[0]} numbers, got {len(hold)}")
        self._robot = SimulatedRobot(self._environment, lambda _: hold)
        self._table = table = robot_table(settings.robot, contract, settings.options)
        if table.policy_action:
            raise UserError(
                f"sim_node cannot play {settings.robot}, whose actions are not the simulator's: simulation can"
            )
        self._time = self.own(self.create_publisher(Clock, "/clock", QoSProfile(depth=1)))
        latched = QoSProfile(depth=1, durability=QoSDurabilityPolicy.TRANSIENT_LOCAL)
        self._outcome = self.own(self.create_publisher(DiagnosticStatus, "~/episode", latched))
        self._trace = self.own(self.create_publisher(Float64MultiArray, "~/trace", latched))
        # lasting topics first, because subscribers do not wait for them
        ordered = sorted(table.states, key=lambda topic: not topic.lasting)
        self._states = [(topic, publisher(self, topic.name, topic.codec.message, topic.qos)) for topic in ordered]
        subscribe(self, table.command.name, table.command.codec.message, table.command.qos, self._hear)
        self._period_s = contract.control_dt_s
        wall_s = self._period_s / settings.real_time_factor
        self.own(self.create_timer(wall_s, self._run_freely, clock=self.steady))
        self.own(self.create_service(Trigger, "~/reset", self._reset))
        for name in {*table.hold.services, *table.emergency.services}:
            self.own(self.create_service(Trigger, name, self._hold))
        self._episodes = self._holds = 0
        self.reports["simulator"] = self._report

    def activate(self) -> None:
        """In real time, begin an episode."""
        self._active = True
        if not self.settings.lock_step:
            self._begin()

    def deactivate(self) -> None:
        """Stop stepping."""
        self._active = self._running = False

    def cleanup(self) -> None:
        """Free the simulator.

        Simulated time continues when the node is configured again, so no node sees it jump back.
        """
        self._earlier_s = self._stamp_s + self._period_s

    def _begin(self) -> None:
        start = int(self.get_parameter("start").value)
        self._robot.reset(**({"starts": torch.tensor([start])} if start >= 0 else {}))
        self._command: np.ndarray | None = None
        self._holding = False
        self._running = True
        self._rows: list[np.ndarray] = []
        self._measure()

    def _reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success = False
        response.message = "activate the simulator first"
        if self._active and self.settings.lock_step and not self._has_listeners():
            response.message = f"fewer than {self.settings.listeners} nodes are connected to the simulator"
        elif self._active:
            self._begin()
            response.success, response.message = True, f"start {int(self._environment.start[0])}"
        return response

    def _has_listeners(self) -> bool:
        """Whether the required listeners are connected; messages published earlier are lost."""
        publishers = [self._time, *(out for _, out in self._states)]
        connected = all(out.get_subscription_count() >= self.settings.listeners for out in publishers)
        return connected and self.count_publishers(self._table.command.name) > 0

    def _hold(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        """Hold on request: the robot follows its own safe behaviour until a command arrives."""
        self._holding = True
        self._command = None
        self._holds += 1
        response.success = True
        return response

    def _hear(self, message: Any) -> None:  # noqa: ANN401 - a ROS message
        if not self._running:
            return
        try:
            arrays, stamp = read(self._table.command.codec, message)
        except UserError as error:
            self.get_logger().error(f"a command cannot be read: {error}", throttle_duration_sec=1.0)
            return
        action = arrays[ACTION]
        if self.settings.lock_step and stamp is not None and stamp < self._stamp_s:
            return  # an answer to an earlier measurement, after which the robot has held
        self._holding = False
        if self.settings.lock_step:
            self._write(action, time.perf_counter() - self._measured)
            self._stepped()
        else:
            self._command, self._commanded_s = action, self._robot.clock()
            self._latency_s = time.perf_counter() - self._measured

    def _run_freely(self) -> None:
        """Run one control period without waiting for a command."""
        if not self._running:
            return
        if self.settings.lock_step and not self._holding:
            waited_s = time.perf_counter() - self._measured
            if time.perf_counter() - self._published > AGAIN_S:
                self._publish()
            # the node that has stopped the robot is silent: without a step, both would wait for each other
            self._holding = waited_s > self.settings.silence_s and bool(self._rows) and self._table.at_rest is not None
            return
        is_fresh = self._command is not None and (
            self._robot.clock() - self._commanded_s <= self.settings.command_timeout_s
        )
        if is_fresh and not self._holding:
            self._write(self._command, self._latency_s)
        else:
            self._write(self._hold_action, np.nan)
        self._stepped()

    def _write(self, action: np.ndarray, latency_s: float) -> None:
        self._rows.append(np.concatenate(([latency_s], action)))
        self._robot.write(action)

    def _stepped(self) -> None:
        transition = self._robot.transition
        assert transition is not None
        if not bool(transition.done[0]):
            self._measure()
            return
        self._running = False
        self._episodes += 1
        self._tell(transition)
        if not self.settings.lock_step:
            self._begin()

    def _measure(self) -> None:
        """Publish the current measurement and the clock."""
        reading = self._robot.read()
        assert reading is not None
        # simulated time continues over episodes and configurations
        nanoseconds = round(1e9 * (self._earlier_s + reading.stamp_s))
        self._stamp_s = nanoseconds / 1e9  # computed like a node's clock, so that times are equal bit for bit
        arrays = self._table.measured(reading.observation)
        self._messages = [(out, topic.codec.encode(arrays, types, self._stamp_s)) for topic, out in self._states]
        # the clock is last, so that no node has a time without its measurement
        time_now = Time(sec=nanoseconds // 10**9, nanosec=nanoseconds % 10**9)
        self._messages.append((self._time, Clock(clock=time_now)))
        self._publish()
        self._measured = self._published

    def _publish(self) -> None:
        for out, message in self._messages:
            out.publish(message)
        self._published = time.perf_counter()

    def _tell(self, transition: Transition) -> None:
        environment = self._environment
        values: dict[str, Any] = {
            "start": int(environment.start[0]),
            "steps": int(environment.steps[0]),
            "success": int(transition.success[0]),
            "terminated": int(transition.terminated[0]),
            "step_limit": environment.step_limit,
        }
        values |= {f"metric.{name}": float(value[0]) for name, value in transition.metrics.items()}
        pairs = [KeyValue(key=key, value=repr(value)) for key, value in values.items()]
        self._trace.publish(
            Float64MultiArray(data=array.array("d", np.concatenate(self._rows).astype(np.float64).tobytes()))
        )
        task = environment.task_names[int(environment.task_index[0])]
        self._outcome.publish(DiagnosticStatus(name=task, message="episode ended", values=pairs))

    def _report(self) -> Report:
        values = {"simulated_s": round(self._stamp_s, 3), "episodes": self._episodes, "holds": self._holds}
        return Report("running" if self._running else "waiting for ~/reset", values=values)
