"""Runs one policy on back ends from its simulator to a robot; `evaluation.sim_to_real` compares them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING

from embodied.configuration import Configuration, NonNegativeFloat, NonNegativeInt, PositiveInt, Seed
from embodied.environment import NumberedStarts
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.policy import Policy
from embodied.saving.checkpoint import results_folder
from embodied.task import Task
from embodied.viewer.options import ViewerOptions
from real_robot.sim_to_real import report as sim_to_real_report
from real_robot.sim_to_real.results import ActionLog, BackEndRun

LATE = re.compile(
    r"latency\.|delay=|success_classifier=|reflex=|task\.(guard|processes|python|step_limit|tasks|id|folder|mdp|options|overrides|assets)=|task\.randomisation\."
)
"""Options of train.py that may differ from training, or have to be repeated (`embodied.runtime.foreign_code`)."""


@dataclass
class ComparisonConfig(Configuration):
    """Options of a comparison on `episodes` initial states of each task (None: 50, in stock LIBERO 10).

    `seed` selects among unlimited initial states; `first_start` selects the first state instead. With `baselines` the
    task's planners are measured too.

    `sim_to_real` lists back ends; the others are compared with the first. simulator: called directly. randomised: the
    same with the options of train.py in `randomised` for the task. ros2: the simulator behind real ROS 2 messages. bag:
    the policy's decisions on the recording `bag`. robot: the robot of the ROS 2 parameter file `robot`; a person sets
    up every trial and judges its outcome.
    """

    episodes: PositiveInt | None = None
    seed: Seed = 0
    first_start: NonNegativeInt | None = None
    baselines: bool = False
    num_envs: PositiveInt | None = None
    device: str = "cpu"
    sim: list[str] = field(default_factory=list)
    sim_to_real: list[str] = field(default_factory=list)
    randomised: dict[str, list[str]] = field(default_factory=dict)
    bag: str | None = None
    robot: str | None = None

    @property
    def first(self) -> int:
        """Number of the first initial state."""
        return self.seed * (self.episodes or 0) if self.first_start is None else self.first_start

    @property
    def compared(self) -> str:
        """Name of the report of several back ends."""
        return sim_to_real_report.SIM_TO_REAL if self.sim_to_real else sim_to_real_report.SIM_TO_SIM

    def check(self) -> None:
        """Raise UserError for unknown back ends, and for back ends without their options."""
        for name in self.sim_to_real:
            if name not in BACK_ENDS:
                raise UserError(f"unknown back end {name!r} in sim_to_real; expected some of {', '.join(BACK_ENDS)}")
        if len(set(self.sim)) < len(self.sim):
            raise UserError(f"expected different simulators in sim, got {', '.join(self.sim)}")
        if self.sim_to_real and len(self.sim) > 1:
            raise UserError("sim_to_real compares in one simulator; name one in sim, or leave sim_to_real out")
        if (self.sim_to_real or len(self.sim) > 1) and self.baselines:
            raise UserError("back ends run a policy alone; use baselines=false with sim_to_real and several sim")
        if "bag" in self.sim_to_real and not self.bag:
            raise UserError("back end bag replays a recording: bag=FILE.mcap")
        if "robot" in self.sim_to_real and not self.robot:
            raise UserError("back end robot needs its ROS 2 parameters: robot=FILE, such as launch/config/arm.yaml")


@dataclass
class EvaluateConfig(ViewerOptions, ComparisonConfig):
    """Options of evaluate.py; `suite`, `assets` and `threads` default to training's, `num_envs` to `evaluation_envs`.

    `sim` names the simulator, by default that of training; with several simulators, `sim=[mujoco,stock]`, the policy is
    compared on the same episodes. `distributions` are all of the task by default; LIBERO's accept a wording,
    `[official:bddl]`. `margins` instead varies single conditions, for tasks that have them, and writes how far each may
    depart from training. `video` or `render` records some episodes of the first distribution, from its first start on.
    With an `execution` (inpaint, blend, naive, synchronous) inference takes `delay_s`, except for planners, while the
    robot continues, with `executed` actions between observations.

    `latency.*`, `delay`, `reflex`, `task.guard`, `task.tasks`, `task.processes`, `task.python` and `task.step_limit`
    default to training's, too.
    """

    checkpoint: str = MISSING
    suite: str | None = None
    assets: str | None = None
    distributions: list[str] | None = None
    delay_s: NonNegativeFloat = 0.0
    execution: str | None = None
    executed: PositiveInt | None = None
    threads: PositiveInt | None = None
    margins: bool = False
    video: bool = False
    render: bool = False

    def check(self) -> None:
        """Raise UserError also for options that the chosen comparison does not read."""
        super().check()
        several = bool(self.sim_to_real) or len(self.sim) > 1
        filmed = self.video or self.render
        if self.margins and (several or self.baselines or self.distributions or filmed):
            raise UserError(
                "margins=true sweeps by itself; leave out sim_to_real, several sim, baselines, distributions, video "
                "and render"
            )
        if several and filmed:
            raise UserError(
                f"of back ends and several sim nothing is filmed; use {'video' if self.video else 'render'}=false"
            )
        if several and self.distributions and len(self.distributions) > 1:
            one = self.distributions[0]
            raise UserError(f"back ends and several sim are compared on one distribution; use distributions=[{one}]")


@dataclass
class Comparison:
    """One policy on the same initial states, of a task's `distribution`, in several back ends.

    `checkpoint` is the policy's file; `environment` makes N simulators with changed options of train.py.
    """

    config: ComparisonConfig
    task: Task
    checkpoint: Path
    policy: Policy
    distribution: str
    environment: Callable[[int, Sequence[str]], NumberedStarts]

    def run(self) -> list[BackEndRun]:
        """Run the requested back ends, or the policy in each of the simulators."""
        if not self.config.sim_to_real:
            return [self._simulated(name, in_sim(name)) for name in self.config.sim]
        return [BACK_ENDS[name](self) for name in self.config.sim_to_real]

    def simulator(self) -> BackEndRun:
        """Run the simulator directly."""
        return self._simulated("simulator", [])

    def randomised(self) -> BackEndRun:
        """Run the simulator with dynamics and latencies that vary per episode."""
        name = self.task.name
        if not (changes := self.config.randomised.get(name)):
            raise UserError(f"no options to randomise {name}; expected randomised.{name}=['option=value']")
        return self._simulated("randomised", changes)

    def ros2(self) -> BackEndRun:
        """Run the simulator in another process, over ROS 2."""
        if self.policy.contract.delay:
            raise UserError(f"back end ros2 lacks the policy's delay={self.policy.contract.delay}; leave it out")
        from real_robot.ros2.software_in_the_loop import Episodes, run_episodes

        tasks = list(self.environment(1, []).task_names) if hasattr(self.task, "tasks") else []
        return run_episodes(
            Episodes(str(self.checkpoint), self.config.episodes, self.config.first, tasks, self.distribution)
        )

    def bag(self) -> BackEndRun:
        """Replay a recording: compare the policy's decisions with the recorded ones."""
        from real_robot.sim_to_real.back_ends import replayed

        assert self.config.bag is not None
        return replayed(self.config.bag, self.policy, self.config.device)

    def robot(self) -> BackEndRun:
        """Run trials on a real robot, judged by a person."""
        from real_robot.ros2.trials import Trials, console, run_trials

        assert self.config.robot is not None
        env = self.environment(1, [])
        if len(env.task_names) != 1:
            raise UserError(f"trials on a robot are of one task, the run has {len(env.task_names)}")
        trials = Trials(
            str(self.checkpoint),
            self.config.robot,
            env.task_names[0],
            self.config.episodes,
            self.config.first,
            env.step_limit,
            env.contract.control_dt_s,
        )
        return run_trials(trials, results_folder(self.checkpoint), console)

    def _simulated(self, name: str, changes: Sequence[str]) -> BackEndRun:
        """Evaluate in the simulator with the options `changes`, and log all actions."""
        actions = ActionLog()
        result = evaluate(
            self.environment(self.config.num_envs, changes),
            self.policy,
            starts_per_task=self.config.episodes,
            first_start=self.config.first,
            device=self.config.device,
            progress=name,
            watch=actions,
        )
        return BackEndRun(name, result, actions.episodes())


def in_sim(name: str) -> list[str]:
    """Options of train.py that run a task in the simulator `name`."""
    return [f"task.sim={name}"]


BACK_ENDS: dict[str, Callable[[Comparison], BackEndRun]] = {
    "simulator": Comparison.simulator,
    "randomised": Comparison.randomised,
    "ros2": Comparison.ros2,
    "bag": Comparison.bag,
    "robot": Comparison.robot,
}
