"""Training told once: SFT on demonstrations -> RL -> a control, each evaluated on the same episodes.

The control is SFT that goes on as it was, optimiser, average and last learning rate, for as many gradient steps as RL
took: what RL gains is told over the better of the two. A task without demonstrations is RL alone, from a new network. A
run is checkpointed as a whole, so that one that was killed continues with the numbers of one that was not.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from embodied import checkpoint, seeding
from embodied.algorithms.sft import SFT, SFTConfig
from embodied.checkpoint import Checkpoint
from embodied.config import at_least
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.evaluation import evaluate
from embodied.interrupt import GracefulStop, Stopped
from embodied.logging import Logger
from embodied.network import DeployablePolicy
from embodied.policy import Policy
from embodied.progress import Progress
from embodied.report import BASELINE, Report, resume_command, title
from embodied.rollout import Collector, first_decisions
from embodied.task import BaselineTask, Learner, LearnerConfig, PolicyConfig, Task, measured
from embodied.timing import PhaseTimer

log = logging.getLogger(__name__)
SEGMENT = 500
"""Gradient steps of supervised training between two entries in the log."""
CURVES = {
    "rollout/success": "environment steps",
    "rl/first_attempts_success": "environment steps",
    "rollout/episode_return": "environment steps",
    "rollout/episode_steps": "environment steps",
    "rl/loss": "environment steps",
    "rl/advantage_loss": "environment steps",
    "rl/teacher_objective": "environment steps",
    "rl/kl": "environment steps",
    "rl/clip_fraction": "environment steps",
    "rl/explained_variance": "environment steps",
    "sft/loss": "gradient steps",
    "sft_control/loss": "gradient steps",
}


class Stage(Enum):
    """What a run does now."""

    SFT = "sft"
    RL = "rl"
    CONTROL = "sft_control"
    DONE = "done"


@dataclass
class TrainerConfig:
    """Sizes of a run.

    RL takes `env_steps` control steps in `num_envs` environments, saving every `checkpoint_every` iterations.
    Evaluations run `evaluation_starts` initial states of each task and distribution. `control` and `video` can be left
    out.
    """

    num_envs: int = 100
    env_steps: int = 1_050_000
    checkpoint_every: int = 10
    evaluation_starts: int = 50
    evaluation_envs: int = 100
    control: bool = True
    video: bool = True
    sft: SFTConfig = field(default_factory=SFTConfig)

    def __post_init__(self) -> None:
        """Raise UserError for sizes that nothing can be done with."""
        at_least(self, 0, "env_steps")
        at_least(self, 1, "num_envs", "checkpoint_every", "evaluation_starts", "evaluation_envs")


class Trainer:
    """One run in `directory`; where that holds a checkpoint, the run continues."""

    def __init__(
        self,
        config: TrainerConfig,
        task: Task,
        policy: PolicyConfig,
        algorithm: LearnerConfig,
        directory: Path,
        *,
        record: dict[str, Any],
        seed: int = 0,
        device: str = "cpu",
        wandb_project: str | None = None,
        demonstrations: Callable[[Contract], TensorDict] | None = None,
    ) -> None:
        """Build all parts, then begin to write; `record`, the composed configuration, is kept in checkpoints.

        `demonstrations` for the environment's contract take the place of the task's own.
        """
        self.config, self.task, self.algorithm, self.directory = config, task, algorithm, directory
        self.record, self.seed, self.device = record, seed, device
        seeding.seed_everything(seed)
        self.env = task.environment(config.num_envs, task.distributions[0], "train", seed, device)
        tasks, fewest = len(self.env.task_names), min(config.num_envs, config.evaluation_envs)
        if fewest < tasks:
            raise UserError(f"expected num_envs and evaluation_envs of at least {tasks}, one per task; got {fewest}")
        self.policy = policy.build(self.env.contract).to(device)
        self.stage = Stage.SFT
        self.counters = {"iteration": 0, "env_steps": 0, "episodes": 0, "rl_gradient_steps": 0, "cpu_s": 0.0}
        exportable = isinstance(self.policy, DeployablePolicy)
        self.report, self.timer = Report(task.name, task.asset_kind, seed, exportable), PhaseTimer()
        self.before: dict[
            str, Any
        ] = {}  # where RL and its control start: SFT's learner, or an untrained "policy" alone
        self.parts: dict[str, Any] = {}  # state of the stage's learner and collector
        with self.timer("demonstrations"):
            given = demonstrations and demonstrations(self.env.contract)
            self.demonstrations = task.demonstrations(directory, seed) if given is None else given
        if self.demonstrations is None:
            self.stage = Stage.RL
        rows = self._restore()
        self.logger = Logger(directory, config=record, wandb_project=wandb_project, rows=rows)

    def run(self) -> Report:
        """Run the stages that are left; writes the report and returns it.

        Raises:
            Stopped: after Ctrl-C or SIGTERM, once everything is saved.
        """
        stages = {Stage.SFT: self._sft, Stage.RL: self._reinforce, Stage.CONTROL: self._control}
        with GracefulStop() as self._stop, self.logger:
            told = self.stage is Stage.DONE and (self.directory / "report.json").exists()
            while self.stage in stages:
                stages[self.stage]()
            if not told:
                self._write()
            if self._film():
                self._write()
        return self.report

    def _sft(self) -> None:
        assert self.demonstrations is not None
        if not self.parts:
            executed = self.demonstrations["actions"][self.demonstrations["valid"]]
            self.policy.fit(self._told(self.demonstrations["observation"]).to(self.device), executed.to(self.device))
        learner = self.config.sft.build(self.policy, seeding.generator(self.seed, "sft"))
        self._supervise(learner, self.config.sft.steps)
        self._evaluate(self.policy)
        self.before = copy.deepcopy(learner.state_dict())
        self._enter(Stage.RL)

    def _told(self, observation: TensorDict) -> TensorDict:
        """`observation` of demonstrations and, from random play, what robots cannot measure: a critic may read it."""
        missing = [key for key in self.env.contract.observation if key not in observation.keys()]  # noqa: SIM118 - no dict
        if not missing:
            return observation
        generator = seeding.generator(self.seed, "random play")
        played, _ = first_decisions(self.env, generator)
        rows = torch.randint(len(played), (len(observation),), generator=generator)
        return observation.copy().update(played.select(*missing).cpu()[rows])

    def _reinforce(self) -> None:
        if not self.before:
            observation, actions = first_decisions(self.env, seeding.generator(self.seed, "random play"))
            self.policy.fit(observation.to(self.device), actions.to(self.device))
            self.before = {"policy": copy.deepcopy(self.policy.state_dict())}
        learner = self.algorithm.build(
            self.policy, self.demonstrations, self.env, seeding.generator(self.seed, "learner")
        )
        noise = seeding.generator(self.seed, "noise", device=self.device)
        collector = learner.collector(self.env, self.policy, noise, learner.starts)
        parts = {"learner": learner, "collector": collector}
        self._resume(parts)
        total, done = self.config.env_steps, self.counters["env_steps"]
        with Progress("RL", total, "step", initial=done) as bar:
            while self.counters["env_steps"] < total:
                ended = self._iterate(learner, collector)
                note = f"success {ended['success']:.0%}" if ended else ""
                bar.update(min(total, self.counters["env_steps"]) - bar.done, note)
                self._keep(parts, self.counters["iteration"] % self.config.checkpoint_every == 0)
        self.counters["rl_gradient_steps"] = learner.gradient_steps
        self._keep(parts, due=True)
        with self.timer("update"):
            self._evaluate(self.policy)
            for name, policy in self.task.baselines().items() if isinstance(self.task, BaselineTask) else ():
                self._evaluate(policy, BASELINE + name)
        controlled = self.config.control and self.demonstrations is not None
        self._enter(Stage.CONTROL if controlled else Stage.DONE)

    def _iterate(self, learner: Learner, collector: Collector) -> dict[str, float]:
        """One collection and update; returns means over the episodes that ended, if any did."""
        started = time.process_time()
        rollout = collector.collect(self.algorithm.decisions)
        self.timer.add("simulation", rollout.simulation_s)
        self.timer.add("policy", rollout.policy_s)
        self.counters["iteration"] += 1
        self.counters["env_steps"] += rollout.env_steps
        with self.timer("update"):
            metrics = learner.update(rollout, min(1.0, self.counters["env_steps"] / self.config.env_steps))
        self.counters["cpu_s"] += time.process_time() - started
        self.counters["episodes"] += int(rollout.done.sum())
        ended = rollout.ended()
        shown = {f"rollout/{name}": value for name, value in ended.items()}
        if rollout.diverged:
            shown["rollout/diverged"] = rollout.diverged
        self.logger.log(self.counters["env_steps"], shown | {f"rl/{name}": value for name, value in metrics.items()})
        return ended

    def _control(self) -> None:
        learner = self.config.sft.build(copy.deepcopy(self.policy), seeding.generator(self.seed, "sft"))
        learner.load_state_dict(copy.deepcopy(self.before))
        self._supervise(learner, self.config.sft.steps + self.counters["rl_gradient_steps"])
        self._evaluate(learner.policy)
        self._enter(Stage.DONE)

    def _supervise(self, learner: SFT, steps: int) -> None:
        """Train on the demonstrations until `steps` gradient steps are done, resuming where a run was cut off."""
        assert self.demonstrations is not None
        first = learner.gradient_steps
        self._resume({"learner": learner})
        done = learner.gradient_steps - first
        with Progress(self._label, steps - first, "step", initial=done) as bar:
            while learner.gradient_steps < steps:
                segment = min(SEGMENT, steps - learner.gradient_steps)
                with self.timer(self._label):
                    loss = learner.fit(self.demonstrations, segment, bar.update)
                self.logger.log(learner.gradient_steps, {f"{self.stage.value}/loss": loss})
                self._keep({"learner": learner}, learner.gradient_steps % (10 * SEGMENT) == 0)

    def _evaluate(self, policy: Policy, stage: str | None = None) -> None:
        stage = stage or self.stage.value
        final = stage == Stage.RL.value
        for distribution in measured(self.task) if final else self.task.distributions:
            with self.timer("evaluation"):
                env = self.task.environment(self.config.evaluation_envs, distribution, "eval", device=self.device)
                label = f"{title(stage)}, evaluation on {distribution}"
                starts = self.config.evaluation_starts
                result = evaluate(env, policy, starts_per_task=starts, device=self.device, progress=label)
            self.report.add(stage, distribution, result)
            row = result.summary()
            log.info(f"{label}: success {row['success']:.1%} [{row['low']:.1%}, {row['high']:.1%}]")

    @property
    def _label(self) -> str:
        return title(self.stage.value)

    def _film(self) -> bool:
        """Film before and after; returns whether there is a new video."""
        path = self.directory / "video.mp4"
        if not self.config.video or path.exists():
            return False
        before = copy.deepcopy(self.policy)
        before.load_state_dict(self.before["policy"])
        with self.timer("video"):
            first = "before: untrained" if self.demonstrations is None else "before: SFT"
            self.task.video(path, {first: before, "after: RL": self.policy}, self.device)
        return True

    def _write(self) -> None:
        self.report.env_steps, self.report.episodes = self.counters["env_steps"], self.counters["episodes"]
        self.report.wall_s, self.report.cpu_s = self.timer.seconds, self.counters["cpu_s"]
        self.report.write(self.directory, CURVES)

    def _enter(self, stage: Stage) -> None:
        self.stage, self.parts = stage, {}
        self._save({})

    def _keep(self, parts: dict[str, Any], due: bool) -> None:
        """Save when `due`, or asked to stop: then leave.

        Raises:
            Stopped: when asked to.
        """
        if due or self._stop.requested:
            self._save({name: part.state_dict() for name, part in parts.items()})
        if self._stop.requested:
            raise Stopped(f"Stopped and saved. Continue with: {resume_command(self.directory)}")

    def _save(self, parts: dict[str, Any]) -> None:
        with self.timer("checkpoint"):
            state = {
                "rng": seeding.rng_state(),
                "report": self.report.state_dict(),
                "wall_s": self.timer.seconds,
                "before": self.before,
                "parts": parts,
            }
            counters = {**self.counters, "stage": self.stage.value, "log_rows": self.logger.rows}
            weights = self.policy.state_dict()
            checkpoint.save(self.directory, Checkpoint(weights, self.policy.contract, self.record, counters, state))

    def _restore(self) -> int:
        """Take up the newest checkpoint, if any; returns the rows of the log that it knew."""
        if not (self.directory / checkpoint.FOLDER).exists():
            return 0
        saved = checkpoint.load(self.directory)
        saved.check(self.env.contract)
        saved.restore(self.policy)
        self.stage = Stage(saved.counters["stage"])
        self.counters = {name: saved.counters.get(name, 0) for name in self.counters}
        self.report.load_state_dict(saved.state["report"])
        self.timer = PhaseTimer(saved.state["wall_s"])
        self.before, self.parts = saved.state["before"], saved.state["parts"]
        seeding.set_rng_state(saved.state["rng"])
        log.info(f"continuing {self.stage.value} at {self.counters['env_steps']:,} environment steps")
        return saved.counters["log_rows"]

    def _resume(self, parts: dict[str, Any]) -> None:
        for name, part in parts.items():
            if name in self.parts:
                part.load_state_dict(self.parts[name])
        self.parts = {}
