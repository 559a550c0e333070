"""Proximal policy optimisation (arXiv 1707.06347) over action chunks.

The policy defines what its log-probability refers to; PPO only sees log_prob [N, P]. With a flow policy sampling by
Flow-SDE this is the algorithm of pi_RL (arXiv 2510.25889). The clipped steps are those of `clipped.py`.

Differs from the papers:
    - one discount per control step, gamma^k for a chunk that executed k actions; the time limit is bootstrapped from
      the value of the true final observation;
    - an iteration stops early once the approximate KL divergence passes `target_kl`;
    - the critic's loss is a plain squared error, and only the critic is trained during the first `critic_warmup`
    iterations;
    - rewards are divided by the running standard deviation of their returns (`reward_scale.py`), and the gradients of
    actor and critic are clipped separately: neither the reward's scale nor large initial errors of the critic slow the
    actor down;
    - a policy with memory is trained through time: minibatches are environments, each from its memory at the beginning
    of the rollout;
    - a person who takes over truncates the policy's sequence like a time limit: a person's decisions are not trained on
    and do not enter the advantages of earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.advantage import explained_variance, gae, moments, next_values, normalise
from embodied.algorithms.clipped import Clipped, ClippedConfig
from embodied.algorithms.reward_scale import RewardScale
from embodied.environment import Environment
from embodied.policy import TrainablePolicy
from embodied.rollout.episodes import Episodes
from embodied.rollout.rollout import Collector, Rollout
from embodied.world import ALONE, World


@dataclass
class PPOConfig(ClippedConfig):
    """Hyper-parameters of PPO: GAE's `discount` per control step and `gae_lambda`, and the critic's.

    In the first `critic_warmup` iterations only the critic is trained, with `value_learning_rate`.
    """

    value_learning_rate: float = 1e-3
    discount: float = 0.99
    gae_lambda: float = 0.95
    critic_warmup: int = 3

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> PPO:
        """Make the learner of `policy`; `generator` shuffles minibatches.

        Raises:
            UserError: for a policy whose samples have no log-probability, or if demonstrations are missing.
        """
        self.check("ppo", policy, demonstrations)
        return PPO(policy, self, demonstrations, generator)


class PPO(Clipped):
    """Updates a policy from its rollouts."""

    starts = None
    collector = Collector
    config: PPOConfig

    def __init__(
        self,
        policy: TrainablePolicy,
        config: PPOConfig,
        demonstrations: Episodes | None,
        generator: torch.Generator,
    ) -> None:
        super().__init__(policy, config, demonstrations, generator, config.learning_rate, config.value_learning_rate)
        self.reward_scale = RewardScale(config.discount)

    @property
    def warm(self) -> bool:
        """Only the critic is trained yet."""
        return self.iterations < self.config.critic_warmup

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """One iteration; returns mean losses, clip fraction, KL and explained variance."""
        self._decay(progress)
        self.reward_scale.add(rollout, world)
        if int(world.sum(rollout.own.sum())) < 2 * world.size:  # a person gave almost all actions
            return {}
        batch, scales = self._prepare(rollout, world)
        return self._epochs(batch, world) | scales

    def _prepare(self, rollout: Rollout, world: World) -> tuple[TensorDict, dict[str, float]]:
        """The training batch [T, N], and scales: of advantages and rewards, and the explained variance."""
        assert rollout.value is not None, "PPO needs policies that return values with their decisions"
        own, value = rollout.own, rollout.value
        advantage, returns = self._gae(rollout, value, next_values(self.policy, rollout, value))
        batch = TensorDict(
            {
                "observation": rollout.observation,
                "sample": rollout.sample,
                "log_prob": rollout.log_prob,
                "advantage": normalise(advantage, own, world),
                "return": returns,
                "own": own,
            },
            batch_size=list(value.shape),
        )
        return batch, {
            "advantage_std": float(moments(advantage[own], world)[1]),
            "explained_variance": explained_variance(value, returns, world),
            "reward_scale": self.reward_scale(),
        }

    def _gae(self, rollout: Rollout, value: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor]:
        return gae(
            self.reward_scale() * rollout.reward, rollout.executed, rollout.terminated, rollout.cut,
            value, next_value, discount=self.config.discount, gae_lambda=self.config.gae_lambda,
        )  # fmt: skip

    def _losses(self, batch: TensorDict, count: float) -> tuple[Tensor, dict[str, Tensor]]:
        """As the actor's alone, with the critic's squared error."""
        evaluation = self.policy.evaluate(batch["observation"], batch["sample"])
        policy_loss, sums = self._policy_loss(batch, evaluation)
        value_loss = torch.where(batch["own"], (evaluation.value - batch["return"]).square(), 0.0).sum()
        loss = value_loss if self.warm else value_loss + policy_loss
        return loss / count, sums | {"value_loss": value_loss.detach()}

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, counters, scale of rewards and draws to come."""
        return super().state_dict() | {"reward_scale": self.reward_scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        self.reward_scale.load_state_dict(state["reward_scale"])
