"""Gaussian squashed by tanh, whose deviation depends on the observation: the actor of soft actor-critic.

Source: arXiv 1801.01290, appendix C. The actor and the critic of `value` have an encoder each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import PositiveFloat
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.export.network import Network
from embodied.policy import (
    Decision,
    DeterministicPolicy,
    Evaluation,
    Reparameterised,
    inference,
    repeated,
    sum_of_executed,
    value_if_needed,
)
from policies.actor_critic import ActorCritic, ActorCriticConfig, dense_layers
from policies.flat import FlatEncoder, PlainEncoder
from policies.tanh import tanh

LOG_STD_RANGE = -10.0, 2.0
"""Bounds of the logarithm of the deviation before tanh."""
SATURATED = 2.5
"""Bound of imitated means before tanh, which is 0.987 there."""


@dataclass
class SquashedConfig(ActorCriticConfig):
    """Options of ActorCriticConfig, and the typical initial deviation before tanh."""

    initial_std: PositiveFloat = 1.0

    def build(self, contract: Contract) -> SquashedPolicy:
        """Build the policy for `contract`; only the critic reads privileged observations."""
        return SquashedPolicy(contract, self)


class SquashedPolicy(ActorCritic, Reparameterised, DeterministicPolicy):
    """Policy of chunks tanh(u), u ~ N(mean, std^2), scaled to the contract's limits.

    The log-probability (P = 1, summed over the K executed actions) is that of actions scaled to [-1, 1]; `sample` has
    u, from which it can be computed where tanh is saturated. Entropies are those of u.

    Raises:
        UserError: if the action has no limits, or the contract lacks observations of the encoder.
    """

    actor: nn.Sequential

    def __init__(self, contract: Contract, config: SquashedConfig) -> None:
        super().__init__(contract, config, "policy=squashed")

    def new_actor(self) -> nn.Sequential:
        """Layers whose outputs are means, then logarithms of deviations."""
        chunk = self.contract.horizon * self.contract.action.shape[-1]
        layers = dense_layers([self.encoder.out_features, *self.config.hidden, 2 * chunk])
        with torch.no_grad():
            # the same deviation in all observations, which imitation leaves so
            layers[-1].weight[chunk:] = 0.0
            layers[-1].bias[chunk:] = math.log(self.config.initial_std)
        return layers

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Shape (H, A) of the noise of one observation."""
        return self.contract.horizon, self.contract.action.shape[-1]

    @inference
    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Sample chunks [N, H, A]; `sample["raw"]` [N, H, A] is u."""
        observation = self.encoder.read(observation)
        mean, log_std = self._gaussian(observation)
        drawn = torch.zeros if deterministic else partial(torch.randn, generator=generator)
        raw, log_prob = self._sample(mean, log_std, drawn(mean.shape, device=mean.device))
        value = value_if_needed(self, observation, deterministic)
        return Decision(self.to_robot(tanh(raw)), TensorDict({"raw": raw}, batch_size=[len(raw)]), log_prob, value)

    def sample(self, observation: TensorDict, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [N, H, A] from standard normal `noise` [N, H, A], and log_prob [N, 1], differentiable."""
        mean, log_std = (repeated(each, len(noise)) for each in self._gaussian(observation))
        raw, log_prob = self._sample(mean, log_std, noise)
        return self.to_robot(tanh(raw)), log_prob.sum(-2)

    def actions(self, observation: TensorDict) -> Tensor:
        """Deterministic chunks [N, H, A] in robot units, differentiable."""
        mean, _ = self._gaussian(observation)
        return self.to_robot(tanh(mean))

    def mean_parameters(self) -> list[nn.Parameter]:
        """Parameters of the actor, whose outputs are also the deviations, which `actions` has no gradient for."""
        return self.actor_parameters()

    def evaluate(self, observation: TensorDict, sample: TensorDict) -> Evaluation:
        """Log-probability of stored chunks; the entropy is that before tanh, which has a closed form."""
        observation = self.encoder.read(observation)
        mean, log_std = self._gaussian(observation)
        raw = sample["raw"]
        log_prob = self._log_prob_terms(raw, log_std, (raw - mean) * (-log_std).exp())
        entropy = self._terms(log_std + 0.5 * math.log(2.0 * math.pi * math.e))
        terms = (sum_of_executed(each, sample) for each in (log_prob, entropy))
        outputs = self.value_outputs(observation)
        return Evaluation(*terms, self.value_head.values(outputs), outputs)

    def loss(self, observation: TensorDict, actions: Tensor, valid: Tensor) -> Tensor:
        """Behaviour cloning: mean squared error of the deterministic action over valid steps, in half action ranges.

        It leaves the deviations alone: a likelihood would let them collapse on demonstrations that agree. Means of
        actions at the limits, as of a gripper, stay where tanh has a gradient. Further out no value could move them,
        and soft actor-critic would make all other elements random to make up for the entropy that they lack.
        """
        observation, actions = self.augmented(observation, actions)
        mean, _ = self._gaussian(observation)
        # L = sum(valid * (|tanh(mean) - a|^2 + max(0, |mean| - SATURATED)^2)) / sum(valid), means over elements
        error = (tanh(mean) - self.normalised(actions)).square() + (mean.abs() - SATURATED).relu().square()
        return (error.mean(-1) * valid).sum() / valid.sum().clamp_min(1)

    def deployable(self) -> Network:
        """Network for export: the deterministic executed actions, including the normaliser.

        Raises:
            UserError: for an encoder of objects or pictures, or without normalisation statistics.
        """
        encoder = self.encoder
        if not isinstance(encoder, FlatEncoder | PlainEncoder):
            raise UserError("policy=squashed is exported with encoder=plain or flat; serve this checkpoint instead")
        if not encoder.fitted:
            raise UserError("the policy has no normalisation statistics; train it before exporting")
        distances = [key for key in encoder.reciprocal if key in encoder.actor_keys]
        mean = encoder.mean[: encoder.observed]
        scale = encoder.scale[: encoder.observed]
        layers = [*(encoder.layers if isinstance(encoder, FlatEncoder) else []), *self.actor, nn.Tanh()]
        return Network.of(self.contract, mean, scale, layers, distances)

    def _gaussian(self, observation: TensorDict) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the deviation of u, each [N, H, A]."""
        outputs = self.actor(self.encoder(observation)).unflatten(-1, (2, *self.noise_shape))
        return outputs.select(-3, 0), outputs.select(-3, 1).clamp(*LOG_STD_RANGE)

    def _sample(self, mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Samples u [N, H, A] from standard normal `noise` z, and terms of their log-probability [N, K, 1]."""
        # u = mean + std z
        raw = torch.addcmul(mean, log_std.exp(), noise)
        return raw, self._log_prob_terms(raw, log_std, noise)

    def _log_prob_terms(self, raw: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
        """Terms [N, K, 1] of the log-probability of tanh(u), from u = `raw` [N, H, A] and its standard normal noise."""
        return self._terms(squashed_log_prob(raw, log_std, noise))

    def _terms(self, elements: Tensor) -> Tensor:
        """Sums [N, K, 1] over the elements of each executed action, from elements [N, H, A]."""
        return elements[:, : self.contract.executed].sum(-1, keepdim=True)


def squashed_log_prob(raw: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
    """Elementwise log-probability of tanh(u), from u = `raw` and the standard normal `noise` z that it comes from."""
    # log p(tanh u) = log N(u) - log(1 - tanh^2 u) = -z^2 / 2 - log std - log(2 pi) / 2 - log(1 - tanh^2 u),
    # log(1 - tanh^2 u) = 2 (log 2 - u - log(1 + exp(-2 u)))
    constant = 0.5 * math.log(2.0 * math.pi) + 2.0 * math.log(2.0)
    gaussian = noise.square().mul(-0.5).sub(constant) - log_std
    return gaussian.add(raw + nn.functional.softplus(-2.0 * raw), alpha=2.0)
