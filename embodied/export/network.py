"""Deployed form of a policy: a chain of known layers from one flat observation to the executed actions.

Policies return a `Network` (`DeployablePolicy.deployable`), which exporters read; those that generate chunks from noise
return a `chunk_network.ChunkNetwork`. Letters: N inputs, I elements of the flat observation, A elements of the flat
action (K executed actions), M of the memory, D features.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.policy import MEMORY, Policy

PRESENT = "present"
"""Name of the token element that is 1 if the token is present and 0 if its row is empty."""


SOFTENING = 0.1
"""Offset of distances before taking their reciprocal, m."""
FARTHEST = 100.0
"""Distance, m, that `Reciprocal.distances` returns if no distance has the reciprocal."""


def reciprocal(away: Tensor) -> Tensor:
    """1 / (d + `SOFTENING`), of any shape; negative distances count as zero."""
    return 1.0 / (away.clamp_min(0.0) + SOFTENING)


def distance(inverse: Tensor) -> Tensor:
    """Approximate inverse of `reciprocal`: distances between 0 and `FARTHEST`."""
    return (1.0 / inverse.clamp_min(1.0 / FARTHEST) - SOFTENING).clamp_min(0.0)


class Reciprocal(nn.Module):
    """Layer that replaces the distances in columns `first` to `last` (exclusive) of each of `spans` by reciprocals."""

    chosen: Tensor

    def __init__(self, spans: Sequence[tuple[int, int]], inputs: int) -> None:
        super().__init__()
        self.spans = list(spans)
        mask = torch.zeros(inputs, dtype=torch.bool)
        for first, last in spans:
            mask[first:last] = True
        self.register_buffer("chosen", mask)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, I] to [N, I]."""
        return torch.where(self.chosen, reciprocal(x), x)

    def distances(self, x: Tensor) -> Tensor:
        """Approximate inverse of `forward`, for `x` [..., I]: distances between 0 and `FARTHEST`."""
        return torch.where(self.chosen, distance(x), x)


class Normalise(nn.Module):
    """Layer from physical units to (x - mean) / std."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.detach().clone())
        self.register_buffer("std", std.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, I] to [N, I]."""
        return (x - self.mean) / self.std


class ToRange(nn.Module):
    """Layer from [-1, 1] to robot units between `low` and `high`; values outside are clamped."""

    low: Tensor
    high: Tensor
    centre: Tensor
    half_range: Tensor

    def __init__(self, low: Sequence[float], high: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(low))
        self.register_buffer("high", torch.tensor(high))
        self.register_buffer("centre", (self.low + self.high) / 2)
        self.register_buffer("half_range", (self.high - self.low) / 2)

    @property
    def rounding(self) -> float:
        """Rounding error of float32 for limits far from zero, in half ranges: 0 for ranges around zero."""
        largest = torch.maximum(self.low.abs(), self.high.abs())
        return float(torch.finfo(torch.float32).eps * (largest / self.half_range - 1.0).max())

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, A] to [N, A]."""
        action = x.clamp(-1.0, 1.0) * self.half_range + self.centre
        return torch.minimum(torch.maximum(action, self.low), self.high)  # rounding may exceed a limit


class GRU(nn.Module):
    """Gated recurrent unit (arXiv 1406.1078, with the reset gate after the product) that learns its initial memory.

    r, z = sigmoid(W x + U h); n = tanh(W_n x + r * U_n h); h' = n + z * (h - n)
    """

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.input = nn.Linear(inputs, 3 * size)
        self.hidden = nn.Linear(size, 3 * size)
        self.initial = nn.Parameter(torch.zeros(size))

    @property
    def size(self) -> int:
        """Size M of the memory."""
        return len(self.initial)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Next memory [N, M], which is also the output."""
        reset_x, update_x, new_x = self.input(x).chunk(3, -1)
        reset_h, update_h, new_h = self.hidden(memory).chunk(3, -1)
        # r, z = sigmoid(W x + U h);  n = tanh(W_n x + r * U_n h);  h' = n + z (h - n)
        reset = torch.sigmoid(reset_x + reset_h)
        update = torch.sigmoid(update_x + update_h)
        new = torch.tanh(new_x + reset * new_h)
        return new + update * (memory - new)


@dataclass(frozen=True)
class Tokens:
    """Position of `count` rows of `size` elements in a flat vector; column `present` marks the rows in use."""

    start: int
    count: int
    size: int
    present: int | None = None


class TokenAttention(nn.Module):
    """Attention of the own state to tokens of neighbours and obstacles, and itself, with one head (arXiv 1706.03762).

    One head of full width needs two matrices, not four: scores contain only W_K^T W_Q, outputs only W_O W_V. So the
    query is compared with the encoded tokens themselves, and their weighted mean is projected. Empty rows have zero
    weight.
    """

    def __init__(self, own: Sequence[tuple[int, int]], groups: Sequence[Tokens], width: int) -> None:
        super().__init__()
        self.columns = list(own)
        self.groups = list(groups)
        self.width = width
        self.own = nn.Linear(sum(stop - start for start, stop in own), width)
        self.encoders = nn.ModuleList(nn.Linear(group.size, width) for group in groups)
        self.query = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, I] to [N, D]."""
        own = torch.tanh(self.own(torch.cat([x[:, start:stop] for start, stop in self.columns], -1)))
        query = self.query(own).unsqueeze(-1) / math.sqrt(self.width)
        tokens = [own.unsqueeze(1)]
        scores = [(tokens[0] @ query).squeeze(-1)]
        for group, encoder in zip(self.groups, self.encoders, strict=True):
            rows = x[:, group.start : group.start + group.count * group.size].unflatten(1, (group.count, group.size))
            tokens.append(torch.tanh(encoder(rows)))
            score = (tokens[-1] @ query).squeeze(-1)
            present = group.present
            scores.append(score if present is None else score.masked_fill(rows[..., present] < 0.5, -torch.inf))
        # softmax(tokens . query / sqrt(D)), zero for empty rows
        weight = torch.softmax(torch.cat(scores, 1), -1).unsqueeze(1)
        pooled = (weight @ torch.cat(tokens, 1)).squeeze(1)
        return self.norm(own + self.output(pooled))


def chain(layers: Iterable[nn.Module], x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Run `layers` on `x` [N, ...]; return the output and the next memory."""
    for layer in layers:
        if isinstance(layer, GRU):
            assert memory is not None, "a network with a GRU needs its memory"
            x = memory = layer(x, memory)
        else:
            x = layer(x)
    return x, memory


class Network(nn.Module):
    """Layers of a deterministic policy, including normalisation and action limits.

    `contract` lists its observations, in the order of the flat observation, and the action, of which it returns K.
    """

    def __init__(self, contract: Contract, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.contract = contract
        self.layers = nn.ModuleList(layers)
        assert sum(isinstance(layer, GRU) for layer in self.layers) <= 1, "one memory at most"

    @staticmethod
    def of(
        contract: Contract, mean: Tensor, std: Tensor, layers: Iterable[nn.Module], distances: Sequence[str] = ()
    ) -> Network:
        """Deploy `layers`, which map observations normalised by `mean` and `std` [I] to H actions in half ranges.

        The observations named in `distances` are replaced by reciprocals first. The last linear layer keeps only the
        rows of the K executed actions.
        """
        inner = [copy.deepcopy(layer).cpu() for layer in layers]
        outputs = contract.executed * contract.action.shape[-1]
        last = max(index for index, layer in enumerate(inner) if isinstance(layer, nn.Linear))
        inner[last] = _first_rows(inner[last], outputs)
        limits = ToRange(contract.action.low * contract.executed, contract.action.high * contract.executed)
        before = [Reciprocal(_spans(readable(contract), distances), len(mean))] if distances else []
        network = Network(readable(contract), [*before, Normalise(mean.cpu(), std.cpu()), *inner, limits])
        return network.requires_grad_(False).eval()

    @property
    def inputs(self) -> int:
        """Number I of elements of the flat observation."""
        return sum(math.prod(spec.shape) for spec in self.contract.observation.values())

    @property
    def outputs(self) -> int:
        """Number A of elements of the flat action."""
        return self.contract.executed * self.contract.action.shape[-1]

    @property
    def initial_memory(self) -> Tensor | None:
        """Memory [M] at the start of an episode; None without memory."""
        return next((layer.initial for layer in self.layers if isinstance(layer, GRU)), None)

    @property
    def limits(self) -> ToRange:
        """Last layer, which clamps actions."""
        last = self.layers[-1]
        assert isinstance(last, ToRange)
        return last

    def forward(self, observation: Tensor, memory: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Actions [N, A] for `observation` [N, I]; with the next memory [N, M] if there is one."""
        action, memory = chain(self.layers, observation, memory)
        return action if memory is None else (action, memory)


@runtime_checkable
class DeployablePolicy(Policy, Protocol):
    """A policy that can be exported."""

    def deployable(self) -> nn.Module:
        """Network of its deterministic actions, a `Network` or `chunk_network.ChunkNetwork`.

        Raises:
            UserError: if it has no normalisation statistics.
        """
        ...


def export_target(policy: Policy) -> str | None:
    """Format to which export.py can convert `policy`: "c" or, where that is not possible, "onnx"; None if neither.

    C needs a `Network`, the units of all its inputs and outputs, and no delay.
    """
    try:
        network = policy.deployable() if isinstance(policy, DeployablePolicy) else None
    except UserError:
        return None
    plain = isinstance(network, Network) and not without_unit(network.contract) and not policy.contract.delay
    return "c" if plain else "onnx" if network is not None else None


def without_unit(contract: Contract) -> list[str]:
    """Names of the observations, and "action", without a unit in `contract`."""
    specs = [*contract.observation.items(), ("action", contract.action)]
    return [name for name, spec in specs if not spec.unit]


def readable(contract: Contract) -> Contract:
    """Reduce `contract` to float32 observations that are not privileged, and to the executed actions."""
    observation = {
        key: spec for key, spec in contract.observation.items() if spec.dtype == "float32" and not spec.privileged
    }
    return replace(contract, observation=observation, horizon=contract.executed)


def elements(key: str, spec: TensorSpec) -> list[str]:
    """Names of the elements of `spec`, flat: "velocity.x", "neighbours[1].distance", "force[2]" without names."""
    *lead, last = spec.shape
    leads = [f"[{index}]" for index in range(math.prod(lead))] if lead else [""]
    names = [f".{name}" for name in spec.names] or [f"[{index}]" for index in range(last)]
    return [f"{key}{row}{name}" for row in leads for name in names]


@torch.no_grad()
def rollout_outputs(policy: Policy, network: Network, inputs: Tensor) -> Tensor:
    """Deterministic actions [S, T, A] of `policy` itself on sequences of flat observations [S, T, I].

    Each sequence starts from the initial memory.
    """
    sizes = [math.prod(spec.shape) for spec in network.contract.observation.values()]
    memory = network.initial_memory
    state = {} if memory is None else {MEMORY: memory.expand(len(inputs), -1)}
    outputs = []
    for flat in inputs.unbind(1):
        parts = zip(network.contract.observation.items(), flat.split(sizes, -1), strict=True)
        observation = {key: part.reshape(-1, *spec.shape) for (key, spec), part in parts}
        decision = policy.act(TensorDict(observation | state, batch_size=[len(flat)]), deterministic=True)
        state = {MEMORY: decision.sample[MEMORY]} if state else {}
        outputs.append(decision.actions[:, : network.contract.executed].flatten(1))
    return torch.stack(outputs, 1)


def _spans(contract: Contract, keys: Sequence[str]) -> list[tuple[int, int]]:
    """First and last column (exclusive) of each observation of `keys` in the flat observation."""
    spans = []
    start = 0
    for key, spec in contract.observation.items():
        stop = start + math.prod(spec.shape)
        if key in keys:
            spans.append((start, stop))
        start = stop
    return spans


def _first_rows(layer: nn.Module, rows: int) -> nn.Linear:
    assert isinstance(layer, nn.Linear)
    reduced = nn.Linear(layer.in_features, rows)
    reduced.weight.data = layer.weight.data[:rows]
    reduced.bias.data = layer.bias.data[:rows]
    return reduced
