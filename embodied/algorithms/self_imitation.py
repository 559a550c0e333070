"""Self-imitation: the supervised loss on the policy's own successful chunks, beside the demonstrations.

Each iteration collects episodes, keeps every chunk of those that succeeded, and takes gradient steps on the growing set
(self-imitation, arXiv 1806.05635, without its value function; filtered behaviour cloning in rounds). With RetryStarts
an initial state that failed is tried again with fresh noise, so that what is added lies where the policy fails. Tasks
are drawn equally often, however rarely they succeed.

Differs from the paper: success alone selects what is imitated; there is no advantage weight and no policy gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

from embodied.algorithms.sft import SFT, SFTConfig
from embodied.config import at_least
from embodied.environment import StartEnvironment
from embodied.policy import TrainablePolicy
from embodied.replay import ChunkReplay, EpisodeAssembler
from embodied.rollout import Rollout
from embodied.starts import RetryStarts


@dataclass
class SelfImitationConfig:
    """`gradient_steps` per iteration of `decisions` chunks per environment; `demonstration_share` of each minibatch."""

    decisions: int = 35
    gradient_steps: int = 250
    demonstration_share: float = 0.25
    capacity: int = 400_000
    retry: float = 0.5
    attempts: int = 4
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(learning_rate=5e-4, final_learning_rate=2.5e-5))

    def __post_init__(self) -> None:
        """Raise ValueError for impossible sizes."""
        at_least(self, 1, "decisions", "capacity", "attempts")

    def build(
        self, policy: TrainablePolicy, demonstrations: TensorDict, env: StartEnvironment, generator: torch.Generator
    ) -> SelfImitation:
        """Make the learner of `policy` in `env`, beside `demonstrations` [D] chunks; `generator` draws minibatches."""
        return SelfImitation(policy, self, demonstrations, env, generator)


class SelfImitation:
    """Updates a policy from its own successes."""

    def __init__(
        self,
        policy: TrainablePolicy,
        config: SelfImitationConfig,
        demonstrations: TensorDict,
        env: StartEnvironment,
        generator: torch.Generator,
    ) -> None:
        self.config, self.generator, self.demonstrations = config, generator, demonstrations
        self.sft = SFT(policy, config.sft, generator)
        tasks = len(env.task_names)
        self.replays = [ChunkReplay(config.capacity // tasks) for _ in range(tasks)]
        self.episodes = EpisodeAssembler(env.num_envs, policy.contract.horizon)
        self.starts = RetryStarts(env.task_index, retry=config.retry, attempts=config.attempts, generator=generator)

    @property
    def gradient_steps(self) -> int:
        """Gradient steps taken so far."""
        return self.sft.gradient_steps

    def update(self, rollout: Rollout, progress: float) -> dict[str, float]:
        """Add the rollout's successes, then take gradient steps; returns the mean loss and the size of the set."""
        chunks = self.episodes.add(rollout)
        if chunks is not None:
            for task in chunks["task_index"].unique().tolist():
                self.replays[task].add(chunks[chunks["task_index"] == task].exclude("task_index"))
        size = sum(map(len, self.replays))
        steps = self.config.gradient_steps if size else 0
        losses = [self.sft.step(self._batch(), progress) for _ in range(steps)]
        loss = {"loss": sum(losses) / steps} if steps else {}
        return loss | {"imitated_chunks": float(size), "first_attempts_success": self.starts.first_attempts_success()}

    def _batch(self) -> TensorDict:
        size = self.config.sft.batch
        old = round(size * self.config.demonstration_share)
        rows = torch.randint(len(self.demonstrations), (old,), generator=self.generator)
        replays = [replay for replay in self.replays if len(replay)]
        share, rest = divmod(size - old, len(replays))
        new = [replay.sample(share + (i < rest), self.generator) for i, replay in enumerate(replays)]
        return TensorDict.cat((self.demonstrations[rows], *new))

    def state_dict(self) -> dict[str, Any]:
        """Learner, replays, unfinished episodes and starts; the demonstrations come from their file."""
        parts = {part: getattr(self, part).state_dict() for part in ("sft", "episodes", "starts")}
        return parts | {"replays": [replay.state_dict() for replay in self.replays]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for part in ("sft", "episodes", "starts"):
            getattr(self, part).load_state_dict(state[part])
        for replay, saved in zip(self.replays, state["replays"], strict=True):
            replay.load_state_dict(saved)
