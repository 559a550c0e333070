"""Proximal policy optimisation (arXiv 1707.06347) over action chunks.

The policy says what its log-probability is defined on; PPO sees log_prob [N, P] alone. With a flow policy sampling by
Flow-SDE this is the algorithm of pi_RL (arXiv 2510.25889).

Differs from the papers:
    - one discount per control step, gamma^k for a chunk that executed k actions; the time limit is bootstrapped from
      the value of the true final observation;
    - an iteration stops early once the approximate KL divergence passes `target_kl`;
    - the critic's loss is a plain squared error, and the critic alone is trained during `critic_warmup` iterations;
    - rewards are divided by the running deviation of their returns (`reward_scale.py`), and the gradients of actor and
      critic are clipped apart: neither the reward's scale nor a critic that begins far off slows the actor down;
    - a policy with a memory is trained through time: minibatches are environments, each from the memory that the
      rollout began with;
    - a person who takes over ends what the policy did, like a time limit: their decisions teach nothing, and have no
      part in the advantages of those before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.advantage import explained_variance, gae, normalise, values
from embodied.algorithms.reward_scale import RewardScale
from embodied.algorithms.schedule import fall
from embodied.config import at_least
from embodied.environment import StartEnvironment
from embodied.errors import UserError
from embodied.memory import RecurrentPolicy
from embodied.policy import TrainablePolicy
from embodied.rollout import Collector, Rollout


@dataclass
class PPOConfig:
    """Hyper-parameters of PPO; `decisions` (T) per environment and iteration.

    Learning rates fall linearly to their `final` share.
    """

    decisions: int = 35
    epochs: int = 5
    minibatch: int = 1750
    learning_rate: float = 1e-4
    value_learning_rate: float = 1e-3
    clip: float = 0.2
    discount: float = 0.99
    trace: float = 0.95
    entropy_weight: float = 0.0
    target_kl: float = 0.05
    critic_warmup: int = 3
    max_gradient_norm: float = 1.0
    final: float = 1.0

    def __post_init__(self) -> None:
        """Raise UserError for impossible sizes."""
        at_least(self, 1, "decisions", "epochs", "minibatch")

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: TensorDict | None,
        env: StartEnvironment,
        generator: torch.Generator,
    ) -> PPO:
        """Make the learner of `policy`; `generator` shuffles minibatches, the demonstrations are not used.

        Raises:
            UserError: for a policy whose samples have no log-probability.
        """
        if not policy.scores:
            raise UserError(
                "expected a policy whose samples have a log-probability for algorithm=ppo; use policy.sampler=flow_sde"
            )
        return PPO(policy, self, generator)


class PPO:
    """Updates a policy from its own rollouts."""

    starts = None
    collector = Collector

    def __init__(self, policy: TrainablePolicy, config: PPOConfig, generator: torch.Generator) -> None:
        self.policy, self.config, self.generator = policy, config, generator
        actor, critic = policy.actor_parameters(), policy.critic_parameters()
        self.optimiser = torch.optim.AdamW(
            [{"params": actor, "lr": config.learning_rate}, {"params": critic, "lr": config.value_learning_rate}],
            weight_decay=0.0, fused=True,
        )  # fmt: skip
        self.parameters = actor, critic
        self.reward_scale = RewardScale(config.discount)
        self.iterations = 0
        self.gradient_steps = 0

    def update(self, rollout: Rollout, progress: float) -> dict[str, float]:
        """One iteration; returns mean losses, clip fraction, KL and explained variance."""
        if self.iterations == 0:
            self.policy.start_critic()
        fall(self.optimiser, progress, self.config.final, self.config.learning_rate, self.config.value_learning_rate)
        self.reward_scale.add(rollout)
        if int(rollout.own.sum()) < 2:  # a person did it all
            return {}
        batch, advantage_std, explained = self._prepare(rollout)
        batch = batch.to(self.policy.device)
        sums: dict[str, float] = {}
        count = 0
        stop = False
        for _ in range(self.config.epochs):
            for part in self._minibatches(batch):
                metrics = self._step(part)
                sums = {key: sums.get(key, 0.0) + value for key, value in metrics.items()}
                count += 1
                stop = metrics["kl"] > self.config.target_kl
                if stop:
                    break
            if stop:
                break
        self.iterations += 1
        means = {key: value / count for key, value in sums.items()}
        told = {"advantage_std": advantage_std, "explained_variance": explained, "reward_scale": self.reward_scale()}
        return means | told | {"minibatches": float(count)}

    def _minibatches(self, batch: TensorDict) -> Iterator[TensorDict]:
        """Decisions [B] of `batch` [T, N] in random order; all decisions [T, B] of environments where one remembers."""
        size, dim = self.config.minibatch, 0
        if isinstance(self.policy, RecurrentPolicy):
            size, dim = max(1, size // len(batch)), 1
        else:
            batch = batch.flatten(0, 1)
        order = torch.randperm(batch.shape[dim], generator=self.generator).to(batch.device)
        for part in _select(batch, order, dim).split(size, dim):
            if part["own"].any():
                yield cast(TensorDict, part)

    def _prepare(self, rollout: Rollout) -> tuple[TensorDict, float, float]:
        """What is trained on [T, N], the deviation of the advantages and the explained variance."""
        own, value = rollout.own, values(self.policy, rollout.observation)
        advantage, returns = self._gae(rollout, value, self._next_value(rollout, value))
        batch = TensorDict(
            {
                "observation": rollout.observation,
                "sample": rollout.sample,
                "log_prob": rollout.log_prob,
                "advantage": normalise(advantage, own),
                "return": returns,
                "own": own,
            },
            batch_size=list(value.shape),
        )
        return batch, float(advantage[own].std()), explained_variance(value, returns)

    def _next_value(self, rollout: Rollout, value: Tensor) -> Tensor:
        """V of the true next observations [T, N]: that of the next decision, unless an ending or nothing follows."""
        asked = rollout.done.clone()
        asked[-1] = True
        following = value.roll(-1, 0)
        following[asked] = values(self.policy, rollout.next_observation[asked].unsqueeze(0)).squeeze(0)
        return following

    def _gae(self, rollout: Rollout, value: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor]:
        return gae(
            self.reward_scale() * rollout.reward, rollout.executed, rollout.terminated, rollout.cut,
            value, next_value, discount=self.config.discount, trace=self.config.trace,
        )  # fmt: skip

    def _step(self, batch: TensorDict) -> dict[str, float]:
        observation, own = batch["observation"], batch["own"]
        evaluation = self.policy.evaluate(observation, batch["sample"])
        log_ratio = evaluation.log_prob - batch["log_prob"]
        ratio = log_ratio.exp()
        advantage = batch["advantage"].unsqueeze(-1)
        clipped = ratio.clamp(1.0 - self.config.clip, 1.0 + self.config.clip)
        # L = -min(r A, clip(r) A)
        policy_loss = -torch.minimum(ratio * advantage, clipped * advantage)[own].mean()
        value = self.policy.value(observation.reshape(-1)).view(own.shape)
        value_loss = (value - batch["return"]).square()[own].mean()
        entropy = evaluation.entropy[own].mean()
        warm = self.iterations < self.config.critic_warmup
        loss = value_loss if warm else value_loss + policy_loss - self.config.entropy_weight * entropy
        self.optimiser.zero_grad()
        loss.backward()
        for parameters in self.parameters:
            nn.utils.clip_grad_norm_(parameters, self.config.max_gradient_norm)
        self.optimiser.step()
        self.gradient_steps += 1
        with torch.no_grad():
            kl = ((ratio - 1.0) - log_ratio)[own].mean()  # low-variance estimate, joschu.net/blog/kl-approx.html
            clip_fraction = ((ratio - 1.0).abs() > self.config.clip)[own].float().mean()
        return {
            "policy_loss": policy_loss.item(),
            "value_loss": value_loss.item(),
            "entropy": entropy.item(),
            "kl": kl.item(),
            "clip_fraction": clip_fraction.item(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, counters and draws to come."""
        return {
            "optimiser": self.optimiser.state_dict(),
            "reward_scale": self.reward_scale.state_dict(),
            "iterations": self.iterations,
            "gradient_steps": self.gradient_steps,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.optimiser.load_state_dict(state["optimiser"])
        self.reward_scale.load_state_dict(state["reward_scale"])
        self.iterations, self.gradient_steps = state["iterations"], state["gradient_steps"]
        self.generator.set_state(state["generator"])


def _select(batch: TensorDict, rows: Tensor, dim: int) -> TensorDict:
    # Copies rows, which is twice as fast as batch[rows]: that copies number by number.
    size = [*batch.shape[:dim], len(rows)]
    return cast(TensorDict, batch.apply(lambda part: part.index_select(dim, rows), batch_size=size))
