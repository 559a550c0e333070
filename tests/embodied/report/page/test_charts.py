"""Charts put values where their axes say."""

import re
from xml.etree import ElementTree

import pytest

from embodied.report.page.charts import (
    BOTTOM,
    HEIGHT,
    POINTS,
    TOP,
    Mark,
    Scale,
    bar,
    brief,
    curves,
    stages,
    thinned,
    ticks,
)


def test_positions_follow_the_axis_and_stay_on_it():
    x = Scale(0.0, 10.0, 100.0, 200.0)
    assert [x(value) for value in (0.0, 2.5, 10.0, -3.0, 99.0)] == [100.0, 125.0, 200.0, 100.0, 200.0]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 1_050_000, [0.0, 250_000, 500_000, 750_000, 1_000_000, 1_250_000]),
        (-3.1, 7.0, [-5.0, -2.5, 0.0, 2.5, 5.0, 7.5]),
        (2.0, 2.0, [2.0, 2.4]),
    ],
)
def test_ticks_are_round_and_cover_the_values(low, high, expected):
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert len(found) <= 8
    if low < high:
        assert found == pytest.approx(expected)


def test_steps_are_told_briefly():
    assert [brief(steps) for steps in (0, 800, 250_000, 1_050_000)] == ["0", "800", "250k", "1.05M"]


def test_a_curve_is_thinned_to_means_and_keeps_its_end():
    points = [(float(step), float(step % 2)) for step in range(10 * POINTS)]
    found = thinned(points)
    assert len(found) == POINTS
    assert found[-1] == (10 * POINTS - 1, 0.5)
    assert thinned(points[:3]) == points[:3]
    assert thinned([]) == []


def test_marks_lie_at_their_steps_and_values_with_their_intervals():
    marks = [
        Mark("SFT", "sft", 0.5, 0.25, 0.75, 0),
        Mark("RL & <b>", "rl", 1.0, 0.9, 1.0, 100),
        Mark("x", "control", 0.0, None, None),
    ]
    drawn = ElementTree.fromstring(stages(marks, 100, "success"))
    dots = {dot.get("class"): dot for dot in drawn.iter("circle")}
    middle = (TOP + HEIGHT - BOTTOM) / 2
    assert float(dots["dot sft"].get("cy", 0)) == middle
    assert float(dots["dot rl"].get("cy", 0)) == TOP
    assert float(dots["dot control"].get("cy", 0)) == HEIGHT - BOTTOM
    across = [float(dots[f"dot {kind}"].get("cx", 0)) for kind in ("sft", "rl", "control")]
    assert across == sorted(across)
    whisker = next(path.get("d", "") for path in drawn.iter("path"))
    ends = re.match(r"M[\d.]+,([\d.]+)V([\d.]+)", whisker)
    assert ends
    quarter = (HEIGHT - BOTTOM - TOP) / 4
    assert [float(end) for end in ends.groups()] == [middle - quarter, middle + quarter]
    assert len(list(drawn.iter("path"))) == 2  # the control's interval is unknown
    assert any(text.text == "RL & <b>" for text in drawn.iter("text"))


def test_the_band_of_evaluations_between_marks_has_the_ends_of_their_intervals():
    marks = [Mark("SFT", "sft", 0.5, 0.25, 0.75, 0), Mark("RL", "rl", 1.0, 0.9, 1.0, 100)]
    between = [Mark("after 50", "rl", 0.75, 0.5, 1.0, 50), Mark("after 100", "rl", 1.0, 0.75, 1.0, 100)]
    drawn = ElementTree.fromstring(stages(marks, 100, "success", between))
    band = next(drawn.iter("polygon")).get("points", "").split()
    heights = [float(point.split(",")[1]) for point in band]
    quarter = (HEIGHT - BOTTOM - TOP) / 4
    assert heights == [TOP, TOP, TOP + quarter, TOP + 2 * quarter]
    lines = {line.get("class"): line.get("points", "").split() for line in drawn.iter("polyline")}
    assert set(lines) == {"curve rl"}  # the dashed line says that nothing was evaluated
    assert [float(point.split(",")[1]) for point in lines["curve rl"]] == [TOP + quarter, TOP]


def test_nothing_is_drawn_of_nothing():
    assert stages([], 0, "success") == ""
    assert curves({"all": []}, 0, "success") == ""


def test_curves_and_bars_are_drawn():
    drawn = ElementTree.fromstring(curves({"return": [(0, -2.0), (50, 3.0)]}, 100, "return"))
    line = next(drawn.iter("polyline")).get("points", "").split()
    assert len(line) == 2
    (x, low), (further, high) = (map(float, point.split(",")) for point in line)
    assert further > x
    assert high < low  # up
    cell = ElementTree.fromstring(bar(Mark("RL", "rl", 0.5, 0.25, 1.0), 0.0, 1.0))
    assert {name: next(cell.iter("rect")).get(name) for name in ("x", "width")} == {"x": "1.5", "width": "78.5"}
    assert str(next(cell.iter("path")).get("d")).startswith("M40.8,8H158.5")
    below = ElementTree.fromstring(bar(Mark("RL", "rl", -5.0, -6.0, -4.0), -8.0, -2.0))
    assert not list(below.iter("rect"))  # no length where the axis does not begin at zero
    assert next(below.iter("circle")).get("cx") == "80.0"
