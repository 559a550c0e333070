"""Gaussian policy with a small GRU, which identifies the robot while it flies.

The actor has the shape of RAPTOR's (arXiv 2509.11481): 22 observations -> 16 -> GRU of 16 -> 4 actions are 2,084
parameters, including the learned initial memory. The memory is explicit: the policy reads it as the observation
"memory" [N, M] and returns the next one as `sample["memory"]`. The policy is stateless between calls: `rollout.memory`
stores it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.configuration import PositiveInt
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.export.network import GRU, chain
from embodied.policy import MEMORY, Decision, inference, value_if_needed
from embodied.rollout.memory import STARTED
from policies.mlp import GaussianPolicy, MLPConfig


@dataclass
class RecurrentConfig(MLPConfig):
    """Widths of the encoder and of the memory; `hidden` is the critic's."""

    hidden: list[PositiveInt] = field(default_factory=lambda: [64, 64])
    encoder: PositiveInt = 16
    memory: PositiveInt = 16

    def build(self, contract: Contract) -> RecurrentPolicy:
        """Build the policy for `contract`."""
        return RecurrentPolicy(contract, self)


class RecurrentPolicy(GaussianPolicy):
    """GaussianPolicy whose actor is recurrent; its critic is not.

    Samples [N] are scored with the memory they were drawn with, which is in the observation; sequences [T, N] are
    scored through time, from the memory of the first step.
    """

    actor: nn.ModuleList

    def __init__(self, contract: Contract, config: RecurrentConfig) -> None:
        super().__init__(contract, config)
        last = nn.Linear(config.memory, contract.horizon * contract.action.shape[-1])
        nn.init.orthogonal_(last.weight, 0.01)
        nn.init.zeros_(last.bias)
        encoder = nn.Linear(self.observed, config.encoder)
        self.gru = GRU(config.encoder, config.memory)
        self.actor = nn.ModuleList([encoder, nn.ReLU(), self.gru, last, nn.Tanh()])
        self.feature_size += config.memory

    def initial_memory(self, count: int) -> Tensor:
        """Learned memory [count, M] at the beginning of episodes."""
        return self.gru.initial.expand(count, -1)

    @inference
    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Sample chunks [N, H, A]; pass `sample["memory"]` [N, M] as the observation "memory" of the next call."""
        mean, memory = self._step(observation)
        sample, actions, log_prob = self._sample(mean, self._noise(mean, deterministic, generator))
        sample[MEMORY] = memory
        return Decision(actions, sample, log_prob, value_if_needed(self, observation, deterministic))

    def features(self, observation: TensorDict) -> Tensor:
        """Standardised observations and the memory that the actor reads with them, [..., feature_size]."""
        return torch.cat((super().features(observation), self._memory(observation).detach()), -1)

    def actions(self, observation: TensorDict) -> Tensor:
        """Mean actions [N, H, A], differentiable."""
        return self._to_robot(self._step(observation)[0])

    def unroll(self, observation: TensorDict, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean actions [T, N, H, A] in robot units for sequences of observations [T, N], and the last memory [N, M].

        Sequences begin with `memory` [N, M], or with the initial one; so does every episode that observation["started"]
        [T, N] marks. Differentiable through time.
        """
        means, memory = self._unroll(observation, memory)
        return self._to_robot(means.flatten(0, 1)).unflatten(0, means.shape[:2]), memory

    def loss(self, observation: TensorDict, actions: Tensor, valid: Tensor) -> Tensor:
        """Mean squared error of the mean action over valid steps, in half action ranges.

        For observations [N], `actions` [N, H, A] and `valid` [N, H] it uses one step from the observation's memory.
        Sequences [T, N] are unrolled through time from the memory of the first observation (the initial one if it has
        none).
        """
        mean = self._means(observation)
        error = (mean.view_as(actions) - (actions - self.centre) / self.half_range).square().mean(-1)
        # L = sum(valid * |mean - a|^2) / sum(valid)
        return (error * valid).sum() / valid.sum().clamp_min(1)

    def _means(self, observation: TensorDict) -> Tensor:
        """Means of raw actions [..., H * A]: of single steps [N], through time for sequences [T, N]."""
        if observation.batch_dims == 1:
            return self._step(observation)[0]
        memory = observation.get(MEMORY)
        return self._unroll(observation, None if memory is None else memory[0])[0]

    def _means_and_value_outputs(self, observation: TensorDict) -> tuple[Tensor, Tensor]:
        return self._means(observation), self.value_outputs(observation)

    def _step(self, observation: TensorDict) -> tuple[Tensor, Tensor]:
        """Mean of the raw action [N, H * A] and next memory [N, M]."""
        mean, memory = chain(self.actor, self._inputs(observation), self._memory(observation))
        assert memory is not None
        return mean, memory

    def _memory(self, observation: TensorDict) -> Tensor:
        """Memory [..., M] in `observation`; UserError if there is none."""
        if MEMORY not in observation.keys():  # noqa: SIM118 - a TensorDict iterates over its batch
            raise UserError(
                f'policy=recurrent reads its memory as observation "{MEMORY}" [N, {self.gru.size}]; begin episodes '
                f'with initial_memory(N) and continue with sample["{MEMORY}"] of the previous decision'
            )
        return observation[MEMORY]

    def _unroll(self, observation: TensorDict, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        encoder, activation, gru, *head = self.actor
        steps, count = observation.batch_size
        features = activation(encoder(self._inputs(observation.flatten(0, 1)))).unflatten(0, (steps, count))
        started = observation[STARTED]
        memory = self.initial_memory(count) if memory is None else memory
        memories = []
        for step in range(steps):
            # episodes that start at this step begin with the initial memory
            memory = gru(features[step], torch.where(started[step].unsqueeze(-1), self.gru.initial, memory))
            memories.append(memory)
        # [T, N, M] -> raw means [T, N, H * A]
        return chain(head, torch.stack(memories))[0], memory
