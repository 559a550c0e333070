"""FAST: chunks of actions as few tokens of a byte pair encoding of their frequencies (arXiv 2501.09747).

The discrete cosine transform along time of each action element is scaled and rounded; all elements' lowest frequencies
come first, and pairs of numbers that are frequent in demonstrations become one token.
Differs from the paper's code: the symbols of a new encoding are the numbers themselves, not the bytes of a text, and
their range is that of all chunks in [-1, 1], not of the demonstrations, so that there is always a token for a number.

Letters: N chunks, H actions of a chunk, A action dimension, V tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodied.extras import needs_extra
from embodied.saving.json_text import loads
from policies.vla.checkpoints.weights import reading

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SCALE = 10.0
"""Factor of the transform before rounding, of the paper."""
FIRST_SYMBOL = 0x4E00
"""Code of the character that stands for the smallest number: letters, so that nothing splits or trims them."""
NO_LETTER = "\N{REPLACEMENT CHARACTER}"
"""Letter that a byte level encoding returns for bytes that are none."""
FILES = ("tokenizer.json", "processor_config.json")


def cosines(horizon: int) -> Tensor:
    """Matrix [H, H] of the orthonormal discrete cosine transform (DCT-II), whose transpose is its inverse."""
    k, n = torch.meshgrid(torch.arange(horizon).double(), torch.arange(horizon).double(), indexing="ij")
    # C_kn = sqrt(2 / H) cos(pi k (n + 1/2) / H), C_0n = sqrt(1 / H)
    matrix = math.sqrt(2.0 / horizon) * torch.cos(math.pi * k * (n + 0.5) / horizon)
    matrix[0] = math.sqrt(1.0 / horizon)
    return matrix


class Fast:
    """Encoding of normalised chunks [N, H, A]: a `bpe` of numbers that begin at `minimum`, with a `scale`.

    A number is the character with the code `first` + number - `minimum`.
    """

    def __init__(self, bpe: Tokenizer, scale: float, minimum: int, first: int = 0) -> None:
        self.bpe = bpe
        self.scale = scale
        self.minimum = minimum
        self.first = first

    @property
    def size(self) -> int:
        """Number V of tokens."""
        return self.bpe.get_vocab_size()

    def encode(self, chunks: Tensor) -> list[list[int]]:
        """Tokens of normalised chunks [N, H, A]."""
        texts = ["".join(map(chr, row)) for row in self._codes(chunks)]
        return [encoding.ids for encoding in self.bpe.encode_batch(texts, add_special_tokens=False)]

    def _codes(self, chunks: Tensor) -> list[list[int]]:
        # round(scale * C x), lowest frequencies of all elements first: [N, H, A] -> [N, H * A]
        numbers = (self.scale * (cosines(chunks.shape[1]) @ chunks.cpu().double())).round().long().flatten(1)
        # numbers of actions out of [-1, 1] may be out of a new encoding's range, which is symmetric: nearest number
        highest = -2 * self.minimum if self.first else None
        return (self.first + (numbers - self.minimum).clamp(0, highest)).tolist()

    def decode(self, tokens: Sequence[Sequence[int]], horizon: int, actions: int) -> Tensor:
        """Normalised chunks [N, horizon, actions] of the tokens of each.

        Missing numbers are 0, and those beyond the end are left out, as in LeRobot's decoding. Bytes that are no
        letter, which a drawn answer may have, are 0, too.
        """
        numbers = torch.zeros(len(tokens), horizon * actions, dtype=torch.float64)
        for row, ids in zip(numbers, tokens, strict=True):
            zero = self.first - self.minimum
            codes = [zero if letter == NO_LETTER else ord(letter) for letter in self._text(ids)][: len(row)]
            row[: len(codes)] = torch.tensor(codes, dtype=torch.float64) - zero
        # x = C^T numbers / scale
        return (cosines(horizon).T @ numbers.unflatten(1, (horizon, actions)) / self.scale).float()

    def _text(self, ids: Sequence[int]) -> str:
        if not self.first:
            return self.bpe.decode(list(ids), skip_special_tokens=False)
        return "".join(self.bpe.id_to_token(each) for each in ids)


def largest(horizon: int) -> int:
    """Largest number of chunks in [-1, 1]: scale * sqrt(H), of a constant action."""
    return math.ceil(SCALE * math.sqrt(horizon))


def symbols(horizon: int) -> int:
    """Number of numbers of chunks in [-1, 1]."""
    return 2 * largest(horizon) + 1


def fitted(chunks: Tensor, size: int) -> Tensor:
    """Pairs [size - symbols, 2] of tokens that a new encoding of `size` tokens merges, in order; -1: no more pairs.

    They are those that are most frequent in the normalised `chunks` [N, H, A], clamped to [-1, 1].
    """
    from tokenizers import Tokenizer, models, trainers

    horizon = chunks.shape[1]
    alphabet = [chr(FIRST_SYMBOL + each) for each in range(symbols(horizon))]
    bpe = Tokenizer(models.BPE())
    plain = Fast(bpe, SCALE, -largest(horizon), FIRST_SYMBOL)
    texts = ("".join(map(chr, row)) for row in plain._codes(chunks.clamp(-1.0, 1.0)))
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    model = json.loads(bpe.to_str())["model"]
    pairs = torch.full((size - len(alphabet), 2), -1, dtype=torch.int32)
    for row, (left, right) in zip(pairs, model["merges"], strict=False):
        row.copy_(torch.tensor([model["vocab"][left], model["vocab"][right]]))
    return pairs


def built(pairs: Tensor, horizon: int) -> Fast:
    """Encoding that merges `pairs` of tokens of numbers of chunks in [-1, 1], see `fitted`."""
    with needs_extra("vla"):
        from tokenizers import Tokenizer, models
    tokens = [chr(FIRST_SYMBOL + each) for each in range(symbols(horizon))]
    merges = []
    for left, right in pairs[pairs[:, 0] >= 0].tolist():
        merges.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return Fast(Tokenizer(models.BPE(vocab=vocabulary, merges=merges)), SCALE, -largest(horizon), FIRST_SYMBOL)


def read(folder: str | Path) -> Fast:
    """Encoding in `folder`, as FAST's processor writes it: tokenizer.json and processor_config.json.

    Raises:
        UserError: if it cannot be read.
    """
    with needs_extra("vla"):
        from tokenizers import Tokenizer
    with reading(f"policy.action_tokenizer={folder}: cannot read {' and '.join(FILES)}"):
        bpe, options = (Path(folder) / name for name in FILES)
        fields = loads(options.read_text(encoding="utf-8"))
        try:
            tokenizer = Tokenizer.from_file(str(bpe))
        except Exception as error:  # the Rust library raises no other class
            raise ValueError(str(error)) from error
        return Fast(tokenizer, float(fields["scale"]), int(fields["min_token"]))
