"""ReBRAC (arXiv 2305.09836): offline TD3 whose actor and whose targets stay near the data.

Differs from the paper:
    - a chunk is one action: its discounted reward, and discount^k for what follows after k executed actions;
    - the actor's distance from the data is the mean over all actions of a predicted chunk, a target's distance the sum
      over the executed ones;
    - targets after which no action was recorded, as at a time limit, have no such distance;
    - rewards are divided by the deviation of the returns; elements of actions by half of their range;
    - TD3+BC (arXiv 2106.06860) averages over the elements of an action, and multiplies Q, here 1 / actor_bc.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied import seeding
from embodied.algorithms.critics import CriticConfig, approach
from embodied.algorithms.finite import check_finite, gradient_norm
from embodied.algorithms.micro_batch import saved_bytes
from embodied.algorithms.off_policy.action_values import ActionValues
from embodied.algorithms.off_policy.replay import recorded_transitions
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.configuration import INF, Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Range
from embodied.data.episodes import Episodes
from embodied.data.transitions import Transitions
from embodied.errors import UserError
from embodied.policy import DeterministicPolicy, TrainablePolicy
from embodied.world import ALONE, World


@dataclass
class ReBRACConfig(CriticConfig):
    """Hyper-parameters of ReBRAC; options of the critics are those of CriticConfig.

    `actor_bc` and `critic_bc` are the weights of the squared distance from the data in the actor's loss, relative to
    the mean size of its values, and in targets. Noise is in half ranges of the actions.
    """

    steps: NonNegativeInt = 10_000
    batch: PositiveInt = 256
    actor_bc: NonNegativeFloat = 0.1
    critic_bc: NonNegativeFloat = 0.01
    learning_rate: NonNegativeFloat = 1e-3
    value_learning_rate: NonNegativeFloat = 1e-3
    discount: Fraction = 0.99
    averaging: Annotated[float, Range(above=0, at_most=1)] = 0.005
    target_noise: NonNegativeFloat = 0.2
    noise_clip: Annotated[float, Range(at_least=0, at_most=INF)] = 0.5
    policy_delay: PositiveInt = 2
    hidden: list[PositiveInt] = field(default_factory=lambda: [256, 256, 256])
    layer_norm: bool = True

    def build(self, policy: TrainablePolicy, generator: torch.Generator) -> ReBRAC:
        """Build the learner of `policy`; `generator` draws minibatches and noise.

        Raises:
            UserError: for a policy without deterministic actions, or actions without limits.
        """
        if not isinstance(policy, DeterministicPolicy):
            raise UserError(
                "offline=rebrac and td3_bc need deterministic actions; use policy=mlp or squashed, or offline=iql"
            )
        return ReBRAC(policy, self, generator)


@dataclass
class TD3BCConfig(ReBRACConfig):
    """TD3+BC: ReBRAC without a penalty in targets, layer norm and the third layer."""

    actor_bc: NonNegativeFloat = 0.4
    critic_bc: NonNegativeFloat = 0.0
    learning_rate: NonNegativeFloat = 3e-4
    value_learning_rate: NonNegativeFloat = 3e-4
    hidden: list[PositiveInt] = field(default_factory=lambda: [256, 256])
    layer_norm: bool = False


class ReBRAC(Composite):
    """Learner of critics from stored episodes, and of a policy that maximises their minimum near the data."""

    def __init__(self, policy: DeterministicPolicy, config: ReBRACConfig, generator: torch.Generator) -> None:
        self.policy = policy
        self.config = config
        self.generator = generator
        self.q = ActionValues(policy, config, config.value_learning_rate)
        with seeding.undisturbed():
            self.target_policy = policy.with_new_weights()
        self.target_policy.load_state_dict(policy.state_dict())
        self.actor_optimiser = torch.optim.Adam(policy.mean_parameters(), config.learning_rate, fused=True)
        self.gradient_steps = 0
        self.actor_loss = 0.0
        self.transitions: Transitions | None = None

    def fit(self, episodes: Episodes, steps: int, world: World = ALONE) -> dict[str, float]:
        """Take `steps` gradient steps on `episodes`, which the processes of `world` share; returns the last metrics.

        Raises:
            UserError: for episodes with unknown rewards, see `recorded_transitions`.
        """
        self.transitions = recorded_transitions(self.policy, episodes, self.config.discount, self.transitions)
        self.q.unit = self.transitions.scale
        metrics: dict[str, Tensor] = {}
        for _ in range(steps):
            rows = self.transitions.draw(self.config.batch, self.generator, world)
            batch = self.transitions.take(rows, self.policy.contract.horizon).to(self.policy.device)
            noise = self._noise(batch, world)
            self.gradient_steps += 1
            # L_Q = sum_j mean (Q_j(s, a) - y)^2
            metrics = self.q.step(batch, self._target(batch, noise), self.gradient_steps)
            if self.gradient_steps % self.config.policy_delay == 0:
                self._update_actor(batch, world)
        return {**{name: float(value) for name, value in metrics.items()}, "actor_loss": self.actor_loss}

    def _noise(self, batch: TensorDict, world: World) -> Tensor:
        """Clipped normal noise of the following actions, [B, K, A]; each process draws the noise of all rows."""
        shape = (self.config.batch, *batch["next_actions"].shape[1:])
        noise = torch.randn(shape, generator=self.generator)[world.rank :: world.size] * self.config.target_noise
        return noise.clamp(-self.config.noise_clip, self.config.noise_clip).to(self.policy.device)

    @torch.no_grad()
    def _target(self, batch: TensorDict, noise: Tensor) -> Tensor:
        """Targets y = R + carry * (min_j Q_j'(s', a') - critic_bc |a' - a'_data|^2), [B]."""
        following = batch["next_observation"]
        # a' = clip(pi'(s') + noise, -1, 1)
        actions = (self.q.scaled(self.target_policy.actions(following)) + noise).clamp(-1.0, 1.0)
        values = self.q.target_minimum(following, actions, self.generator)
        error = (actions - self.q.scaled(batch["next_actions"])).square().sum(-1)
        distance = (error * batch["next_valid"]).sum(-1)
        return batch["reward"] + batch["carry"] * (values - self.config.critic_bc * distance)

    def _update_actor(self, batch: TensorDict, world: World) -> None:
        actions = self.policy.actions(batch["observation"])
        values = self.q.values(batch["observation"], self.q.scaled(actions), frozen=True).amin(0)
        error = ((actions - batch["actions"]) / self.q.half_range).square().sum(-1)
        size, valid = ((world.sum(each) / world.size) for each in (values.detach().abs().mean(), batch["valid"].sum()))
        distance = (error * batch["valid"]).sum() / valid
        # L = -mean min_j Q_j(s, pi(s)) / mean |min_j Q_j| + actor_bc |pi(s) - a|^2
        loss = -values.mean() / size + self.config.actor_bc * distance
        self.actor_optimiser.zero_grad()
        loss.backward()
        gradient = gradient_norm(self.policy.mean_parameters())
        check_finite({"actor_loss": loss.detach(), "gradient of the actor": gradient}, self.gradient_steps)
        self.actor_optimiser.step()
        self.q.follow(self.config.averaging)
        approach(self.target_policy.mean_parameters(), self.policy.mean_parameters(), self.config.averaging)
        self.actor_loss = float(loss.detach())

    def values(self) -> dict[str, Any] | None:
        """Critics with which a learner of the stage rl goes on, see `ActionValues.in_rewards`."""
        return self.q.in_rewards()

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that the critics' minibatch stores, or the actor's with the critics' if that is more."""
        rows = passes.share(self.config.batch)
        observation = passes.observation(rows)
        actor = saved_bytes(lambda: self.q.values(observation, self.q.scaled(self.policy.actions(observation))))
        return max(self.q.stored_bytes(passes, rows), actor)

    def state_dict(self) -> dict[str, Any]:
        """Critics, targets, optimisers, counter, last loss and generator."""
        return {
            **self.q.state_dict(),
            **{name: getattr(self, name).state_dict() for name in _PARTS},
            "gradient_steps": self.gradient_steps,
            "actor_loss": self.actor_loss,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; the policy's weights are restored by its owner."""
        self.q.load_state_dict(state)
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.gradient_steps = state["gradient_steps"]
        self.actor_loss = state["actor_loss"]
        self.generator.set_state(state["generator"])


_PARTS = ("target_policy", "actor_optimiser")
