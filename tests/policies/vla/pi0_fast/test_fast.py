"""FAST's tokens: the transform against scipy's, pairs of a hand-made case, and files of its processor."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.fft import dct
from tokenizers import ByteLevelBPETokenizer
from tokenizers.trainers import BpeTrainer

from embodied.errors import UserError
from policies.vla.pi0_fast.fast import FIRST_SYMBOL, Fast, built, cosines, fitted, largest, read, symbols


def chunks(count: int = 200, horizon: int = 8, seed: int = 0) -> torch.Tensor:
    """Smooth chunks of two elements, in [-1, 1]."""
    slope, level = torch.rand(2, count, 1, 2, generator=torch.Generator().manual_seed(seed)) - 0.5
    return level + slope * torch.linspace(-1.0, 1.0, horizon).view(1, -1, 1)


def plain(horizon: int) -> Fast:
    return built(torch.full((0, 2), -1), horizon)


def test_the_transform_is_the_orthonormal_cosine_transform() -> None:
    x = chunks(3).double()
    np.testing.assert_allclose((cosines(8) @ x).numpy(), dct(x.numpy(), axis=1, norm="ortho"), atol=1e-12)
    torch.testing.assert_close(cosines(8).T @ cosines(8), torch.eye(8).double())


def test_without_pairs_a_token_is_a_number_the_lowest_frequencies_of_all_elements_first() -> None:
    x = torch.tensor([[[1.0, 0.5], [1.0, -0.5]]])  # the first is constant, the second changes
    # round(10 C x): sqrt(2) * 10 = 14.1 of the constant one, 0.5 * sqrt(2) * 10 = 7.07 of the other
    assert largest(2) == 15
    assert symbols(2) == 31
    assert plain(2).encode(x) == [[14 + 15, 0 + 15, 0 + 15, 7 + 15]]
    torch.testing.assert_close(plain(2).decode([[29, 15, 15, 22]], 2, 2), x, atol=0.02, rtol=0.0)


def test_missing_numbers_are_zero_and_those_beyond_the_end_are_left_out() -> None:
    decoded = plain(2).decode([[29], [29, 15, 15, 22, 0, 0]], 2, 2)
    torch.testing.assert_close(decoded[0], torch.tensor([[0.99, 0.0], [0.99, 0.0]]), atol=0.01, rtol=0.0)
    torch.testing.assert_close(decoded[1], torch.tensor([[0.99, 0.495], [0.99, -0.495]]), atol=0.01, rtol=0.0)


def test_an_action_out_of_range_has_the_nearest_number_and_moves_no_other() -> None:
    x = torch.tensor([[[1.4, 0.5], [1.4, -0.5]], [[-1.4, 0.5], [-1.4, -0.5]]])
    # round(10 sqrt(2) 1.4) = 20 is above 15, the largest number; -20 is below the smallest
    assert plain(2).encode(x) == [[15 + 15, 15, 15, 7 + 15], [0, 15, 15, 7 + 15]]


def test_what_is_frequent_becomes_one_token() -> None:
    """Chunks of zeros but for the first number of each element, and two chunks of ten that are all zeros."""
    x = torch.zeros(10, 2, 1)
    x[:8, :, 0] = 0.5  # numbers 7, 0
    pairs = fitted(x, symbols(2) + 3)
    assert pairs.tolist() == [[7 + 15, 15], [15, 15], [-1, -1]]
    assert built(pairs, 2).encode(x) == [[31]] * 8 + [[32]] * 2
    assert built(pairs, 2).size == 33


def test_chunks_come_back_within_the_rounding() -> None:
    x = chunks()
    encoding = built(fitted(x, 256), 8)
    ids = encoding.encode(x)
    # a number is rounded by at most 1/2 of 1/10, in an orthonormal basis of 8
    assert (encoding.decode(ids, 8, 2) - x).norm(dim=1).max() <= 0.05 * 8**0.5 + 1e-6
    assert sum(map(len, ids)) < 0.4 * 16 * len(x)
    assert encoding.decode(plain(8).encode(x), 8, 2).allclose(encoding.decode(ids, 8, 2))
    assert torch.equal(fitted(x, 256), fitted(x, 256))


def published(folder: Path, x: torch.Tensor) -> None:
    """Files as FAST's processor fits and writes them: bytes of a text, whose smallest number is `min_token`."""
    numbers = np.around(dct(x.numpy(), axis=1, norm="ortho") * 10.0).astype(int).reshape(len(x), -1)
    texts = ["".join(map(chr, row - numbers.min())) for row in numbers]
    bpe = ByteLevelBPETokenizer()
    alphabet = [chr(code) for code in range(numbers.max() - numbers.min() + 1)]
    trainer = BpeTrainer(vocab_size=300, min_frequency=2, special_tokens=[], initial_alphabet=alphabet)
    bpe._tokenizer.train_from_iterator(texts, trainer=trainer)
    bpe._tokenizer.save(str(folder / "tokenizer.json"))
    options = {"scale": 10.0, "min_token": int(numbers.min()), "vocab_size": 300}
    (folder / "processor_config.json").write_text(json.dumps(options))


def test_files_of_the_processor_are_read(tmp_path: Path) -> None:
    x = chunks()
    published(tmp_path, x)
    encoding = read(tmp_path)
    assert encoding.first == 0
    ids = encoding.encode(x)
    assert max(map(len, ids)) <= 16
    expected = plain(8).decode(plain(8).encode(x), 8, 2)
    torch.testing.assert_close(encoding.decode(ids, 8, 2), expected)


def test_bytes_that_are_no_letter_are_zero(tmp_path: Path) -> None:
    """A drawn answer may begin a letter of two bytes and not end it."""
    published(tmp_path, torch.cat((-20.0 * torch.ones(1, 8, 2), chunks())))  # so that numbers are beyond 127
    encoding = read(tmp_path)
    begun = encoding.bpe.encode(chr(-encoding.minimum)).ids[:1]
    assert encoding.bpe.decode(begun) == "\ufffd"
    assert not encoding.decode([begun * 3], 8, 2).any()


def test_a_folder_without_them_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read tokenizer\.json and processor_config\.json"):
        read(tmp_path)
    published(tmp_path, chunks())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"cannot read tokenizer\.json and processor_config\.json"):
        read(tmp_path)
    assert FIRST_SYMBOL > 255
