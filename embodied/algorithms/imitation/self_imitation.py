"""Self-imitation: the supervised loss on demonstrations and the policy's own successful chunks.

Each iteration collects episodes, keeps every chunk of successful ones, and takes gradient steps on the growing set
(self-imitation, arXiv 1806.05635, without its value function; filtered behaviour cloning in rounds). With RetryStarts a
failed initial state is tried again with new noise, so that data is added where the policy fails. Where noise does not
lead out of a failure, `exchange` may: chunks of other environments (`rollout/exchange.py`). All tasks are sampled
equally often, however rarely they succeed.

A network that has converged on little data learns less from additional data than a new one does (primacy bias, arXiv
2205.07802). So training has rounds: while the policy of the last round collects, a new network learns from all
successes so far, and replaces it at the end of the round. With `warm_start` it continues the last round's instead,
because picture encoders take long to learn from scratch.

If a small actor steers the policy, it collects in the first round, and the policy that has learned from its successes
acts alone from then on: the distillation of Probe, Learn, Distill (arXiv 2511.00091). If it is a residual, the frozen
policy may act alone in the first `base_decisions_high` decisions or fewer, and the residual from the states reached.

Differs from the paper: success alone selects what is imitated; there is no advantage weight and no policy gradient.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.imitation.sft import SFT, SFTConfig, replace_actor, with_drawn_weights
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.algorithms.small_actor import with_small_actor
from embodied.configuration import Configuration, Fraction, NonNegativeInt, PositiveInt
from embodied.data.episodes import Episodes
from embodied.data.store import EpisodeStore
from embodied.environment import Environment, NumberedStarts
from embodied.errors import UserError
from embodied.policy import Steering, TrainablePolicy
from embodied.rollout.exchange import ExchangingCollector
from embodied.rollout.rollout import Rollout
from embodied.rollout.starts import RetryStarts
from embodied.world import ALONE, World

PARTS = ("sft", "replay")


@dataclass
class SelfImitationConfig(Configuration):
    """Hyper-parameters: `gradient_steps` per iteration of `rollout_length` chunks; a run has `rounds` of equal length.

    A share `demonstration_share` of each minibatch is demonstrations; the rest is divided equally among the tasks, with
    demonstrations of those that have no success yet, which new networks would otherwise forget. A share `retry` of
    restarts goes to states where the policy has failed, at most `attempts` times each. A share `exchange` of decisions
    is another environment's. While a residual steers the policy, the frozen policy acts alone in the first 0 to
    `base_decisions_high` decisions of an episode. Rounds begin with new networks, or with the last round's if
    `warm_start`.
    """

    rollout_length: PositiveInt = 35
    rounds: PositiveInt = 6
    gradient_steps: PositiveInt = 300
    demonstration_share: Fraction = 0.25
    capacity: PositiveInt = 400_000
    retry: Fraction = 0.5
    attempts: PositiveInt = 4
    exchange: Fraction = 0.0
    base_decisions_high: NonNegativeInt = 0
    warm_start: bool = False
    sft: SFTConfig = field(default_factory=SFTConfig)

    @property
    def reads_demonstrations(self) -> bool:
        """Whether demonstrations are read: always."""
        return True

    @property
    def max_staleness(self) -> int:
        """Updates that a rollout's policy may be behind: any, because successes of every policy are imitated."""
        return sys.maxsize

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> SelfImitation:
        """Build the learner of `policy` in `env`, with `demonstrations`; `generator` draws minibatches.

        Raises:
            UserError: without demonstrations, and for decisions of the base of a policy without a residual.
        """
        if self.base_decisions_high:
            with_small_actor(policy, Steering.RESIDUAL, "base_decisions_high")
        if demonstrations is None:
            raise UserError("imitation needs demonstrations, but this task has none; use algorithm=ppo")
        return SelfImitation(policy, self, demonstrations, env, generator)


class SelfImitation(Composite):
    """Learner that updates a policy from its successful episodes."""

    def __init__(
        self,
        policy: TrainablePolicy,
        config: SelfImitationConfig,
        demonstrations: Episodes,
        env: Environment,
        generator: torch.Generator,
    ) -> None:
        self.policy = policy
        self.config = config
        self.generator = generator
        self.demonstrations = demonstrations
        self.sft = self._begin()
        self.progress = 0.0
        self.gradient_steps = 0
        self.replay = EpisodeStore(config.capacity, device="cpu")
        self.by_task: dict[int, Tensor] = {}  # rows of the replay's successes, for each task that has any
        rows = demonstrations.imitated_rows()
        self.demonstration_rows = _by_task(rows, demonstrations.task_index[demonstrations.episode[rows]])
        self.starts: RetryStarts | None = None  # None: initial states are not numbered
        if isinstance(env, NumberedStarts):
            self.starts = RetryStarts(env.task_index, retry=config.retry, attempts=config.attempts, generator=generator)

    @property
    def collector(self) -> Callable[..., ExchangingCollector]:
        """Factory of the collector, which exchanges chunks between environments and hands over to a residual."""
        config = self.config
        return partial(ExchangingCollector, exchange=config.exchange, base_decisions_high=config.base_decisions_high)

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """Add the rollout's successes, then take gradient steps; returns the mean loss and the size of the set."""
        self.replay.add(rollout)
        self._sort()
        self.sft.follow_statistics(self.policy)
        rounds = self.config.rounds
        steps = self.config.gradient_steps
        done = min(math.floor(self.progress * rounds), rounds - 1)  # an extended run stays in the last round
        advance = progress - self.progress
        # share of the round done at each gradient step: (p + dp step / steps) rounds - round
        shares = [(self.progress + advance * step / steps) * rounds - done for step in range(steps)]
        losses = [self.sft.step(self._batch(), min(1.0, share)) for share in shares]
        self.progress, self.gradient_steps = progress, self.gradient_steps + steps
        # End of the round: the new network replaces the one that collected.
        if progress * rounds >= done + 1:
            replace_actor(self.policy, self.sft.policy)
            if progress < 1.0:
                self.sft = self._begin()
        return {"loss": sum(losses) / len(losses), "imitated_chunks": float(sum(map(len, self.by_task.values())))}

    def _begin(self) -> SFT:
        """Start a learner of the next round's network, with the policy's normalisation statistics."""
        # a seed from the learner's generator, so that a resumed run begins the same network
        policy = with_drawn_weights(self.policy, self.generator)
        if self.config.warm_start:
            policy.load_state_dict(self.policy.state_dict())
        return SFT(policy, self.config.sft, self.generator)

    def _batch(self) -> TensorDict:
        size = self.config.sft.batch
        num_demonstrations = round(size * self.config.demonstration_share) if self.by_task else size
        horizon = self.policy.contract.horizon
        batch = self.demonstrations.sample(num_demonstrations, horizon, self.generator)
        if not self.by_task:
            return batch
        tasks = sorted({*self.by_task, *self.demonstration_rows})
        share, rest = divmod(size - num_demonstrations, len(tasks))
        # the other rows are divided equally among tasks; the remainder goes to the first ones
        counts = {task: share + (i < rest) for i, task in enumerate(tasks)}
        unsolved = {task: self.demonstration_rows[task] for task in tasks if task not in self.by_task}
        imitated = self.replay.chunks(self._random_rows(self.by_task, counts), horizon)
        keys = batch["observation"].keys()  # demonstrations may lack privileged observations
        imitated["observation"] = imitated["observation"].select(*keys)
        parts = [batch, imitated]
        if unsolved:
            parts.append(self.demonstrations.chunks(self._random_rows(unsolved, counts), horizon))
        return TensorDict.cat(parts)

    def _random_rows(self, rows: dict[int, Tensor], counts: dict[int, int]) -> Tensor:
        """Random draw of `counts` rows of each task's `rows`, concatenated."""
        selected = [
            task_rows[torch.randint(len(task_rows), (counts[task],), generator=self.generator)]
            for task, task_rows in rows.items()
        ]
        return torch.cat(selected)

    def _sort(self) -> None:
        rows = self.replay.succeeded()
        self.by_task = _by_task(rows, self.replay.decisions(rows, "task_index")["task_index"])

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the largest supervised loss stores."""
        return self.sft.largest_pass(passes)

    def state_dict(self) -> dict[str, Any]:
        """State of learner and replay; demonstrations are read from their file."""
        parts = {part: getattr(self, part).state_dict() for part in PARTS}
        return parts | {"progress": self.progress, "gradient_steps": self.gradient_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for part in PARTS:
            getattr(self, part).load_state_dict(state[part])
        self.progress = state["progress"]
        self.gradient_steps = state["gradient_steps"]
        if self.replay.written:
            self._sort()


def _by_task(rows: Tensor, task: Tensor) -> dict[int, Tensor]:
    """The `rows` [B] of each task in `task` [B]."""
    return {int(index): rows[task == index] for index in task.unique()}
