"""Q-chunking (arXiv 2507.07969): values of executed chunks, and a policy that stays within the behaviour it imitates.

The behaviour is a policy that generates chunks, trained by its supervised loss on demonstrations and on all of its own
episodes. It acts by the best of several samples under the learned value (QC). With `policy.steering.kind=one_step` a
second actor generates chunks in one step instead, which imitates the behaviour and maximises the value (QC-FQL,
`algorithm=qc_fql`; with `task.executed=1` that is FQL, arXiv 2502.02538).

Differs from the papers:
    - the head of the policy chooses among samples, in targets as in acting, and the target networks value the choice,
    as in double Q-learning; head and critics learn the same targets;
    - the behaviour acts with averaged weights, as after supervised fine-tuning, and the one-step actor imitates those;
    - many environments: an iteration stores `rollout_length` chunks of each, then takes `gradient_steps` steps;
    - features of the critics are learned and have no target network.
Recorded episodes alone are learned from by the same losses in `offline.fql`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied import seeding
from embodied.algorithms.critics import CriticConfig
from embodied.algorithms.finite import check_finite, gradient_norm
from embodied.algorithms.imitation.sft import SFT, SFTConfig
from embodied.algorithms.micro_batch import saved_bytes
from embodied.algorithms.off_policy.action_values import ActionValues
from embodied.algorithms.off_policy.replay import MixedReplay, demonstrations_or_none_yet
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.algorithms.small_actor import with_small_actor
from embodied.configuration import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Range
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.policy import RankingPolicy, SteeredPolicy, Steering, TrainablePolicy
from embodied.rollout.rollout import Collector, Rollout
from embodied.world import ALONE, World


@dataclass
class QCConfig(CriticConfig):
    """Hyper-parameters of Q-chunking; options of the critics are those of CriticConfig, and `sft` of the behaviour.

    A `demonstration_share` of each minibatch is drawn from demonstrations, in which rewards are known, and to which
    with `keep_interventions` a person's actions on a robot belong, too. The behaviour imitates all decisions, as in the
    paper, or without `imitate_failures` a person's, and those of demonstrations and own episodes that did not fail: a
    policy that mostly fails would learn to. Gradient steps begin after `warmup` decisions.
    The policy acts by values after `critic_warmup` of them; those of new critics choose at random. A one-step actor
    pays `distillation` for the squared distance from the behaviour, in half ranges, in units of the mean absolute
    value.
    """

    rollout_length: PositiveInt = 20
    gradient_steps: PositiveInt = 100
    lookahead: PositiveInt = 1
    minibatch: PositiveInt = 256
    demonstration_share: Fraction = 0.25
    keep_interventions: bool = True
    imitate_failures: bool = True
    capacity: PositiveInt = 500_000
    warmup: NonNegativeInt = 2_000
    critic_warmup: NonNegativeInt = 1_000
    learning_rate: NonNegativeFloat = 3e-4
    value_learning_rate: NonNegativeFloat = 3e-4
    discount: Fraction = 0.99
    averaging: Annotated[float, Range(above=0, at_most=1)] = 0.005
    distillation: NonNegativeFloat = 10.0
    layer_norm: bool = True
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(learning_rate=3e-4))

    @property
    def reads_demonstrations(self) -> bool:
        """Whether demonstrations are read."""
        return self.demonstration_share > 0

    @property
    def max_staleness(self) -> int:
        """Updates that a rollout's policy may be behind: any, because values are learned off-policy."""
        return sys.maxsize

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> QC:
        """Build the learner of `policy`; `generator` draws minibatches.

        Raises:
            UserError: for a policy that cannot rank candidates, and demonstrations that are missing or lack rewards.
        """
        if self.reads_demonstrations:
            kept = self.keep_interventions
            demonstrations = demonstrations_or_none_yet(demonstrations, policy, env, keep_interventions=kept)
        return QC(ranking_policy(policy, "algorithm=qc"), self, demonstrations, generator)


@dataclass
class QCFQLConfig(QCConfig):
    """QCConfig of a policy with a one-step actor."""

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> QC:
        """See `QCConfig.build`.

        Raises:
            UserError: for a policy without a one-step actor, too.
        """
        with_small_actor(policy, Steering.ONE_STEP, "algorithm=qc_fql")
        return super().build(policy, demonstrations, env, generator)


class QC(Composite):
    """Learner of the values of chunks, of the behaviour, and of the head or the one-step actor that acts."""

    starts = None
    collector = Collector

    def __init__(
        self,
        policy: RankingPolicy,
        config: QCConfig,
        demonstrations: Episodes | None,
        generator: torch.Generator,
        q: ActionValues | None = None,
    ) -> None:
        self.policy: RankingPolicy = policy
        self.config = config
        self.generator = generator
        self.q = q or ActionValues(policy, config, config.value_learning_rate)
        self.behaviour = SFT(policy, config.sft, generator)
        self.one_step: SteeredPolicy | None = None
        self.actor_parameters = policy.advantage_parameters()
        if isinstance(policy, SteeredPolicy) and policy.steering is Steering.ONE_STEP:
            self.one_step = policy
            self.actor_parameters = policy.steering_parameters()
        self.actor_optimiser = torch.optim.Adam(self.actor_parameters, config.learning_rate, fused=True)
        share = config.demonstration_share
        kept = config.keep_interventions
        self.replay = MixedReplay(policy, config.capacity, share, demonstrations, keep_interventions=kept)
        self.gradient_steps = 0

    def continue_values(self, values: Mapping[str, Any] | None) -> None:
        """Begin with the critics `values` of the stage offline, if it has some.

        Raises:
            UserError: if they have other layers.
        """
        if values is not None:
            self.q.continue_from(values)

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """Store one rollout, then take gradient steps; returns mean losses and the number of rows stored."""
        self.replay.add(rollout)
        if self.replay.written < self.config.warmup:
            return {}
        own = None if self.config.imitate_failures else self.replay.own_imitable()
        steps = [self._step(progress, own) for _ in range(self.config.gradient_steps)]
        if self.gradient_steps >= self.config.critic_warmup:
            self._act_by_values()
        return {name: float(torch.stack([step[name] for step in steps]).mean()) for name in steps[0]}

    def _act_by_values(self) -> None:
        """Let the policy act by the best of several samples, or by the one-step actor, from now on."""
        if self.one_step is None:
            self.policy.start_ranking()
        else:
            self.one_step.start_steering()

    def _step(self, progress: float, own: Tensor | None) -> dict[str, Tensor]:
        """Take one step; the behaviour imitates the same decisions, or those among `own` and of demonstrations."""
        config = self.config
        rows = self.replay.draw(config.minibatch, self.generator)
        batch = self.replay.transitions(rows, config.lookahead, config.discount)
        chunks_of = self.replay.chunks
        if own is not None:
            rows = self.replay.draw_imitable(config.minibatch, self.generator, own)
            chunks_of = self.replay.imitated_chunks
        imitated = len(rows[0]) + len(rows[1]) > 0
        return self._learn(batch, chunks_of(rows, self.policy.contract.horizon) if imitated else None, progress)

    def _learn(self, batch: TensorDict, chunks: TensorDict | None, progress: float) -> dict[str, Tensor]:
        """Take one step of critics and actor on the transitions `batch`, and of the behaviour; returns metrics.

        The behaviour takes none if there are no `chunks` that it may imitate.

        Raises:
            DivergedError: before a step whose loss or gradient is not finite.
        """
        self.gradient_steps += 1
        target = self._target(batch)
        metrics = self._update_critics(batch, target)
        self.q.follow(self.config.averaging)
        if chunks is not None:
            metrics["behaviour_loss"] = torch.tensor(self.behaviour.step(chunks, progress))
        observation = batch["observation"]
        if self.one_step is None:
            # the head learns the critics' targets: L = mean (A(s, a) - y)^2
            loss = self.policy.advantage_loss(observation, batch["actions"], target)
        else:
            loss = self._loss_of_one_step(self.one_step, observation)
        self.actor_optimiser.zero_grad()
        loss.backward(inputs=self.actor_parameters)
        gradient = gradient_norm(self.actor_parameters)
        check_finite({"policy_loss": loss.detach(), "gradient of the actor": gradient}, self.gradient_steps)
        self.actor_optimiser.step()
        return metrics | {"policy_loss": loss.detach(), "target": target.mean()}

    def _update_critics(self, batch: TensorDict, target: Tensor) -> dict[str, Tensor]:
        return self.q.step(batch, target, self.gradient_steps)

    @torch.no_grad()
    def _target(self, batch: TensorDict) -> Tensor:
        """Targets y = R + carry * mean_i Q_i'(s', a'), [B]; a' is the chunk that the policy would execute."""
        observation = batch["next_observation"]
        # QC: a' = argmax_j A(s', a_j), a_1 .. a_n ~ behaviour(s'); QC-FQL: a' = mu(s', z), z ~ N(0, I)
        generator = seeding.child(self.generator, self.policy.device)
        actions = self.policy.act(observation, generator=generator).actions
        following = self.q.targets.values(self.q.inputs(observation, self.q.scaled(actions))).mean(0)
        return batch["reward"] + batch["carry"] * following

    def _loss_of_one_step(self, policy: SteeredPolicy, observation: TensorDict) -> Tensor:
        shape = (len(observation), *policy.steering_noise_shape)
        noise = torch.randn(shape, generator=self.generator).to(policy.device)
        observation = policy.encoded(observation, generates=True)  # once for both chunks
        actions, *_ = policy.steered(observation, noise)
        value = self.q.values(observation, self.q.scaled(actions), frozen=True).mean(0)
        # L = alpha |mu(s, z) - behaviour(s, z)|^2 - lambda Q(s, mu(s, z)), lambda = 1 / mean |Q|
        scale = 1.0 / value.detach().abs().mean().clamp_min(1e-6)
        return self.config.distillation * policy.distance_of_one_step(observation, noise) - scale * value.mean()

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the largest minibatch stores: of critics, behaviour or actor."""
        minibatch = self.config.minibatch
        observation = passes.observation(minibatch)
        actions = passes.actions(minibatch)

        def actor() -> Tensor:
            if self.one_step is not None:
                return self._loss_of_one_step(self.one_step, observation)
            return self.policy.advantage_loss(observation, actions, actions[:, 0, 0])

        return max(self.q.stored_bytes(passes, minibatch), passes.loss(minibatch), saved_bytes(actor))

    def state_dict(self) -> dict[str, Any]:
        """Critics, behaviour (with the generator), optimisers and replay; demonstrations are read from their file."""
        parts = {name: getattr(self, name).state_dict() for name in _PARTS}
        return self.q.state_dict() | parts | {"gradient_steps": self.gradient_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.q.load_state_dict(state)
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.gradient_steps = state["gradient_steps"]


def ranking_policy(policy: TrainablePolicy, option: str) -> RankingPolicy:
    """The `policy`, which ranks candidates.

    Raises:
        UserError: for another policy.
    """
    if isinstance(policy, RankingPolicy):
        return policy
    raise UserError(f"expected a policy that ranks candidates for {option}; use policy=flow")


_PARTS = ("behaviour", "actor_optimiser", "replay")
