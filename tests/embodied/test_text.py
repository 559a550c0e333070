"""Text is encoded and decoded without loss."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied.contract import TensorSpec
from embodied.errors import UserError
from embodied.text import decode, encode, encode_as, text_spec


@given(st.text(max_size=20).filter(lambda text: "\0" not in text))
def test_every_text_comes_back(text):
    data = encode(text, 80)
    assert (data.shape, data.dtype) == ((80,), np.uint8)
    assert decode(data) == text
    assert decode(encode(text, max(1, len(text.encode())))) == text  # no room for padding is needed


def test_bytes_by_hand():
    assert encode("né", 5).tolist() == [110, 195, 169, 0, 0]
    assert text_spec(5) == TensorSpec((5,), "uint8", unit="utf-8")
    assert text_spec(5, -1).shape == (-1, 5)
    assert text_spec(5).is_text
    assert not text_spec(3, 4, 4).is_picture


@pytest.mark.parametrize(
    ("text", "message"), [("Müsli", "got 6 bytes: 'Müsli'"), ("a\0b", r"none of them zero; got a zero: 'a\\x00b'")]
)
def test_what_does_not_fit_is_refused_and_never_cut(text, message):
    with pytest.raises(UserError, match=message):
        encode(text, 5)


def test_bytes_that_are_not_utf_8_are_refused():
    with pytest.raises(UserError, match="expected text in UTF-8"):
        decode(np.array([255, 0], np.uint8))


def test_text_for_an_array_of_a_spec():
    names = encode_as(["milk", "tomato sauce"], (-1, 16))
    assert names.shape == (2, 16)
    assert [decode(name) for name in names] == ["milk", "tomato sauce"]
    assert encode_as([], (-1, 16)).shape == (0, 16)
    assert decode(encode_as("milk", (6,))) == "milk"


@pytest.mark.parametrize(("text", "shape"), [(["milk"], (6,)), ("milk", (-1, 6)), ([1], (-1, 6)), (7, (6,))])
def test_values_that_are_not_text_are_refused(text, shape):
    with pytest.raises(UserError, match=r"expected (text|a list of texts), got"):
        encode_as(text, shape)


@pytest.mark.parametrize(
    "spec", [{"shape": (8,)}, {"shape": (), "dtype": "uint8"}, {"shape": (8, -1), "dtype": "uint8"}]
)
def test_text_that_is_no_bytes_is_no_spec(spec):
    with pytest.raises(UserError, match=r"expected text \(unit 'utf-8'\) as uint8"):
        TensorSpec(**spec, unit="utf-8")
