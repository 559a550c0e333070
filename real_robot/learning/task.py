"""A task on a robot, beside which a person stands: `python train.py task=NAME robot=ROW`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from embodied.configuration import FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt
from embodied.contract import Contract
from embodied.environment import Environment
from embodied.environments.wrapping import WrappedTask
from embodied.errors import UserError
from embodied.policy import Policy
from embodied.task import Task
from real_robot.learning.continuing import ContinuingSimulation
from real_robot.learning.control import Control
from real_robot.learning.disturbances import DisturbanceConfig, DisturbedRobot
from real_robot.learning.environment import RobotEnvironment, Rules
from real_robot.learning.homing import Homing
from real_robot.learning.judging import Judge
from real_robot.learning.remote.link import address
from real_robot.learning.resetting import BackwardConfig, BackwardEnvironment, PolicyResets
from real_robot.learning.scripted import HelpConfig, ScriptedPerson
from real_robot.robots import teleoperation
from real_robot.robots.control_loop import Watchdog
from real_robot.robots.devices import Device
from real_robot.robots.intervention import Engaging, Person
from real_robot.robots.teleoperation import SIMULATION, DriveOptions, Station
from real_robot.safety.safety import Safety


class Helper(Enum):
    """Who helps a robot: a person with a device, a scripted one where the simulator has an expert, or nobody."""

    OPERATOR = "operator"
    SCRIPTED = "scripted"
    NOBODY = "nobody"


class Reset(Enum):
    """Who brings the scene back to a start: a person, or a policy that learns it, for which a person helps out."""

    PERSON = "person"
    POLICY = "policy"


@dataclass
class RobotConfig(DriveOptions):
    """Robot of a training run: options of DriveOptions, and these.

    `row` is simulation, or a row of the tables. `person` helps and judges; `help` are the options of a scripted one.
    Episodes are truncated after `step_limit` control steps. Before each the robot is commanded to the actions `home`,
    each for `waypoint_s`; with `waits` it begins when the person presses a button. With `reset` policy a second policy
    brings the scene back, and a person is asked to after `reset_tries` failures in a row; `reset_classifier`, a folder
    that classify.py wrote, judges whether it is back, else the simulated task or the person does;
    `reset_demonstrations` are data sets that end at a start, read as `demonstrations` of the run are. `disturbances`
    are those of a simulated robot's measurements. With `listen`, HOST:PORT, this program only learns, and the robot's
    computer, which runs actor.py, connects to it; the policy may be `max_staleness` updates old there. All other
    options are then the actor's.
    """

    row: str = SIMULATION
    person: Helper = Helper.OPERATOR
    step_limit: PositiveInt = 200
    home: list[list[FiniteFloat]] = field(default_factory=list)
    waypoint_s: PositiveFloat = 3.0
    waits: bool = True
    reset: Reset = Reset.PERSON
    reset_tries: PositiveInt = 3
    reset_classifier: str | None = None
    reset_demonstrations: Any = None
    help: HelpConfig = field(default_factory=HelpConfig)
    disturbances: DisturbanceConfig = field(default_factory=DisturbanceConfig)
    listen: str | None = None
    max_staleness: NonNegativeInt = 4

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and for options that do not go together."""
        super().__post_init__()
        if self.listen:
            address(self.listen)
            if self.reset is Reset.POLICY:
                raise UserError("robot.reset=policy learns beside the robot; leave out robot.listen, and learn there")
        if (self.reset_classifier or self.reset_demonstrations) and self.reset is Reset.PERSON:
            raise UserError("robot.reset_classifier and reset_demonstrations are of robot.reset=policy; leave them out")
        if self.row == SIMULATION:
            if self.device is Device.LEADER:
                raise UserError("robot.device=leader needs ROS 2; use robot=ROW, such as robot=joint_trajectory")
            return
        if self.person is not Helper.OPERATOR:
            raise UserError(f"robot={self.row} moves: somebody has to stop it; use robot.person=operator")
        if self.disturbances.present:
            raise UserError("robot.disturbances are those of a simulated robot; leave them out")
        if not self.limits and not self.listen:
            raise UserError(f"robot={self.row} needs the limits of its motion; give robot.limits=FILE")


class RobotTask(WrappedTask):
    """The `task` on the robot of `config`, where it has one distribution and one environment.

    Args:
        task: the task; its demonstrations are those of the run.
        single: the same task with single actions, of which the simulator makes a simulated robot.
        config: the robot, and who stands beside it.
        judge: decides which episodes succeed, beside the person.
        backward: policy and learner of resets by a policy; None for a run that does not learn on the robot.
        reset_judge: decides whether the scene is back at a start, beside the person.
    """

    def __init__(
        self,
        task: Task,
        single: Task,
        config: RobotConfig,
        judge: Judge | None = None,
        backward: BackwardConfig | None = None,
        reset_judge: Judge | None = None,
    ) -> None:
        super().__init__(task)
        self.distributions = task.distributions[:1]
        self.single = single
        self.config = config
        self.judge = judge
        self.backward = backward
        self.reset_judge = reset_judge
        self._open: RobotEnvironment | None = None

    def __reduce__(self) -> tuple[()]:
        """Raise UserError: only the run's own process drives the robot."""
        raise UserError("a robot is driven by the run's own process; use placement=local")

    @property
    def variants(self) -> tuple[str, ...]:
        """None: a robot's scene does not vary by name."""
        return ()

    def baselines(self) -> Mapping[str, Policy]:
        """None: planners read a simulator's state."""
        return {}

    def contract(self, distribution: str) -> Contract:
        """Contract of the task without privileged observations, which robots lack."""
        contract = self.task.contract(distribution)
        specs = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
        return replace(contract, observation=specs)

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> RobotEnvironment:
        """Connect to the robot, and open the person's device.

        Raises:
            UserError: for several environments, and for a robot or a person that is not there.
        """
        if num_envs != 1 or self._open:
            raise UserError("a robot is one environment; use num_envs=1 evaluation_envs=1 and one collector")
        with ExitStack() as stack:
            simulated = self.config.row == SIMULATION
            contract = self.contract(distribution)
            helps = None
            is_back = None
            name = self.name, self.name
            if simulated:
                station, env = self._simulated(distribution, split, seed, stack)
                name = env.task_names[0], env.instructions[0]
                helps = self._scripted(env)
                is_back = self.single.start_condition(env) if self.config.reset is Reset.POLICY else None
            else:
                station = stack.enter_context(self._connected(contract))
            # before the person's device is opened; an error closes the station
            own = replace(station.contract, horizon=contract.horizon, executed=contract.executed)
            contract.check(own.delayed(contract.delay))
            limits = teleoperation.limits(self.config.limits, contract.control_dt_s)
            homing = Homing(self.config.home, self.config.waypoint_s)
            homing.check(station.contract, limits)
            relocates = simulated or self.config.simulated_time
            safety = Safety(station.robot, limits, station.clock, station.steady, relocates=relocates)
            if not simulated:  # a simulator's time stands still while the program learns
                stack.callback(Watchdog(safety, contract.control_dt_s).close)
            by_hand = simulated and self.config.person is Helper.OPERATOR
            pace = time.monotonic if by_hand else None
            control = Control(station, safety, self._person(station, helps), pace)
            begins = helps.begin if helps else lambda training: None
            self._open = RobotEnvironment(
                control,
                contract,
                name,
                Rules(self.config.step_limit, self.judge, waits=self.config.waits, homing=homing),
                begins=begins,
                resets=self._resets(control, contract, homing, is_back, begins),
                help=helps,
                waits=simulated,
                close=stack.pop_all().close,
            )
        return self._open

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """Raise UserError: there is no camera that films the robot."""
        raise UserError("there are no videos of robots; use video=false")

    def close(self) -> None:
        """Hold and release the robot, if it is connected."""
        if self._open:
            self._open.close()
        self._open = None

    def _simulated(self, distribution: str, split: str, seed: int, stack: ExitStack) -> tuple[Station, Environment]:
        env = self.single.environment(1, distribution, split, seed)
        stack.callback(env.close)
        if len(env.task_names) > 1:
            raise UserError(f"a robot learns one task, got {len(env.task_names)}; choose one, such as task.tasks=[0]")
        continuing = ContinuingSimulation(env) if self.config.reset is Reset.POLICY else None
        station = teleoperation.simulated(continuing or env)
        if self.config.disturbances.present:
            station = _disturbed(station, DisturbedRobot(station.robot, station.clock, self.config.disturbances, seed))
        if continuing is None:
            return station, env

        def put_back() -> None:
            continuing.put_back()
            station.begin()

        return replace(station, put_back=put_back), env

    def _resets(
        self,
        control: Control,
        contract: Contract,
        homing: Homing,
        is_back: Callable[[], bool] | None,
        begins: Callable[[bool], None],
    ) -> PolicyResets | None:
        """Resets by a second policy; None if a person resets.

        Raises:
            UserError: if nobody knows whether the scene is back, or the run does not learn on the robot.
        """
        config = self.config
        if config.reset is Reset.PERSON:
            return None
        if contract.delay:
            raise UserError("robot.reset=policy has not been tried under a delay; use robot.reset=person or delay=0")
        if self.backward is None:
            raise UserError("robot.reset=policy learns beside an algorithm of the stage rl; set algorithm=rlpd")
        if is_back is None and self.reset_judge is None and config.person is not Helper.OPERATOR:
            raise UserError(
                f"nobody knows when the scene of {self.name} is back at a start; use robot.reset_classifier=DIR (see"
                " classify.py), or robot.person=operator"
            )
        env = BackwardEnvironment(
            control,
            contract,
            ("reset", "put it back"),
            Rules(config.step_limit, self.reset_judge, waits=False, homing=homing),
            begins=lambda training: begins(False),  # a scripted person knows the task, not the way back
        )
        env.is_back = is_back
        return PolicyResets(env, self.backward, config.reset_tries)

    def _connected(self, contract: Contract):  # noqa: ANN202 - a context of a Station
        config = self.config
        try:
            from real_robot.ros2 import teleoperated
        except ImportError as error:
            raise UserError(f"robot={config.row} needs ROS 2 ({error}); see real_robot/ros2/README.md") from error
        return teleoperated.station(
            config.row,
            contract,
            config.options,
            prefix=config.prefix,
            leader=config.leader if config.device is Device.LEADER else "",
            leader_joints=config.leader_joints,
            simulated_time=config.simulated_time,
        )

    def _scripted(self, env: Environment) -> ScriptedPerson | None:
        if self.config.person is not Helper.SCRIPTED:
            return None
        if (expert := self.single.expert(env)) is None:
            raise UserError(f"{self.name} has no scripted expert; use robot.person=operator or nobody")
        return ScriptedPerson(expert, self.config.help)

    def _person(self, station: Station, scripted: ScriptedPerson | None) -> Callable[[], Person] | None:
        """Opens the device of who stands beside the robot; None: nobody."""
        if scripted or self.config.person is Helper.NOBODY:
            return (lambda: scripted) if scripted else None
        opens = partial(teleoperation.person, self.config, station, alone=False)
        return (lambda: Engaging(opens())) if self.config.device is Device.LEADER else opens


def _disturbed(station: Station, robot: DisturbedRobot) -> Station:
    """The `station` with the disturbed `robot` in place of its own."""

    def begin() -> None:
        station.begin()
        robot.restart()

    return replace(station, robot=robot, begin=begin)
