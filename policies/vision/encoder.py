"""Encoder of pictures, an instruction and the robot's own measurements, for robots without a tracker."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.networks.words import WORD_BUCKETS, WordTable
from policies.encoders.base import Encoder
from policies.encoders.sentences import FEATURES, HUB_NAME, SentenceTable
from policies.encoders.words import Reading, Words, summed, word_features
from policies.flat import FlatObservations
from policies.vision.backbones import PatchAttention, Transformer, VisionConfig, backbone

INSTRUCTION_WORDS = 20
WORD_WIDTH = 32
"""Largest number of words of an instruction, more raise an error; and the width of a word's vector."""
SENTENCE_WIDTH = 64
"""Width of the trained projection of a sentence's features."""
SENTENCE = "sentence_features"
"""Key of the features of the instruction [N, FEATURES] in what `read` returns."""
SMALLEST_STD = 0.01
"""Smallest deviation of sentences' features, which are about 0.05 each: one instruction alone has none."""


def pictures(contract: Contract) -> list[str]:
    """Names of the pictures that actors may read."""
    return [key for key, spec in contract.observation.items() if spec.is_picture and not spec.privileged]


class PictureEncoder(Encoder):
    """Encoder of a contract's pictures, its float32 observations of fixed size, and one instruction if there is one.

    Each camera has a network of its own; a frozen transformer is one for all. Instructions are sums of fixed word
    vectors; words that were not in `fit` are ignored, because their meaning was never learned. Or they are a trained
    projection of frozen features of the whole sentence, as `reading` chooses. What is frozen is that of the encoder
    `lender`, if there is one. Privileged observations are not read.

    Raises:
        UserError: if the contract has no pictures that actors may read.
    """

    sentence_mean: Tensor
    sentence_std: Tensor

    def __init__(
        self,
        contract: Contract,
        width: int,
        config: VisionConfig,
        reading: Reading = Reading(),  # noqa: B008 - frozen
        lender: PictureEncoder | None = None,
    ) -> None:
        super().__init__()
        self._lender = (lender,) if lender else ()  # a tuple: its weights are no weights of this encoder
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
        self.reads_sentences = bool(texts) and reading.words is Words.MINILM
        self.tables = {} if self.reads_sentences else {key: WordTable(INSTRUCTION_WORDS) for key in texts[:1]}
        self.reads, self.seeds = (
            [*self.cameras, *self.state.actor_keys, *texts[:1]],
            self.state.actor_keys or self.cameras,
        )
        if self.reads_sentences:
            self.register_buffer("sentence_mean", torch.zeros(FEATURES))
            self.register_buffer("sentence_std", torch.ones(()))
            self.projection = nn.Linear(FEATURES, SENTENCE_WIDTH)
        else:
            self.register_buffer("words", word_features(WORD_WIDTH))
            self.register_buffer("known", torch.zeros(WORD_BUCKETS, dtype=torch.bool))
        if not lender:
            self.sentences = SentenceTable(reading.model) if self.reads_sentences else None
            self.transformer = Transformer(config, 0) if config.frozen else None
        inner = SENTENCE_WIDTH if self.reads_sentences else WORD_WIDTH
        shared = self._source.transformer
        self.eyes = nn.ModuleDict(
            {
                key: PatchAttention(shared.inner, inner, config.features)
                if shared
                else backbone(config, *contract.observation[key].shape[:2], inner)
                for key in self.cameras
            }
        )
        self.proprioception = nn.Sequential(nn.Linear(inner + self.state.observed, width), nn.ReLU())
        self.out_features = width + len(self.cameras) * config.features

    @property
    def remarks(self) -> list[str]:
        """Sentence for reports on how instructions are read."""
        if not self.instruction:
            return []
        if self.reads_sentences:
            model = self._source.sentences.model or HUB_NAME
            return [f"Instructions are read as frozen features of sentences by {model}."]
        return ["Instructions are read as fixed random vectors of words; words that training did not have are ignored."]

    def check_export(self) -> None:
        """Raise UserError for features of sentences, which exported networks do not compute."""
        if self.reads_sentences:
            raise UserError(
                "policy.words=minilm cannot be exported yet; serve the checkpoint, or train with words=hashed"
            )

    def read(self, observation: TensorDict) -> TensorDict:
        """See `Encoder.read`; features of sentences are added under SENTENCE, and critics still find the text."""
        if not self.reads_sentences or SENTENCE in observation:
            return super().read(observation)
        return observation.copy().update({SENTENCE: self._source.sentences(observation[self.instruction])})

    @torch.no_grad()
    def fit(self, observation: TensorDict) -> None:
        """Compute mean and deviation of the float32 observations and of sentences; collect the known words, of [N]."""
        self.state.fit_statistics(observation)
        if self.reads_sentences:
            self._source.sentences.learn(observation[self.instruction])
            features = self.read(observation.exclude(SENTENCE))[SENTENCE]
            self.sentence_mean.copy_(features.mean(0))
            # one scale for all: a feature that hardly varies in training says little
            self.sentence_std.copy_((features - self.sentence_mean).square().mean().sqrt().clamp_min(SMALLEST_STD))
            return
        self.known.fill_(False)
        if self.instruction:
            self.known[self.read(observation)[self.instruction].unique()] = True

    def forward(self, observation: TensorDict) -> Tensor:
        """Features [N, out_features] of the robot's state and each camera; RuntimeError before `fit`."""
        instruction = self._instruction_features(self.read(observation))
        transformer = self._source.transformer
        state = self.state.standardised(observation, self.state.actor_keys)
        features = [self.proprioception(torch.cat((instruction, state), -1))]
        for key, eye in self.eyes.items():
            # uint8 [N, height, width, 3] -> [N, 3, height, width] in [0, 1]
            picture = observation[key].movedim(3, 1).to(instruction.dtype) / 255.0
            features.append(eye(transformer.patches(picture) if transformer else picture, instruction))
        return torch.cat(features, -1)

    def begin_like(self, other: Self) -> None:
        """Copy the weights, statistics and known words of `other`."""
        own = self.state_dict().keys()
        self.load_state_dict({name: values for name, values in other.state_dict().items() if name in own})

    def example(self, contract: Contract, count: int, rows: int, generator: Generator) -> TensorDict:
        """Random observations [count], with random pixels."""
        observation = self.state.random_observations(contract, count, generator)
        for key in self.cameras:
            shape = (count, *contract.observation[key].shape)
            observation[key] = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        if self.reads_sentences:
            noise = torch.randn(count, FEATURES, generator=generator)
            observation[SENTENCE] = self.sentence_mean + self.sentence_std * noise
        elif self.instruction:
            word_ids = self.known.nonzero().squeeze(1)
            observation[self.instruction] = word_ids[
                torch.randint(len(word_ids), (count, INSTRUCTION_WORDS), generator=generator)
            ]
        return observation

    @property
    def _source(self) -> PictureEncoder:
        """The encoder with the frozen transformer and the table of sentences, if any."""
        return self._lender[0] if self._lender else self

    def _instruction_features(self, observation: TensorDict) -> Tensor:
        if self.reads_sentences:
            return self.projection((observation[SENTENCE] - self.sentence_mean) / self.sentence_std)
        if not self.instruction:
            return self.words.new_zeros(*observation.batch_size, WORD_WIDTH)
        return summed(observation[self.instruction], self.known, self.words)
