"""Reinforcement learning: iterations of collection and update (`loop.py`), evaluated in between."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from embodied import seeding
from embodied.environment import in_real_time, own_help, own_resets
from embodied.placement.actor import ActorEnvironment
from embodied.policy import TrainablePolicy
from embodied.report.report import result_text
from embodied.rollout.ahead import CollectorAhead
from embodied.rollout.rollout import Collector, RolloutSource
from embodied.saving import checkpoint
from embodied.saving.checkpoint import Checkpoint
from embodied.task import ContinuesValues
from embodied.training.held_out import PHASE
from embodied.training.loop import Iteration, iterations
from embodied.training.stages.stage import Stage

log = logging.getLogger(__name__)
PATIENCE_S = 1.0
"""Longest iteration, s, that a stop waits for."""


class ReinforcementStage(Stage[Iteration]):
    """Stage that trains until all processes together have taken `env_steps` environment steps."""

    name = "rl"
    baselines = True
    collector: RolloutSource | CollectorAhead

    @property
    def patience_s(self) -> float:
        """Longest iteration, s, that a stop waits for."""
        # nothing that a robot did is done again: it ends its rollout by itself, which is then stored
        return math.inf if in_real_time(self.run.env) else PATIENCE_S

    @property
    def total(self) -> int:
        """Environment steps."""
        return self.run.config.env_steps

    @property
    def done(self) -> int:
        """Environment steps that are done."""
        return self.run.counters["env_steps"]

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due after this iteration."""
        return self.run.counters["iteration"] % self.run.config.checkpoint_every == 0

    def build(self, resumed: bool) -> dict[str, Any]:
        """Build learner and collector; statistics are those of random play, unless the policy has some."""
        run = self.run
        config = self.run.config
        if not run.before:
            if not config.start_from:
                observation, actions = run.random_play(seeding.generator(run.seed, "random play"))
                run.policy.fit(observation.to(run.device), actions.to(run.device))
            run.before = run.aside({"policy": dict(run.policy.state_dict())})
            if isinstance(run.env, ActorEnvironment):
                run.save({})  # from here on every rollout is on disk, from which a killed run goes on
        if not resumed:
            # only at the beginning of the stage: a resumed run loads the critic's weights
            run.policy.start_critic()
        self.learner, self.collector = run.learner_and_collector(run.env, run.policy, run.demonstrations)
        if not resumed and isinstance(self.learner, ContinuesValues):
            self.learner.continue_values(run.before.get("values"))
        if config.overlap and isinstance(self.collector, Collector):  # an actor never waits for an update
            self.collector = CollectorAhead(self.collector, run.policy, config.precision)
        self.parts = {"learner": self.learner, "held_out": run.held_out}
        if resets := own_resets(run.env):
            self.parts["resets"] = resets
        if help := own_help(run.env):
            self.parts["help"] = help
        self.parts["collector"] = self.collector  # restored last: one that collects ahead goes on at once
        return self.parts

    def running(self) -> AbstractContextManager[object]:
        """Context of the thread that collects ahead, if there is one."""
        return self.collector if isinstance(self.collector, CollectorAhead) else nullcontext()

    def steps(self) -> Iterator[Iteration]:
        """Iterations, after an evaluation that is due but was interrupted."""
        run = self.run
        self._watch()
        return iterations(
            self.learner,
            self.collector,
            run.learning.rollout_length,
            self.total,
            done=self.done,
            planned=run.counters["planned_env_steps"],
            precision=run.config.precision,
            world=run.world,
        )

    def record(self, step: Iteration) -> str:
        """Count and log an iteration, then evaluate the policy if due."""
        run = self.run
        run.counters["iteration"] += 1
        run.counters["env_steps"] = step.env_steps
        run.timer.add("simulation", step.simulation_s)
        run.timer.add("policy", step.policy_s)
        run.timer.add("update", run.step_s - step.simulation_s - step.policy_s)
        # CPU time of all processes, and of collectors in other processes
        run.counters["cpu_s"] += step.cpu_s + float(run.world.sum(torch.tensor(run.step_cpu_s)))
        run.counters["episodes"] += step.episodes
        for name in ("lost", "pushed"):
            run.counters[name] += step.odd_episodes[name]
        for name, count in step.interventions.items():
            run.counters[name] += count
        for name in ("lost_collectors", "dropped_rollouts"):
            run.counters[name] += getattr(step, name)
        wall_s = sum(run.timer.seconds[phase] for phase in ("simulation", "policy", "update"))
        spent = {"time/wall_s": wall_s, "time/cpu_s": run.counters["cpu_s"]}
        resets = own_resets(run.env)
        of_resets = {f"resets/{name}": value for name, value in resets.metrics().items()} if resets else {}
        run.logger.log(step.env_steps, step.logged | of_resets | spent)
        self._watch()
        return ", ".join(filter(None, (step.note, resets.note if resets else "")))

    def finish(self) -> None:
        """Save the checkpoint at the end of RL, from which more `env_steps` continue, and delete older results."""
        run = self.run
        if resets := own_resets(run.env):
            run.report.resets = resets.record()
        if not self.learner.gradient_steps:
            run.report.notes.append(
                f"Reinforcement learning took no gradient step in {self.done:,} environment steps: set more env_steps,"
                " or a shorter warm-up of the algorithm."
            )
        if run.counters["rl_checkpoint"]:
            return
        run.counters["rl_gradient_steps"] = self.learner.gradient_steps
        run.counters["rl_checkpoint"] = int(run.save(self.parts).name)
        for name in ("report.json", "video.mp4") if not run.world.rank else ():
            (run.directory / name).unlink(missing_ok=True)

    def _watch(self) -> None:
        """Evaluate the policy on held-out episodes, if due; the best is saved in best/."""
        run = self.run
        if run.anywhere(run.held_out.due(self.done, self.total, run.counters["episodes"], run.timer.seconds)):
            whole = run.world.whole(run.policy)
            run.world.lead(lambda: self._evaluate_held_out(whole))
            run.save(self.parts)  # so that the report and best/ are consistent

    def _evaluate_held_out(self, policy: TrainablePolicy) -> None:
        run = self.run
        held_out = self.run.held_out
        done = self.done
        wall_s = self.run.timer.seconds
        began = time.perf_counter()
        with run.abandonable(self.parts, changing=False), run.timer(PHASE):
            point = held_out.evaluate(policy, done)
            if chosen := held_out.in_training.chosen():
                weights = dict(policy.state_dict())
                counters = {**run.counters, "stage": self.name}
                saved = Checkpoint(weights, run.policy.contract, run.record, counters, chosen=chosen)
                checkpoint.save_best(run.directory, saved)
        held_out.plan(time.perf_counter() - began, done, self.total, wall_s)
        log.info(
            f"held-out {result_text(point)} after {done:,} environment steps{', the best so far' if chosen else ''}"
        )
        values = {name: value for name, value in point.items() if name not in ("env_steps", "episodes")}
        run.logger.log(done, {f"evaluation/{name}": value for name, value in values.items() if value is not None})
