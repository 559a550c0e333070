"""Rounds of offline learning, of which each may be gated by off-policy evaluation (RL-100, arXiv 2510.14830).

A round is all steps of an offline learner, which begins with the weights of the present policy. The new policy replaces
the present one only if its estimated value exceeds that of the present one by a margin; else it is refused and the
present weights stay. Where there is a simulator, the present policy collects further episodes between rounds. With
`imitate_anew` a round but the first begins with a policy of new weights, which imitates all episodes so far.

Differs from the paper:
    - any offline learner; PPO on denoising steps is `offline=bppo`;
    - there is one estimate at the end of a round, instead of one every 100 steps, and a margin of 10%: on LIBERO a
    policy that succeeds in 70% was estimated to be worth 7% more than one of 94%;
    - encoders are not regularised by reconstruction and a variational bottleneck;
    - collected episodes that failed are not imitated, as in supervised fine-tuning; critics learn from all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from embodied import seeding
from embodied.algorithms.imitation.sft import SFT, SFTConfig, replace_actor, with_drawn_weights
from embodied.algorithms.offline.dynamics import Dynamics, DynamicsConfig
from embodied.algorithms.offline.off_policy_evaluation import (
    Estimator,
    OffPolicyEvaluation,
    OffPolicyEvaluationConfig,
    with_weights,
)
from embodied.algorithms.parts import Composite
from embodied.configuration import Configuration, NonNegativeFloat, NonNegativeInt, PositiveInt
from embodied.data.episodes import Episodes, columns, from_columns
from embodied.data.rewards import check_rewards
from embodied.data.round_results import collected_total
from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from embodied.rollout.memory import RecurrentPolicy
from embodied.saving.tree import copy_tree
from embodied.task import LearnsValues, OfflineLearner, OfflineLearnerConfig
from embodied.world import ALONE, World

log = logging.getLogger(__name__)
Collect = Callable[[int], Episodes]
"""Function that collects one episode in each environment, for the n-th time (from 0)."""


@dataclass
class RoundsConfig(Configuration):
    """Number `count` of rounds of the stage offline, the `gate` that a round's policy must pass, and what it collects.

    A policy passes if its estimate exceeds that of the present policy by the share `margin` of the latter's size.
    Before each round but the first the present policy collects `collected` episodes in each environment of training.
    With `imitate_anew` a policy of new weights then imitates the episodes, by the options of SFT, and learns in its
    place.
    """

    count: PositiveInt = 1
    gate: Estimator = Estimator.NONE
    margin: NonNegativeFloat = 0.1
    collected: NonNegativeInt = 0
    imitate_anew: bool = False
    evaluation: OffPolicyEvaluationConfig = field(default_factory=OffPolicyEvaluationConfig)
    dynamics: DynamicsConfig = field(default_factory=DynamicsConfig)

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range or do not go together."""
        super().__post_init__()
        if self.collected and self.count == 1:
            raise UserError(
                "rounds.collected is of episodes between rounds; use rounds.count=2 or more, or collected=0"
            )
        if self.imitate_anew and self.count == 1:
            raise UserError(
                "rounds.imitate_anew is of rounds after the first; use rounds.count=2 or more, or imitate_anew=false"
            )

    @property
    def are_used(self) -> bool:
        """Whether there is more than one round, or a gate."""
        return self.count > 1 or self.gate is not Estimator.NONE

    def steps(self, learning: int, imitation: int, rounds: int | None = None) -> int:
        """Gradient steps of the first `rounds` (None: of all), of which each has `learning` steps.

        Those of `imitation` come before each but the first, if the policy imitates anew.
        """
        rounds = self.count if rounds is None else rounds
        return rounds * learning + max(0, rounds - 1) * imitation * self.imitate_anew

    def check(self, policy: TrainablePolicy, processes: int, *, has_simulator: bool) -> None:
        """Check that rounds of `policy` are possible.

        Raises:
            UserError: in several processes, for a policy with memory, if episodes are to be collected without a
                simulator, and for observations that a model of the dynamics cannot predict.
        """
        if not self.are_used:
            return
        alone = "use rounds.count=1 rounds.gate=none"
        if processes > 1:
            raise UserError(f"rounds of offline learning need one process; {alone}")
        if isinstance(policy, RecurrentPolicy):
            raise UserError(f"rounds do not evaluate policies with a memory yet; {alone}, or policy=mlp")
        if self.collected and not has_simulator:
            raise UserError("there is no simulator to collect episodes in; use rounds.collected=0")
        if self.gate is Estimator.AM_Q:
            try:
                Dynamics(policy.contract, self.dynamics)
            except UserError as error:
                raise UserError(f"rounds.gate=am_q is not possible, use rounds.gate=fqe: {error}") from error


class Rounds(Composite):
    """Offline learner that takes the steps of several learners of `learning`, one after another.

    If there `is_present` a trained policy, the first round has to improve on it, too. `collect` is None without a
    simulator. `imitation` has the options of imitation anew.
    """

    def __init__(
        self,
        policy: TrainablePolicy,
        config: RoundsConfig,
        learning: OfflineLearnerConfig,
        generator: torch.Generator,
        collect: Collect | None,
        *,
        is_present: bool,
        imitation: SFTConfig | None = None,
    ) -> None:
        self.policy = policy
        self.config = config
        self.learning = learning
        self.generator = generator
        self.collect = collect
        self.present = self._weights() if is_present else None  # a learner may change how the policy acts
        self.learner: OfflineLearner = learning.build(policy, generator)
        self.imitation_config = imitation or SFTConfig()
        self.imitation: SFT | None = None
        """Learner of the policy of new weights with which this round begins; None unless it is still learning."""
        self.evaluation = OffPolicyEvaluation(config.gate, config.evaluation, config.dynamics, seeding.child(generator))
        self.collected: Episodes | None = None
        self.results: list[dict[str, Any]] = []
        """Estimates of each round: [low, high] are intervals of 95%."""
        self._merged: tuple[Episodes, Episodes] | None = None

    @property
    def gradient_steps(self) -> int:
        """Gradient steps of all rounds."""
        learning = self.learning.steps
        imitation = self.imitation_config.steps
        finished = len(self.results)
        before = self.config.steps(learning, imitation, finished)
        if self.imitation is not None:
            return before + self.imitation.gradient_steps
        if finished and self.learner.gradient_steps == learning:
            return before  # the next round has not begun
        return self.config.steps(learning, imitation, finished + 1) - learning + self.learner.gradient_steps

    def fit(self, episodes: Episodes, steps: int, world: World = ALONE) -> dict[str, float]:
        """Take `steps` gradient steps on `episodes` and those collected; returns the last metrics.

        Raises:
            UserError: for unknown rewards or a single episode, if there is a gate, and for episodes that collected
                ones cannot join.
        """
        if not self.gradient_steps:
            if self.config.gate is not Estimator.NONE:
                check_rewards(episodes, "rounds.gate=none")
                if len(episodes.ends) < 2:
                    raise UserError("rounds.gate compares means of at least 2 episodes; record more, or use gate=none")
            if self.config.collected:
                check_joins(episodes, self.policy)
        metrics: dict[str, float] = {}
        for _ in range(steps):
            if self.imitation is None and self.learner.gradient_steps == self.learning.steps:
                self._begin()
            if self.imitation is not None:
                metrics = self._imitate(self.imitation, self._all(episodes))
                continue
            metrics = dict(self.learner.fit(self._all(episodes), 1, world))
            if self.learner.gradient_steps == self.learning.steps:
                self._end(self._all(episodes))
        return metrics

    def _begin(self) -> None:
        """Begin a round that is not the first."""
        for number in range(self.config.collected):
            assert self.collect is not None
            more = self.collect((len(self.results) - 1) * self.config.collected + number)
            self.collected = more if self.collected is None else Episodes.join([self.collected, more])
        if self.config.imitate_anew:
            self.imitation = self._imitation()
        else:
            self.learner = self.learning.build(self.policy, self.generator)

    def _imitation(self) -> SFT:
        return SFT(with_drawn_weights(self.policy, self.generator), self.imitation_config, self.generator)

    def _imitate(self, imitation: SFT, episodes: Episodes) -> dict[str, float]:
        """Take one step of imitation anew; after the last one the policy goes on with its weights."""
        metrics = imitation.fit(episodes, 1)
        if imitation.gradient_steps == self.imitation_config.steps:
            replace_actor(self.policy, imitation.policy)
            self.imitation = None
            self.learner = self.learning.build(self.policy, self.generator)
        return metrics

    def _all(self, episodes: Episodes) -> Episodes:
        """The `episodes` and those collected."""
        if self.collected is None:
            return episodes
        if self._merged is None or self._merged[0] is not self.collected:
            self._merged = self.collected, merged(episodes, self.collected, self.policy)
        return self._merged[1]

    def _end(self, episodes: Episodes) -> None:
        """Accept or refuse the policy of the round that is complete."""
        result: dict[str, Any] = {"round": len(self.results) + 1, "episodes": len(episodes.ends), "accepted": True}
        if self.collected is not None:
            total = {"episodes": len(self.collected.ends), "env_steps": self.collected.steps}
            result["collected"] = {name: each - collected_total(self.results, name) for name, each in total.items()}
        if self.config.gate is not Estimator.NONE:
            policies = [self.policy]
            if self.present is not None:
                policies.insert(0, with_weights(self.policy, self.present))
            generator = torch.Generator().manual_seed(0)
            *others, new = self.evaluation.estimates(policies, episodes)
            result |= {"gate": self.config.gate.value, "estimate": new.mean, "interval": new.interval(generator)}
            for present in others:
                # J(new) > J(present) + margin |J(present)|
                accepted = new.mean > present.mean + self.config.margin * abs(present.mean)
                result |= {"accepted": accepted, "present": present.mean}
                result |= {"present_interval": present.interval(generator)}
        if not result["accepted"]:
            assert self.present is not None
            features = [each.detach().clone() for each in self.policy.critic_parameters()]
            self.policy.load_state_dict(self.present)
            # the critics, with which the stage rl may go on, read their own features; the policy acts without these
            with torch.no_grad():
                for own, other in zip(self.policy.critic_parameters(), features, strict=True):
                    own.copy_(other)
        self.present = self._weights()
        result["sentence"] = sentence(result)
        self.results.append(result)
        log.info(result["sentence"])

    def _weights(self) -> dict[str, Any]:
        return copy_tree(dict(self.policy.state_dict()))

    def values(self) -> dict[str, Any] | None:
        """Critics of the last round's learner, see `LearnsValues`."""
        return self.learner.values() if isinstance(self.learner, LearnsValues) else None

    def state_dict(self) -> dict[str, Any]:
        """The round's learner or imitation, the present weights, the collected episodes and the results."""
        return {
            "learner": self.learner.state_dict(),
            "present": self.present,
            "evaluation": self.evaluation.generator.get_state(),
            "collected": None if self.collected is None else columns(self.collected),
            "imitation": None if self.imitation is None else self.imitation.state_dict(),
            "results": list(self.results),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.learner.load_state_dict(state["learner"])
        self.present = state["present"]
        self.evaluation.generator.set_state(state["evaluation"])
        self.collected = None if state["collected"] is None else from_columns(state["collected"])
        self.results = list(state["results"])
        self.imitation = None
        if (imitation := state.get("imitation")) is not None:
            self.imitation = self._imitation()
            self.imitation.load_state_dict(imitation)


def check_joins(recorded: Episodes, policy: TrainablePolicy) -> None:
    """Check that episodes of `policy` can join the `recorded` ones.

    Raises:
        UserError: for pictures and weighted data sets.
    """
    if recorded.pictures is not None or any(spec.is_picture for spec in policy.contract.observation.values()):
        raise UserError("episodes with pictures are not collected between rounds yet; use rounds.collected=0")
    if recorded.weights is not None:
        raise UserError("collected episodes have no weight among weighted data sets; use rounds.collected=0")


def merged(recorded: Episodes, collected: Episodes, policy: TrainablePolicy) -> Episodes:
    """Join `recorded` and `collected` episodes with the observations that both have."""
    parts = [recorded.expanded(), collected.expanded()]
    for name in ("observation", "final_observation"):
        named = [getattr(part, name) for part in parts]
        if None not in named:
            shared = [key for key in named[0].keys() if key in named[1].keys()]  # noqa: SIM118 - of a TensorDict
            parts = [replace(part, **{name: each.select(*shared)}) for part, each in zip(parts, named, strict=True)]
    return Episodes.join(parts).indexed(policy.contract)


def sentence(result: dict[str, Any]) -> str:
    """Sentence on a round for log and report."""
    text = f"Offline round {result['round']} on {result['episodes']:,} episodes: "
    if "gate" not in result:
        return f"{text}accepted without a gate."
    text += f"{'accepted' if result['accepted'] else 'refused, the present weights stay'}, "
    text += f"{result['gate']} estimates {_with_interval(result['estimate'], result['interval'])}"
    if "present" in result:
        text += f", of the present policy {_with_interval(result['present'], result['present_interval'])}"
    return f"{text}."


def _with_interval(value: float, interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{value:.4g} [{low:.4g}, {high:.4g}]"
