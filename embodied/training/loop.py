"""The reinforcement learning loop: collect, update, repeat; for `train.py` and for library users.

for step in train(env, policy, PPOConfig(), env_steps=100_000):
print(step.env_steps, step.ended.get("success"))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from embodied import seeding
from embodied.algorithms.finite import check_finite, losses
from embodied.environment import Environment
from embodied.policy import RenormalisedPolicy, TrainablePolicy
from embodied.precision import Precision
from embodied.rollout.episodes import Episodes
from embodied.rollout.rollout import Collector, first_decisions
from embodied.task import Learner, LearnerConfig
from embodied.world import ALONE, World


@dataclass(frozen=True)
class Iteration:
    """One collection and update; all but `env_steps` (the total so far) refer to this iteration only."""

    env_steps: int
    episodes: int  # number that ended
    ended: dict[str, float]  # means over these: success, episode_return, episode_steps; empty if none ended
    diverged: int
    lost: int  # of those, with a process of the simulator that died
    pushed: int  # episodes that ended and in which a person pushed something
    metrics: dict[str, float]  # the learner's
    simulation_s: float
    policy_s: float

    @property
    def logged(self) -> dict[str, float]:
        """Metrics of the iteration by name."""
        counted = {"diverged": self.diverged, "lost": self.lost, "pushed": self.pushed}
        shown = self.ended | {name: float(count) for name, count in counted.items() if count}
        rollout = {f"rollout/{name}": value for name, value in shown.items()}
        return rollout | {f"rl/{name}": value for name, value in self.metrics.items()}

    @property
    def note(self) -> str:
        """What a progress bar says of the episodes that ended."""
        told = {"success": "success {:.0%}", "episode_return": "return {:.4g}"}
        return next((text.format(self.ended[name]) for name, text in told.items() if name in self.ended), "")


def train(
    env: Environment,
    policy: TrainablePolicy,
    algorithm: LearnerConfig,
    *,
    env_steps: int,
    seed: int = 0,
    demonstrations: Episodes | None = None,
    world: World = ALONE,
) -> Iterator[Iteration]:
    """Train a new `policy`, in place, for `env_steps` control steps of `env`; yields after every update.

    Its normalisation statistics are first computed from random actions.
    """
    policy.fit(*(each.to(policy.device) for each in first_decisions(env, seeding.generator(seed, "random play"))))
    policy.start_critic()
    learner, collector = build(env, policy, algorithm, demonstrations, seed, world)
    return iterations(learner, collector, algorithm.rollout_length, env_steps, world=world)


def build(
    env: Environment,
    policy: TrainablePolicy,
    algorithm: LearnerConfig,
    demonstrations: Episodes | None,
    seed: int,
    world: World = ALONE,
) -> tuple[Learner, Collector]:
    """The learner of `policy` and its collector in `env`; every process of `world` has its own exploration noise.

    Raises:
        UserError: if the parts are incompatible.
    """
    learner = algorithm.build(policy, demonstrations, env, seeding.generator(seed, "learner"))
    own = (world.rank,) if world.rank else ()
    noise = seeding.generator(seed, "noise", *own, device=policy.device)
    return learner, learner.collector(env, policy, noise, learner.starts)


def iterations(
    learner: Learner,
    collector: Collector,
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
    """
    while done < env_steps:
        with precision.on(collector.generator.device):
            rollout = collector.collect(rollout_length)
            done += int(world.sum(torch.tensor(rollout.env_steps)))
            metrics = learner.update(rollout, min(1.0, done / max(1, planned or env_steps)), world)
            check_finite(losses(metrics), learner.gradient_steps)
            if isinstance(collector.policy, RenormalisedPolicy):
                collector.policy.renormalise(rollout.observation, world)
        collector.version += 1
        yield Iteration(
            done, int(rollout.done.sum()), rollout.ended(), rollout.diverged, rollout.lost, rollout.pushed,
            metrics, rollout.simulation_s, rollout.policy_s,
        )  # fmt: skip
