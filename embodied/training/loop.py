"""Reinforcement learning loop: collect, update, repeat; for `train.py` and for library users.

for step in train(env, policy, PPOConfig(), env_steps=100_000):
print(step.env_steps, step.ended.get("success"))
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

import torch

from embodied import seeding
from embodied.algorithms.advantage import values
from embodied.algorithms.finite import check_finite, losses
from embodied.algorithms.parts import check_equal_weights, check_policy_is_listed, iter_parts, only_listed_optimisers
from embodied.data.episodes import Episodes
from embodied.data.store import EpisodeStore
from embodied.environment import ODD_EVENTS, Environment
from embodied.errors import UserError
from embodied.networks.precision import Precision
from embodied.placement.local import Local, Processes
from embodied.policy import TrainablePolicy, unread_observations
from embodied.rollout.ahead import CollectorAhead
from embodied.rollout.random_play import first_decisions
from embodied.rollout.rollout import Collector, Rollout, RolloutSource
from embodied.rollout.starts import OwnStarts
from embodied.task import Learner, LearnerConfig
from embodied.world import ALONE, World

log = logging.getLogger(__name__)
LOCAL = Local()


@dataclass(frozen=True)
class Iteration:
    """Result of one collection and update; all but `env_steps` (the total so far) refer to this iteration only."""

    env_steps: int
    episodes: int  # number of ended episodes
    ended: dict[str, float]  # means over the ended episodes, see `Rollout.ended`; empty if none ended
    odd_episodes: dict[str, int]  # number of episodes that ended with each of ODD_EVENTS
    metrics: dict[str, float]  # the learner's
    simulation_s: float
    policy_s: float
    placement_metrics: dict[str, float] = field(default_factory=dict)  # metrics of the collectors' placement
    interventions: dict[str, int] = field(default_factory=dict)  # see `Rollout.intervention_counts`
    human_share: float | None = None  # share of the control steps in which a person acted; None where nobody can

    @property
    def cpu_s(self) -> float:
        """CPU time of collectors in other processes, s."""
        return self.placement_metrics.get("cpu_s", 0.0)

    @property
    def lost_collectors(self) -> int:
        """Number of collectors that died."""
        return int(self.placement_metrics.get("lost_collectors", 0))

    @property
    def dropped_rollouts(self) -> int:
        """Number of rollouts that were too old to learn from."""
        return int(self.placement_metrics.get("dropped_rollouts", 0))

    @property
    def logged(self) -> dict[str, float]:
        """Metrics of the iteration by name."""
        ended_means = self.ended | {name: float(count) for name, count in self.odd_episodes.items() if count}
        rollout = {f"rollout/{name}": value for name, value in ended_means.items()}
        if self.human_share is not None:
            rollout["rollout/human_share"] = self.human_share
        placement = {f"placement/{name}": value for name, value in self.placement_metrics.items()}
        return rollout | {f"rl/{name}": value for name, value in self.metrics.items()} | placement

    @property
    def note(self) -> str:
        """Text for a progress bar: success or return of the episodes that ended, and the share of a person's steps."""
        formats = {"success": "success {:.0%}", "episode_return": "return {:.4g}"}
        outcome = [text.format(self.ended[name]) for name, text in formats.items() if name in self.ended][:1]
        return ", ".join([*outcome, *([] if self.human_share is None else [f"person {self.human_share:.0%}"])])


def train(
    env: Environment,
    policy: TrainablePolicy,
    algorithm: LearnerConfig,
    *,
    env_steps: int,
    seed: int = 0,
    demonstrations: Episodes | None = None,
    world: Processes = LOCAL,
) -> Iterator[Iteration]:
    """Train a new `policy`, in place, for `env_steps` control steps of `env`; yields after every update.

    Its normalisation statistics are first computed from random actions. Every process of `world` calls this with its
    own `env`, which has its own seed; all get the same weights, and `env_steps` counts the steps of all together.

    Raises:
        UserError: if the parts are incompatible, or the learner does not list its parts.
    """
    if unread := unread_observations(policy):
        log.warning("the policy does not read %s", ", ".join(unread))
    policy.fit(*(each.to(policy.device) for each in first_decisions(env, seeding.generator(seed, "random play"))))
    policy.start_critic()
    learner, collector = build(env, policy, algorithm, demonstrations, seed, world)
    world.join(learner)
    return iterations(learner, collector, algorithm.rollout_length, env_steps, world=world)


def build(
    env: Environment,
    policy: TrainablePolicy,
    algorithm: LearnerConfig,
    demonstrations: Episodes | None,
    seed: int,
    world: World = ALONE,
    own_seed: int | None = None,
) -> tuple[Learner, Collector]:
    """Build the learner of `policy` and its collector in `env`.

    Every process of `world` has its own exploration noise and initial states, by `own_seed` if it is set.

    Raises:
        UserError: if the parts are incompatible.
    """
    learner = algorithm.build(policy, demonstrations, env, seeding.generator(seed, "learner"))
    if world.size > 1:
        check_policy_is_listed(learner, policy)
    if world.size > 1 and list(iter_parts(learner, (EpisodeStore,))):
        raise UserError(
            f"this algorithm learns from a replay, of which each of {world.size} processes would have a part only: not"
            " supported yet; use algorithm=ppo, grpo, bptt or distillation, or one process"
        )
    rank = (world.rank,) if world.rank else ()
    own_seed = seed if own_seed is None else own_seed
    noise = seeding.generator(own_seed, "noise", *rank, device=policy.device)
    for starts in iter_parts(learner, (OwnStarts,)) if world.size > 1 else ():
        starts.separate(seeding.generator(own_seed, "starts", *rank))
    return learner, learner.collector(env, policy, noise, learner.starts)


def iterations(
    learner: Learner,
    collector: RolloutSource,
    rollout_length: int,
    env_steps: int,
    *,
    done: int = 0,
    planned: int | None = None,
    precision: Precision = Precision.FLOAT32,
    world: World = ALONE,
) -> Iterator[Iteration]:
    """Collect `rollout_length` decisions per environment and update until all processes together reach `env_steps`.

    Schedules of the learner run over `planned` steps, `env_steps` if None.

    Raises:
        DivergedError: if a loss or a gradient is not finite.
        UserError: if the learner does not list its parts, or its first update differs between processes.
    """
    first = True
    while done < env_steps:
        with precision.on(collector.generator.device):
            rollout = collector.collect(rollout_length)
            interventions = rollout.intervention_counts()
            share = interventions["human_steps"] / max(1, rollout.env_steps) if interventions else None
            counts = _mean_counts(rollout, world)
            done += counts.pop("env_steps")
            # the next collection runs during this update, by the policy from before it
            if done < env_steps and isinstance(collector, CollectorAhead):
                collector.begin(rollout_length)
            # The values of an older critic are replaced by those of the current one.
            if rollout.value is not None and rollout.policy_version < collector.version:
                rollout = replace(rollout, value=values(cast(TrainablePolicy, collector.policy), rollout.observation))
            with only_listed_optimisers(learner):
                learner_metrics = learner.update(rollout, min(1.0, done / max(1, planned or env_steps)), world)
            if first and world.size > 1:
                # once is enough: a learner that leaves the processes apart does so in its first update
                check_equal_weights(learner, world)
            first = False
            metrics = world.mean(learner_metrics | rollout.starts)
            check_finite(losses(metrics), learner.gradient_steps)
            if isinstance(collector.policy, TrainablePolicy):
                collector.policy.renormalise(rollout.observation, world)
        collector.version += 1
        yield Iteration(
            done,
            metrics=metrics,
            placement_metrics=rollout.placement_metrics,
            interventions=interventions,
            human_share=share,
            simulation_s=rollout.simulation_s,
            policy_s=rollout.policy_s,
            **counts,
        )


def _mean_counts(rollout: Rollout, world: World) -> dict[str, Any]:
    """Counts and means over the rollouts of all processes, as arguments of `Iteration`."""
    odd = rollout.odd_episodes()
    episodes = int(rollout.done.sum())
    if world.size == 1:
        return {"env_steps": rollout.env_steps, "episodes": episodes, "odd_episodes": odd, "ended": rollout.ended()}
    values = rollout.episode_values()
    empty = torch.zeros(0)
    named = sorted(name for name in rollout.episode_totals if name not in ODD_EVENTS)  # in all processes the same
    names = ["episode_return", "episode_steps", *(["success"] if rollout.has_success else []), *named]
    ended = [values.get(name, empty) for name in names]
    counts = [rollout.env_steps, episodes, *odd.values()]
    sums = [(float(each.sum()), len(each)) for each in ended]
    # one reduction of [counts, sum_1, n_1, sum_2, n_2, ...]
    all_sums = world.sum(torch.tensor([*counts, *chain(*sums)], dtype=torch.float64)).tolist()
    env_steps, episodes, *odd_sums = map(round, all_sums[: len(counts)])
    totals = all_sums[len(counts) :: 2]
    numbers = all_sums[len(counts) + 1 :: 2]
    return {
        "env_steps": env_steps,
        "episodes": episodes,
        "odd_episodes": dict(zip(odd, odd_sums, strict=True)),
        "ended": {name: total / n for name, total, n in zip(names, totals, numbers, strict=True) if n},
    }
