"""Supervised fine-tuning: the policy's own supervised loss on stored action chunks.

The acting policy is an exponential moving average of the trained one (as in diffusion policy, arXiv 2303.04137),
because a flow-matching loss is noisy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from embodied import seeding
from embodied.algorithms.finite import check_finite
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.configuration import Configuration, Limit, NonNegativeFloat, NonNegativeInt, PositiveInt, Range
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.policy import SteeredPolicy, TrainablePolicy, copy_statistics
from embodied.world import ALONE, World

RECENT = 50
"""Gradient steps whose losses `SFT.fit` averages."""


@dataclass
class SFTConfig(Configuration):
    """Optimiser settings; the learning rate decays by a cosine to `final_learning_rate` over the planned `steps`.

    It rises linearly in the first `warmup` steps, at most a tenth of the planned ones.
    """

    steps: NonNegativeInt = 4000
    batch: PositiveInt = 256
    learning_rate: NonNegativeFloat = 1e-3
    final_learning_rate: NonNegativeFloat = 1e-4
    warmup: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 1e-4
    average: Annotated[float, Range(at_least=0, below=1)] = 0.998
    max_gradient_norm: Limit = 1.0

    def build(self, policy: TrainablePolicy, generator: torch.Generator) -> SFT:
        """Build the learner of `policy`; `generator` draws minibatches."""
        return SFT(policy, self, generator)


class SFT(Composite):
    """Learner that trains a copy of `policy`; `policy` itself is the moving average of that copy."""

    begins = 0
    """Gradient steps before the first of imitation, in learners that take other steps first."""

    def __init__(self, policy: TrainablePolicy, config: SFTConfig, generator: torch.Generator) -> None:
        self.policy = policy
        self.config = config
        self.generator = generator
        with seeding.undisturbed():
            self.trained = policy.with_new_weights()
        self.trained.load_state_dict(policy.state_dict())
        self.averaged, self.parameters = tuple(policy.actor_parameters()), tuple(self.trained.actor_parameters())
        self.optimiser = torch.optim.AdamW(
            self.parameters, config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self.gradient_steps = 0
        self.losses: deque[float] = deque(maxlen=RECENT)

    def fit(self, episodes: Episodes, steps: int, world: World = ALONE) -> dict[str, float]:
        """Take `steps` gradient steps on chunks of `episodes`; returns the mean of the last losses as "loss".

        Steps beyond the planned number use the final learning rate. The processes of `world` share each minibatch.

        Raises:
            UserError: for a minibatch smaller than the world.
        """
        if self.config.batch < world.size:
            raise UserError(f"sft.batch={self.config.batch} is shared by {world.size} processes; use at least one each")
        for _ in range(steps):
            batch = episodes.sample(self.config.batch, self.policy.contract.horizon, self.generator, world)
            planned = self.gradient_steps < self.config.steps
            progress = self.gradient_steps / self.config.steps if planned else 1.0
            self.losses.append(self.step(batch, progress, world))
        return {"loss": sum(self.losses) / max(1, len(self.losses))}

    def follow_statistics(self, policy: TrainablePolicy) -> None:
        """Normalise observations as `policy` does, whose running statistics may have changed since the last call."""
        for each in (self.policy, self.trained):
            copy_statistics(each, policy)

    def step(
        self,
        batch: TensorDict,
        progress: float,
        world: World = ALONE,
        added: Callable[[TrainablePolicy], Tensor] | None = None,
    ) -> float:
        """Take one gradient step on {observation, actions [B, H, A], valid [B, H]}; returns the loss.

        `progress`, the share of training done from 0 to 1, sets the learning rate. The loss is a mean over valid
        actions, here over those of all processes, with weights if `valid` has them, plus the loss that `added` returns
        for the trained policy.

        Raises:
            DivergedError: before the step, if the loss or its gradient is not finite.
        """
        for group in self.optimiser.param_groups:
            group["lr"] = self._learning_rate(progress)
        batch = batch.to(self.policy.device)
        loss = self.trained.loss(batch["observation"], batch["actions"], batch["valid"])
        if world.size > 1:
            valid_actions = batch["valid"].sum().to(loss.dtype)
            # the process average of L_i n_i / mean(n) is the mean over the valid actions of all processes
            loss = loss * valid_actions / (world.sum(valid_actions) / world.size)
        if added is not None:
            loss = loss + added(self.trained)
        mean = world.sum(loss.detach()) / world.size
        self.optimiser.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.max_gradient_norm)
        check_finite({"supervised loss": mean, "gradient": norm}, self.gradient_steps + 1)
        self.optimiser.step()
        self.gradient_steps += 1
        self._average()
        return float(mean)

    def _learning_rate(self, progress: float) -> float:
        high = self.config.learning_rate
        low = self.config.final_learning_rate
        warmup = min(self.config.warmup, self.config.steps // 10)
        rise = min(1.0, (self.gradient_steps - self.begins + 1) / (warmup + 1))
        # linear warm-up, then cosine: low + (high - low) (1 + cos(pi p)) / 2
        return rise * (low + (high - low) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))

    def _average(self) -> None:
        # The window grows with training, so that the initial random weights leave the average.
        decay = min(self.config.average, (1.0 + self.gradient_steps) / (10.0 + self.gradient_steps))
        # average <- decay * average + (1 - decay) * trained
        get_ema_multi_avg_fn(decay)(self.averaged, self.parameters, self.gradient_steps)

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the loss of a minibatch stores."""
        return passes.loss(passes.share(self.config.batch))

    def state_dict(self) -> dict[str, Any]:
        """Both sets of weights, optimiser, generator, counter and last losses."""
        return {
            "policy": self.policy.state_dict(),
            "generator": self.generator.get_state(),
            "trained": self.trained.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "gradient_steps": self.gradient_steps,
            "losses": list(self.losses),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.policy.load_state_dict(state["policy"])
        self.generator.set_state(state["generator"])
        self.trained.load_state_dict(state["trained"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.gradient_steps = state["gradient_steps"]
        self.losses = deque(state["losses"], maxlen=RECENT)


def with_drawn_weights(policy: TrainablePolicy, generator: torch.Generator) -> TrainablePolicy:
    """Policy like `policy`, with its statistics and new weights, of which `generator` draws the seed."""
    with seeding.undisturbed():
        torch.manual_seed(int(torch.randint(1 << 40, (), generator=generator)))
        return policy.with_new_weights()


@torch.no_grad()
def replace_actor(policy: TrainablePolicy, other: TrainablePolicy) -> None:
    """Copy the weights by which `other` acts into `policy`, which then acts without a small actor."""
    for old, new in zip(policy.actor_parameters(), other.actor_parameters(), strict=True):
        old.copy_(new)
    if isinstance(policy, SteeredPolicy):
        policy.stop_steering()
