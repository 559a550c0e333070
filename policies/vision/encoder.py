"""Encoder of pictures, an instruction and the robot's own measurements, for robots without a tracker."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.words import WORD_BUCKETS, WordTable
from policies.encoders import Encoder
from policies.flat import FlatObservations
from policies.vision.backbones import VisionConfig, backbone
from policies.words import summed, word_features

INSTRUCTION_WORDS = 20
WORD_WIDTH = 32
"""Largest number of words of an instruction, more raise an error; and the width of a word's vector."""


def pictures(contract: Contract) -> list[str]:
    """Names of the pictures that actors may read."""
    return [key for key, spec in contract.observation.items() if spec.is_picture and not spec.privileged]


class PictureEncoder(Encoder):
    """Encoder of a contract's pictures, its float32 observations of fixed size, and one instruction if there is one.

    Each camera has a network of its own. Instructions are sums of fixed word vectors; words that were not in `fit` are
    ignored, because their meaning was never learned. Privileged observations are not read.

    Raises:
        UserError: if the contract has no pictures that actors may read.
    """

    def __init__(self, contract: Contract, width: int, config: VisionConfig) -> None:
        super().__init__()
        self.cameras = pictures(contract)
        if not self.cameras:
            raise UserError(
                "policy.encoder=pictures reads pictures, which this task lacks; name cameras in task.images"
            )
        specs = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
        texts = [key for key, spec in specs.items() if spec.is_text and len(spec.shape) == 1]
        self.instruction = texts[0] if texts else None
        own = replace(contract, observation=specs)
        self.state = FlatObservations(own, [], "policy.encoder=pictures", "flat", required=False)
        self.tables = {key: WordTable(INSTRUCTION_WORDS) for key in texts[:1]}
        self.reads, self.seeds = (
            [*self.cameras, *self.state.actor_keys, *texts[:1]],
            self.state.actor_keys or self.cameras,
        )
        self.register_buffer("words", word_features(WORD_WIDTH))
        self.register_buffer("known", torch.zeros(WORD_BUCKETS, dtype=torch.bool))
        self.eyes = nn.ModuleDict(
            {key: backbone(config, *contract.observation[key].shape[:2], WORD_WIDTH) for key in self.cameras}
        )
        self.proprioception = nn.Sequential(nn.Linear(WORD_WIDTH + self.state.observed, width), nn.ReLU())
        self.out_features = width + len(self.cameras) * config.features

    @torch.no_grad()
    def fit(self, observation: TensorDict) -> None:
        """Compute mean and deviation of the float32 observations, and collect the known words, from [N]."""
        self.state.fit_statistics(observation)
        self.known.fill_(False)
        if self.instruction:
            self.known[self.read(observation)[self.instruction].unique()] = True

    def forward(self, observation: TensorDict) -> Tensor:
        """Features [N, out_features] of the robot's state and each camera; RuntimeError before `fit`."""
        instruction = self._instruction_features(self.read(observation))
        state = self.state.standardised(observation, self.state.actor_keys)
        features = [self.proprioception(torch.cat((instruction, state), -1))]
        for key, eye in self.eyes.items():
            # uint8 [N, height, width, 3] -> [N, 3, height, width] in [0, 1]
            features.append(eye(observation[key].movedim(3, 1).to(instruction.dtype) / 255.0, instruction))
        return torch.cat(features, -1)

    def begin_like(self, other: Self) -> None:
        """Copy the weights, statistics and known words of `other`."""
        self.load_state_dict(other.state_dict())

    def example(self, contract: Contract, count: int, rows: int, generator: Generator) -> TensorDict:
        """Random observations [count], with random pixels."""
        observation = self.state.random_observations(contract, count, generator)
        for key in self.cameras:
            shape = (count, *contract.observation[key].shape)
            observation[key] = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        if self.instruction:
            word_ids = self.known.nonzero().squeeze(1)
            observation[self.instruction] = word_ids[
                torch.randint(len(word_ids), (count, INSTRUCTION_WORDS), generator=generator)
            ]
        return observation

    def _instruction_features(self, observation: TensorDict) -> Tensor:
        if not self.instruction:
            return self.words.new_zeros(*observation.batch_size, WORD_WIDTH)
        return summed(observation[self.instruction], self.known, self.words)
