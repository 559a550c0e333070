"""Training told once: SFT on demonstrations -> RL -> a control, each evaluated on the same episodes.

The control is SFT that goes on as it was, optimiser, average and last learning rate, for as many gradient steps as RL
took: what RL gains is told over the better of the two. A task without demonstrations is RL alone, from a new network. A
run is checkpointed as a whole, so that one that was killed continues with the numbers of one that was not.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied import checkpoint, seeding
from embodied.algorithms.sft import SFT, SFTConfig
from embodied.checkpoint import Checkpoint
from embodied.config import at_least, check_continues
from embodied.contract import Contract
from embodied.curves import CURVES
from embodied.environment import StartEnvironment
from embodied.errors import UserError
from embodied.evaluation import evaluate
from embodied.interrupt import Abandoned, GracefulStop, Stopped
from embodied.logging import Logger
from embodied.network import DeployablePolicy
from embodied.policy import Policy, TrainablePolicy
from embodied.progress import Progress
from embodied.report import BASELINE, Report, resume_command, title
from embodied.rollout import Collector, first_decisions
from embodied.task import BaselineTask, Learner, LearnerConfig, PolicyConfig, Task, measured
from embodied.timing import PhaseTimer
from embodied.tree import copy_tree

log = logging.getLogger(__name__)
SEGMENT = 500
"""Gradient steps of supervised training between two entries in the log, and checkpoints."""
PATIENCE_S = 1.0
"""A stop waits for iterations that take less; longer ones are abandoned, which needs a copy of the state before."""
FREE = {"video", "wandb", "device", "threads", "checkpoint_every", "evaluation_envs", "resume", "output", "eval_only"}
"""Options that may have another value when a run is resumed: no result depends on them, but for rounding."""


COUNTERS = (
    "iteration", "env_steps", "planned_env_steps", "episodes", "rl_gradient_steps", "rl_checkpoint", "cpu_s",
)  # fmt: skip
"""What a run counts; learners plan over `planned_env_steps`, asked for at first; RL ended in the `rl_checkpoint`."""


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
        saved = self._saved()
        seeding.seed_everything(seed)
        self.env = self._environment("train", task.distributions[0])
        self.policy = policy.build(self.env.contract).to(device)
        self.stage = Stage.SFT
        self.counters: dict[str, Any] = dict.fromkeys(COUNTERS, 0) | {"planned_env_steps": config.env_steps}
        exportable = isinstance(self.policy, DeployablePolicy)
        self.report, self.timer = Report(task.name, task.asset_kind, seed, exportable), PhaseTimer()
        self.before: dict[str, Any] = {}  # where RL and control start: SFT's learner, or an untrained "policy" alone
        self.parts: dict[str, Any] = {}  # state of the stage's learner and collector
        self.rng: dict[str, Any] = {}  # of the global generators, when those were saved
        self.iteration_s = math.inf  # how long the last one took
        with seeding.undisturbed():
            self.evaluation_envs = {name: self._environment("eval", name) for name in task.distributions}
            self._try(TensorDict({}, [0]))  # demonstrations may take long to make
        self.demonstrations = self._demonstrate(demonstrations)
        if self.demonstrations is None:
            self.stage = Stage.RL
        rows = self._restore(saved) if saved else 0
        self.logger = Logger(directory, config=record, wandb_project=wandb_project, rows=rows)

    def _environment(self, split: str, distribution: str) -> StartEnvironment:
        count, seed = (self.config.num_envs, self.seed) if split == "train" else (self.config.evaluation_envs, 0)
        env = self.task.environment(count, distribution, split, seed, self.device)
        if count < len(env.task_names):
            raise UserError(f"expected at least {len(env.task_names)} environments, one per task; got {count}")
        return env

    def _demonstrate(self, given: Callable[[Contract], TensorDict] | None) -> TensorDict | None:
        """The demonstrations `given`, else the task's own, if it has any."""
        with self.timer("demonstrations"):
            made = given(self.env.contract) if given else self.task.demonstrations(self.directory, self.seed)
        if made is None:
            with seeding.undisturbed():
                self._try(None)
        return made

    def _try(self, demonstrations: TensorDict | None) -> None:
        """Build learner and collector on copies: what does not go together says so before anything runs."""
        env, policy = self.evaluation_envs[self.task.distributions[0]], copy.deepcopy(self.policy)
        self._learner(env, policy, demonstrations)

    def _learner(
        self, env: StartEnvironment, policy: TrainablePolicy, demonstrations: TensorDict | None
    ) -> tuple[Learner, Collector]:
        learner = self.algorithm.build(policy, demonstrations, env, seeding.generator(self.seed, "learner"))
        noise = seeding.generator(self.seed, "noise", device=self.device)
        return learner, learner.collector(env, policy, noise, learner.starts)

    def run(self) -> Report:
        """Run the stages that are left; writes the report and returns it.

        Raises:
            Stopped: after Ctrl-C or SIGTERM, once everything is saved.
        """
        stages = {Stage.SFT: self._sft, Stage.RL: self._reinforce, Stage.CONTROL: self._control}
        with GracefulStop("Stopping: saving ...") as self._stop, self.logger:
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
        self._evaluate(self.policy, {"learner": learner})
        self.before = copy_tree(learner.state_dict())
        self._enter(Stage.RL)

    def _told(self, observation: TensorDict) -> TensorDict:
        """`observation` of demonstrations and, from random play, what robots cannot measure: a critic may read it."""
        missing = [key for key in self.env.contract.observation if key not in observation.keys()]  # noqa: SIM118 - no dict
        if not missing:
            return observation
        generator = seeding.generator(self.seed, "random play")
        played, _ = self._play(generator)
        rows = torch.randint(len(played), (len(observation),), generator=generator)
        return observation.copy().update(played.select(*missing).cpu()[rows])

    def _play(self, generator: torch.Generator) -> tuple[TensorDict, Tensor]:
        """`first_decisions` in environments of their own: the collector's are at their beginning when it takes over."""
        return first_decisions(self._environment("train", self.task.distributions[0]), generator)

    def _reinforce(self) -> None:
        if not self.before:
            observation, actions = self._play(seeding.generator(self.seed, "random play"))
            self.policy.fit(observation.to(self.device), actions.to(self.device))
            self.before = {"policy": copy_tree(dict(self.policy.state_dict()))}
        learner, collector = self._learner(self.env, self.policy, self.demonstrations)
        parts = {"learner": learner, "collector": collector}
        self._resume(parts)
        total, done = self.config.env_steps, self.counters["env_steps"]
        with Progress("RL", total, "step", initial=done) as bar:
            while self.counters["env_steps"] < total:
                ended = self._iterate(parts)
                note = f"success {ended['success']:.0%}" if ended else ""
                bar.update(min(total, self.counters["env_steps"]) - bar.done, note)
                self._keep(parts, self.counters["iteration"] % self.config.checkpoint_every == 0)
        if not self.counters["rl_checkpoint"]:
            self._finish(parts)
        with self.timer("update"):
            self._evaluate(self.policy, parts)
            with self._abandonable(parts):
                baselines = self.task.baselines() if isinstance(self.task, BaselineTask) else {}
            for name, policy in baselines.items():
                self._evaluate(policy, parts, BASELINE + name)
        controlled = self.config.control and self.demonstrations is not None
        self._enter(Stage.CONTROL if controlled else Stage.DONE)

    def _finish(self, parts: dict[str, Any]) -> None:
        """Save for good where RL ended: with more `env_steps` a run goes on from there. Older results are void."""
        self.counters["rl_gradient_steps"] = parts["learner"].gradient_steps
        self.counters["rl_checkpoint"] = int(self._save(self._snapshot(parts)).name)
        for name in ("report.json", "video.mp4"):
            (self.directory / name).unlink(missing_ok=True)

    def _iterate(self, parts: dict[str, Any]) -> dict[str, float]:
        """One collection and update; returns means over the episodes that ended, if any did."""
        started, began = time.process_time(), time.perf_counter()
        with self._abandonable(parts) if self.iteration_s > PATIENCE_S else nullcontext():
            rollout = parts["collector"].collect(self.algorithm.decisions)
            self.timer.add("simulation", rollout.simulation_s)
            self.timer.add("policy", rollout.policy_s)
            self.counters["iteration"] += 1
            self.counters["env_steps"] += rollout.env_steps
            with self.timer("update"):
                planned = max(1, self.counters["planned_env_steps"])
                metrics = parts["learner"].update(rollout, min(1.0, self.counters["env_steps"] / planned))
        self.iteration_s = time.perf_counter() - began
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
        learner.load_state_dict(copy_tree(self.before))
        self._supervise(learner, self.config.sft.steps + self.counters["rl_gradient_steps"])
        self._evaluate(learner.policy, {"learner": learner})
        self._enter(Stage.DONE)

    def _supervise(self, learner: SFT, steps: int) -> None:
        """Train on the demonstrations until `steps` gradient steps are done, resuming where a run was cut off."""
        assert self.demonstrations is not None
        parts, first, label = {"learner": learner}, learner.gradient_steps, title(self.stage.value)
        self._resume(parts)
        with Progress(label, steps - first, "step", initial=learner.gradient_steps - first) as bar:
            while learner.gradient_steps < steps:
                with self.timer(label):
                    loss = learner.fit(self.demonstrations, 1)
                bar.update(1)
                due = learner.gradient_steps % SEGMENT == 0 or learner.gradient_steps == steps
                if due:
                    self.logger.log(learner.gradient_steps, {f"{self.stage.value}/loss": loss})
                self._keep(parts, due)

    def _evaluate(self, policy: Policy, parts: dict[str, Any], stage: str | None = None) -> None:
        """Evaluate `policy` on what it has not been evaluated on yet, while `parts` of the stage wait."""
        stage = stage or self.stage.value
        for distribution in measured(self.task) if stage == Stage.RL.value else self.task.distributions:
            if (stage, distribution) in self.report.results:
                continue
            label, starts = f"{title(stage)}, evaluation on {distribution}", self.config.evaluation_starts
            with self._abandonable(parts), self.timer("evaluation"):
                env = self.evaluation_envs.get(distribution) or self._environment("eval", distribution)
                result = evaluate(env, policy, starts_per_task=starts, device=self.device, progress=label)
            self.report.add(stage, distribution, result)
            row = result.summary()
            log.info(f"{label}: success {row['success']:.1%} [{row['low']:.1%}, {row['high']:.1%}]")

    def _film(self) -> bool:
        """Film before and after; returns whether there is a new video."""
        path = self.directory / "video.mp4"
        if not self.config.video or path.exists():
            return False
        before = copy.deepcopy(self.policy)
        before.load_state_dict(self.before["policy"])
        with self._abandonable({}), self.timer("video"):
            first = "before: untrained" if self.demonstrations is None else "before: SFT"
            self.task.video(path, {first: before, "after: RL": self.policy}, self.device)
        return True

    def _write(self) -> None:
        self.report.env_steps, self.report.episodes = self.counters["env_steps"], self.counters["episodes"]
        self.report.wall_s, self.report.cpu_s = self.timer.seconds, self.counters["cpu_s"]
        self.report.write(self.directory, CURVES)

    def _enter(self, stage: Stage) -> None:
        self.stage, self.parts = stage, {}
        self._save(self._snapshot({}))

    def _keep(self, parts: dict[str, Any], due: bool) -> None:
        """Save when `due`, or asked to stop: then leave.

        Raises:
            Stopped: when asked to.
        """
        if self._stop.requested:
            self._leave(self._snapshot(parts))
        if due:
            self._save(self._snapshot(parts))

    @contextmanager
    def _abandonable(self, parts: dict[str, Any]) -> Iterator[None]:
        """Asked to stop inside, leave with the state before: a resumed run repeats the body with the same numbers.

        Raises:
            Stopped: when asked to.
        """
        before = copy_tree(self._snapshot(parts))
        try:
            with self._stop.abandonable():
                yield
        except Abandoned:
            self._leave(before)

    def _leave(self, snapshot: dict[str, Any]) -> NoReturn:
        self._save(snapshot)
        raise Stopped(f"Stopped and saved. Continue with: {resume_command(self.directory)}")

    def _snapshot(self, parts: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds now, as a tree that shares memory with what it is of."""
        state = {
            "rng": seeding.rng_state(),
            "report": self.report.state_dict(),
            "wall_s": self.timer.seconds,
            "before": self.before,
            "parts": {name: part.state_dict() for name, part in parts.items()},
        }
        counters = {**self.counters, "stage": self.stage.value, "log_rows": self.logger.rows}
        return {"policy": dict(self.policy.state_dict()), "counters": counters, "state": state}

    def _save(self, snapshot: dict[str, Any]) -> Path:
        with self.timer("checkpoint"):
            saved = Checkpoint(contract=self.policy.contract, config=self.record, **snapshot)
            return checkpoint.save(self.directory, saved, kept=snapshot["counters"]["rl_checkpoint"])

    def _saved(self) -> Checkpoint | None:
        """The newest checkpoint, if any; with more steps asked for than it has, that in which RL ended."""
        folder = self.directory / checkpoint.FOLDER
        if not folder.exists():
            return None
        saved = checkpoint.load(self.directory)
        check_continues(saved.config, self.record, FREE)
        if saved.counters["rl_checkpoint"] and self.config.env_steps > saved.counters["env_steps"]:
            saved = checkpoint.load(folder / f"{saved.counters['rl_checkpoint']:06d}")
        return saved

    def _restore(self, saved: Checkpoint) -> int:
        """Take up `saved`; returns the rows of the log that it knew."""
        saved.check(self.env.contract)
        saved.restore(self.policy)
        self.stage = Stage(saved.counters["stage"])
        self.counters = {name: saved.counters[name] for name in self.counters}
        self.report.load_state_dict(saved.state["report"])
        self.timer = PhaseTimer(saved.state["wall_s"])
        self.before, self.parts, self.rng = (saved.state[name] for name in ("before", "parts", "rng"))
        seeding.set_rng_state(self.rng)
        log.info(f"continuing {self.stage.value} at {self.counters['env_steps']:,} environment steps")
        return saved.counters["log_rows"]

    def _resume(self, parts: dict[str, Any]) -> None:
        """Take up `parts` in the middle of a stage; to build them may have drawn random numbers."""
        for name, state in self.parts.items():
            parts[name].load_state_dict(state)
        if self.parts:
            seeding.set_rng_state(self.rng)
        self.parts = {}
