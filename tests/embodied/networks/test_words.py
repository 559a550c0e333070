"""Words have the same integers in every process and script, and are cached."""

import pytest
import torch

from embodied.errors import UserError
from embodied.networks import words
from embodied.networks.words import WORD_BUCKETS, WordTable, hash_words
from tests.policies.observations import text


def test_ids_are_the_same_in_every_process():
    assert hash_words("pick up the milk", 6) == [3334, 2051, 634, 3900, 0, 0]


def test_names_and_instructions_share_words():
    assert hash_words("alphabet_soup_1") == hash_words("Alphabet soup") == hash_words("alphabet, soup!")


def test_padding_is_no_word():
    ids = hash_words("basket milk", 5)
    assert ids[2:] == [0, 0, 0]
    assert all(0 < word < WORD_BUCKETS for word in ids[:2])
    assert hash_words("", 2) == [0, 0]


def test_words_of_every_script_are_words():
    assert sum(word != 0 for word in hash_words("hebe die große Schüssel")) == 4
    assert hash_words("ÉLÈVE") == hash_words("élève") != hash_words("l ve")
    assert hash_words("牛奶 篮子")[1] not in (0, hash_words("牛奶")[0])


def test_too_many_words_are_refused():
    with pytest.raises(UserError, match="at most 2 words, got 3: 'a b c'"):
        hash_words("a b c", 2)


def test_words_of_the_tasks_do_not_collide():
    said = "pick up the and place it in basket alphabet soup bbq sauce butter chocolate pudding cream cheese ketchup"
    listed = {*said.split(), "milk", "orange", "juice", "salad", "dressing", "tomato"}
    assert len({hash_words(word, 1)[0] for word in listed}) == len(listed)


def test_a_table_gives_the_ids_of_texts_of_any_shape_again_and_again(monkeypatch: pytest.MonkeyPatch):
    table = WordTable(5)
    said = ["pick milk", "", "in basket", "pick milk"]
    expected = torch.tensor([hash_words(each, 5) for each in said])
    assert torch.equal(table(text(*said)), expected)
    more = torch.cat((expected, torch.tensor([hash_words("other", 5)])))
    assert torch.equal(table(text(*said, "other").view(5, 1, -1))[:, 0], more)
    assert len(table.rows) == 4
    assert table.longest == 2
    monkeypatch.setattr(words, "REMEMBERED", 4)
    assert torch.equal(table(text("new", *said))[1:], expected)  # clears the cache and reads again
    assert len(table.rows) == 4
    with pytest.raises(UserError, match="at most 5 words"):
        table(text("a b c d e f"))
    with pytest.raises(UserError, match="expected text in UTF-8"):
        table(torch.full((1, 64), 255, dtype=torch.uint8))
