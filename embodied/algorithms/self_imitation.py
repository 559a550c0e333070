"""Self-imitation: the supervised loss on the policy's own successful chunks, beside the demonstrations.

Each iteration collects episodes, keeps every chunk of those that succeeded, and takes gradient steps on the growing set
(self-imitation, arXiv 1806.05635, without its value function; filtered behaviour cloning in rounds). With RetryStarts
an initial state that failed is tried again with fresh noise, so that what is added lies where the policy fails. Tasks
are drawn equally often, however rarely they succeed.

A network that has converged on little learns less from more than a new one does (primacy bias, arXiv 2205.07802). So
training goes in rounds: while the policy of the last round collects, a new network learns from all successes so far,
and takes its place at the end of the round.

Differs from the paper: success alone selects what is imitated; there is no advantage weight and no policy gradient.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.algorithms.sft import SFT, SFTConfig
from embodied.config import at_least
from embodied.environment import StartEnvironment
from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from embodied.replay import ChunkReplay, EpisodeAssembler
from embodied.rollout import Collector, Rollout
from embodied.starts import RetryStarts

PARTS = ("sft", "replay", "episodes", "starts")


@dataclass
class SelfImitationConfig:
    """`gradient_steps` per iteration of `decisions` chunks per environment; a run has `rounds` of equal length.

    A share `demonstration_share` of each minibatch are demonstrations. A share `retry` of restarts go to states where
    the policy has failed, at most `attempts` times each.
    """

    decisions: int = 35
    rounds: int = 6
    gradient_steps: int = 300
    demonstration_share: float = 0.25
    capacity: int = 400_000
    retry: float = 0.5
    attempts: int = 4
    sft: SFTConfig = field(default_factory=SFTConfig)

    def __post_init__(self) -> None:
        """Raise UserError for impossible sizes."""
        at_least(self, 1, "decisions", "rounds", "gradient_steps", "capacity", "attempts")

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: TensorDict | None,
        env: StartEnvironment,
        generator: torch.Generator,
    ) -> SelfImitation:
        """Make the learner of `policy` in `env`, beside `demonstrations` [D] chunks; `generator` draws minibatches.

        Raises:
            UserError: without demonstrations.
        """
        if demonstrations is None:
            raise UserError("imitation needs demonstrations, which this task has not; use algorithm=ppo")
        return SelfImitation(policy, self, demonstrations, env, generator)


class SelfImitation:
    """Updates a policy from its own successes."""

    collector = Collector

    def __init__(
        self,
        policy: TrainablePolicy,
        config: SelfImitationConfig,
        demonstrations: TensorDict,
        env: StartEnvironment,
        generator: torch.Generator,
    ) -> None:
        self.policy, self.config, self.generator, self.demonstrations = policy, config, generator, demonstrations
        self.sft, self.progress, self.gradient_steps = self._begin(), 0.0, 0
        self.replay = ChunkReplay(config.capacity)
        self.by_task: list[Tensor] = []  # rows of the replay, for each task that has any
        self.episodes = EpisodeAssembler(env.num_envs, policy.contract.horizon)
        self.starts = RetryStarts(env.task_index, retry=config.retry, attempts=config.attempts, generator=generator)

    def update(self, rollout: Rollout, progress: float) -> dict[str, float]:
        """Add the rollout's successes, then take gradient steps; returns the mean loss and the size of the set."""
        chunks = self.episodes.add(rollout)
        if chunks is not None:
            self.replay.add(chunks)
            self._sort()
        rounds, steps = self.config.rounds, self.config.gradient_steps
        done = min(math.floor(self.progress * rounds), rounds - 1)  # beyond its end a run stays in the last round
        ahead = progress - self.progress
        through = [(self.progress + ahead * step / steps) * rounds - done for step in range(steps)]
        losses = [self.sft.step(self._batch(), min(1.0, part)) for part in through]
        self.progress, self.gradient_steps = progress, self.gradient_steps + steps
        if progress * rounds >= done + 1:
            pairs = zip(self.policy.actor_parameters(), self.sft.policy.actor_parameters(), strict=True)
            with torch.no_grad():
                for old, new in pairs:
                    old.copy_(new)
            if progress < 1.0:
                self.sft = self._begin()
        metrics = {"loss": sum(losses) / len(losses), "imitated_chunks": float(len(self.replay))}
        return metrics | self.starts.first_attempts()

    def _begin(self) -> SFT:
        """A learner of a new network, with the policy's normalisation statistics."""
        policy = copy.deepcopy(self.policy)
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(1 << 40, (), generator=self.generator)))
            for module in cast(nn.Module, policy).modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
        return SFT(policy, self.config.sft, self.generator)

    def _batch(self) -> TensorDict:
        size = self.config.sft.batch
        old = round(size * self.config.demonstration_share) if self.by_task else size
        batch = self.demonstrations[torch.randint(len(self.demonstrations), (old,), generator=self.generator)]
        if not self.by_task:
            return batch
        share, rest = divmod(size - old, len(self.by_task))
        picked = [
            rows[torch.randint(len(rows), (share + (i < rest),), generator=self.generator)]
            for i, rows in enumerate(self.by_task)
        ]
        return TensorDict.cat((batch, self.replay.rows[torch.cat(picked)].exclude("task_index")))

    def _sort(self) -> None:
        task = self.replay.rows["task_index"]
        self.by_task = [torch.nonzero(task == index).flatten() for index in task.unique()]

    def state_dict(self) -> dict[str, Any]:
        """Learner, replay, unfinished episodes and starts; the demonstrations come from their file."""
        parts = {part: getattr(self, part).state_dict() for part in PARTS}
        return parts | {"progress": self.progress, "gradient_steps": self.gradient_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for part in PARTS:
            getattr(self, part).load_state_dict(state[part])
        self.progress, self.gradient_steps = state["progress"], state["gradient_steps"]
        if len(self.replay):
            self._sort()
