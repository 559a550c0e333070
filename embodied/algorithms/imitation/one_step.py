"""One-step actor: generates a chunk in one pass in place of the denoising steps of a policy, which it imitates.

The actor maps the noise from which the policy denoises a chunk to that chunk, as the consistency head of RL-100
(arXiv 2510.14830). It imitates a trained policy, which stays frozen, in states that it visits itself
(`algorithm=one_step`), or in those of recorded episodes (`offline=one_step`). Beside a policy that still learns it is
trained by the options `algorithm.one_step` and `offline.one_step` of learners with clipped steps. A policy that ranks
candidates goes on ranking those of the actor.

Differs from the paper: the target is the end of the denoising steps, and no intermediate noise level is distilled.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.finite import check_finite, gradient_norm
from embodied.algorithms.micro_batch import saved_bytes
from embodied.algorithms.off_policy.replay import MixedReplay
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.algorithms.schedule import linear_decay
from embodied.algorithms.small_actor import with_small_actor
from embodied.configuration import Configuration, Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.policy import SteeredPolicy, Steering, TrainablePolicy
from embodied.rollout.rollout import Collector, Rollout
from embodied.world import ALONE, World


@dataclass
class OneStepConfig(Configuration):
    """Hyper-parameters of the distillation; the learning rate decays linearly to its `final_lr_share`."""

    batch: PositiveInt = 256
    learning_rate: NonNegativeFloat = 1e-3
    final_lr_share: Fraction = 0.02


@dataclass
class OnlineOneStepConfig(OneStepConfig):
    """OneStepConfig of a learner in the policy's own states.

    An iteration stores `rollout_length` decisions of each environment, then takes `gradient_steps`. The policy acts
    until `warmup` gradient steps are done, then the actor does.
    """

    rollout_length: PositiveInt = 20
    gradient_steps: PositiveInt = 300
    capacity: PositiveInt = 200_000
    warmup: NonNegativeInt = 1_000

    @property
    def reads_demonstrations(self) -> bool:
        """Whether demonstrations are read: never."""
        return False

    @property
    def max_staleness(self) -> int:
        """Updates that a rollout's policy may be behind: any, because only states are used."""
        return sys.maxsize

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> OnlineOneStep:
        """Build the learner of the one-step actor of `policy`; `generator` draws minibatches and noise.

        Raises:
            UserError: for a policy without such an actor.
        """
        actor = with_small_actor(policy, Steering.ONE_STEP, "algorithm=one_step")
        replay = MixedReplay(policy, self.capacity, encode=partial(actor.encoded, generates=True))
        return OnlineOneStep(actor, self, generator, replay)


@dataclass
class OfflineOneStepConfig(OneStepConfig):
    """OneStepConfig of a learner in the states of recorded episodes, which takes `steps` gradient steps."""

    steps: NonNegativeInt = 4_000

    def build(self, policy: TrainablePolicy, generator: torch.Generator) -> OfflineOneStep:
        """Build the learner of the one-step actor of `policy`, which acts from now on.

        Raises:
            UserError: for a policy without such an actor.
        """
        actor = with_small_actor(policy, Steering.ONE_STEP, "offline=one_step")
        actor.start_steering(keep_ranking=True)
        return OfflineOneStep(actor, self, generator)


class OneStep(Composite):
    """Learner of the one-step actor of `policy`, which otherwise does not change."""

    def __init__(self, policy: SteeredPolicy, config: OneStepConfig, generator: torch.Generator) -> None:
        self.policy = policy
        self.config = config
        self.generator = generator
        self.parameters = policy.steering_parameters()
        self.optimiser = torch.optim.Adam(self.parameters, config.learning_rate, fused=True)
        self.gradient_steps = 0

    def step(self, observation: TensorDict, progress: float, world: World = ALONE) -> Tensor:
        """Take one gradient step on observations [B], this process's part of a minibatch; returns the loss.

        Of more than this process's share of `config.batch` only the first ones are used.

        Raises:
            DivergedError: before a step whose loss or gradient is not finite.
        """
        linear_decay(self.optimiser, progress, self.config.final_lr_share, self.config.learning_rate)
        # each process draws the noise of all rows
        shape = (self.config.batch, *self.policy.steering_noise_shape)
        noise = torch.randn(shape, generator=self.generator)[world.rank :: world.size][: len(observation)]
        observation = observation[: len(noise)]
        # L = mean |mu(s, z) - sg(generate(s, z))|^2, z ~ N(0, I)
        loss = self.policy.distance_of_one_step(observation.to(self.policy.device), noise.to(self.policy.device))
        self.optimiser.zero_grad()
        loss.backward(inputs=self.parameters)
        gradient = gradient_norm(self.parameters)
        self.gradient_steps += 1
        check_finite({"distance": loss.detach(), "gradient of the one-step actor": gradient}, self.gradient_steps)
        self.optimiser.step()
        return loss.detach()

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the backward pass of a minibatch stores."""
        rows = passes.share(self.config.batch)
        observation = passes.observation(rows)
        noise = torch.empty(rows, *self.policy.steering_noise_shape, device=self.policy.device)
        return saved_bytes(lambda: self.policy.distance_of_one_step(observation, noise))

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, counter and generator."""
        return {
            "optimiser": self.optimiser.state_dict(),
            "gradient_steps": self.gradient_steps,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.optimiser.load_state_dict(state["optimiser"])
        self.gradient_steps = state["gradient_steps"]
        self.generator.set_state(state["generator"])


class OnlineOneStep(OneStep):
    """Distillation in states of rollouts, of the policy at first, then of the actor (as DAgger, arXiv 1011.0686)."""

    config: OnlineOneStepConfig
    starts = None
    collector = Collector

    def __init__(
        self, policy: SteeredPolicy, config: OnlineOneStepConfig, generator: torch.Generator, replay: MixedReplay
    ) -> None:
        super().__init__(policy, config, generator)
        self.replay = replay

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """Store one rollout, then take gradient steps; returns their mean distance, in squared half ranges."""
        self.replay.add(rollout)
        losses = []
        for _ in range(self.config.gradient_steps):
            rows = self.replay.draw(self.config.batch, self.generator)
            losses.append(self.step(self.replay.observations(rows), progress))
        if self.gradient_steps >= self.config.warmup:
            self.policy.start_steering(keep_ranking=True)
        return {"distance": float(torch.stack(losses).mean())}

    def state_dict(self) -> dict[str, Any]:
        """See `OneStep.state_dict`, with the replay."""
        return super().state_dict() | {"replay": self.replay.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        self.replay.load_state_dict(state["replay"])


class OfflineOneStep(OneStep):
    """Distillation in states of recorded episodes that did not fail."""

    config: OfflineOneStepConfig

    def fit(self, episodes: Episodes, steps: int, world: World = ALONE) -> dict[str, float]:
        """Take `steps` gradient steps on `episodes`, whose samples the processes of `world` share."""
        loss = torch.zeros(())
        for _ in range(steps):
            batch = episodes.sample(self.config.batch, self.policy.contract.horizon, self.generator, world)
            progress = min(1.0, self.gradient_steps / max(1, self.config.steps))
            loss = self.step(batch["observation"], progress, world)
        return {"distance": float(loss)}
