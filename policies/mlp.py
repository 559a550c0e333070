"""Gaussian actor-critic for small control policies: two MLPs on concatenated observations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import PositiveFloat, PositiveInt
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.export.network import Network
from embodied.networks.value_head import ValueHead
from embodied.policy import (
    Decision,
    DeterministicPolicy,
    Evaluation,
    PolicyConfig,
    Reparameterised,
    inference,
    needs_value,
    repeated,
    sum_of_executed,
)
from embodied.world import ALONE, World
from policies.flat import FlatObservations
from policies.kernels.flow import gaussian_entropy, gaussian_log_prob
from policies.tanh import tanh


@dataclass
class MLPConfig(PolicyConfig):
    """Layer widths and the initial standard deviation in units of half the action range.

    `reciprocal` observations are distances, read as `network.reciprocal`, which resolves near distances to the
    centimetre. With `running_statistics` observations are normalised by all observations since training began instead
    of the first ones, for tasks whose observations change as the policy learns (locomotion). The critic has a head of
    `values`.
    """

    hidden: list[PositiveInt] = field(default_factory=lambda: [256, 256])
    initial_std: PositiveFloat = 0.5
    reciprocal: list[str] = field(default_factory=list)
    running_statistics: bool = False
    values: ValueHead = field(default_factory=ValueHead)

    def build(self, contract: Contract) -> MLPPolicy:
        """Build the policy for `contract`; only the critic reads privileged observations."""
        return MLPPolicy(contract, self)


class GaussianPolicy(FlatObservations, Reparameterised):
    """Gaussian policy over H actions: tanh limits the mean, the deviation is one learned number per element.

    The critic also reads privileged observations, the actor never does. Actions are clamped to the contract's limits
    after sampling; `sample` has the action before clamping and scaling, for which the log-probability (P = 1, summed
    over the K executed actions) is defined.

    Raises:
        UserError: if an observation has a variable axis or the action has no limits.
    """

    def __init__(self, contract: Contract, config: MLPConfig) -> None:
        super().__init__(contract, config.reciprocal, "policy=mlp", "policy=flow")
        self.contract = contract
        self.config = config
        if not contract.action.low:
            raise UserError("MLPPolicy needs action limits; set low and high in the action spec")
        chunk = contract.horizon * contract.action.shape[-1]
        self.actor = _layers(self.observed, config.hidden, chunk).append(nn.Tanh())
        self.value_head = config.values
        self.critic = _layers(self.feature_size, config.hidden, self.value_head.outputs)
        self.log_std = nn.Parameter(torch.full((chunk,), math.log(config.initial_std)))
        low = torch.tensor(contract.action.low)
        high = torch.tensor(contract.action.high)
        self.register_buffer("centre", (low + high) / 2)
        self.register_buffer("half_range", (high - low) / 2)

    def critic_parameters(self) -> list[nn.Parameter]:
        """Parameters that only `value` uses."""
        return list(self.critic.parameters())

    def fit(self, observation: TensorDict, actions: Tensor) -> None:
        """Compute normalisation statistics from observations [N]; actions are scaled by the contract's limits."""
        self.fit_statistics(observation)

    def renormalise(self, observation: TensorDict, world: World = ALONE) -> None:
        """Merge observations [...] into the normalisation if it uses running statistics."""
        if self.config.running_statistics:
            self.merge_statistics(observation, world)

    @inference
    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Sample chunks [N, H, A]; `sample["raw"]` is [N, H * A]."""
        if needs_value(self, observation, deterministic):
            mean, outputs = self._means_and_value_outputs(observation)
            value = self.value_head.values(outputs)
        else:
            mean = self._means(observation)
            value = None
        sample, actions, log_prob = self._sample(mean, self._noise(mean, deterministic, generator))
        return Decision(actions, sample, log_prob, value)

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Shape (H, A) of the noise of one observation."""
        return self.contract.horizon, self.contract.action.shape[-1]

    def sample(self, observation: TensorDict, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [N, H, A] from standard normal `noise` [N, H, A], and log_prob [N, 1], differentiable.

        As in `act` the log-probability is that of the actions before clamping; clamped elements have no gradient.
        """
        _, actions, log_prob = self._sample(repeated(self._means(observation), len(noise)), noise.flatten(1))
        return actions, log_prob.sum(-2)

    def evaluate(self, observation: TensorDict, sample: TensorDict) -> Evaluation:
        """Log-probability of stored raw actions."""
        mean, outputs = self._means_and_value_outputs(observation)
        std = self.log_std.exp()
        log_prob = self._terms(gaussian_log_prob(sample["raw"], mean, std))
        entropy = self._terms(gaussian_entropy(std).expand_as(mean))
        terms = (sum_of_executed(each, sample) for each in (log_prob, entropy))
        return Evaluation(*terms, self.value_head.values(outputs), outputs)

    def value(self, observation: TensorDict) -> Tensor:
        """Expected discounted return [N]; for sequences [T, N], [T, N]."""
        return self.value_head.values(self.value_outputs(observation))

    def value_outputs(self, observation: TensorDict) -> Tensor:
        """Outputs [..., O] of the critic."""
        return _run(self.critic, self.standardised(observation, self.keys))

    def deployable(self) -> Network:
        """Network for export: the mean of the executed actions, including the normaliser."""
        if not self.fitted:
            raise UserError("the policy has no normalisation statistics; train it before exporting")
        distances = [key for key in self.reciprocal if key in self.actor_keys]
        mean = self.mean[: self.observed]
        scale = self.scale[: self.observed]
        return Network.of(self.contract, mean, scale, self.actor, distances)

    def loss(self, observation: TensorDict, actions: Tensor, valid: Tensor) -> Tensor:
        """Behaviour cloning: mean squared error of the mean action over valid steps, in half action ranges."""
        mean = self._means(observation).view_as(actions)
        error = (mean - (actions - self.centre) / self.half_range).square().mean(-1)
        # L = sum(valid * |mean - a|^2) / sum(valid)
        return (error * valid).sum() / valid.sum().clamp_min(1)

    def _sample(self, mean: Tensor, noise: Tensor | None) -> tuple[TensorDict, Tensor, Tensor]:
        """Sample [N], actions [N, H, A] and terms of log_prob [N, K, 1] of raw `mean` and standard normal `noise`.

        Mean and noise are [N, H * A]; without noise the sample is the mean.
        """
        std = self.log_std.exp()
        # a = mean + std z, so that a ~ N(mean, std^2), scored before clamping
        raw = mean if noise is None else mean + std * noise
        log_prob = self._terms(gaussian_log_prob(raw, mean, std))
        return TensorDict({"raw": raw}, batch_size=[len(raw)]), self._to_robot(raw.clamp(-1.0, 1.0)), log_prob

    def _noise(self, mean: Tensor, deterministic: bool, generator: torch.Generator | None) -> Tensor | None:
        """Standard normal noise of the shape of `mean`; None of deterministic samples."""
        return None if deterministic else torch.randn(mean.shape, generator=generator, device=mean.device)

    def _means(self, observation: TensorDict) -> Tensor:
        """Means of raw actions [N, H * A]."""
        return _run(self.actor, self._inputs(observation))

    def _means_and_value_outputs(self, observation: TensorDict) -> tuple[Tensor, Tensor]:
        """Means [..., H * A] and the critic's outputs [..., O], whose standardised observations are computed once."""
        inputs = self.standardised(observation, self.keys)
        return _run(self.actor, inputs[..., : self.observed]), _run(self.critic, inputs)

    def _inputs(self, observation: TensorDict) -> Tensor:
        return self.standardised(observation, self.actor_keys)

    def _to_robot(self, raw: Tensor) -> Tensor:
        return raw.view(len(raw), self.contract.horizon, -1) * self.half_range + self.centre

    def _terms(self, elementwise: Tensor) -> Tensor:
        """Sums [..., K, 1] over the elements of each executed action, from elements [..., H * A]."""
        actions = elementwise.unflatten(-1, (self.contract.horizon, -1))
        return actions[..., : self.contract.executed, :].sum(-1, keepdim=True)


class MLPPolicy(GaussianPolicy, DeterministicPolicy):
    """GaussianPolicy whose actor is an MLP."""

    def mean_parameters(self) -> list[nn.Parameter]:
        """Parameters of the mean only."""
        return list(self.actor.parameters())

    def actions(self, observation: TensorDict) -> Tensor:
        """Mean actions [N, H, A], differentiable."""
        return self._to_robot(self._means(observation))

    def dense_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Layers of the actor as (weight [out, in], bias [out]) with tanh after each, including the normaliser.

        They map physical observations to actions in half ranges around the middle, differentiably.
        """
        if self.reciprocal:
            raise UserError("bptt supports only dense layers, not reciprocals; train with policy.reciprocal=[]")
        linear = [layer for layer in self.actor if isinstance(layer, nn.Linear)]
        # W (x - mean) / scale + b = (W / scale) x + (b - (W / scale) mean)
        weight = linear[0].weight / self.scale[: self.observed]
        bias = linear[0].bias - weight @ self.mean[: self.observed]
        return [(weight, bias), *((layer.weight, layer.bias) for layer in linear[1:])]


def _run(layers: nn.Sequential, x: Tensor) -> Tensor:
    """Apply `layers` to `x`, with our own tanh."""
    for layer in layers:
        x = tanh(x) if isinstance(layer, nn.Tanh) else layer(x)
    return x


def _layers(inputs: int, hidden: list[int], outputs: int) -> nn.Sequential:
    sizes = [inputs, *hidden]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    last = nn.Linear(sizes[-1], outputs)
    nn.init.orthogonal_(last.weight, 0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)
