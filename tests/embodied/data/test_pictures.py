"""Pictures that stay encoded: they come back from disk bit for bit, decoded ahead or not."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import Episodes, EpisodeWriter, read
from embodied.data.pictures import Pictures, encode_all
from embodied.errors import UserError

SPEC = TensorSpec((5, 4, 3), "uint8")
CONTRACT = Contract({"x": TensorSpec((1,)), "front": SPEC, "wrist": SPEC}, TensorSpec((1,)), control_dt_s=0.1)
LENGTHS = (3, 1, 4)
FRAMES = {
    key: np.random.default_rng(seed).integers(0, 256, (sum(LENGTHS), 5, 4, 3), np.uint8)
    for seed, key in enumerate(("front", "wrist"))
}


def episodes() -> list[Episodes]:
    found, begin = [], 0
    for length in LENGTHS:
        rows = slice(begin, begin := begin + length)
        x = torch.arange(rows.start, rows.stop).float().unsqueeze(1)
        shown = Pictures.of({key: encode_all(frames[rows]) for key, frames in FRAMES.items()})
        found.append(Episodes.of(TensorDict({"x": x}, [length]), x, pictures=shown))
    return found


@pytest.fixture(params=["joined", "written"])
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Episodes:
    if request.param == "joined":
        return Episodes.join(episodes())
    with EpisodeWriter(tmp_path / "episodes", CONTRACT) as writer:
        for part in episodes():
            writer.add(part)
    return read(tmp_path / "episodes")[0]


def check(batch: TensorDict) -> None:
    rows = batch["observation", "x"].flatten().long()
    for key, frames in FRAMES.items():
        assert torch.equal(batch["observation", key], torch.from_numpy(frames)[rows])


def test_every_row_has_its_picture(whole: Episodes):
    check(whole.chunks(torch.tensor([7, 0, 3, 3, 2]), 2))
    check(whole.chunks(torch.arange(len(whole)), 1))


def test_what_is_decoded_ahead_changes_nothing(whole: Episodes):
    """Draws are those without pictures, also when something else draws in between."""
    generator, alone = (torch.Generator().manual_seed(3) for _ in range(2))
    for step in range(6):
        if step == 3:
            torch.randint(5, (1,), generator=generator)
            torch.randint(5, (1,), generator=alone)
        batch = whole.sample(4 + step % 2, 2, generator)
        check(batch)
        expected = torch.randint(len(whole), (4 + step % 2,), generator=alone)
        assert torch.equal(batch["observation", "x"].flatten().long(), expected)
    assert torch.equal(generator.get_state(), alone.get_state())


def test_the_next_minibatch_is_taken_from_what_was_decoded_ahead(whole: Episodes, monkeypatch: pytest.MonkeyPatch):
    begun = []
    monkeypatch.setattr(
        whole.pictures, "_begin", lambda rows, begin=whole.pictures._begin: begun.append(rows) or begin(rows)
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        check(whole.sample(4, 1, generator))
    assert len(begun) == 6  # the first, and one ahead each time


def test_a_damaged_picture_is_reported():
    part = episodes()[0]
    part.pictures.data["front"][20:60] = 0
    with pytest.raises(UserError, match="cannot decode a picture"):
        part.chunks(torch.arange(3), 1)
