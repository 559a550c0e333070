"""Self-imitation proposes several chunks; an advantage learned from all executed chunks chooses one.

Each iteration estimates the advantage of every executed chunk from the following rewards and values (TD(lambda), as in
PPO), and a network learns it as a function of observation and chunk, from the most recent iterations. The policy then
samples candidates and executes the one with the highest learned advantage. Successful chunks are imitated, so that
candidates improve too.

Policy gradients use each estimate for one step, where noise exceeds the effect of a single chunk; regression averages
over many similar chunks. Candidates are the policy's own samples, where the learned advantage has data.

Sources: candidates of a generative policy ranked by a critic, IDQL (arXiv 2304.10573); over chunks, Q-chunking (arXiv
2507.07969). Differs from both: the critic is not learned by bootstrapping from replayed transitions. Its targets are
TD(lambda) advantages of the policy that collected them, from recent iterations only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.algorithms.advantage import clamped_targets, explained_variance, gae, next_values
from embodied.algorithms.finite import check_finite
from embodied.algorithms.imitation.self_imitation import SelfImitation, SelfImitationConfig
from embodied.algorithms.micro_batch import saved_bytes
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.configuration import Configuration, Fraction, Limit, NonNegativeFloat, NonNegativeInt, PositiveInt, Range
from embodied.data.episodes import Episodes
from embodied.data.store import EpisodeStore
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.policy import RankingPolicy, TrainablePolicy
from embodied.rollout.exchange import ExchangingCollector
from embodied.rollout.rollout import Rollout
from embodied.world import ALONE, World

PARTS = ("imitation", "value_optimiser", "advantage_optimiser", "replay")


@dataclass
class RankingConfig(Configuration):
    """Hyper-parameters; `imitation` makes the proposals and configures rollouts and initial states.

    Its rounds take the first share `imitated` of a run; in the rest only the value and the advantage are trained.

    The value is trained for `epochs` on each iteration's returns (`value_gae_lambda`), in minibatches of
    `value_minibatch`. The advantages (`gae_lambda`) of the last `window` iterations are replayed in `gradient_steps`
    minibatches of `minibatch`. Ranking begins after `warmup` iterations; in the first third of these only the value is
    trained.
    """

    imitation: SelfImitationConfig = field(default_factory=lambda: SelfImitationConfig(gradient_steps=180, rounds=4))
    imitated: Annotated[float, Range(above=0, at_most=1)] = 0.8
    discount: Fraction = 0.99
    epochs: PositiveInt = 5
    value_minibatch: PositiveInt = 1750
    value_learning_rate: NonNegativeFloat = 1e-3
    value_gae_lambda: Fraction = 0.95
    gradient_steps: PositiveInt = 120
    minibatch: PositiveInt = 384
    learning_rate: NonNegativeFloat = 3e-4
    weight_decay: NonNegativeFloat = 1e-2
    gae_lambda: Fraction = 0.7
    window: PositiveInt = 20
    warmup: NonNegativeInt = 6
    max_gradient_norm: Limit = 1.0

    @property
    def rollout_length(self) -> int:
        """Chunks per environment and iteration, from `imitation`."""
        return self.imitation.rollout_length

    @property
    def reads_demonstrations(self) -> bool:
        """Whether demonstrations are read: always."""
        return True

    @property
    def max_staleness(self) -> int:
        """Updates that a rollout's policy may be behind: any number.

        Advantages belong to the policy that collected.
        """
        return sys.maxsize

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> Ranking:
        """Build the learner of `policy` in `env`, with `demonstrations`; `generator` draws minibatches.

        Raises:
            UserError: for a policy that cannot rank.
        """
        if not isinstance(policy, RankingPolicy):
            raise UserError("expected a policy that ranks candidates for algorithm=ranking; use policy=flow")
        imitation = self.imitation.build(policy, demonstrations, env, generator)
        return Ranking(policy, self, imitation, env.num_envs, generator)


class Ranking(Composite):
    """Learner of the advantage by which `policy` ranks its candidates."""

    def __init__(
        self,
        policy: RankingPolicy,
        config: RankingConfig,
        imitation: SelfImitation,
        num_envs: int,
        generator: torch.Generator,
    ) -> None:
        self.policy = policy
        self.config = config
        self.imitation = imitation
        self.generator = generator
        self.starts = imitation.starts
        self.value_optimiser = torch.optim.AdamW(
            policy.critic_parameters(), config.value_learning_rate, weight_decay=0.0, fused=True
        )
        self.advantage_optimiser = torch.optim.AdamW(
            policy.advantage_parameters(), config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self.replay = EpisodeStore(config.window * config.rollout_length * num_envs)
        self.iterations = 0
        self.critic_steps = 0

    @property
    def gradient_steps(self) -> int:
        """Gradient steps of all networks so far."""
        return self.imitation.gradient_steps + self.critic_steps

    @property
    def collector(self) -> Callable[..., ExchangingCollector]:
        """Factory of imitation's collector."""
        return self.imitation.collector

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """Run one iteration; returns mean losses, explained variance and imitation's metrics."""
        assert rollout.value is not None, "ranking needs policies that return values with their decisions"
        value = rollout.value
        returns, advantage = self._targets(rollout, value, next_values(self.policy, rollout, value))
        metrics = {
            "value_loss": self._fit_value(*_simulated(rollout, rollout.observation, returns)),
            "advantage_std": float(advantage.std()),
            "explained_variance": explained_variance(value, returns, world),
            **clamped_targets(self.policy.value_head, returns.flatten(), world),
        }
        # In the first third of the warm-up only the value is trained: advantages of an untrained value are noise.
        if self.iterations >= self.config.warmup // 3:
            # advantages of recent iterations are regressed together, which averages their noise
            self.replay.add(rollout, chunk=rollout.actions, advantage=advantage)
            metrics["advantage_loss"] = self._fit_advantage()
        self.iterations += 1
        if self.iterations >= self.config.warmup:
            self.policy.start_ranking()
        # imitation's rounds take the first share `imitated` of the run
        if self.imitation.progress < 1.0:
            metrics |= self.imitation.update(rollout, min(1.0, progress / self.config.imitated), world)
        return metrics

    def _targets(self, rollout: Rollout, value: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns and advantages, [T, N] each."""
        transitions = (rollout.reward, rollout.executed, rollout.terminated, rollout.cut, value, next_value)
        # G_t = A_t(value lambda) + V(s_t)
        _, returns = gae(*transitions, discount=self.config.discount, gae_lambda=self.config.value_gae_lambda)
        # A_t with the smaller lambda: the chunk's return beyond V(s_t)
        advantage, _ = gae(*transitions, discount=self.config.discount, gae_lambda=self.config.gae_lambda)
        return returns, advantage

    def _fit_value(self, observation: TensorDict, returns: Tensor) -> float:
        losses = []
        for _ in range(self.config.epochs):
            order = torch.randperm(len(returns), generator=self.generator)
            for rows in order.split(self.config.value_minibatch):
                rows = rows.to(returns.device)
                minibatch, target = (part[rows].to(self.policy.device) for part in (observation, returns))
                # L_V = mean (V(s) - G)^2, or of the cross-entropy of categorical values
                loss = self.policy.value_head.errors(self.policy.value_outputs(minibatch), target).mean()
                losses.append(self._step(self.value_optimiser, loss))
        return sum(losses) / len(losses)

    def _fit_advantage(self) -> float:
        losses = []
        for _ in range(self.config.gradient_steps):
            rows = self.replay.draw(self.config.minibatch, self.generator)
            batch = self.replay.decisions(rows, "observation", "chunk", "advantage").to(self.policy.device)
            loss = self.policy.advantage_loss(batch["observation"], batch["chunk"], batch["advantage"])
            losses.append(self._step(self.advantage_optimiser, loss))
        return sum(losses) / len(losses)

    def _step(self, optimiser: torch.optim.Optimizer, loss: Tensor) -> float:
        optimiser.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(optimiser.param_groups[0]["params"], self.config.max_gradient_norm)
        check_finite({"loss": loss.detach(), "gradient": norm}, self.gradient_steps + 1)
        optimiser.step()
        self.critic_steps += 1
        return float(loss.detach())

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the largest minibatch stores: of values, advantages or imitation."""
        observation = passes.observation(self.config.minibatch)
        actions = passes.actions(self.config.minibatch)
        advantage = saved_bytes(lambda: self.policy.advantage_loss(observation, actions, actions[:, 0, 0]))
        imitation = self.imitation.largest_pass(passes)
        return None if imitation is None else max(passes.value(self.config.value_minibatch), advantage, imitation)

    def state_dict(self) -> dict[str, Any]:
        """Imitation (with its generator), optimisers, replay and counters."""
        parts = {part: getattr(self, part).state_dict() for part in PARTS}
        return parts | {"iterations": self.iterations, "critic_steps": self.critic_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for part in PARTS:
            getattr(self, part).load_state_dict(state[part])
        self.iterations = state["iterations"]
        self.critic_steps = state["critic_steps"]


def _simulated(rollout: Rollout, *parts: Any) -> list[Any]:  # noqa: ANN401 - tensors and observations
    """Rows [B] of `parts` [T, N] of `rollout`, without those where the simulation diverged."""
    rows = rollout.simulated.flatten()
    return [part.flatten(0, 1)[rows] for part in parts]
