"""Implicit Q-learning over action chunks, acting by the best of several sampled chunks.

Every chunk of every episode is replayed: two critics Q(s, chunk) and a value V(s) learn by temporal differences over
whole chunks (Q-chunking, arXiv 2507.07969), with the expectile regression of IQL (arXiv 2110.06169) in place of a
maximum over actions. The policy draws several chunks and takes the one with the highest Q (IDQL, arXiv 2304.10573), and
its flow is trained on replayed chunks, weighted by exp(advantage / temperature).

Differs from the papers: demonstrations are part of every batch of both losses; the policy that is weighted is the one
that collects, so that the best of several improves from round to round; failed starts are tried again (RetryStarts).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from embodied.advantage import chunk_reward
from embodied.algorithms.sft import SFT, SFTConfig
from embodied.config import at_least
from embodied.environment import StartEnvironment
from embodied.policy import TrainablePolicy
from embodied.replay import ChunkReplay
from embodied.rollout import Rollout
from embodied.starts import RetryStarts


class RankingPolicy(TrainablePolicy, Protocol):
    """A policy with critics of whole chunks; `ranked` makes it act by the best of several."""

    ranked: Tensor

    def action_values(self, observation: TensorDict, actions: Tensor) -> Tensor:
        """Expected discounted return after chunks `actions` [N, H, A], by each of C critics, [C, N]."""
        ...


@dataclass
class ChunkedIQLConfig:
    """Gradient steps per iteration of `decisions` chunks per environment, and the usual settings of IQL."""

    decisions: int = 35
    critic_steps: int = 400
    actor_steps: int = 300
    batch: int = 256
    demonstration_share: float = 0.25
    learning_rate: float = 5e-4
    discount: float = 0.99
    expectile: float = 0.8
    temperature: float = 0.1
    largest_weight: float = 5.0
    target_rate: float = 0.01
    capacity: int = 300_000
    retry: float = 0.3
    attempts: int = 4
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(learning_rate=5e-4, final_learning_rate=1e-4))

    def __post_init__(self) -> None:
        """Raise ValueError for impossible sizes."""
        at_least(self, 1, "decisions", "batch", "capacity", "attempts", "critic_steps", "actor_steps")

    def build(
        self, policy: RankingPolicy, demonstrations: TensorDict, env: StartEnvironment, generator: torch.Generator
    ) -> ChunkedIQL:
        """Make the learner of `policy` in `env`, beside `demonstrations` [D] chunks; `generator` draws minibatches.

        Raises:
            ValueError: for a policy without critics of chunks.
        """
        if not hasattr(policy, "action_values"):
            raise ValueError(f"chunked_iql needs a policy with action values, policy=flow; got {type(policy).__name__}")
        return ChunkedIQL(policy, self, demonstrations, env, generator)


class ChunkedIQL:
    """Updates critics and flow from replayed chunks."""

    def __init__(
        self,
        policy: RankingPolicy,
        config: ChunkedIQLConfig,
        demonstrations: TensorDict,
        env: StartEnvironment,
        generator: torch.Generator,
    ) -> None:
        self.policy, self.config, self.generator = policy, config, generator
        self.demonstrations = demonstration_transitions(demonstrations, config.discount)
        self.actor = SFT(policy, config.sft, generator)
        self.critic_parameters = policy.critic_parameters()
        self.target = copy.deepcopy(policy)
        self.optimiser = torch.optim.AdamW(self.critic_parameters, config.learning_rate, fused=True)
        self.replay = ChunkReplay(config.capacity)
        self.starts = RetryStarts(env.task_index, retry=config.retry, attempts=config.attempts, generator=generator)

    @property
    def gradient_steps(self) -> int:
        """Gradient steps taken by the actor."""
        return self.actor.gradient_steps

    def update(self, rollout: Rollout, progress: float) -> dict[str, float]:
        """Add the rollout, train critics, then the actor; returns mean losses and values."""
        self.replay.add(rollout_transitions(rollout, self.config.discount))
        critic = [self._critic_step(self._batch()) for _ in range(self.config.critic_steps)]
        actor = [self._actor_step(self._batch(), progress) for _ in range(self.config.actor_steps)]
        self.policy.ranked.fill_(True)
        names = ("q_loss", "value_loss", "q", "value")
        metrics = {
            name: sum(column) / len(critic) for name, column in zip(names, zip(*critic, strict=True), strict=True)
        }
        return metrics | {"loss": sum(actor) / len(actor), "replayed_chunks": float(len(self.replay))}

    def _batch(self) -> TensorDict:
        old = round(self.config.batch * self.config.demonstration_share)
        rows = torch.randint(len(self.demonstrations), (old,), generator=self.generator)
        new = self.replay.sample(self.config.batch - old, self.generator)
        return TensorDict.cat((self.demonstrations[rows], new)).to(self.policy.device)

    def _critic_step(self, batch: TensorDict) -> tuple[float, float, float, float]:
        with torch.no_grad():
            following = self.policy.value(batch["next_observation"])
            goal = batch["reward"] + batch["decay"] * following  # decay is 0 where the task terminated
            reference = self.target.action_values(batch["observation"], batch["actions"]).amin(0)
        q = self.policy.action_values(batch["observation"], batch["actions"])
        value = self.policy.value(batch["observation"])
        q_loss = (q - goal).square().mean()
        # L_V = |expectile - 1(Q < V)| (Q - V)^2
        gap = reference - value
        value_loss = (torch.where(gap < 0, 1 - self.config.expectile, self.config.expectile) * gap.square()).mean()
        self.optimiser.zero_grad()
        (q_loss + value_loss).backward()
        nn.utils.clip_grad_norm_(self.critic_parameters, 1.0)
        self.optimiser.step()
        slow = tuple(self.target.critic_parameters())
        get_ema_multi_avg_fn(1.0 - self.config.target_rate)(slow, tuple(self.critic_parameters), 0)
        return q_loss.item(), value_loss.item(), q.mean().item(), value.mean().item()

    def _actor_step(self, batch: TensorDict, progress: float) -> float:
        with torch.no_grad():
            q = self.target.action_values(batch["observation"], batch["actions"]).amin(0)
            advantage = q - self.policy.value(batch["observation"])
            weight = (advantage / self.config.temperature).exp().clamp_max(self.config.largest_weight)
        batch["valid"] = batch["valid"] * weight.unsqueeze(-1)
        return self.actor.step(batch, progress)

    def state_dict(self) -> dict[str, Any]:
        """Learner, replay and starts; the demonstrations come from their file."""
        parts = {part: getattr(self, part).state_dict() for part in ("actor", "replay", "starts", "optimiser")}
        return parts | {"target": self.target.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for part in ("actor", "replay", "starts", "optimiser", "target"):
            getattr(self, part).load_state_dict(state[part])


def rollout_transitions(rollout: Rollout, discount: float) -> TensorDict:
    """Chunks of a rollout as rows {observation, actions, valid, reward, decay, next_observation}, [T * N].

    `decay` is what the value of `next_observation` counts: discount^executed, and 0 where the task terminated.
    """
    executed = rollout.executed.sum(-1)
    horizon = rollout.actions.shape[2]
    rows = TensorDict(
        {
            "observation": rollout.observation,
            "next_observation": rollout.next_observation,
            "actions": rollout.actions,
            "valid": (torch.arange(horizon) < executed.unsqueeze(-1)).float(),
            "reward": chunk_reward(rollout.reward, discount),
            "decay": discount ** executed.float() * ~rollout.terminated,
        },
        batch_size=list(executed.shape),
    )
    return rows.flatten(0, 1)


def demonstration_transitions(chunks: TensorDict, discount: float) -> TensorDict:
    """Windows of successful episodes (see `cut_chunks`) as rows like those of `rollout_transitions`, [D].

    A window that reaches the end of its episode terminates there, with reward 1.

    Raises:
        ValueError: for windows of one action, which do not show where episodes end.
    """
    whole = chunks["valid"].all(-1)
    horizon = chunks["valid"].shape[-1]
    if horizon < 2:
        raise ValueError(
            "chunked_iql needs a horizon of at least 2 actions, got 1; use algorithm=self_imitation or ppo"
        )
    row = torch.arange(len(chunks))
    # a window ends exactly with its episode where it is whole and the next one is not; the last of all is never whole
    continues = whole & whole.roll(-1)
    steps = chunks["valid"].sum(-1)
    return TensorDict(
        {
            "observation": chunks["observation"],
            "next_observation": chunks["observation"][torch.where(continues, row + horizon, row)],
            "actions": chunks["actions"],
            "valid": chunks["valid"].float(),
            "reward": torch.where(continues, 0.0, discount ** (steps - 1.0)),
            "decay": torch.where(continues, discount**horizon, 0.0),
        },
        batch_size=[len(chunks)],
    )
