"""Inputs of a vision-language-action model: square pictures, tokens of the instruction, the state.

Letters: N observations, C cameras, S pixels of a picture's side, L tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from embodied.contract import Contract
from embodied.errors import UserError
from embodied.networks.words import WORD_BUCKETS, WordTable, hash_words
from embodied.policy import Condition
from embodied.text import decode
from policies.flat import FlatObservations
from policies.vision.encoder import INSTRUCTION_WORDS, pictures

PAD = 0
BOS = 1
FIRST_BYTE = 2
VOCABULARY = WORD_BUCKETS
"""Tokens of models without a tokenizer: padding and words, or padding, a beginning and the 256 bytes."""

LONGEST = 48
"""Number of tokens of an instruction of published models, with padding."""

LABELS = {
    Condition.NONE: "",
    Condition.NEGATIVE: "Advantage: negative",
    Condition.POSITIVE: "Advantage: positive",
}
"""Text of each condition at the end of a prompt (pi*0.6, arXiv 2511.14759)."""


class Inputs(nn.Module):
    """Inputs of a model: pictures that actors may read, the instruction, and float32 observations of fixed size.

    A camera that the contract lacks has no tokens, which is equivalent to masking its tokens. The statistics of the
    state are buffers. Privileged observations are not read. Tokens are words until `tokenizer` is set; `antialias` and
    `centred` are those of `squared`.

    Raises:
        UserError: if the contract has no pictures or no state that actors may read.
    """

    centred = True

    def __init__(self, contract: Contract, reader: str = "policy=pi0") -> None:
        super().__init__()
        contract = contract.delayed(0)  # the action prefix is no part of the state
        self.cameras = pictures(contract)
        if not self.cameras:
            raise UserError(f"{reader} reads pictures, which this task lacks; name cameras in task.images")
        specs = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
        texts = [key for key, spec in specs.items() if spec.is_text and len(spec.shape) == 1]
        self.instruction = texts[0] if texts else None
        fixed = {key: spec for key, spec in specs.items() if -1 not in spec.shape}
        self.state = FlatObservations(replace(contract, observation=fixed), [], reader, "another policy")
        self.state_size = self.state.observed
        self.keys = [*self.cameras, *texts[:1], *self.state.actor_keys]
        self.tokenizer: Tokenizer | None = None
        self.antialias = True
        self.words = WordTable(INSTRUCTION_WORDS)

    def fit(self, observation: TensorDict) -> None:
        """Compute mean and deviation of the state from observations [N]."""
        self.state.fit_statistics(observation)

    def standardised_state(self, observation: TensorDict) -> Tensor:
        """Robot's state [N, state_size]; RuntimeError before `fit`."""
        return self.state.standardised(observation, self.state.actor_keys)

    def identity(self, observation: TensorDict) -> Tensor:
        """Measured state, [N, B], which seeds deterministic noise."""
        return self.state.concatenated(observation, self.state.actor_keys)

    def pictures(self, observation: TensorDict, size: int) -> Tensor:
        """Pictures [N, C, 3, size, size] in [-1, 1]."""
        options = {"antialias": self.antialias, "centred": self.centred}
        return torch.stack([squared(observation[key], size, **options) for key in self.cameras], 1)

    def tokens(self, observation: TensorDict, condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens [N, L] of the instruction and where they are real, both int64.

        The label of the `condition` [M] follows the instruction: of M rows, N or a multiple, row i is of observation
        i % N. Without conditions there are no labels.
        """
        tokens, real = self._instruction_tokens(observation)
        if condition is None:
            return tokens, real
        tokens, real = (each.repeat(len(condition) // len(each), 1) for each in (tokens, real))
        labels, of_label = (each[condition] for each in self._label_tokens(tokens.device))
        tokens, real = torch.cat((tokens, labels), 1), torch.cat((real, of_label), 1)
        # padding comes last
        order = real.argsort(dim=1, descending=True, stable=True)
        return tokens.gather(1, order), real.gather(1, order)

    def _label_tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens [3, S] of the label of each condition, and where they are real."""
        rows = [self._label_ids(LABELS[each]) for each in Condition]
        length = max(map(len, rows))
        tokens = torch.tensor([row + [PAD] * (length - len(row)) for row in rows], device=device)
        return tokens, (
            torch.arange(length, device=device) < torch.tensor([[len(row)] for row in rows], device=device)
        ).long()

    def _label_ids(self, label: str) -> list[int]:
        if not label:
            return []
        return self.tokenizer.following(f"{label}\n") if self.tokenizer else hash_words(label, len(label.split()))

    def _instruction_tokens(self, observation: TensorDict) -> tuple[Tensor, Tensor]:
        """Tokens [N, L] of the instruction and where they are real, both int64."""
        empty = torch.zeros(*observation.batch_size, 0, dtype=torch.uint8, device=self.state.mean.device)
        text = observation[self.instruction] if self.instruction else empty
        if self.tokenizer:
            return self.tokenizer(text)
        words = self.words(text) if text.numel() else empty.long()
        if words.numel():
            words = words[:, : int((words != PAD).sum(-1).max())]
        return words, (words != PAD).long()


def squared(images: Tensor, size: int, *, antialias: bool = True, centred: bool = True) -> Tensor:
    """Fit images [N, height, width, 3], uint8, into black squares: [N, 3, size, size] in [-1, 1].

    Pixels are interpolated linearly, with `antialias` as in openpi's client, without as in LeRobot. Sides are rounded
    down, as in both. Pictures are `centred`, or at the bottom right, as in LeRobot's SmolVLA.
    """
    scaled = images.movedim(-1, 1).float() / 127.5 - 1.0
    height, width = scaled.shape[-2:]
    ratio = max(height, width) / size  # divided in openpi's and LeRobot's order, which decides about rounding
    inner = max(1, int(height / ratio)), max(1, int(width / ratio))
    if inner != (height, width):
        scaled = nn.functional.interpolate(scaled, inner, mode="bilinear", antialias=antialias).clamp(-1.0, 1.0)
    top, left = size - inner[0], size - inner[1]
    if centred:
        top, left = top // 2, left // 2
    margins = (left, size - inner[1] - left, top, size - inner[0] - top)
    return nn.functional.pad(scaled, margins, value=-1.0)


class Tokenizer:
    """Tokenizer of transformers in openpi's format: a beginning, the text, a line's end.

    Tokens of a text are cached, because the same few texts are read at every step. The model has `vocabulary` tokens.
    Texts are padded to `longest` tokens, or where this is None, to those of the longest text of a batch. Underscores
    become spaces if it `spaces_underscores`, as openpi does.
    """

    longest: int | None = LONGEST
    kind = "pi0"
    has_beginning = True
    spaces_underscores = True

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:  # noqa: ANN401 - of transformers
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.cache: dict[bytes, list[int]] = {}

    def __call__(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Encode tokens [N, S] of texts [N, L] (`embodied.text`), int64, and where they are real.

        Raises:
            UserError: for a text of more than `longest` tokens, or that is not UTF-8, and for unknown tokens.
        """
        rows = [self._tokens(row) for row in text.cpu().numpy()]
        length = self.longest or max(map(len, rows), default=0)
        tokens = torch.tensor([self._padded(row, PAD, length) for row in rows], device=text.device)
        return tokens, torch.tensor([self._padded([1] * len(row), 0, length) for row in rows], device=text.device)

    def _tokens(self, row: np.ndarray) -> list[int]:
        key = row.tobytes()
        if key not in self.cache:
            written = decode(row)
            text = " ".join((written.replace("_", " ") if self.spaces_underscores else written).split())
            tokens = self._ids(text)
            if self.longest and len(tokens) > self.longest:
                raise UserError(
                    f"expected an instruction of at most {self.longest} tokens, got {len(tokens)}: {text!r}"
                )
            self.cache[key] = tokens
        return self.cache[key]

    def encode(self, text: str) -> list[int]:
        """Encode a text, after the token of a beginning if the model has one.

        Raises:
            UserError: for tokens that the model does not have.
        """
        beginning = [self.tokenizer.bos_token_id] if self.has_beginning else []
        return [*beginning, *self.following(text)]

    def following(self, text: str) -> list[int]:
        """Encode `text` that follows another one.

        Raises:
            UserError: for tokens that the model does not have.
        """
        tokens = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if max(tokens, default=0) >= self.vocabulary:
            raise UserError(
                f"the tokenizer beside the weights has number {max(tokens)} in {text!r}, they know those below "
                f"{self.vocabulary}: put {self.kind}'s tokenizer.json and tokenizer_config.json there"
            )
        return tokens

    def _ids(self, instruction: str) -> list[int]:
        return self.encode(f"{instruction}\n")

    def _padded(self, row: list[int], padding: int, length: int) -> list[int]:
        return row + [padding] * (length - len(row))


def quantile(rows: Tensor, share: float) -> Tensor:
    """Interpolated quantile [A] of rows [N, A]; `torch.quantile` is limited to 16 million numbers."""
    ordered = rows.sort(0).values
    position = share * (len(rows) - 1)
    return ordered[int(position)].lerp(ordered[min(int(position) + 1, len(rows) - 1)], position % 1.0)
