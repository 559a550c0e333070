"""Small actor that steers a policy which generates chunks from noise and stays frozen while the actor learns.

Sources: the initial noise, DSRL (arXiv 2506.15799); a residual, policy decorator (arXiv 2412.13630); one step in place
of the denoising steps, FQL (arXiv 2502.02538). The actor reads the features of the policy's own encoder.

Letters: N observations, G generated and K executed actions, A action dimension, F features.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import Configuration, PositiveFloat, PositiveInt
from embodied.contract import ACTION_PREFIX
from embodied.errors import UserError
from embodied.policy import BASE, INITIAL_NOISE, Decision, SteeredPolicy, Steering, value_if_needed
from embodied.seeding import fixed_noise
from policies.actor_critic import dense_layers
from policies.kernels.sampling import undefined_log_prob
from policies.squashed import LOG_STD_RANGE, squashed_log_prob

ENCODED = "encoded"
"""Observation: the features that the small actor reads."""


@dataclass
class SteeringConfig(Configuration):
    """Quantity that a small actor with layers `hidden` chooses: the initial noise, a residual, or chunks in one step.

    Initial noise is within `noise_bound`, residuals are within `residual_scale` in half ranges of the action; before
    tanh both have the `initial_std` at first. With `shared_noise` a one-step actor that acts deterministically has the
    same noise in all observations, so that it is a network of dense layers.
    """

    kind: Steering = Steering.NONE
    hidden: list[PositiveInt] = field(default_factory=lambda: [256, 256])
    noise_bound: PositiveFloat = 1.5
    residual_scale: PositiveFloat = 0.1
    initial_std: PositiveFloat = 1.0
    shared_noise: bool = False

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and for options that do not go together."""
        super().__post_init__()
        if self.shared_noise and self.kind is not Steering.ONE_STEP:
            raise UserError("policy.steering.shared_noise needs policy.steering.kind=one_step")


class SteeringActor(nn.Module):
    """Network from features [N, F] to what `config.kind` names.

    That are variables [N, G, A] (noise) or [N, K, A] (residual) in (-1, 1), a Gaussian squashed by tanh, or a
    normalised chunk [N, G, A] from noise. A residual's actor also reads the executed actions of the policy, in half
    ranges, [N, K, A].
    """

    def __init__(self, features: int, generated: int, executed: int, actions: int, config: SteeringConfig) -> None:
        super().__init__()
        self.config = config
        self.shape = (executed if config.kind is Steering.RESIDUAL else generated, actions)
        size = math.prod(self.shape)
        inputs = features if config.kind is Steering.NOISE else features + size
        outputs = size if config.kind is Steering.ONE_STEP else 2 * size
        self.layers = dense_layers([inputs, *config.hidden, outputs])
        if config.kind is not Steering.ONE_STEP:
            # at first the policy acts as it would alone, but for exploration
            nn.init.zeros_(self.layers[-1].weight)
            nn.init.zeros_(self.layers[-1].bias)
            with torch.no_grad():
                self.layers[-1].bias[size:] += math.log(config.initial_std)

    def chunk(self, features: Tensor, noise: Tensor) -> Tensor:
        """Normalised chunk [N, G, A] from `noise` [N, G, A]."""
        return self.layers(torch.cat((features, noise.flatten(1)), -1)).unflatten(-1, self.shape)

    def variables(self, features: Tensor, noise: Tensor, base: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Variables in (-1, 1) from standard normal `noise`, both of `shape`, and their log_prob [N, 1]."""
        inputs = features if base is None else torch.cat((features, base.flatten(1)), -1)
        mean, log_std = self.layers(inputs).unflatten(-1, (2, *self.shape)).unbind(1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
        # u = mean + std z
        raw = torch.addcmul(mean, log_std.exp(), noise)
        log_prob = squashed_log_prob(raw, log_std, noise).flatten(1).sum(-1, keepdim=True)
        return raw.tanh(), log_prob


class Steerable(SteeredPolicy):
    """Base of policies that generate chunks from noise by `_generate`, with or without a small actor."""

    past: int
    action_mean: Tensor
    action_std: Tensor
    action_low: Tensor
    action_high: Tensor
    critic_reads: Sequence[str]
    """Names of the observations that critics read, beside the action prefix."""
    generates_from_features = False
    """Whether chunks are generated from nothing but the features that the small actor reads."""

    def add_steering(self, config: SteeringConfig, features: int, elements: int) -> None:
        """Add the small actor of `config`, if it names one; it reads `features`, a generated action has `elements`."""
        self.steering = config.kind
        self.elements = elements
        if self.steering is Steering.NONE:
            self.steers = False
            return
        self.steering_actor = SteeringActor(features, self.generated, self.contract.executed, elements, config)
        self.register_buffer("steers", torch.zeros((), dtype=torch.bool))
        self.register_load_state_dict_pre_hook(_with_own_actor)

    @property
    def scores(self) -> bool:
        """Whether samples have a log-probability: not those of the small actor."""
        return not self.steers

    @property
    def noise_bound(self) -> float:
        """See `SteeredPolicy.noise_bound`."""
        return self.steering_actor.config.noise_bound

    def start_steering(self, *, keep_ranking: bool = False) -> None:
        """See `SteeredPolicy.start_steering`."""
        assert isinstance(self.steers, Tensor)
        self.steers.fill_(True)

    def stop_steering(self) -> None:
        """Act without the small actor from now on."""
        if isinstance(self.steers, Tensor):
            self.steers.fill_(False)

    def check_inpaints(self) -> None:
        """Raise UserError if a small actor steers the policy, which then cannot continue running chunks."""
        if self.steers:
            raise UserError("a policy that a small actor steers cannot inpaint; use execution=blend")

    def steering_parameters(self) -> list[nn.Parameter]:
        """Parameters that only the small actor uses."""
        return [] if self.steering is Steering.NONE else list(self.steering_actor.parameters())

    def actor_parameters(self) -> list[nn.Parameter]:
        """All parameters that neither critics nor the small actor use alone."""
        steering = set(self.steering_parameters())
        return [parameter for parameter in super().actor_parameters() if parameter not in steering]

    @property
    def steering_noise_shape(self) -> tuple[int, int]:
        """See `SteeredPolicy.steering_noise_shape`."""
        residual = self.contract.executed if self.steering is Steering.RESIDUAL else 0
        return self.generated + residual, self.elements

    @abstractmethod
    def _inputs_of(self, observation: TensorDict) -> Any:  # noqa: ANN401 - of the policy
        """Inputs from which chunks are generated, such as features [N, F]."""

    def _features_of(self, inputs: Any) -> Tensor:  # noqa: ANN401 - of the policy
        """Features [N, F] that the small actor reads, from those `inputs`."""
        return inputs

    @abstractmethod
    def _generate(
        self,
        x: Tensor,
        inputs: Any,  # noqa: ANN401 - of the policy
        deterministic: bool,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, TensorDict, Tensor]:
        """Generate normalised chunks from noise `x` [B, generated, A].

        Also returns the sample [B] and terms of its log_prob [B, K, P].
        """

    def _generate_or_map(
        self, x: Tensor, features: Tensor, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, TensorDict, Tensor]:
        """Chunks as of `_generate`, or in one step from `x` if a small actor generates them."""
        if not self.steers:
            return self._generate(x, features, deterministic, generator)
        sample = TensorDict({INITIAL_NOISE: x}, batch_size=[len(x)])
        return self.steering_actor.chunk(features, x), sample, undefined_log_prob(len(x), self.contract, x.device)

    def encoded(self, observation: TensorDict, *, generates: bool) -> TensorDict:
        """See `SteeredPolicy.encoded`."""
        if ENCODED in observation.keys() or (generates and not self.generates_from_features):  # noqa: SIM118
            return observation
        features = self._small_actor_features(observation.to(self.device))
        kept = observation.select(*self.critic_reads, ACTION_PREFIX, strict=False)
        return kept.set(ENCODED, features.to(observation[self.actor_keys[0]].device))

    def _small_actor_features(self, observation: TensorDict) -> Tensor:
        """Features [N, F] that the small actor reads, stored ones if there are any."""
        encoded = observation.get(ENCODED, None)
        return self._features_of(self._inputs_of_features(observation)) if encoded is None else encoded

    def _inputs_of_features(self, observation: TensorDict) -> Any:  # noqa: ANN401 - of the policy
        """Inputs that `_features_of` needs, fewer than those from which chunks are generated or the same."""
        return self._frozen_inputs(observation)

    def generate(self, observation: TensorDict, noise: Tensor) -> Tensor:
        """See `SteeredPolicy.generate`."""
        chunk, _, _ = self._generate(noise, self._inputs_of(observation), True, None)
        return self.predicted(chunk)

    def initial_noise(self, observation: TensorDict, noise: Tensor) -> tuple[Tensor, Tensor]:
        """See `SteeredPolicy.initial_noise`."""
        return self._initial_noise(self._small_actor_features(observation), noise)

    def _initial_noise(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        variables, log_prob = self.steering_actor.variables(features, noise)
        return self.noise_bound * variables, log_prob

    def steered(self, observation: TensorDict, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `SteeredPolicy.steered`; noise of the residual that is absent is zero."""
        actions, log_prob, initial, _ = self._steered(observation, noise)
        return actions, log_prob, initial

    def _steered(self, observation: TensorDict, noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `steered`, with the executed actions [N, K, A] that a residual corrects."""
        initial = noise[:, : self.generated]
        inputs = self._frozen_inputs(observation)
        features = self._features_of(inputs)
        if self.steering is Steering.NOISE:
            initial, log_prob = self._initial_noise(features, initial)
            with torch.no_grad():
                chunk, _, _ = self._generate(initial, inputs, True, None)
            return self.predicted(chunk), log_prob, initial, None
        if self.steering is Steering.ONE_STEP:
            chunk = self.steering_actor.chunk(features, initial)
            return self.predicted(chunk), chunk.new_full((len(chunk), 1), torch.nan), initial, None
        with torch.no_grad():
            base = self.predicted(self._generate(initial, inputs, True, None)[0])
        executed = self.contract.executed
        scaled = (base[:, :executed] - (self.action_high + self.action_low) / 2) / self.half_range
        residual_noise = noise[:, self.generated :] if noise.shape[1] > self.generated else torch.zeros_like(scaled)
        variables, log_prob = self.steering_actor.variables(features, residual_noise, scaled)
        # a = clip(a_base + s u), s in half ranges
        residual = self.steering_actor.config.residual_scale * self.half_range * variables
        corrected = (base[:, :executed] + residual).clamp(self.action_low, self.action_high)
        return torch.cat((corrected, base[:, executed:]), 1), log_prob, initial, base[:, :executed]

    def steered_decision(self, observation: TensorDict, noise: Tensor, deterministic: bool) -> Decision:
        """Decision of the small actor for standard normal `noise`, see `steered`."""
        actions, _, initial, base = self._steered(observation, noise)
        sample = TensorDict({INITIAL_NOISE: initial}, batch_size=[len(actions)])
        if base is not None:
            sample[BASE] = base
        terms = undefined_log_prob(len(actions), self.contract, actions.device)
        return Decision(actions, sample, terms, value_if_needed(self, observation, deterministic))

    def distance_of_one_step(self, observation: TensorDict, noise: Tensor) -> Tensor:
        """See `SteeredPolicy.distance_of_one_step`."""
        inputs = self._frozen_inputs(observation)
        with torch.no_grad():
            generated, _, _ = self._generate(noise, inputs, True, None)
        # not clamped, so that gradients lead back from beyond the limits
        chunk = self.steering_actor.chunk(self._features_of(inputs), noise)
        difference = (chunk - generated) * self.action_std / self.half_range
        return difference.square().mean()

    @torch.no_grad()
    def layers_of_one_step(self, added: Tensor) -> list[nn.Module]:
        """Layers on the CPU from features [N, F] to H actions in half ranges, for noise that all observations share.

        The features `added` [F] are the same in all observations, too.
        """
        layers = list(copy.deepcopy(self.steering_actor.layers).cpu())
        first = layers[0]
        assert isinstance(first, nn.Linear)
        shape = (1, self.generated, self.contract.action.shape[-1])
        constant = torch.cat((added.cpu(), fixed_noise(torch.zeros(1, 0), shape).flatten()))
        # W (f + p, z) + b = W_f f + (W (p, z) + b)
        layers[0] = _linear(first.weight[:, : len(added)], first.bias + first.weight @ constant)
        last = layers[-1]
        assert isinstance(last, nn.Linear)
        predicted = slice(self.past, self.past + self.contract.horizon)
        half_range = self.half_range.cpu()
        scale = self.action_std.cpu() / half_range
        centre = (self.action_high + self.action_low).cpu() / 2
        # (x std + mean - centre) / half range
        weight = last.weight.unflatten(0, self.steering_actor.shape)[predicted] * scale.unsqueeze(1)
        bias = last.bias.unflatten(0, self.steering_actor.shape)[predicted] * scale
        layers[-1] = _linear(weight.flatten(0, 1), (bias + (self.action_mean.cpu() - centre) / half_range).flatten())
        return layers

    @property
    def half_range(self) -> Tensor:
        """Half of the range of each action element, [A]."""
        return (self.action_high - self.action_low) / 2

    def predicted(self, chunk: Tensor) -> Tensor:
        """Predicted actions [N, H, A] in robot units of normalised chunks [N, G, A]."""
        return self.to_robot(chunk[:, self.past : self.past + self.contract.horizon])

    def to_robot(self, x: Tensor) -> Tensor:
        """Convert normalised actions to robot units, clamped to the contract's limits."""
        # x std + mean, clamped
        return (x * self.action_std + self.action_mean).clamp(self.action_low, self.action_high)

    def _frozen_inputs(self, observation: TensorDict) -> Any:  # noqa: ANN401 - of the policy
        """Inputs of the policy, which the small actor does not train."""
        with torch.no_grad():
            return self._inputs_of(observation)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Dense layer with these weights."""
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)
    return layer


def _with_own_actor(policy: Steerable, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Add the small actor of `policy` to weights of the same policy without one, before they are loaded."""
    if f"{prefix}steers" not in state:
        own = {"steers": policy.steers, **policy.steering_actor.state_dict(prefix="steering_actor.")}
        state.update({prefix + name: value for name, value in own.items()})
