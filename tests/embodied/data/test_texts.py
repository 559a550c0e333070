"""Texts of episodes are numbers of a table in memory and in files, and bytes in every batch."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import RECORD, Episodes, EpisodeWriter, columns, read
from embodied.data.texts import Texts
from embodied.errors import UserError
from embodied.saving import sealed
from embodied.text import encode, text_spec

CONTRACT = Contract(
    {"x": TensorSpec((1,)), "instruction": text_spec(32), "objects": text_spec(8, -1)},
    TensorSpec((1,)),
    control_dt_s=0.1,
)
PARTS = ["open", "open", "close"], ["close", "lift"], ["open"]


def episode(instructions: list[str], number: int = 0, **options) -> Episodes:
    """An episode with an instruction a step, and the same two objects in all of its steps."""
    length = len(instructions)
    x = 10.0 * number + torch.arange(length).float().unsqueeze(1)
    objects = np.stack([encode("cup", 8), encode(f"bowl{number}", 8)])
    rows = {
        "x": x,
        "instruction": torch.from_numpy(np.stack([encode(text, 32) for text in instructions])),
        "objects": torch.from_numpy(objects).expand(length, 2, 8),
    }
    return Episodes.of(TensorDict(rows, [length]), x, **options)


def episodes() -> list[Episodes]:
    return [episode(texts, number, success=number != 1) for number, texts in enumerate(PARTS)]


def write(folder: Path, parts: list[Episodes]) -> Episodes:
    with EpisodeWriter(folder, CONTRACT) as writer:
        for part in parts:
            writer.add(part)
    return read(folder)[0]


def same(first: TensorDict, second: TensorDict) -> bool:
    return first.keys() == second.keys() and bool((first == second).all())


def test_a_table_has_each_text_once_and_rows_have_its_number(tmp_path):
    stored = write(tmp_path / "a", episodes())
    assert stored.texts is not None
    assert {*stored.observation.keys()} == {"x"}
    table = [bytes(row.numpy()).rstrip(b"\0") for row in stored.texts.tables["instruction"]]
    assert table == [b"open", b"close", b"lift"]
    assert stored.texts.numbers["instruction"].tolist() == [0, 0, 1, 1, 2, 0]
    assert stored.texts.tables["objects"].shape == (3, 2, 8)
    assert stored.texts.numbers["objects"].tolist() == [0, 0, 0, 1, 1, 2]
    assert np.load(tmp_path / "a/text_numbers.instruction.npy").nbytes == 6 * 4
    assert np.load(tmp_path / "a/texts.instruction.npy").nbytes == 3 * 32


def test_every_view_has_the_bytes_of_the_contract(tmp_path):
    plain, stored = Episodes.join(episodes()), write(tmp_path / "a", episodes())
    rows = torch.tensor([5, 0, 4, 2])
    assert same(stored.chunks(rows, 2), plain.chunks(rows, 2))
    batches = [each.sample(16, 2, torch.Generator().manual_seed(3)) for each in (stored, plain)]
    assert same(*batches)
    assert same(stored.by_weight()[0], plain.by_weight()[0])
    whole = [replace(each, success=torch.ones(3, dtype=torch.int8)) for each in (stored, plain)]
    assert same(whole[0].by_weight()[0], whole[1].by_weight()[0])
    weighted = [
        replace(each, dataset_index=torch.tensor([0, 1, 1]), weights=torch.tensor([1.0, 3.0])) for each in whole
    ]
    assert same(weighted[0].by_weight()[0], weighted[1].by_weight()[0])
    assert same(stored.expanded().observation, plain.observation)
    assert same(stored.part(1, 3).expanded().observation, plain.part(1, 3).observation)


def test_texts_are_joined_with_texts_and_with_bytes(tmp_path):
    first, second = write(tmp_path / "a", episodes()[:2]), write(tmp_path / "b", episodes()[1:])
    plain = Episodes.join([*episodes()[:2], *episodes()[1:]])
    joined = Episodes.join([first, second])
    assert joined.texts is not None
    assert len(joined.texts.tables["instruction"]) == 3
    assert same(joined.expanded().observation, plain.observation)
    mixed = Episodes.join([first, *episodes()[1:]])
    assert mixed.texts is None
    assert same(mixed.observation, plain.observation)


def test_stored_episodes_are_written_again_with_the_numbers_of_the_new_table(tmp_path):
    stored = write(tmp_path / "a", episodes())
    again = write(tmp_path / "b", [stored.part(2, 3), stored.part(0, 2)])
    assert again.texts is not None
    assert again.texts.numbers["instruction"].tolist() == [0, 0, 0, 1, 1, 2]
    assert len(again.texts.tables["instruction"]) == 3
    plain = Episodes.join(episodes())
    assert same(again.expanded().observation, plain.observation[[5, 0, 1, 2, 3, 4]])


def test_texts_of_another_shape_or_without_a_key_are_refused_before_anything_is_written(tmp_path):
    other = episode(["open"])
    other.observation["objects"] = torch.zeros(1, 3, 8, dtype=torch.uint8)
    silent = replace(episode(["open"]), observation=episode(["open"]).observation.exclude("instruction"))
    with EpisodeWriter(tmp_path / "a", CONTRACT) as writer:
        writer.add(episode(["open"]))
        with pytest.raises(UserError, match=r"expected rows of .* in texts\.objects\.npy"):
            writer.add(other)
        with pytest.raises(UserError, match=r"expected episodes with .*texts\.instruction"):
            writer.add(silent)
        writer.add(episode(["lift"]))
    stored = read(tmp_path / "a")[0]
    assert same(stored.expanded().observation, Episodes.join([episode(["open"]), episode(["lift"])]).observation)


def test_folders_of_format_2_are_read(tmp_path):
    plain = Episodes.join(episodes())
    bare = replace(CONTRACT, observation={"x": TensorSpec((1,))})  # without texts in its contract
    with EpisodeWriter(tmp_path / "a", bare) as writer:
        writer.add(plain)
    record = json.loads((tmp_path / "a" / RECORD).read_text())
    files = record.pop("files")
    assert "observation.instruction.npy" in files
    sealed.write(tmp_path / "a" / RECORD, record | {"format": 2, "contract": CONTRACT.to_dict()}, files)
    stored = read(tmp_path / "a")[0]
    assert stored.texts is None
    assert same(stored.observation, plain.observation)
    sealed.write(tmp_path / "a" / RECORD, record | {"format": 4}, files)
    with pytest.raises(UserError, match="has format 4, this version reads format 2 or 3"):
        read(tmp_path / "a")


def test_observations_may_be_texts_alone(tmp_path):
    spoken = [replace(each, observation=each.observation.select("instruction")) for each in episodes()]
    stored = write(tmp_path / "a", spoken)
    assert not any(name.startswith("observation.") for name in columns(stored))
    rows = torch.tensor([0, 4])
    assert same(stored.chunks(rows, 1), Episodes.join(spoken).chunks(rows, 1))
    empty = Texts.of({"objects": torch.zeros(3, 0, 8, dtype=torch.uint8)})
    assert empty.numbers["objects"].tolist() == [0, 0, 0]
