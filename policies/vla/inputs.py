"""What a vision-language-action model reads of an observation: square pictures, tokens of the instruction, the state.

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
from embodied.text import decode
from embodied.words import WORD_BUCKETS, WordTable
from policies.flat import FlatObservations
from policies.vision.encoder import INSTRUCTION_WORDS, pictures

PAD, BOS, FIRST_BYTE = 0, 1, 2
VOCABULARY = WORD_BUCKETS
"""Tokens of models without a tokenizer: padding and words, or padding, a beginning and the 256 bytes."""

LONGEST = 48
"""Tokens of an instruction of published models, with padding."""


class Inputs(nn.Module):
    """The pictures of a contract that actors may read, its instruction, and its float32 observations of fixed size.

    A camera that the contract lacks has no tokens, which is what masking its tokens amounts to. The statistics of the
    state are buffers. Privileged observations are not read. Tokens are words until `tokenizer` is set.

    Raises:
        UserError: if the contract has no pictures or no state that actors may read.
    """

    def __init__(self, contract: Contract, reader: str = "policy=pi0") -> None:
        super().__init__()
        self.cameras = pictures(contract)
        if not self.cameras:
            raise UserError(f"{reader} reads pictures, which this task lacks; name cameras in task.images")
        seen = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
        texts = [key for key, spec in seen.items() if spec.is_text and len(spec.shape) == 1]
        self.instruction = texts[0] if texts else None
        fixed = {key: spec for key, spec in seen.items() if -1 not in spec.shape}
        self.state = FlatObservations(replace(contract, observation=fixed), [], reader, "another policy")
        self.state_size = self.state.observed
        self.keys = [*self.cameras, *texts[:1], *self.state.actor_keys]
        self.tokenizer: Tokenizer | None = None
        self.words = WordTable(INSTRUCTION_WORDS)

    def fit(self, observation: TensorDict) -> None:
        """Compute mean and deviation of the state from observations [N]."""
        self.state.fit_statistics(observation)

    def standardised_state(self, observation: TensorDict) -> Tensor:
        """The robot's state [N, state_size]; RuntimeError before `fit`."""
        return self.state.standardised(observation, self.state.actor_keys)

    def identity(self, observation: TensorDict) -> Tensor:
        """What the robot measures of itself, [N, B]; deterministic noise is drawn from it."""
        return self.state.concatenated(observation, self.state.actor_keys)

    def pictures(self, observation: TensorDict, size: int) -> Tensor:
        """Pictures [N, C, 3, size, size] in [-1, 1]."""
        return torch.stack([squared(observation[key], size) for key in self.cameras], 1)

    def tokens(self, observation: TensorDict) -> tuple[Tensor, Tensor]:
        """Tokens [N, L] of the instruction and where they are real, both int64."""
        empty = torch.zeros(*observation.batch_size, 0, dtype=torch.uint8, device=self.state.mean.device)
        text = observation[self.instruction] if self.instruction else empty
        if self.tokenizer:
            return self.tokenizer(text)
        words = self.words(text) if text.numel() else empty.long()
        if words.numel() and not words.is_meta:
            words = words[:, : int((words != PAD).sum(-1).max())]
        return words, (words != PAD).long()


def squared(images: Tensor, size: int) -> Tensor:
    """Images [N, height, width, 3], uint8, fitted into black squares, centred: [N, 3, size, size] in [-1, 1]."""
    scaled = images.movedim(-1, 1).float() / 127.5 - 1.0
    height, width = scaled.shape[-2:]
    share = size / max(height, width)
    inner = max(1, round(height * share)), max(1, round(width * share))
    if inner != (height, width):
        scaled = nn.functional.interpolate(scaled, inner, mode="bilinear", antialias=True).clamp(-1.0, 1.0)
    top, left = (size - inner[0]) // 2, (size - inner[1]) // 2
    around = (left, size - inner[1] - left, top, size - inner[0] - top)
    return nn.functional.pad(scaled, around, value=-1.0)


class Tokenizer:
    """Tokens of texts by a tokenizer of transformers, as openpi has them: a beginning, the text, a line's end.

    Those of a text are kept, because the same few are read at every step. The model knows `vocabulary` tokens.
    """

    longest = LONGEST

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:  # noqa: ANN401 - of transformers
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.known: dict[bytes, list[int]] = {}

    def __call__(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [N, longest] of texts [N, L] (`embodied.text`), int64, and where they are real.

        Raises:
            UserError: for a text of more than `longest` tokens, or that is not UTF-8, and for unknown tokens.
        """
        if text.is_meta:  # shapes alone, see embodied/training/plan.py
            return (text.new_empty(len(text), self.longest, dtype=torch.int64),) * 2
        rows = [self._tokens(row) for row in text.cpu().numpy()]
        tokens = torch.tensor([self._padded(row, PAD) for row in rows], device=text.device)
        return tokens, torch.tensor([self._padded([1] * len(row), 0) for row in rows], device=text.device)

    def _tokens(self, row: np.ndarray) -> list[int]:
        key = row.tobytes()
        if key not in self.known:
            said = " ".join(decode(row).replace("_", " ").split())
            found = self._ids(said)
            if len(found) > self.longest:
                raise UserError(f"expected an instruction of at most {self.longest} tokens, got {len(found)}: {said!r}")
            self.known[key] = found
        return self.known[key]

    def begun(self, text: str) -> list[int]:
        """A beginning and the tokens of `text`.

        Raises:
            UserError: for tokens that the model does not know.
        """
        found = [self.tokenizer.bos_token_id, *self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        if max(found) >= self.vocabulary:
            raise UserError(
                f"the tokenizer beside the weights has number {max(found)} in {text!r}, they know those below "
                f"{self.vocabulary}: put pi0's tokenizer.json and tokenizer_config.json there"
            )
        return found

    def _ids(self, said: str) -> list[int]:
        return self.begun(f"{said}\n")

    def _padded(self, row: list[int], padding: int) -> list[int]:
        return row + [padding] * (self.longest - len(row))


def quantile(rows: Tensor, share: float) -> Tensor:
    """The quantile [A] of rows [N, A], between two of them; `torch.quantile` takes 16 million numbers at most."""
    ordered, place = rows.sort(0).values, share * (len(rows) - 1)
    return ordered[int(place)].lerp(ordered[min(int(place) + 1, len(rows) - 1)], place % 1.0)
