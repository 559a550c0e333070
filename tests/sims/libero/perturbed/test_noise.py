"""Image noise of LIBERO-plus: blurs against numbers by hand, and what each kind leaves as it is."""

import math

import numpy as np
import pytest

from sims.libero.perturbed import noise
from sims.libero.perturbed.noise import MOST, PIXELS, corrupted

RNG = np.random.default_rng(0)
PICTURE = np.kron(RNG.integers(256, size=(32, 32, 3)), np.ones((8, 8, 1))).astype(np.uint8)
KINDS = {"motion": 1, "gaussian": 11, "zoom": 21, "fog": 31, "glass": 41}


@pytest.mark.parametrize("first", KINDS.values(), ids=KINDS)
def test_noise_is_that_of_the_task_and_the_picture_and_grows(first: int) -> None:
    weak, strong = (corrupted(PICTURE, number, "task") for number in (first, first + 9))
    assert weak.shape == PICTURE.shape
    assert weak.dtype == np.uint8
    assert np.array_equal(weak, corrupted(PICTURE, first, "task"))
    differences = [np.abs(each.astype(int) - PICTURE).mean() for each in (weak, strong)]
    assert 0.0 < differences[0] < differences[1]
    if first in (1, 31, 41):  # drawn at random
        assert not np.array_equal(weak, corrupted(PICTURE, first, "another task"))


@pytest.mark.parametrize("kind", ["motion", "gaussian", "zoom", "glass"])
@pytest.mark.parametrize("strength", range(10))
def test_a_plain_picture_stays_as_it_is(kind: str, strength: int) -> None:
    plain = np.full((PIXELS, PIXELS, 3), 51, np.uint8)
    found = corrupted(plain, KINDS[kind] + strength, "task").astype(int)
    assert np.abs(found - 51).max() <= (2 if kind == "glass" else 1)  # bytes are rounded down, twice behind glass


def test_all_fifty_kinds_are_pictures() -> None:
    assert MOST == 50
    assert len({corrupted(PICTURE, number, "task").tobytes() for number in range(1, MOST + 1)}) == 50


def test_gaussian_blur_of_an_edge_is_the_normal_distribution() -> None:
    edge = np.zeros((PIXELS, PIXELS, 3), np.uint8)
    edge[:, 128:] = 200
    found = corrupted(edge, 14, "task")[100, :, 1]  # a deviation of four pixels
    expected = [200.0 * 0.5 * (1.0 + math.erf((column - 127.5) / (4.0 * math.sqrt(2.0)))) for column in range(256)]
    assert np.abs(found - np.array(expected)).max() < 1.5
    assert (found[0], found[-1]) == (0, 200)


def test_motion_blur_moves_bytes_along_a_line_of_one_direction() -> None:
    point = np.zeros((PIXELS, PIXELS, 3), np.uint8)
    point[128, 128] = 255
    found = corrupted(point, 5, "task")[..., 0].astype(float)  # radius 15 pixels, deviation 6
    rows, columns = found.nonzero()
    assert 0.9 * 255 < found.sum() < 1.1 * 255
    assert columns.max() == 128  # pixels show what is to the right of them
    assert 128 - 30 <= columns.min() <= 118
    slope = (rows - 128) / np.minimum(columns - 128, -1)
    assert np.abs(slope[columns < 120]).max() <= 1.0 + 0.2  # at most 45 degrees
    # weights exp(-i^2 / (2 36)), normalised
    weights = np.exp(-(np.arange(31) ** 2) / 72.0)
    assert found[128, 128] == pytest.approx(255 * weights[0] / weights.sum(), abs=1.0)


def test_zoom_blur_keeps_the_middle_and_smears_the_rim() -> None:
    image = noise._magnified(np.arange(256.0)[:, None, None] * np.ones((1, 256, 3)), 2.0)
    # the 128 rows from 64 on, over 256 pixels: row i shows 64 + i 127 / 255
    np.testing.assert_allclose(image[:, 7, 0], 64.0 + np.arange(256) * 127.0 / 255.0)
    assert np.array_equal(noise._magnified(image, 1.0), image)
    difference = np.abs(corrupted(PICTURE, 25, "task").astype(int) - PICTURE)
    assert difference[124:132, 124:132].mean() < 0.3 * difference[:, :16].mean()


def test_fog_brightens_and_is_uneven() -> None:
    dark = np.zeros((PIXELS, PIXELS, 3), np.uint8)
    dark[0, 0] = 200
    found = corrupted(dark, 35, "task")
    assert found.max() <= 200  # the brightest pixel stays the brightest
    assert found.std() > 5.0
    clouds = noise._clouds(2.0, np.random.default_rng(1))
    assert (clouds.min(), clouds.max()) == (0.0, 1.0)
    assert np.abs(clouds - np.roll(clouds, 1, 0)).max() < 0.3  # without seams, also at the rim


def test_glass_displaces_pixels_up_to_the_rim() -> None:
    # each column has its own grey: where a pixel was taken from
    columns = np.broadcast_to(np.arange(PIXELS)[:, None], (PIXELS, PIXELS, 3)).astype(np.uint8)
    sources = noise._displaced(columns, 5, 1, np.random.default_rng(0)).astype(int)[..., 0]
    shift = sources - np.arange(PIXELS)
    assert np.array_equal(shift[:, :6], np.zeros((PIXELS, 6)))  # beyond the reach from the rim nothing moves
    assert np.array_equal(shift[:6], np.zeros((6, PIXELS)))
    assert np.array_equal(shift[:, 252:], np.zeros((PIXELS, 4)))
    moved = shift[6:252, 6:252]
    assert {-5, 4} < set(moved.flatten().tolist())  # and more, where the neighbour had been replaced
    assert (moved != 0).mean() > 0.8
    for corner in (moved[:30, :30], moved[-30:, -30:], moved[-30:, :30], moved[:30, -30:]):
        assert (corner != 0).mean() > 0.8
