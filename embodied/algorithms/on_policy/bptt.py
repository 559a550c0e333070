"""Analytic policy gradients: short-horizon backpropagation through a differentiable simulator.

With `critic=true` this is SHAC (arXiv 2204.07137): a value function estimates the return after the horizon. Without it
the last reward counts `terminal_weight` times, which suffices for tasks of reaching a state.

Differs from the paper:
    - the critic is trained on TD(lambda) returns of the last rollout only, without a target network;
    - an environment whose episode ends inside the horizon contributes nothing more until the next one.

A comparison of results with those of other learners must state that gradients are analytic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.algorithms.advantage import chunk_reward, clamped_targets, gae, next_values, values
from embodied.algorithms.finite import check_finite, gradient_norm
from embodied.algorithms.micro_batch import saved_bytes
from embodied.algorithms.minibatches import Minibatches
from embodied.algorithms.parts import Composite
from embodied.algorithms.passes import Passes
from embodied.algorithms.schedule import linear_decay
from embodied.configuration import Configuration, Fraction, Limit, NonNegativeFloat, PositiveInt
from embodied.data.episodes import Episodes
from embodied.environment import DifferentiableEnvironment, Environment
from embodied.errors import DivergedError, UserError
from embodied.policy import DeterministicPolicy, TrainablePolicy
from embodied.rollout.differentiable import DifferentiableCollector
from embodied.rollout.rollout import Rollout
from embodied.world import ALONE, World


@dataclass
class BPTTConfig(Configuration):
    """Hyper-parameters; `rollout_length` is the horizon. The learning rate decays linearly to its `final_lr_share`.

    The gradient of an environment's return by one of its actions is scaled down to norm `max_action_gradient`, in units
    of reward, before it flows on to earlier actions: otherwise few environments that the policy does not yet stabilise
    decide its gradient, for theirs grow exponentially with the horizon. inf does not limit it.
    """

    rollout_length: PositiveInt = 48
    learning_rate: NonNegativeFloat = 5e-3
    final_lr_share: Fraction = 0.05
    max_gradient_norm: Limit = 0.5
    max_action_gradient: Limit = math.inf
    discount: Fraction = 1.0
    terminal_weight: NonNegativeFloat = 5.0
    critic: bool = False
    value_learning_rate: NonNegativeFloat = 1e-3
    value_epochs: PositiveInt = 4
    value_minibatch: PositiveInt = 1024
    gae_lambda: Fraction = 0.95

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range or do not go together."""
        super().__post_init__()
        if self.critic and self.discount >= 1.0:
            raise UserError(f"expected a discount below 1 with critic=true, got {self.discount}")

    @property
    def reads_demonstrations(self) -> bool:
        """Whether demonstrations are read: never."""
        return False

    @property
    def max_staleness(self) -> int:
        """Updates that a rollout's policy may be behind: 0, because gradients flow through the rollout."""
        return 0

    def build(
        self,
        policy: TrainablePolicy,
        demonstrations: Episodes | None,
        env: Environment,
        generator: torch.Generator,
    ) -> BPTT:
        """Build the learner of `policy` in `env`; the demonstrations are not used.

        Raises:
            UserError: for an environment or a policy without gradients.
        """
        if not isinstance(env, DifferentiableEnvironment):
            raise UserError("expected a differentiable simulator for algorithm=bptt; use algorithm=ppo")
        if not isinstance(policy, DeterministicPolicy):
            raise UserError("expected a policy with deterministic actions for algorithm=bptt; use policy=mlp")
        return BPTT(policy, self, generator)


class BPTT(Composite):
    """Learner that maximises the return of differentiable rollouts by gradient ascent."""

    starts = None

    def __init__(self, policy: DeterministicPolicy, config: BPTTConfig, generator: torch.Generator) -> None:
        self.policy = policy
        self.config = config
        self.generator = generator
        self.parameters = policy.mean_parameters()
        self.optimiser = torch.optim.Adam(self.parameters, config.learning_rate, fused=True)
        self.value_optimiser = torch.optim.Adam(policy.critic_parameters(), config.value_learning_rate, fused=True)
        self.gradient_steps = 0

    @property
    def collector(self) -> Callable[..., DifferentiableCollector]:
        """Factory of the collector, which limits the gradients through actions."""
        return partial(DifferentiableCollector, max_action_gradient=self.config.max_action_gradient)

    def update(self, rollout: Rollout, progress: float, world: World = ALONE) -> dict[str, float]:
        """Take one gradient step of the actor, `value_epochs` of the critic; returns the mean reward and losses.

        Raises:
            DivergedError: before a step whose objective, loss or gradient is not finite.
        """
        linear_decay(self.optimiser, progress, self.config.final_lr_share, self.config.learning_rate)
        objective = self._objective(rollout)
        check_finite({"objective": objective.detach()}, self.gradient_steps + 1)
        self.optimiser.zero_grad()
        # through the simulator, back to all actions of the horizon
        (-objective).backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.max_gradient_norm)
        if not norm.isfinite():
            raise DivergedError(
                f"the gradient through the simulator became {float(norm)} at gradient step {self.gradient_steps + 1};"
                " try a shorter algorithm.rollout_length or a lower learning rate"
            )
        self.optimiser.step()
        self.gradient_steps += 1
        metrics = {"objective": float(objective.detach()), "gradient_norm": float(norm)}
        return metrics | (self._fit_value(rollout, world) if self.config.critic else {})

    def _objective(self, rollout: Rollout) -> Tensor:
        """Objective to maximise: mean discounted return per decision.

        It is the mean over environments of sum_t discount^t r_t plus the estimated return after the horizon, divided
        by the horizon.
        """
        reward = chunk_reward(rollout.reward, self.config.discount)
        # control steps before each decision: J = mean_n (sum_t gamma^steps_t r_t + gamma^steps_T V(s_T)) / T
        steps = rollout.executed.sum(-1).cumsum(0) - rollout.executed.sum(-1)
        total = (self.config.discount ** steps.to(reward.dtype) * reward).sum(0)
        if self.config.critic:
            value = self.policy.value(rollout.last_observation.to(self.policy.device)).to(reward.device)
            # Gradients reach the actor through V(s_T), too.
            decay = self.config.discount ** rollout.executed.sum((0, -1)).to(reward.dtype)
            rest = decay * value * ~rollout.terminated.any(0)  # no value after a termination inside the horizon
        else:
            rest = (self.config.terminal_weight - 1.0) * reward[-1]
        return (total + rest).mean() / len(reward)

    def _fit_value(self, rollout: Rollout, world: World = ALONE) -> dict[str, float]:
        """Regress the critic on TD(lambda) returns; returns the mean loss as "value_loss", and `clamped_targets`."""
        observation = rollout.observation.detach()
        value = values(self.policy, rollout.observation)
        _, returns = gae(
            rollout.reward.detach(),
            rollout.executed,
            rollout.terminated,
            rollout.truncated,
            value,
            next_values(self.policy, rollout, value, world),
            discount=self.config.discount,
            gae_lambda=self.config.gae_lambda,
        )
        batch = TensorDict({"observation": observation, "return": returns}, list(returns.shape)).flatten(0, 1)
        minibatches = Minibatches(rollout.executed.any(-1), world)
        losses = []
        for _ in range(self.config.value_epochs):
            for rows, counted in minibatches.draw(self.config.value_minibatch, self.generator):
                minibatch = batch[rows.to(returns.device)].to(self.policy.device)
                # L_V = mean (V(s) - G^lambda)^2 over the decisions that were executed, averaged over processes;
                # or of the cross-entropy of categorical values
                outputs = self.policy.value_outputs(minibatch["observation"])
                error = self.policy.value_head.errors(outputs, minibatch["return"])
                counted = counted.to(error.device)
                count = float(world.sum(counted.sum())) / world.size
                loss = torch.where(counted, error, 0.0).sum() / count
                self.value_optimiser.zero_grad()
                loss.backward()
                gradient = gradient_norm(self.policy.critic_parameters())
                check_finite({"value_loss": loss.detach(), "gradient of the critic": gradient}, self.gradient_steps)
                self.value_optimiser.step()
                losses.append(loss.detach())
        clamped = clamped_targets(self.policy.value_head, returns[rollout.executed.any(-1)], world)
        return {"value_loss": float(torch.stack(losses).mean()), **clamped}

    def largest_pass(self, passes: Passes) -> int | None:
        """Bytes that all actions of a horizon store, without the simulator."""
        observation = passes.observation(passes.num_envs)
        return passes.rollout_length * saved_bytes(lambda: self.policy.actions(observation))

    def state_dict(self) -> dict[str, Any]:
        """Optimisers, counter and the generator."""
        return {
            "optimiser": self.optimiser.state_dict(),
            "value_optimiser": self.value_optimiser.state_dict(),
            "gradient_steps": self.gradient_steps,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.optimiser.load_state_dict(state["optimiser"])
        self.value_optimiser.load_state_dict(state["value_optimiser"])
        self.gradient_steps = state["gradient_steps"]
        self.generator.set_state(state["generator"])
