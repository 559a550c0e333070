"""Proximal policy optimisation (arXiv 1707.06347) over action chunks.

The policy defines what its log-probability refers to; PPO only sees log_prob [N, P]. With a flow policy sampling by
Flow-SDE this is the algorithm of pi_RL (arXiv 2510.25889).

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

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.algorithms.advantage import explained_variance, gae, moments, next_values, normalise
from embodied.algorithms.micro_batch import rows_within
from embodied.algorithms.reward_scale import RewardScale
from embodied.algorithms.schedule import linear_decay
from embodied.command_line.config import at_least
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from embodied.rollout.episodes import Episodes
from embodied.rollout.memory import RecurrentPolicy
from embodied.rollout.rollout import Collector, Rollout
from embodied.world import ALONE, World


@dataclass
class PPOConfig:
    """Hyper-parameters of PPO; `rollout_length` (T) decisions per environment and iteration.

    Learning rates decay linearly to their `final_lr_share`. Minibatches are scored in pieces that keep at most
    `memory_gb` for the backward pass; whole if None. Where a log-probability has several parts, denoising steps, each
    is clipped by itself (DPPO, arXiv 2409.00588): from `clip_first` (None: `clip`) to `clip` at the last, with the
    advantage discounted by `part_discount` for every step that follows.
    """

    rollout_length: int = 35
    epochs: int = 5
    minibatch: int = 1750
    learning_rate: float = 1e-4
    value_learning_rate: float = 1e-3
    clip: float = 0.2
    clip_first: float | None = None
    part_discount: float = 1.0
    discount: float = 0.99
    gae_lambda: float = 0.95
    entropy_weight: float = 0.0
    target_kl: float = 0.05
    critic_warmup: int = 3
    max_gradient_norm: float = 1.0
    final_lr_share: float = 1.0
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        """Raise UserError for impossible sizes."""
        at_least(self, 1, "rollout_length", "epochs", "minibatch")
        if self.memory_gb is not None and self.memory_gb <= 0.0:
            raise UserError(f"expected memory_gb above 0, got {self.memory_gb}")

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
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
    """Updates a policy from its rollouts."""

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
        self.piece: int | None = None  # rows scored together; None: not measured yet

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """One iteration; returns mean losses, clip fraction, KL and explained variance."""
        linear_decay(
            self.optimiser,
            progress,
            self.config.final_lr_share,
            self.config.learning_rate,
            self.config.value_learning_rate,
        )
        self.reward_scale.add(rollout, world)
        if int(world.sum(rollout.own.sum())) < 2 * world.size:  # a person gave almost all actions
            return {}
        batch, advantage_std, explained = self._prepare(rollout, world)
        sums: dict[str, float] = {}
        count = 0
        stop = False
        for _ in range(self.config.epochs):
            for part in self._minibatches(batch):
                metrics = self._step(part, world)
                if not metrics:
                    continue
                sums = {key: sums.get(key, 0.0) + value for key, value in metrics.items()}
                count += 1
                kl = world.sum(torch.tensor(metrics["kl"])) / world.size
                stop = bool(kl > self.config.target_kl)
                if stop:
                    break
            if stop:
                break
        self.iterations += 1
        means = {key: value / count for key, value in sums.items()}
        scales = {"advantage_std": advantage_std, "explained_variance": explained, "reward_scale": self.reward_scale()}
        return means | scales | {"minibatches": float(count)}

    def _minibatches(self, batch: TensorDict) -> Iterator[TensorDict]:
        """Decisions [B] of `batch` [T, N] in random order; for a policy with memory, whole environments [T, B].

        Each is copied to the policy's device when it is used, since the whole rollout may not fit there.
        """
        size, dim = self.config.minibatch, 0
        if isinstance(self.policy, RecurrentPolicy):
            size, dim = max(1, size // len(batch)), 1
        else:
            batch = batch.flatten(0, 1)
        for rows in torch.randperm(batch.shape[dim], generator=self.generator).split(size):
            yield _select(batch, rows, dim).to(self.policy.device)

    def _prepare(self, rollout: Rollout, world: World) -> tuple[TensorDict, float, float]:
        """The training batch [T, N], the standard deviation of its advantages, and the explained variance."""
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
        return batch, float(moments(advantage[own], world)[1]), explained_variance(value, returns, world)

    def _gae(self, rollout: Rollout, value: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor]:
        return gae(
            self.reward_scale() * rollout.reward, rollout.executed, rollout.terminated, rollout.cut,
            value, next_value, discount=self.config.discount, gae_lambda=self.config.gae_lambda,
        )  # fmt: skip

    def _step(self, batch: TensorDict, world: World = ALONE) -> dict[str, float]:
        """One gradient step on decisions [B], or sequences [T, B]; returns losses and ratios, means over `own`.

        Sums are divided by the average number of own decisions per process, so that the average over processes is the
        mean over all decisions. Either every process takes the step, even one without own decisions, or none does; then
        the result is empty.
        """
        dim, count = batch.batch_dims - 1, int(world.sum(batch["own"].sum())) / world.size
        if not count:
            return {}
        if self.piece is None:
            self.piece = rows_within(
                self.config.memory_gb, batch.shape[dim], lambda rows: self._losses(batch.narrow(dim, 0, rows), rows)[0]
            )
        self.optimiser.zero_grad()
        totals: dict[str, Tensor] = {}
        for piece in [batch] if self.piece >= batch.shape[dim] else batch.split(self.piece, dim):
            loss, sums = self._losses(cast(TensorDict, piece), count)
            loss.backward()
            totals = {name: totals.get(name, 0.0) + value for name, value in sums.items()}
        for parameters in self.parameters:
            nn.utils.clip_grad_norm_(parameters, self.config.max_gradient_norm)
        self.optimiser.step()
        self.gradient_steps += 1
        return {name: float(value) / count for name, value in totals.items()}

    def _losses(self, batch: TensorDict, count: float) -> tuple[Tensor, dict[str, Tensor]]:
        """This piece's part of the mean loss over `count` decisions, and sums of the metrics."""
        own = batch["own"]
        evaluation = self.policy.evaluate(batch["observation"], batch["sample"])
        log_ratio = evaluation.log_prob - batch["log_prob"]
        ratio = log_ratio.exp()
        clip, weight = self._of_parts(ratio)
        advantage = batch["advantage"].unsqueeze(-1) * weight
        clipped = ratio.clamp(1.0 - clip, 1.0 + clip)
        # L = -min(r A, clip(r) A)
        policy_loss = -_total(torch.minimum(ratio * advantage, clipped * advantage), own)
        value_loss = torch.where(own, (evaluation.value - batch["return"]).square(), 0.0).sum()
        entropy = _total(evaluation.entropy if self.config.entropy_weight else evaluation.entropy.detach(), own)
        warm = self.iterations < self.config.critic_warmup
        loss = value_loss if warm else value_loss + policy_loss - self.config.entropy_weight * entropy
        with torch.no_grad():
            kl = _total((ratio - 1.0) - log_ratio, own)  # low-variance, joschu.net/blog/kl-approx.html
            far = _total(((ratio - 1.0).abs() > clip).float(), own)
        sums = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "kl": kl,
            "clip_fraction": far,
        }
        return loss / count, {name: value.detach() for name, value in sums.items()}

    def _of_parts(self, ratio: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Clip range and weight of the advantage [P] for the parts of `ratio` [..., P].

        clip_p = first + (clip - first) (e^(3 p / (P - 1)) - 1) / (e^3 - 1)
        """
        config, count = self.config, ratio.shape[-1]
        if count == 1:
            return config.clip, 1.0
        first = config.clip if config.clip_first is None else config.clip_first
        rise = torch.expm1(torch.linspace(0.0, 3.0, count, device=ratio.device)) / math.expm1(3.0)
        following = torch.arange(count - 1, -1, -1, device=ratio.device)
        return first + (config.clip - first) * rise, config.part_discount**following

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


def _total(parts: Tensor, own: Tensor) -> Tensor:
    """Sum over the decisions `own` [...] of the mean over `parts` [..., P]."""
    return torch.where(own, parts.mean(-1), 0.0).sum()


def _select(batch: TensorDict, rows: Tensor, dim: int) -> TensorDict:
    # Twice as fast as batch[rows], which copies element by element.
    size = [*batch.shape[:dim], len(rows)]
    return cast(TensorDict, batch.apply(lambda part: part.index_select(dim, rows.to(part.device)), batch_size=size))
