"""Trees are read back bit for bit, and other files are refused."""

import os
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tensordict import TensorDict

from embodied.saving.tree import copy_tree, load_tree, save_tree


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, TensorDict):
        return a.batch_size == b.batch_size and same(dict(a.items()), dict(b.items()))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and same(a.numpy(), b.numpy())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float) and np.isnan(a):
        return bool(np.isnan(b))  # JSON has one NaN
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    return a == b


def round_trip(tree, path):
    save_tree(path, tree)
    return load_tree(path)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=15,
)


@given(tree=trees)
def test_any_json_like_tree_comes_back_equal(tree, tmp_path_factory):
    assert same(round_trip(tree, tmp_path_factory.mktemp("tree") / "tree.safetensors"), tree)


def test_tensors_and_arrays_come_back_bit_for_bit(tmp_path):
    nan = torch.tensor([0x7FC00001, -0x80000000], dtype=torch.int32).view(torch.float32)  # a NaN's payload, minus zero
    weight = torch.randn(4, 6)
    tree = {
        "special": nan,
        "views": [weight, weight[1], weight.t(), weight[:, ::2]],
        "empty": torch.empty(0, 3),
        "zero_d": [torch.tensor(2.5, dtype=torch.float64), np.array(3, dtype=np.uint32)],
        "mask": np.array([True, False]),
        "wide": np.arange(6, dtype=np.int64).reshape(2, 3).T,
        "batch": TensorDict({"a": torch.arange(3), "b": {"c": torch.ones(3, 2)}}, batch_size=[3]),
        0: torch.zeros(1),
        "0": torch.ones(1),
    }
    back = round_trip(tree, tmp_path / "tree.safetensors")
    back["views"] = [view.contiguous() for view in back["views"]]
    tree["views"] = [view.contiguous() for view in tree["views"]]
    tree["wide"] = np.ascontiguousarray(tree["wide"])
    assert same(back, tree)


def test_random_generators_continue_from_a_stored_state(tmp_path):
    generators = np.random.default_rng(3), random.Random(3), torch.Generator().manual_seed(3)
    tree = {
        "numpy": generators[0].bit_generator.state,
        "python": generators[1].getstate(),
        "torch": generators[2].get_state(),
    }
    drawn = generators[0].random(), generators[1].random(), torch.rand(1, generator=generators[2])
    back = round_trip(tree, tmp_path / "rng.safetensors")
    generators[0].bit_generator.state = back["numpy"]
    generators[1].setstate(back["python"])
    generators[2].set_state(back["torch"])
    assert (generators[0].random(), generators[1].random(), torch.rand(1, generator=generators[2])) == drawn


@pytest.mark.parametrize("stranger", [object(), {1, 2}, np.array(["a"]), np.array([None])])
def test_what_cannot_be_stored_is_refused_with_its_place(stranger, tmp_path):
    with pytest.raises(ValueError, match="a/0/b"):
        save_tree(tmp_path / "tree.safetensors", {"a": [{"b": stranger}]})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "tree.safetensors"
    save_tree(path, {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_tree(path, {"a": 2})
    assert load_tree(path) == {"a": 1}
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


def test_damaged_files_are_one_line_errors(tmp_path):
    path = tmp_path / "tree.safetensors"
    save_tree(path, {"a": torch.arange(100)})
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:50], b"", whole + b"x", pickle.dumps({"a": 1}), b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot read") as error:
            load_tree(path)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cannot read"):
        load_tree(tmp_path / "missing")


def test_no_flipped_bit_changes_what_comes_back(tmp_path):
    path, tree = (
        tmp_path / "tree.safetensors",
        {"a": torch.arange(5.0), "b": {"c": [1, "text", torch.tensor([True, False])]}},
    )
    save_tree(path, tree)
    whole = path.read_bytes()
    message = []
    numbers = 8 * (len(whole) - 5 * 4 - 2)  # where those of the tensors begin: each bit of them is flipped
    for bit in [*random.Random(0).sample(range(numbers), 200), *range(numbers, 8 * len(whole))]:
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert same(load_tree(path), tree), bit  # a blank of the header
        except ValueError as error:
            message.append(str(error))
    assert len(message) > 360
    assert not any("\n" in line for line in message)


def test_a_file_without_checksum_is_not_taken_for_one_with(tmp_path):
    path = tmp_path / "tree.safetensors"
    save_file({}, path, metadata={"tree": "[1, 2]"})
    with pytest.raises(ValueError, match="not a tree with a checksum; delete it"):
        load_tree(path)


def test_the_same_tree_is_the_same_file(tmp_path):
    tree = {"a": torch.arange(3.0), "b": [1, "two"]}
    for number in range(8):
        save_tree(tmp_path / f"{number}.safetensors", tree)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_copy_shares_no_memory(device: str | None):
    def made() -> dict:
        return {
            "tensor": torch.zeros(2),
            "array": np.zeros(2),
            "number": 1,
            "nested": [(torch.zeros(2), {"deep": np.zeros(2)}), TensorDict({"row": torch.zeros(2)}, [2])],
        }

    tree = made()
    copy = copy_tree(tree, device)
    assert same(copy, tree)
    for part in (tree["tensor"], tree["array"], tree["nested"][0][0], tree["nested"][0][1]["deep"]):
        part += 1
    tree["nested"][1]["row"] += 1
    tree["nested"].append(3)
    assert same(copy, made())
