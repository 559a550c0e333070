"""Options of a training run, with which other programs compose a run's task and policy again.

This is where policies, simulators and robots are joined: the only module of the core that imports their packages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from embodied.algorithms.off_policy import risk
from embodied.algorithms.registry import ALGORITHMS, OFFLINE
from embodied.command_line.config import compose
from embodied.commands import option
from embodied.configuration import NonNegativeInt, PositiveFloat, PositiveInt, Seed
from embodied.environments.classified import ClassifiedTask
from embodied.environments.delay import with_delay
from embodied.environments.latency import LatencyConfig, with_latency
from embodied.environments.reflex import in_steps, with_reflex
from embodied.errors import UserError
from embodied.placement.registry import PLACEMENTS, PlacementOptions
from embodied.policy import PolicyConfig
from embodied.saving.starting_point import StartingPoint
from embodied.task import Task
from embodied.training.experiment import ExperimentConfig
from embodied.viewer.options import ViewerOptions
from policies.encoders import sentences
from policies.encoders.choice import EncoderConfig
from policies.encoders.words import Words
from policies.registry import POLICIES
from policies.success_classifier import SuccessClassifier
from policies.vla.checkpoints import starting_points
from policies.vla.pi0 import Pi0Config
from policies.vla.tokens import TokensConfig
from real_robot.learning.environment import Judge
from real_robot.learning.remote.robot import RemoteRobotTask
from real_robot.learning.resetting import BackwardConfig
from real_robot.learning.task import Reset, RobotConfig, RobotTask
from real_robot.recording.demonstrations import DemonstrationOptions, demonstrations, sources
from real_robot.recording.recorded_task import RecordedTask
from sims.registry import TASKS, in_processes

log = logging.getLogger("embodied")
GROUPS = {
    "task": {**TASKS, "dataset_schema": RecordedTask},
    "policy": POLICIES,
    "algorithm": ALGORITHMS,
    "offline": OFFLINE,
    "placement": PLACEMENTS,
    "robot": {"robot_schema": RobotConfig},
}
"""Config classes by name, for each part of a run that is chosen by name."""


@dataclass
class TrainConfig(ViewerOptions, DemonstrationOptions, PlacementOptions, ExperimentConfig):
    """Options of train.py: options of a run and of its parts.

    `offline` is the learner of the stage offline. `robot` is where the task is learned, null: in its simulator. `seed`
    determines all random numbers. `device` is for policy and learner; PyTorch uses `threads` cores. `wandb` names a
    project, `output` a new run's directory. `resume` continues a run, or a checkpoint of it, unchanged; `eval_only`
    evaluates it. `plan` checks whether the run fits into `device_gb` of memory. Rewards and ends of episodes are those
    of the `success_classifier`, a folder that classify.py wrote, in place of a simulator's, whose own success
    evaluations count; on a robot it judges beside the person. `reflex` is the folder of a reflex, which checks chunks
    (reflex.py). A chunk begins `delay` control steps after the observation that it is decided from, because inference
    takes time; the policy reads the actions that run until then.
    """

    task: Any = MISSING
    policy: Any = MISSING
    algorithm: Any = MISSING
    offline: Any = None
    robot: Any = None
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    delay: NonNegativeInt = 0
    success_classifier: str | None = None
    reflex: str | None = None
    seed: Seed = 0
    device: str = "cpu"
    device_gb: PositiveFloat | None = None
    threads: PositiveInt | None = None
    wandb: str | None = None
    output: str | None = None
    resume: str | None = None
    eval_only: bool = False
    plan: bool = False


def with_conditions(config: TrainConfig, device: str) -> Task:
    """Task of `config` in its simulator, with its latencies, delay, and success classifier and reflex on `device`.

    Raises:
        UserError: for a reflex with a delay, and see `SuccessClassifier.load`, `risk.load` and `in_steps`.
    """
    if config.reflex and config.delay:
        raise UserError(
            "a reflex cuts the running chunk, which a policy with delay has already decided on; use delay=0"
        )
    classifier = None
    if config.success_classifier is not None:
        classifier = SuccessClassifier.load(config.success_classifier).to(device)

    def wrapped(task: Task) -> Task:
        task = in_processes(task)
        return with_latency(ClassifiedTask(task, classifier) if classifier else task, config.latency)

    reflexive = with_reflex(config.task, risk.load(config.reflex, device) if config.reflex else None, wrapped)
    return with_delay(reflexive, config.delay)


@contextmanager
def opened_task(
    config: TrainConfig, viewed: Callable[[Task], Task], directory: Path, record: Mapping[str, Any]
) -> Iterator[Task]:
    """Context of the task of `config`, `viewed` in its simulator, or on its robot, which is released at the end.

    A robot at another computer uses the run's `directory`, and makes its parts from `record`, the composed `config`.

    Raises:
        UserError: for options of simulators with a robot.
    """
    if config.robot is None:
        yield viewed(with_conditions(config, config.device))
        return
    if config.viewer or config.latency.present or config.reflex:
        raise UserError("viewer, reflex and latency.* are of simulators; with robot= use robot.disturbances.latency_s")
    remote = config.robot.listen is not None
    delayed = with_delay(config.task, config.delay)
    task = RemoteRobotTask(delayed, config.robot, directory, record) if remote else robot_task(config, directory)
    with closing(task):
        yield task


def robot_task(config: TrainConfig, folder: Path | None = None) -> RobotTask:
    """Task of `config` on the robot of this computer; with the run's `folder` a second policy may reset the scene.

    Raises:
        UserError: for resets by a policy without a folder, on the robot of a learner at another computer.
    """
    backward = None
    if folder is not None and config.algorithm is not None:
        backward = _backward(config, folder / "backward")
    elif config.robot.reset is Reset.POLICY and folder is None:
        raise UserError("robot.reset=policy learns beside the robot; leave out robot.listen and run train.py there")
    single = in_processes(in_steps(config.task))
    judge = _judge(config.success_classifier, config.device)
    reset_judge = _judge(config.robot.reset_classifier, config.device)
    return RobotTask(with_delay(config.task, config.delay), single, config.robot, judge, backward, reset_judge)


def _backward(config: TrainConfig, folder: Path) -> BackwardConfig:
    """Policy and learner of resets on a robot, whose demonstrations have their index in `folder`."""
    paths = sources(config.robot.reset_demonstrations, None, "robot.reset_demonstrations")
    read = None
    if paths:
        read = partial(demonstrations, paths, run=folder, task=config.task, options=config.matching)
    return BackwardConfig(config.policy, config.algorithm, config.seed, config.device, read)


def _judge(folder: str | None, device: str) -> Judge | None:
    """Judge of episodes on a robot by the success classifier in `folder`, None without one."""
    if folder is None:
        return None
    classifier = SuccessClassifier.load(folder).to(device)
    return Judge(classifier, classifier.threshold, classifier.frames)


def starting_options(weights: str) -> list[str]:
    """Options of train.py that make a policy of published `weights`, without those of a task.

    Raises:
        UserError: for weights that cannot be read.
    """
    start = starting_points.read(weights)
    if start is None:
        raise UserError(f"checkpoint={weights} has no config.json; of adapters merge them into their weights first")
    return [f"policy={start.policy}", "algorithm=ppo", option("policy.weights", weights)]


def with_starting_point(arguments: Sequence[str]) -> list[str]:
    """Options of the published weights in policy.weights (`Task.published_options`), and then `arguments`, which win.

    A line in the log names the convention and the reason.

    Raises:
        UserError: for weights that cannot be read.
    """
    if not any(each.startswith("policy.weights=") for each in arguments):
        return [*arguments]
    config, _ = compose(TrainConfig, "train", arguments, GROUPS)
    if not isinstance(config.policy, Pi0Config | TokensConfig) or not config.policy.weights:
        return [*arguments]
    start = starting_points.read(config.policy.weights)
    options = config.task.published_options(start) if start else []
    if start:
        report(start, config.task.name, tuple(options))
    return [*options, *arguments]


def words_option(policy: PolicyConfig) -> str | None:
    """Option that replaces policy.words=auto of a new run, so that the run records its choice; None without it.

    A line in the log names the choice and the reason.
    """
    if not isinstance(policy, EncoderConfig) or policy.words is not Words.AUTO:
        return None
    model = policy.words_model or sentences.local_model()
    report_words(model)
    return option("policy.words", (Words.MINILM if model else Words.HASHED).value)


@cache
def report_words(model: str | None) -> None:
    """Log how instructions are read with policy.words=auto, by the sentence encoder `model` if there is one, once."""
    if model:
        log.info(f"policy.words=minilm: instructions are read as whole sentences by {model}")
    else:
        log.info(f"policy.words=hashed: no {sentences.HUB_NAME} on this machine reads sentences; {sentences.INSTALL}")


@cache
def report(start: StartingPoint, task: str, options: tuple[str, ...]) -> None:
    """Log the convention of `start` in `task`, with its `options` and the reason, once."""
    source = f"{start.weights}: {start.policy} as written by {start.program}"
    if options:
        chosen = f"{source}, evaluated as its authors do, because {start.evidence}: {' '.join(options)}"
        log.info(f"{chosen}; options that you set win")
    else:
        why = f"its files name {start.benchmark}" if start.benchmark else "its files name no benchmark"
        log.info(f"{source}, with the observations of task={task} as they are, because {why}")
