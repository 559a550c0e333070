"""Word ids are the same in every process and version, because trained policies depend on them."""

import numpy as np
import pytest

from embodied.text import WORD_BUCKETS, hash_words, word_ids
from sims.libero.suite import SUITES, load_tasks


def test_ids_never_change():
    assert hash_words("pick up the milk", 6) == [3334, 2051, 634, 3900, 0, 0]


def test_numbers_case_and_underscores_do_not_count():
    assert hash_words("alphabet_soup_1") == hash_words("Alphabet soup") == hash_words("alphabet, soup!")


def test_padding_is_zero_and_no_word_is():
    ids = hash_words("basket milk", 5)
    assert ids[2:] == [0, 0, 0]
    assert all(0 < word < WORD_BUCKETS for word in ids[:2])
    assert hash_words("", 2) == [0, 0]


def test_too_many_words_are_refused_and_never_cut():
    with pytest.raises(ValueError, match="at most 2 words, got 3: 'a b c'"):
        hash_words("a b c", 2)


def test_libero_has_no_two_words_with_one_id():
    tasks = [task for suite in SUITES for task in load_tasks(suite)]
    texts = " ".join(task.language + " " + " ".join(task.problem.objects) for task in tasks)
    words = sorted({word for word in texts.lower().replace("_", " ").split() if word.isalpha()})
    assert len({hash_words(word, 1)[0] for word in words}) == len(words)


def test_arrays_of_words_take_text():
    assert word_ids("pick up the milk", (6,)).tolist() == [3334, 2051, 634, 3900, 0, 0]
    names = word_ids(["milk", "tomato sauce"], (-1, 3))
    assert names.dtype == np.int64
    assert names.tolist() == [hash_words("milk", 3), hash_words("tomato sauce", 3)]
    assert word_ids([], (-1, 3)).shape == (0, 3)


@pytest.mark.parametrize(("text", "shape"), [(["milk"], (6,)), ("milk", (-1, 6)), ([1], (-1, 6)), (7, (6,))])
def test_what_is_no_text_is_told_so(text, shape):
    with pytest.raises(ValueError, match=r"expected (text|a list of texts), got"):
        word_ids(text, shape)
