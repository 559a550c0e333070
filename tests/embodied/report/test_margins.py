"""Margins by hand: between which values enough episodes succeed."""

import json

import pytest

from embodied.report.margins import Margin, measure, read
from embodied.task import Sweep, Task

FACTOR = Sweep("1", "times the mass", (0.8, 0.9, 1.0, 1.1, 1.2))


@pytest.mark.parametrize(
    ("successes", "bounds", "words"),
    [
        ((90, 95, 100, 96, 94), (0.9, 1.1), "0.9 to 1.1"),
        ((99, 99, 100, 99, 96), (None, None), "0.8 or less to 1.2 or more"),
        ((99, 50, 99, 100, 99), (1.0, None), "1 to 1.2 or more"),  # it must hold everywhere in between
        ((10, 20, 94, 20, 10), (1.0, 1.0), "nowhere 95%"),
        ((10, 20, 95, 20, 10), (1.0, 1.0), "1 to 1"),
    ],
)
def test_a_margin_is_the_range_around_the_best_value(successes, bounds, words):
    margin = Margin(FACTOR, successes, 100)
    assert margin.bounds() == bounds
    assert margin.words() == words


def test_rates_have_wilsons_interval():
    rate, low, high = Margin(FACTOR, (50, 0, 0, 0, 0), 100).rates()[0]
    assert (rate, low, high) == pytest.approx((0.5, 0.4038, 0.5962), abs=1e-4)


def test_margins_of_other_weights_are_none(tmp_path):
    assert read(tmp_path, "ab") is None
    (tmp_path / "margins.json").write_text(json.dumps({"weights_sha256": "ab", "margins": {}}))
    assert read(tmp_path, "ab") == {"weights_sha256": "ab", "margins": {}}
    assert read(tmp_path, "cd") is None
    (tmp_path / "margins.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        read(tmp_path, "ab")


def test_a_task_without_sweeps_is_refused():
    class Plain(Task):
        name = "reach"

    with pytest.raises(ValueError, match="reach has no conditions to sweep"):
        measure(Plain(), lambda name: None, None, starts_per_task=1)
