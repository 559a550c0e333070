"""Deployed form of a policy that generates chunks from noise, and the conversion of observations to its inputs.

The network computes with numbers only. Text is word ids (`embodied.networks.words`), and noise is an input: a fixed
function of the bytes of some observations (`seeding.fixed_noise`). Letters: N observations, C candidates, G generated,
H predicted and K executed actions, A action dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.export.network import ToRange
from embodied.networks.words import WordTable
from embodied.seeding import fixed_noise

NOISE = "noise"
"""Name of the input of noise, which comes last."""


class ChunkInputs:
    """Conversion of observations of `contract` to a network's inputs, as in the policy itself.

    `words` is the number of word ids of each text, `noise` the shape [C, G, A] of an observation's noise, whose seed is
    the CRC-32 of the float32 bytes of the observations `seeds`, of none of them if all observations share their noise.
    """

    def __init__(
        self, contract: Contract, words: Mapping[str, int], noise: Sequence[int], seeds: Sequence[str]
    ) -> None:
        self.contract = contract
        self.words = dict(words)
        self.noise = tuple(noise)
        self.seeds = tuple(seeds)
        self._tables = {key: WordTable(count) for key, count in words.items()}

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Specs of the inputs, in order."""
        observed = self.contract.observation
        ids = {key: TensorSpec((*observed[key].shape[:-1], count), "int64") for key, count in self.words.items()}
        return observed | ids | {NOISE: TensorSpec(self.noise)}

    def description(self) -> dict[str, Any]:
        """Arguments other than the contract, ready for JSON."""
        return {"words": self.words, "noise": list(self.noise), "seeds": list(self.seeds)}

    def of(self, observation: TensorDict) -> dict[str, Tensor]:
        """Inputs [N, ...] for observations [N] of the contract.

        Raises:
            UserError: for observations that do not fit the contract, or text of too many words.
        """
        check(self.contract.observation, observation)
        words = {key: table(observation[key]) for key, table in self._tables.items()}
        return self.with_noise(observation.select(*self.contract.observation).update(words))

    def with_noise(self, read: TensorDict) -> dict[str, Tensor]:
        """Inputs for observations [N] with word ids instead of text."""
        # without seeds the noise is the same for all observations
        identity = torch.cat([torch.zeros(len(read), 0), *(read[key].flatten(1) for key in self.seeds)], -1)
        return {key: read[key] for key in self.contract.observation} | {NOISE: fixed_noise(identity, self.noise)}


def check(specs: Mapping[str, TensorSpec], observation: TensorDict) -> None:
    """Raise UserError unless `observation` [N] has tensors of `specs`, with equally long axes of variable length."""
    rows: dict[str, int] = {}
    for key, spec in specs.items():
        if key not in observation.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            raise UserError(f"the observation lacks {key}; expected {', '.join(specs)}")
        dtype = str(observation[key].dtype).removeprefix("torch.")
        shape = tuple(observation[key].shape[1:])
        axes = list(zip(spec.shape, shape, strict=False))
        if dtype != spec.dtype or len(shape) != len(spec.shape) or any(a not in (-1, b) for a, b in axes):
            raise UserError(f"{key}: expected {spec.dtype} {spec.shape} of each observation, got {dtype} {shape}")
        rows.update((key, length) for size, length in axes if size < 0)
    if len(set(rows.values())) > 1 or 0 in rows.values():
        lengths = ", ".join(f"{key} {length}" for key, length in rows.items())
        raise UserError(f"expected as many rows of each of these, at least one, got {lengths}")


class ChunkNetwork(nn.Module):
    """Network from observations, in the order of `contract`, and noise to the best candidate's actions [N, K, A].

    `contract` lists the observations that are read. `policy` is a module with its weights on the CPU, and two methods:
    `candidates(observation, noise)` returns deterministic chunks [N, C, H, A] from noise [N, C, G, A] and their
    advantage [N, C] (any if C = 1); `example(count, rows, generator)` returns random observations [count] with word
    ids, in which axes of variable length have `rows`.
    """

    policy: Any

    def __init__(
        self,
        contract: Contract,
        words: Mapping[str, int],
        noise: Sequence[int],
        seeds: Sequence[str],
        policy: nn.Module,
    ) -> None:
        super().__init__()
        self.contract = replace(contract, horizon=contract.executed)
        self.inputs = ChunkInputs(self.contract, words, noise, seeds)
        self.policy = policy

    @property
    def limits(self) -> ToRange:
        """Range of actions."""
        return ToRange(self.contract.action.low, self.contract.action.high)

    def candidates(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Executed actions [N, C, K, A] of all candidates, and their advantage [N, C]."""
        *observed, noise = inputs
        keys = self.contract.observation
        observation = TensorDict(dict(zip(keys, observed, strict=True)), batch_size=[len(noise)])
        actions, advantage = self.policy.candidates(observation, noise)
        return actions[:, :, : self.contract.executed], advantage

    def forward(self, *inputs: Tensor) -> Tensor:
        """Executed actions [N, K, A] of the best candidate, the first of equal ones."""
        actions, advantage = self.candidates(*inputs)
        if self.inputs.noise[0] == 1:
            return actions[:, 0]
        best = advantage.argmax(1).view(-1, 1, 1, 1).expand(-1, 1, *actions.shape[2:])
        return actions.gather(1, best).squeeze(1)

    def example(self, count: int, rows: int, seed: int) -> TensorDict:
        """Random observations [count] with word ids instead of text; axes of variable length have `rows`."""
        return self.policy.example(count, rows, torch.Generator().manual_seed(seed))
