"""Behaviour proximal policy optimisation (BPPO, arXiv 2302.11312): clipped steps of PPO from recorded episodes alone.

Critics Q and V first learn from the recorded chunks by implicit Q-learning, as in Uni-O4 (arXiv 2311.03351). Then a
behaviour, which is a copy of the policy, samples chunks in recorded states, and the policy raises the probability of
those with a large advantage Q - V, as far as the clip range allows. After `behaviour_steps` the policy is the next
behaviour. Of a policy that denoises, each scored denoising step has a ratio of its own, and all of a chunk share its
advantage: the offline stage of RL-100 (arXiv 2510.14830).

    a ~ beta(. | s),  r_k = pi(x_(k+1) | x_k, s) / beta(x_(k+1) | x_k, s),  A = min_j Q_j(s, a) - V(s)
    L = -mean over k of min(r_k A, clip(r_k, 1 - epsilon, 1 + epsilon) A)

Differs from the papers:
    - a chunk is one action: its discounted reward, and discount^k for what follows after k executed actions;
    - the behaviour is replaced after a number of steps, not if an estimate of its value rises; `rounds.gate` estimates
    values of whole rounds;
    - the clip range falls linearly over all steps of the policy, not by a factor in the first 200;
    - positive and negative advantages have the same weight, and the behaviour is one policy, not an ensemble;
    - a diffusion policy has a ratio for each of its `tuned_steps`. Of a flow policy with `sampler=flow_sde` one step of
    a chunk is noisy and has a ratio; with learned noise the steps of a chunk have one ratio together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied import seeding
from embodied.algorithms.advantage import moments, normalise
from embodied.algorithms.off_policy.replay import recorded_transitions
from embodied.algorithms.offline.iql import ImplicitValues, ImplicitValuesConfig
from embodied.algorithms.on_policy.clipped import Clipped, ClippedConfig, copied
from embodied.algorithms.passes import Passes
from embodied.configuration import (
    Fraction,
    Limit,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    common_options,
)
from embodied.data.episodes import Episodes
from embodied.data.transitions import Transitions
from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from embodied.rollout.memory import RecurrentPolicy
from embodied.world import ALONE, World


@dataclass
class BPPOConfig(ImplicitValuesConfig):
    """Hyper-parameters of BPPO; options of its critics are those of implicit Q-learning.

    The first `value_share` of the `steps` train the critics, the others the policy, in `batch` recorded states each.
    The policy becomes the behaviour after every `behaviour_steps` of its own. The `clip` range and the learning rate
    fall linearly to their `final_clip_share` and `final_lr_share`. Minibatches are scored in pieces that keep at most
    `memory_gb` for the backward pass; whole if None. With `one_step` every step of the policy is followed by one of its
    one-step actor, which imitates it and does not act yet.
    """

    steps: NonNegativeInt = 10_000
    batch: PositiveInt = 256
    value_share: Annotated[float, Range(above=0, below=1)] = 0.5
    behaviour_steps: PositiveInt = 100
    learning_rate: NonNegativeFloat = 1e-4
    final_lr_share: Fraction = 0.1
    clip: PositiveFloat = 0.25
    final_clip_share: Fraction = 0.1
    max_gradient_norm: Limit = 1.0
    memory_gb: PositiveFloat | None = None
    one_step: bool = False

    @property
    def clipped(self) -> ClippedConfig:
        """Options of clipped steps with the same names."""
        return ClippedConfig(minibatch=self.batch, **common_options(self, ClippedConfig))

    def build(self, policy: TrainablePolicy, generator: torch.Generator) -> BPPO:
        """Build the learner of `policy`; `generator` draws minibatches and chunks of the behaviour.

        Raises:
            UserError: for a policy whose samples have no log-probability or with a memory, or actions without limits.
        """
        self.clipped.check("offline=bppo", policy)
        if isinstance(policy, RecurrentPolicy):
            raise UserError("offline=bppo learns from single decisions, without a memory; use policy=mlp")
        return BPPO(policy, self, generator)


class BPPO(Clipped):
    """Learner of critics from stored episodes, then of a policy from chunks that its behaviour samples."""

    def __init__(self, policy: TrainablePolicy, config: BPPOConfig, generator: torch.Generator) -> None:
        super().__init__(policy, config.clipped, generator, config.learning_rate)
        self.options = config
        self.critics = ImplicitValues(policy, config)
        self.behaviour = copied(policy)
        self.transitions: Transitions | None = None

    @property
    def value_steps(self) -> int:
        """Gradient steps of the critics, which come first."""
        return round(self.options.value_share * self.options.steps)

    def fit(self, episodes: Episodes, steps: int, world: World = ALONE) -> dict[str, float]:
        """Take `steps` gradient steps on `episodes`, which the processes of `world` share; returns the last metrics.

        Raises:
            UserError: for episodes with unknown rewards, see `recorded_transitions`.
            DivergedError: before a step whose loss or gradient is not finite.
        """
        self.transitions = recorded_transitions(self.policy, episodes, self.options.discount, self.transitions)
        self.critics.q.unit = self.transitions.scale
        metrics: dict[str, float] = {}
        for _ in range(steps):
            rows = self.transitions.draw(self.options.batch, self.generator, world)
            if self.gradient_steps < self.value_steps:
                batch = self.transitions.take(rows, self.policy.contract.horizon).to(self.policy.device)
                advantage, values = self.critics.step(batch, self.generator, self.gradient_steps + 1)
                self.gradient_steps += 1
                metrics = {"advantage": float(advantage.mean()), **{name: float(each) for name, each in values.items()}}
            else:
                metrics = self._improve(episodes.chunks(rows, 1)["observation"].to(self.policy.device), world)
        return metrics

    def _improve(self, observation: TensorDict, world: World) -> dict[str, float]:
        """Take one clipped step of the policy in states [B], which may make it the next behaviour; returns metrics."""
        steps = max(1, self.options.steps - self.value_steps)
        self._decay(min(1.0, (self.gradient_steps - self.value_steps) / steps))
        batch, metrics = self._sample(observation, world)
        metrics |= self._step(batch, world)
        if (self.gradient_steps - self.value_steps) % self.options.behaviour_steps == 0:
            self.behaviour.load_state_dict(self.policy.state_dict())
        return metrics

    @torch.no_grad()
    def _sample(self, observation: TensorDict, world: World) -> tuple[TensorDict, dict[str, float]]:
        """Decisions of the behaviour in states [B] with their normalised advantages, and moments of the advantages."""
        # each process has its own noise
        generators = [seeding.child(self.generator, self.policy.device) for _ in range(world.size)]
        decision = self.behaviour.act(observation, generator=generators[world.rank])
        # A = min_j Q_j'(s, a) - V(s), a ~ beta(. | s)
        scaled = self.critics.q.scaled(decision.actions)
        advantage = self.critics.advantage(observation, scaled, self.generator)
        own = torch.ones_like(advantage, dtype=torch.bool)
        parts = {
            "observation": observation,
            "sample": decision.sample,
            "log_prob": decision.log_prob,
            "advantage": normalise(advantage, own, world),
            "own": own,
        }
        mean, std = moments(advantage, world)
        return TensorDict(parts, batch_size=[len(own)]), {"advantage": float(mean), "advantage_std": float(std)}

    def _of_parts(self, ratio: Tensor) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
        """See `Clipped._of_parts`; the clip range falls from `clip` to its `final_clip_share`."""
        low, high, weight = super()._of_parts(ratio)
        share = 1.0 + self.progress * (self.options.final_clip_share - 1.0)
        return share * low, share * high, weight

    def values(self) -> dict[str, Any] | None:
        """Critics with which a learner of the stage rl goes on, see `ActionValues.in_rewards`."""
        return self.critics.q.in_rewards()

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the critics' minibatch stores, or scoring one if that is more."""
        rows = passes.share(self.options.batch)
        scored = super().largest_pass(replace(passes, num_envs=rows, rollout_length=1))
        return max(self.critics.q.stored_bytes(passes, rows), scored or 0)

    def state_dict(self) -> dict[str, Any]:
        """State of the clipped steps, the critics and the behaviour."""
        return {**super().state_dict(), "critics": self.critics.state_dict(), "behaviour": self.behaviour.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; the policy's weights are restored by its owner."""
        super().load_state_dict(state)
        self.critics.load_state_dict(state["critics"])
        self.behaviour.load_state_dict(state["behaviour"])
