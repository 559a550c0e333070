"""Ratios of the throughput benchmark, by hand: both render the same number of images."""

import pytest

from benchmarks.libero_throughput import Rate, compared


def test_pictures_are_compared_with_as_many_and_alone() -> None:
    # ours: 1 ms a step and 30 ms for the pictures; stock: 10 ms and 90 ms; two cores
    plain, stock = Rate(1000, 0, 1.0, 0.5), Rate(100, 0, 1.0, 0.5)
    every_step, every_chunk = Rate(100, 100, 3.1, 1.55), Rate(400, 100, 3.4, 1.7)
    row = compared(plain, every_step, every_chunk, stock, Rate(50, 50, 5.0, 2.5))
    ratios = {name: pair["ratio_cpu"] for name, pair in row.items()}
    assert ratios == pytest.approx({"none": 10.0, "every step": 100 / 31, "every chunk": 400 / 34, "alone": 3.0})
    assert row["alone"]["ours"]["per_cpu_s"] == pytest.approx(1 / 0.030)
    assert row["alone"]["stock"]["per_wall_s"] == pytest.approx(2 / 0.090)


def test_where_stock_cannot_draw_only_steps_are_compared() -> None:
    plain = Rate(1000, 0, 1.0, 0.5)
    assert [*compared(plain, plain, plain, plain, None)] == ["none"]
