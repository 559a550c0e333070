"""Training on demonstrations: supervised fine-tuning, and other learners with `fit(episodes, steps, world)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from embodied import seeding
from embodied.algorithms.finite import check_finite, losses
from embodied.algorithms.imitation.sft import SFT
from embodied.algorithms.offline.oer import OER
from embodied.algorithms.offline.rounds import Collect, Rounds
from embodied.algorithms.parts import check_equal_weights, check_policy_is_listed, name_of, only_listed_optimisers
from embodied.data.demonstrations import with_privileged
from embodied.data.episodes import Episodes
from embodied.data.recording import record_episodes
from embodied.errors import UserError
from embodied.policy import SteeredPolicy, TrainablePolicy
from embodied.task import LearnsValues, OfflineLearner, OfflineLearnerConfig
from embodied.training.kept_episodes import write_kept
from embodied.training.stages.stage import Stage

SEGMENT = 500
"""Gradient steps between log entries, and between checkpoints."""


class OfflineStage(Stage[Mapping[str, float]]):
    """Stage of the learner that `Experiment(offline=)` builds."""

    name = "offline"
    offline = baselines = True
    learner: OfflineLearner
    first = 0
    """Gradient steps that the learner had taken before this stage."""

    @property
    def config(self) -> OfflineLearnerConfig:
        """Config of the learner."""
        assert self.run.offline is not None
        return self.run.offline

    @property
    def demonstrations(self) -> Episodes:
        """Episodes to train on."""
        assert self.run.demonstrations is not None
        return self.run.demonstrations

    @property
    def total(self) -> int:
        """Gradient steps of this stage."""
        return self.run.config.rounds.steps(self.config.steps, self.run.config.sft.steps) - self.first

    @property
    def done(self) -> int:
        """Gradient steps that are done."""
        return self.learner.gradient_steps - self.first

    @property
    def due(self) -> bool:
        """Whether a log entry and a checkpoint are due."""
        return self.learner.gradient_steps % SEGMENT == 0 or self.done == self.total

    def build(self, resumed: bool) -> dict[str, Any]:
        """Build the learner; the policy's statistics are those of the demonstrations, unless it has some.

        Raises:
            UserError: if imitation trains a policy in whose place a small actor acts.
        """
        run = self.run
        if not (resumed or run.before or run.config.start_from):
            self._fit_statistics()
        self.learner = self._build_learner(seeding.generator(run.seed, self.name))
        if isinstance(self.learner, OER):
            self.learner.remember(run.kept)
        check_acts_alone(self.learner, run.policy)
        if run.world.size > 1:
            check_policy_is_listed(self.learner, run.policy)
        return {"learner": self.learner}

    def _build_learner(self, generator: torch.Generator) -> OfflineLearner:
        run = self.run
        rounds = run.config.rounds
        if not rounds.are_used:
            return self.config.build(run.policy, generator)
        is_present = bool(run.before or run.config.start_from)
        options = {"is_present": is_present, "imitation": run.config.sft}
        return Rounds(run.policy, rounds, self.config, generator, self._collector(), **options)

    def _collector(self) -> Collect | None:
        """Function that collects episodes of the policy while it explores; None without a simulator."""
        run = self.run
        if run.task.held_out_share is not None:
            return None

        def collect(number: int) -> Episodes:
            generator = seeding.generator(run.seed, "collected", number, device=run.device)
            with run.timer("simulation"):
                return record_episodes(run.env, run.policy, generator, number, run.device)

        return collect

    def _fit_statistics(self) -> None:
        run = self.run
        observations, actions = self.demonstrations.by_weight()
        if min(len(observations), len(actions)) < 2:  # the deviation of one number is not a number
            raise UserError("the episodes to imitate have a single step, of which there are no statistics; record more")
        generator = seeding.generator(run.seed, "random play")
        observations = with_privileged(observations, run.contract, lambda rng: run.random_play(rng)[0], generator)
        run.policy.fit(observations.to(run.device), actions.to(run.device))

    def steps(self) -> Iterator[Mapping[str, float]]:
        """Yield the metrics of each gradient step.

        Raises:
            DivergedError: if a loss is not finite.
            UserError: if the learner takes no step, steps an optimiser that it does not list, or if its first step
                leaves different weights in several processes.
        """
        run = self.run
        learner = self.learner
        first = True
        while True:
            before = learner.gradient_steps
            with run.timer(self.title), run.config.precision.on(run.device), only_listed_optimisers(learner):
                metrics = run.world.mean(learner.fit(self.demonstrations, 1, run.world))
            if learner.gradient_steps == before:
                raise UserError(f"{name_of(learner)}.fit(episodes, 1) did not count a step in gradient_steps")
            if first and run.world.size > 1:
                check_equal_weights(learner, run.world)
            check_finite(losses(metrics), learner.gradient_steps)
            first = False
            yield metrics

    def record(self, step: Mapping[str, float]) -> str:
        """Log the metrics if due."""
        if not self.due:
            return ""
        values = dict(step)
        note = ""
        if (open_loop := self.run.open_loop) is not None:
            whole = self.run.world.whole(self.policy)
            with self.run.timer("evaluation"):
                values["held_out_loss"] = float(self.run.world.lead(lambda: str(open_loop.loss(whole))))
            note = f"held-out loss {values['held_out_loss']:.4g}"
        self.run.logger.log(self.learner.gradient_steps, {f"{self.name}/{name}": each for name, each in values.items()})
        return note

    def finish(self) -> None:
        """Keep the policy as what later stages are compared with, unless an earlier stage kept its own, and values.

        The observations that OER keeps are written into the run's directory.
        """
        self.run.counters["offline_gradient_steps"] = self.learner.gradient_steps
        if isinstance(self.learner, Rounds):
            self.run.report.rounds = list(self.learner.results)
        if isinstance(self.learner, OER):
            write_kept(self.run.directory, self.learner.kept(self.demonstrations), self.run.contract)
        before = self.run.before or self.run.aside({"policy": dict(self.run.policy.state_dict())})
        if isinstance(self.learner, LearnsValues) and self.run.algorithm and (values := self.learner.values()):
            before = before | {"values": self.run.aside(values)}
        self.run.before = before


class SupervisedStage(OfflineStage):
    """Supervised fine-tuning."""

    name = "sft"
    baselines = False

    @property
    def config(self) -> OfflineLearnerConfig:
        """Options of SFT."""
        return self.run.config.sft

    @property
    def total(self) -> int:
        """Gradient steps of this stage."""
        return self.config.steps - self.first

    def _build_learner(self, generator: torch.Generator) -> OfflineLearner:
        return self.config.build(self.run.policy, generator)

    def finish(self) -> None:
        """Keep the learner, from which the control continues."""
        self.run.before = self.run.aside(self.learner.state_dict())


def check_acts_alone(learner: OfflineLearner, policy: TrainablePolicy) -> None:
    """Check that no small actor acts in place of `policy` while a `learner` that imitates trains it.

    Raises:
        UserError: if one does.
    """
    learner = learner.learner if isinstance(learner, Rounds) else learner
    if isinstance(learner, SFT) and isinstance(policy, SteeredPolicy) and policy.steers:
        raise UserError(
            "a small actor acts in place of the policy that this stage would train; start_from weights before steering,"
            " or make one policy of both by stages=[rl] algorithm=self_imitation"
        )
