"""Diffusion steering (DSRL, arXiv 2506.15799): soft actor-critic chooses the initial noise of a frozen policy.

The policy generates chunks from noise by a deterministic sampler, a = generate(s, w). A small actor learns w, |w| <= m.
With `aliasing` (DSRL-NA) critics learn the values of executed actions, as those of other data can be, and further
critics learn from them the value of noise; without it (DSRL-SAC) critics of noise alone learn from the noise that was
chosen.

Differs from the paper:
    - noise that teaches the critics of noise is from N(0, I) in one half of a batch and the actor's in the other;
    - targets have no entropy: where a success ends the episode, that of dozens of elements of noise in the decisions
      that it saves is worth more than the reward, and the actor learns to fail;
    - the actor's noise is within m by tanh from the beginning, without a phase of unbounded noise;
    - deterministic actions are those of fixed noise of the actor, not of its mean: chunks from zero noise lie between
    the modes of the policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.algorithms.off_policy.action_values import ActionValues
from embodied.algorithms.off_policy.sac import SAC, SACConfig
from embodied.algorithms.schedule import linear_decay
from embodied.algorithms.small_actor import SmallActor, with_small_actor
from embodied.configuration import Fraction, NonNegativeInt, PositiveFloat
from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import Episodes
from embodied.environment import Environment
from embodied.errors import UserError
from embodied.policy import INITIAL_NOISE, SteeredPolicy, Steering, TrainablePolicy
from embodied.rollout.rollout import Rollout
from embodied.world import ALONE, World


@dataclass
class DSRLConfig(SACConfig):
    """SACConfig of the noise, whose bound m is `policy.steering.noise_bound`; `aliasing` is described in the module.

    Learning rates decay to zero: at a constant one the small actor swings, and where it ends may be far below its mean.
    """

    aliasing: bool = True
    updates: PositiveFloat = 1.0
    warmup: NonNegativeInt = 2_000
    initial_temperature: PositiveFloat = 0.01
    entropy_in_target: bool = False
    target_std: PositiveFloat = 0.242  # a target entropy of 0
    layer_norm: bool = True
    final_lr_share: Fraction = 0.0

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> SAC:
        """Build the learner of `policy`, whose small actor acts from now on.

        Raises:
            UserError: for a policy whose noise cannot be chosen, and demonstrations that have no noise, are missing or
                lack rewards.
        """
        steered = with_small_actor(policy, Steering.NOISE, "algorithm=dsrl")
        if self.demonstration_share and not self.aliasing:
            raise UserError("demonstrations have no noise; use algorithm.aliasing=true or demonstration_share=0")
        learner = DSRL(steered, self, generator, demonstrations)
        steered.start_steering()
        return learner


class DSRL(SAC):
    """SAC whose actions are initial noise [1, G * A]: `q` values noise, `executed` executed actions if aliasing."""

    def __init__(
        self,
        policy: SteeredPolicy,
        config: DSRLConfig,
        generator: torch.Generator,
        demonstrations: Episodes | None,
    ) -> None:
        rate = config.value_learning_rate
        q = ActionValues(policy, config, rate, trains_features=not config.aliasing, contract=noise_contract(policy))
        encode = partial(policy.encoded, generates=config.aliasing)
        super().__init__(policy, config, generator, demonstrations, NoiseActor(policy), q, encode)
        self.steered = policy
        self.executed = ActionValues(policy, config, rate) if config.aliasing else None

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """See `SAC.update`.

        Raises:
            UserError: if a person acted, whose actions have no noise, without aliasing.
        """
        if self.executed is not None:
            return super().update(rollout, progress, world)
        if "human" in rollout.signals and bool(rollout.signals["human"].any()):
            raise UserError("actions of a person have no noise to learn from; use algorithm.aliasing=true")
        noise = rollout.sample[INITIAL_NOISE].flatten(-2).unsqueeze(-2)
        return super().update(replace(rollout, actions=noise), progress, world)

    def _decay_learning_rates(self, progress: float) -> None:
        super()._decay_learning_rates(progress)
        if self.executed is not None:
            config = self.config
            linear_decay(self.executed.optimiser, progress, config.final_lr_share, config.value_learning_rate)

    def _update_critics(self, batch: TensorDict) -> dict[str, Tensor]:
        executed = self.executed
        if executed is None:
            return super()._update_critics(batch)
        metrics = executed.step(batch, self._target(batch), self.gradient_steps)
        executed.follow(self.config.averaging)
        # Q_W(s, w) <- Q_A(s, generate(s, w))
        observation = batch["observation"]
        with torch.no_grad():
            noise = self._noise(len(batch))
            half = len(batch) // 2
            chosen, _ = self.steered.initial_noise(cast(TensorDict, observation[half:]), noise[half:])
            noise = torch.cat((noise[:half], chosen))
            actions = self.steered.generate(observation, noise)
            target = executed.values(observation, executed.scaled(actions))
        batch = TensorDict({"observation": observation, "actions": noise.flatten(1).unsqueeze(1)}, [len(batch)])
        taught = self.q.step(batch, target, self.gradient_steps)
        return metrics | {"noise_value_loss": taught["value_loss"]}

    @torch.no_grad()
    def _target(self, batch: TensorDict) -> Tensor:
        """Targets y = R + carry * (min_i Q_i'(s', a') - alpha log pi(w'|s')), a' = generate(s', w'), [B]."""
        executed = self.executed
        if executed is None:
            return super()._target(batch)
        actions, log_prob, _ = self.steered.steered(batch["next_observation"], self._noise(len(batch)))
        bonus = -self.temperature * log_prob.sum(-1) if self.config.entropy_in_target else None
        return executed.target(batch, executed.scaled(actions), self.generator, bonus)

    def state_dict(self) -> dict[str, Any]:
        """See `SAC.state_dict`, with the critics of executed actions."""
        executed = {} if self.executed is None else {"executed": self.executed.state_dict()}
        return super().state_dict() | executed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        if self.executed is not None:
            self.executed.load_state_dict(state["executed"])


class NoiseActor(SmallActor):
    """The small actor of `policy`, whose one action is the initial noise [1, G * A]."""

    def sample(self, observation: TensorDict, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Initial noise [N, 1, G * A] from standard normal `noise` [N, G, A], and its log_prob [N, 1]."""
        initial, log_prob = self.policy.initial_noise(observation, noise)
        return initial.flatten(1).unsqueeze(1), log_prob


def noise_contract(policy: SteeredPolicy) -> Contract:
    """Contract of `policy` whose one action is the initial noise [1, G * A]."""
    generated, actions = policy.steering_noise_shape
    limits = (policy.noise_bound,) * (generated * actions)
    action = TensorSpec((len(limits),), low=tuple(-limit for limit in limits), high=limits)
    return replace(policy.contract, action=action, horizon=1, executed=1)
