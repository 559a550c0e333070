"""A run as an experiment: stages evaluated on the same episodes, a control, a report, and checkpoints.

The stages are in `stages/`. The control continues SFT, with its optimiser, average and final learning rate, for as many
gradient steps as the stages after SFT took: RL's gain is reported over the better of SFT and control. A killed run,
once resumed, gives the same numbers as an uninterrupted one if its simulator is `Restorable`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from embodied import seeding
from embodied.algorithms.offline.bppo import BPPOConfig
from embodied.algorithms.on_policy.clipped import ClippedConfig
from embodied.environment import Environment, SwitchableEnvironment
from embodied.errors import UserError
from embodied.evaluation.evaluation import EvaluationResult, evaluate
from embodied.export.network import export_target
from embodied.placement.actor import ActorEnvironment
from embodied.policy import Policy, SteeredPolicy, TrainablePolicy
from embodied.report.curves import CURVES
from embodied.report.headline import BASELINE, ONE_STEP, UNTRAINED
from embodied.report.report import Report, result_text, title
from embodied.run_options import ExperimentConfig
from embodied.runtime.interrupt import GracefulStop
from embodied.runtime.progress import Progress
from embodied.task import evaluation_distributions
from embodied.training.built_run import BuiltRun
from embodied.training.saved_run import DONE
from embodied.training.stages.registry import STAGES
from embodied.training.stages.stage import Stage

__all__ = ["Experiment", "ExperimentConfig"]
log = logging.getLogger(__name__)
REPORTED = (
    *("env_steps", "episodes", "lost", "pushed", "takeovers", "human_steps"),
    *("lost_collectors", "dropped_rollouts", "cpu_s"),
)
"""Counters of a run that its report has."""
UNTRAINED_STARTS = range(5, 51)
"""Least and largest number of initial states of each task on which the untrained policy is evaluated."""
UNTRAINED_SHARE = 0.05
"""Largest share of the environment steps of training that this evaluation may take."""


class Experiment(BuiltRun):
    """Run in `directory`, which continues from a checkpoint there, if there is one."""

    def run(self) -> Report:
        """Run the remaining stages; writes the report and returns it.

        Raises:
            Stopped: after Ctrl-C or SIGTERM, once everything is saved.
            DivergedError: if a number of the training is not finite; it names the last good checkpoint, which stays.
        """
        with GracefulStop("Stopping: saving ...") as self._stop, self.logger:
            is_written = self.stage == DONE and (self.directory / "report.json").exists()
            while self.stage != DONE:
                stage = STAGES[self.stage](self)
                with self._running(stage) as (parts, steps, bar):
                    while stage.done < stage.total:
                        with self._step(stage, parts):
                            step = next(steps)
                        note = stage.record(step)
                        bar.update(min(stage.total, stage.done) - bar.done, note)
                        self._keep(parts, stage.due)
            self._write_results(is_written)
        return self.report

    @contextmanager
    def _running(self, stage: Stage[Any]) -> Iterator[tuple[dict[str, Any], Iterator[Any], Progress]]:
        """Context of the parts, steps and progress of `stage`, which ends with its evaluation."""
        with self._naming_checkpoint():
            parts = stage.build(resumed=bool(self.parts))
            with stage.running():
                self._resume(parts)
                if "learner" in parts:
                    self.world.join(parts["learner"])
                steps = stage.steps()
                total = stage.total
                with Progress(stage.title, total, "step", initial=stage.done, visible=total > 0) as bar:
                    yield parts, steps, bar
            stage.finish()
            self._evaluate(stage, parts)
            self._next()

    @contextmanager
    def _step(self, stage: Stage[Any], parts: dict[str, Any]) -> Iterator[None]:
        """Context of one step of `stage`, which a stop abandons if the step before took longer than its patience."""
        cpu_began = time.process_time()
        began = time.perf_counter()
        # other processes would wait for the abandoned one
        waits = self.step_s <= stage.patience_s or self.world.size > 1
        with self.leaving(parts) if waits else self.abandonable(parts):
            yield
        self.step_s, self.step_cpu_s = time.perf_counter() - began, time.process_time() - cpu_began

    def _evaluate(self, stage: Stage[Any], parts: dict[str, Any]) -> None:
        """Evaluate the policy of `stage` on the remaining distributions; checkpoints in between contain its `parts`."""
        if self.world.size > 1:
            self.save(parts)
        whole = self.world.whole(stage.policy)
        self.world.lead(lambda: self._evaluate_in_first_process(whole, parts, stage.name))
        if stage.baselines:
            self.world.lead(lambda: self._evaluate_baselines(parts))
        if stage.name == self.stages[0] == "rl":  # no earlier stage has figures to compare with
            untrained = self.world.whole(self._policy_before())
            self.world.lead(lambda: self._evaluate_in_first_process(untrained, parts, UNTRAINED))
        if stage.name == self._training[-1] and self.open_loop is None and self._has_one_step:
            actor = self.world.whole(self._one_step_actor())
            self.world.lead(lambda: self._evaluate_in_first_process(actor, parts, ONE_STEP))

    def _evaluate_baselines(self, parts: dict[str, Any]) -> None:
        with self.abandonable(parts), self.timer("evaluation"):
            baselines = self.task.baselines()
        for name, policy in baselines.items():
            self._evaluate_in_first_process(policy, parts, BASELINE + name)

    @property
    def _training(self) -> list[str]:
        """Names of the stages that train the run's policy, in order."""
        return [name for name in self.stages if name != DONE and STAGES[name].trains]

    def _evaluate_in_first_process(self, policy: Policy, parts: dict[str, Any], stage: str) -> None:
        """Evaluate `policy` in the first process, see `_evaluate`."""
        last = self._training[-1]
        if self.open_loop is not None:
            if stage == last and self.report.open_loop is None:
                assert isinstance(policy, TrainablePolicy)
                with self.abandonable(parts), self.timer("evaluation"), self.config.precision.on(self.device):
                    self.report.open_loop = self.open_loop.evaluate(policy)
            return
        for distribution in evaluation_distributions(self.task) if stage == last else self.task.distributions:
            starts = self._starts(stage, distribution, last)
            if not starts or (stage, distribution) in self.report.results:
                continue
            label = f"{title(stage)}, evaluation on {distribution}"
            with (
                self.abandonable(parts),
                self.timer("evaluation"),
                self._evaluation_env(distribution, parts) as env,
                self.config.precision.on(self.device),
            ):
                result = self._evaluated(env, policy, starts, label)
            self.report.add(stage, distribution, result)
            log.info(f"{label}: {result_text(result.summary())}")

    def _evaluated(self, env: Environment, policy: Policy, starts: int, label: str) -> EvaluationResult:
        """Evaluate `policy` from `starts` initial states of each task."""
        if isinstance(env, ActorEnvironment) and isinstance(policy, TrainablePolicy):
            return env.evaluate(policy, starts)
        return evaluate(
            env,
            policy,
            starts_per_task=starts,
            first_start=self.config.evaluation_first_start,
            device=self.device,
            progress=label,
        )

    def _starts(self, stage: str, distribution: str, last: str) -> int:
        """Number of initial states of each task on which `stage` is evaluated; 0: it is not."""
        starts = self.config.evaluation_starts
        if distribution != self.task.distributions[0] and self.config.comparison_starts is not None:
            starts = min(starts, self.config.comparison_starts)
        if stage != UNTRAINED:
            return starts
        if distribution != self.task.distributions[0]:
            return 0
        # an episode of each task takes at most as many steps as the step limit times the tasks
        trained = self.report.results[last, distribution]
        steps = len(trained.tasks) * (trained.step_limit or int(trained.steps.max()))
        starts = min(starts, UNTRAINED_STARTS[-1], int(UNTRAINED_SHARE * self.counters["env_steps"] / steps))
        return starts if starts in UNTRAINED_STARTS else 0

    @contextmanager
    def _evaluation_env(self, distribution: str, parts: dict[str, Any]) -> Iterator[Environment]:
        """Environment for evaluation on `distribution`; a shared one is switched back and loses its episodes."""
        if isinstance(self.env, SwitchableEnvironment):
            self.env.switch(distribution, "eval")
            yield self.env
            self.env.switch(self.task.distributions[0], "train")
            if "collector" in parts:
                parts["collector"].abandon()
        elif distribution in self.evaluation_envs:
            yield self.evaluation_envs[distribution]
        else:
            env = self.environment("eval", distribution)
            yield env
            env.close()

    def _write_results(self, is_written: bool) -> None:
        """Write the report, unless it is written, and the video if it is due."""
        self.report.export_target = export_target(self.world.whole(self.policy))
        policies = self._filmed()
        if self.world.rank:
            return
        if not is_written:
            self._write()
        if policies:
            self._film(policies)
            self._write()

    def _filmed(self) -> dict[str, Policy]:
        """Policies of the video by caption, before and after training; none if no video is due."""
        if not self.config.video or (self.directory / "video.mp4").exists():
            return {}
        first = self._training[0]
        last = self._training[-1]
        after: dict[str, Policy] = {f"after: {title(last)}": self.world.whole(self.policy)}
        if first == last and STAGES[first].offline:
            return after
        start = title(first) if first != last else "as it started" if self.config.start_from else "untrained"
        return {f"before: {start}": self.world.whole(self._policy_before()), **after}

    @property
    def _has_one_step(self) -> bool:
        """Whether the last stage that trains the policy also trains a one-step actor beside it."""
        learning = {"offline": self.offline, "rl": self.algorithm}.get(self._training[-1])
        return isinstance(learning, ClippedConfig | BPPOConfig) and learning.one_step

    def _one_step_actor(self) -> TrainablePolicy:
        """Copy of the policy that acts by its one-step actor."""
        with seeding.undisturbed():
            policy = self._policy()
        assert isinstance(policy, SteeredPolicy)
        policy.load_state_dict(self.policy.state_dict())
        policy.start_steering(keep_ranking=True)
        return policy

    def _policy_before(self) -> TrainablePolicy:
        """Policy with the weights from before the last stages."""
        with seeding.undisturbed():
            policy = self._policy()
        policy.load_state_dict(self.before["policy"])
        return policy

    def _film(self, policies: dict[str, Policy]) -> None:
        """Write the video of `policies`, or a note of the reason why there is none."""
        with self.abandonable({}), self.timer("video"):
            try:
                self.task.video(self.directory / "video.mp4", policies, self.device)
            except UserError as error:  # the run is complete without it
                log.warning(f"no video: {error}")
                self.report.notes.append(f"No video: {error}.")

    def _write(self) -> None:
        for name in REPORTED:
            setattr(self.report, name, self.counters[name])
        self.report.wall_s, self.report.phase_cpu_s = self.timer.seconds, self.timer.cpu
        self.report.write(self.directory, CURVES)
