"""Recorded episodes that a person begins, drives and judges; a policy may act while the person does not."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from embodied.configuration import Configuration, PositiveInt, Range
from embodied.contract import Contract
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.execution.chunking import Execution
from embodied.policy import Policy
from embodied.viewer.options import ViewerOptions
from real_robot.recording.lerobot_dataset import Store
from real_robot.recording.recorder import Recorder
from real_robot.robots.control_loop import Controller, ControlLoop, Executor
from real_robot.robots.devices import Device, open_device
from real_robot.robots.intervention import GRIPPER, Leader, Operator, Person, usual_axes
from real_robot.robots.robot import Array, Clock, Reading, Robot, SimulatedRobot
from real_robot.safety.filters import action_names
from real_robot.safety.limits import Limits, load_limits
from real_robot.safety.safety import Safety, State, Verdict
from real_robot.serving.chunk_executor import ChunkExecutor

log = logging.getLogger(__name__)
SIMULATION = "simulation"
FIRST_READING_S = 5.0
PATIENCE = 2.5
"""Control periods without a measurement or a command after which the robot holds."""


@dataclass
class DriveOptions(Configuration):
    """Options of a person who drives a robot.

    `device` drives it; `event` is the device's path if there are several. `axes` maps action elements to the device's
    axes; elements with names such as x, yaw and speed have defaults. Full deflection is the share `speed` of the
    action's limit. `leader` is the topic of a second arm's joint states; `leader_joints` are its joints in the action's
    order. `limits` is a YAML file of the robot's limits. `options` are those of the robot's row. Commands are published
    with the `prefix` to which safety_node subscribes. `simulated_time` uses the time of /clock.
    """

    options: dict[str, Any] = field(default_factory=dict)
    device: Device = Device.KEYBOARD
    event: str = ""
    axes: dict[str, str] = field(default_factory=dict)
    speed: Annotated[float, Range(above=0, at_most=1)] = 0.5
    leader: str = "leader/joint_states"
    leader_joints: list[str] = field(default_factory=list)
    limits: str | None = None
    prefix: str = "policy/"
    simulated_time: bool = False


@dataclass
class RecordConfig(ViewerOptions, DriveOptions):
    """Options of record.py: those of ViewerOptions and DriveOptions; `task` and task.* are the same as in train.py.

    `robot` is simulation, or a row of the tables with its `options`. The policy in `checkpoint` acts while the person
    does not. `episodes` is the number of episodes after which the program ends. `real_time` requests real-time
    scheduling. `lerobot` also writes a dataset, with `pictures` as videos or images; `output` is a new folder.
    """

    robot: str = SIMULATION
    checkpoint: str | None = None
    episodes: PositiveInt | None = None
    real_time: bool = False
    lerobot: bool = True
    pictures: Store = Store.VIDEO
    output: str | None = None

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and for a leader arm in a simulation."""
        super().__post_init__()
        if self.device is Device.LEADER and self.robot == SIMULATION:
            raise UserError("device=leader needs ROS 2; give the follower's row, such as robot=joint_trajectory")


@dataclass(frozen=True)
class Station:
    """A robot that a person can drive.

    Attributes:
        robot: the robot.
        contract: contract of policies and of recordings.
        clock: clock of the measurements.
        sleep: waits, in real time, and processes incoming messages meanwhile.
        begin: called before every episode; it may move a simulated robot to a start.
        over: outcome of an episode that has ended by itself: True is success; None: it has not ended.
        out_of_time: whether such an episode ended at a time limit.
        has_subscriber: whether commands have a subscriber.
        alive: called in every period in which commands are sent.
        leader: positions [A] of a second arm; None without new ones.
        translate: converts an executor of the contract's actions to one of the robot's actions, where they differ.
        put_back: called when a person has put the scene back; a simulator does it then where `begin` does not.
        steady: clock of control periods, which does not jump when `clock` is set; None: `clock`.
    """

    robot: Robot
    contract: Contract
    clock: Clock
    sleep: Callable[[float], None]
    begin: Callable[[], None]
    over: Callable[[], bool | None] = lambda: None
    out_of_time: Callable[[], bool] = lambda: False
    has_subscriber: Callable[[], bool] = lambda: True
    alive: Callable[[], None] = lambda: None
    leader: Callable[[], Array | None] = lambda: None
    translate: Callable[[Executor], Executor] = lambda executor: executor
    put_back: Callable[[], None] = lambda: None
    steady: Clock | None = None


class Driver:
    """An executor of the actions of a `person`, and of a `policy` while the person does not intervene.

    `trip` stops the robot before anything else is commanded, if the person presses stop or their device is gone.
    """

    def __init__(self, person: Person, policy: Executor | None, trip: Callable[[str], None]) -> None:
        self.person = person
        self._policy = policy
        self._trip = trip
        self.human = False
        """Whether the last action was the person's."""
        self.proposed_action: Array | None = None
        """Last requested action [A], of the person or the policy."""
        self.lost: OSError | None = None
        """Error of the person's device, which can't be read any more."""

    def reset(self) -> None:
        """Begin an episode."""
        if self._policy:
            self._policy.reset()

    def observe(self, reading: Reading) -> None:
        """Pass a measurement to the policy."""
        if self._policy:
            self._policy.observe(reading)

    def action(self, now_s: float) -> Array | None:
        """The action [A] for the time `now_s`; None if neither the person nor the policy has one."""
        proposed = self._policy.action(now_s) if self._policy else None
        command = None
        try:
            command = self.person.action(proposed)
            if "stop" in self.person.pressed:
                self._trip("stopped by a person")
        except OSError as error:
            self.lost = error
            self._trip(f"the person's controls are gone: {error}")
        self.human = command is not None
        self.proposed_action = proposed if command is None else command
        return self.proposed_action


class _QuitError(Exception):
    """Raised when the person, or a signal, ends the program."""


class Session:
    """Runs the episodes of `task` at a `station`; buttons or `station.over` determine the outcome.

    Only `safety` writes to the robot. Every episode without success, including stopped ones, is recorded as a failure.
    `stopping` returns whether the program has to end.
    """

    def __init__(
        self,
        station: Station,
        safety: Safety,
        driver: Driver,
        recorder: Recorder,
        task: str,
        stopping: Callable[[], bool],
    ) -> None:
        self._station = station
        self._safety = safety
        self._driver = driver
        self._recorder = recorder
        self._task = task
        self._stopping = stopping
        self._loop = ControlLoop(station.robot.contract.control_dt_s, sleep=station.sleep)
        self._translated = station.contract.action != station.robot.contract.action
        executor = station.translate(driver)
        self._controller = Controller(station.robot, executor, safety, station.clock, self._record)
        self._success = False
        self._logged_reason = ""

    def run(self, episodes: int | None) -> list[bool]:
        """Run up to `episodes` episodes, until the person presses stop between two; returns whether each was a success.

        Raises:
            UserError: if the person's device is gone, or the robot does not measure.
        """
        outcomes: list[bool] = []
        try:
            while episodes is None or len(outcomes) < episodes:
                outcomes.append(self._episode(len(outcomes)))
        except _QuitError:
            pass
        except OSError as error:  # while waiting
            self._driver.lost = error
        if self._driver.lost:
            raise UserError(f"the person's controls are gone: {self._driver.lost}; the recording is complete")
        return outcomes

    def _episode(self, number: int) -> bool:
        station = self._station
        station.begin()
        log.info(f"episode {number}: success or go begins it, stop ends the program")
        if self._driver.person.wait_for("success", "go", "stop", sleep=self._wait) == "stop":
            raise _QuitError
        if self._safety.state is State.STOPPED:
            self._safety.reset()
        first_reading(station)
        self._recorder.begin_episode(self._task)
        self._driver.reset()
        self._success = False
        self._logged_reason = ""
        timing = self._loop.run(self._period)
        self._safety.settle("the episode is over", station.sleep)
        self._recorder.end_episode(success=self._success)
        outcome = (
            "success" if self._success else "failure" if not self._logged_reason else f"ended: {self._logged_reason}"
        )
        log.info(f"episode {number}: {outcome}; {timing.periods} periods, {timing.missed} missed")
        if self._stopping() or self._driver.lost:
            raise _QuitError
        return self._success

    def _period(self) -> None:
        self._station.alive()
        verdict = self._controller.tick()
        pressed = self._driver.person.pressed
        if self._safety.reason != self._logged_reason:
            self._logged_reason = self._safety.reason
            if self._logged_reason:
                log.warning(f"{verdict.state.value}: {self._logged_reason}")
        outcome = True if "success" in pressed else False if "failure" in pressed else self._station.over()
        if outcome is not None or self._safety.state is State.STOPPED or self._stopping():
            self._success = bool(outcome) and self._safety.state is not State.STOPPED
            self._loop.stop()

    def _record(self, now_s: float, reading: Reading | None, proposed_action: Array | None, verdict: Verdict) -> None:
        if self._translated:  # policies learn the person's action, not its translation
            proposed_action = self._driver.proposed_action
            verdict = replace(verdict, action=proposed_action if verdict.state is State.ACTIVE else None)
        self._recorder.write(now_s, reading, proposed_action, verdict, self._driver.human)

    def _wait(self, seconds: float) -> None:
        self._station.sleep(seconds)
        if self._stopping():
            raise _QuitError


def simulated(environment: Environment) -> Station:
    """Station of a robot simulated by `environment` (N = 1, K = 1), which rests without an action."""
    spec = environment.contract.action
    rest = np.clip(np.zeros(spec.shape, np.float32), spec.low or -np.inf, spec.high or np.inf)
    robot = SimulatedRobot(environment, lambda _: rest)

    def over() -> bool | None:
        transition = robot.transition
        return None if transition is None or not bool(transition.done[0]) else bool(transition.success[0])

    def out_of_time() -> bool:
        return robot.transition is not None and bool(robot.transition.truncated[0])

    begin = lambda: robot.reset() and None  # noqa: E731
    return Station(robot, robot.contract, robot.clock, time.sleep, begin, over, out_of_time)


def limits(path: str | None, control_dt_s: float) -> Limits:
    """Load the limits of the YAML file at `path`; by default, the contract's limits and time-outs that fit the rate."""
    if path:
        return load_limits(Path(path))
    timeout_s = max(Limits.command_timeout_s, PATIENCE * control_dt_s)
    return Limits(observation_timeout_s=timeout_s, command_timeout_s=timeout_s)


def acting(policy: Policy, station: Station) -> ChunkExecutor:
    """Executor of `policy` at `station`; inference runs in a thread, unless time is simulated."""
    waits = isinstance(station.robot, SimulatedRobot)
    clock = station.clock
    execution = Execution.DELAYED if policy.contract.delay else Execution.NAIVE
    return ChunkExecutor(policy, station.contract, execution=execution, clock=clock, asynchronous=not waits)


def person(config: DriveOptions, station: Station, *, alone: bool) -> Person:
    """The operator or leader for `config.device`; `alone` without a policy.

    Raises:
        UserError: if the device is missing, or does not move every element of the action.
    """
    contract = station.contract
    if config.device is Device.LEADER:
        return Leader(station.leader, open_device(Device.KEYBOARD))
    axes = usual_axes(contract, config.axes, config.speed)
    gripper = GRIPPER if GRIPPER in action_names(contract) and GRIPPER not in axes else ""
    channel = open_device(config.device, config.event)
    try:
        return Operator(channel, contract, axes, gripper, alone=alone)
    except UserError:
        channel.close()
        raise


def first_reading(station: Station) -> Reading:
    """Wait for the first valid measurement of the robot and for a subscriber of its commands.

    Waiting is counted in `sleep`, because a simulator's clock is 0 until its first message, and then any time.

    Raises:
        UserError: without a valid measurement or a subscriber within `FIRST_READING_S`.
    """
    period_s = station.robot.contract.control_dt_s
    reading = None
    for _ in range(math.ceil(FIRST_READING_S / period_s)):
        reading = station.robot.read()
        if reading is not None and not reading.fault and station.has_subscriber():
            return reading
        station.sleep(period_s)
    if reading is not None and not reading.fault:
        raise UserError(f"nobody listened to commands for {FIRST_READING_S:g} s: is safety_node running?")
    fault = reading.fault if reading else "is its driver running?"
    raise UserError(f"the robot gave no valid measurement in {FIRST_READING_S:g} s: {fault}")
