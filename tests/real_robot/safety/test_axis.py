"""Motion inside all limits passes unchanged; other targets are reached in nearly minimal time, without overshoot."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real_robot.safety.axis import INF, Axis, _fits

DT_S = 0.002


def axis(velocity: float = 2.0, acceleration: float = 10.0, jerk: float = 500.0, reach: float = 2.0) -> Axis:
    fastest = velocity * DT_S
    return Axis(-reach, reach, -fastest, fastest, acceleration * DT_S**2, jerk * DT_S**3)


def least_time(distance: float, v: float, a: float, j: float) -> float:
    """Of the jerk-limited motion from rest to rest, s."""
    if math.isinf(a):
        return distance / v
    ramp = 0.0 if math.isinf(j) else a / j
    if distance >= v * (v / a + ramp):
        return distance / v + v / a + ramp
    if distance >= 2.0 * a * ramp**2:
        return math.sqrt(ramp**2 + 4.0 * distance / a) + ramp
    return 4.0 * (distance / (2.0 * j)) ** (1.0 / 3.0)


@pytest.mark.parametrize("limits", [(2.0, 10.0, 500.0), (2.0, 10.0, INF), (2.0, INF, INF), (0.5, 20.0, 5000.0)])
@pytest.mark.parametrize("target", [1.0, 2.0, 2.5, -0.01])
def test_a_step_is_made_in_nearly_the_least_time_and_not_passed(limits, target):
    moved = axis(*limits)
    positions = np.array([moved.toward(target) for _ in range(2500)])
    end = min(target, 2.0)
    assert (np.sign(target) * (positions - end)).max() <= moved.fastest  # less than what a period covers
    late = np.nonzero(np.abs(positions - end) > 1e-3)[0][-1] + 2
    assert late * DT_S <= 1.05 * least_time(abs(end), *limits) + 5 * DT_S
    assert positions[-1] == pytest.approx(end, abs=1e-9)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(0.05, 0.4), st.floats(0.1, 3.0), st.floats(0.0, 6.0)), min_size=1, max_size=3))
def test_motion_inside_all_limits_passes_unchanged(waves):
    time_s = np.arange(600) * DT_S
    # sums of squared sines begin at rest, with no acceleration; scaled into the limits
    path = sum(a * np.sin(w * time_s) ** 4 * np.cos(phase) for a, w, phase in waves)
    steps = [np.abs(np.diff(path, order)).max() for order in (1, 2, 3)]
    moved = axis(reach=1.5)
    # what stopping needs is kept free too: motion at a limit itself may be changed
    most = (0.8 * moved.fastest, 0.8 * moved.most_b, 0.8 * moved.most_c)
    path = path * min(1.0, *(limit / max(step, 1e-30) for limit, step in zip(most, steps, strict=True)))
    path = path * min(1.0, 0.5 / max(np.abs(path).max(), 1e-30))
    followed = np.array([moved.toward(position) for position in path])
    np.testing.assert_allclose(followed, path, atol=1e-12)


def test_without_a_limit_of_jerk_acceleration_reverses_from_one_period_to_the_next():
    moved = axis(jerk=INF)
    acceleration = 0.8 * moved.most_b * np.where(np.arange(400) // 40 % 2, -1.0, 1.0)
    path = acceleration.cumsum().cumsum()
    followed = np.array([moved.toward(position) for position in path])
    np.testing.assert_allclose(followed, path, atol=1e-12)


def test_a_moving_target_is_met_after_a_jump():
    moved, time_s = axis(), np.arange(3000) * DT_S
    target = 0.5 * np.sin(2.0 * time_s) + np.where(time_s > 1.0, 0.3, 0.0)
    error = np.abs(np.array([moved.toward(position) for position in target]) - target)
    assert error[900:].max() < 2e-3


def test_a_velocity_is_followed_up_to_a_wall_that_is_measured():
    moved, x, speeds = axis(reach=1.0), 0.0, [0.0]
    for _ in range(2000):
        moved.p = x
        speeds.append(moved.at_velocity(1.5 * DT_S))
        x += speeds[-1]
    assert 0.999 < x <= 1.0
    assert speeds[-1] == pytest.approx(0.0, abs=1e-9)
    assert 1.5 * DT_S <= max(speeds) <= 1.53 * DT_S
    assert np.abs(np.diff(speeds)).max() <= moved.most_b * (1 + 1e-12)
    assert np.abs(np.diff(speeds, 2)).max() <= moved.most_c * (1 + 1e-9)


@pytest.mark.parametrize("outside", [1.2, -1.2])
def test_outside_its_walls_it_moves_inward_alone(outside):
    moved = axis(reach=1.0)
    moved.p = outside
    assert moved.at_velocity(math.copysign(1.0, outside) * DT_S) == 0.0
    for _ in range(20):
        moved.p = outside
        speed = moved.at_velocity(math.copysign(1.0, -outside) * DT_S)
    assert speed * outside < 0.0


def test_a_wall_that_comes_closer_than_braking_needs_is_met_with_all_braking_there_is():
    moved = axis(jerk=INF, reach=1.0)
    for _ in range(300):
        moved.p = 0.0
        moved.at_velocity(1.5 * DT_S)
    speeds = [1.5 * DT_S]
    moved.p = 0.99
    while speeds[-1] > 0.0:
        speeds.append(moved.at_velocity(1.5 * DT_S))
    # one period more than the least, in which the last remainder is taken away
    assert len(speeds) - 1 <= math.ceil(speeds[0] / moved.most_b) + 2


def test_a_stop_stays_inside_all_limits_and_ends_at_rest():
    rng = np.random.default_rng(0)
    stops = periods = 0
    for _ in range(3000):
        moved = axis(jerk=rng.choice([200.0, 2000.0]), reach=0.02)
        box = (moved.low, moved.high, moved.slowest, moved.fastest)
        p, w, b = rng.uniform(-1.0, 1.0, 3) * (moved.high, 0.2 * moved.fastest, moved.most_b)
        if (stop := moved._stop_from(p, w, b, box)) is None:
            continue
        changes = [c for c, count in stop for _ in range(count)]
        stops += 1
        periods += len(changes)
        for c in changes:
            b += c
            w += b
            p += w
            assert abs(c) <= moved.most_c * (1 + 1e-9)
            assert abs(b) <= moved.most_b * (1 + 1e-9)
            assert moved.slowest - 1e-12 <= w <= moved.fastest + 1e-12
            assert moved.low - 1e-12 <= p <= moved.high + 1e-12
        assert w == pytest.approx(0.0, abs=1e-12)
        assert b == pytest.approx(0.0, abs=1e-12)
    assert (stops, periods) == (2454, 55674)  # neither fewer nor longer ones


@pytest.mark.parametrize(
    ("method", "w", "b", "arguments", "expected"),
    # an axis from -40 to 40 with |w| <= 6, |b| <= 2, |c| <= 1/2 that may go on for 2 periods
    [
        # w gains b^2 / 2c + b / 2 = 5 until b = 2 has ceased, and loses 1.5 until b = -1 has
        ("_room", 0.0, 0.0, (3.0, 2.0), (-40.0, 40.0 - 2.0 * 8.0)),
        ("_room", 0.0, 0.0, (-3.0, 2.0), (-40.0 + 2.0 * 3.0, 40.0 - 2.0 * 2.0)),
        ("_room", 0.0, 0.0, (-1.0, -1.0), (-40.0 + 2.0 * 2.5, 40.0)),
        ("_room", 0.0, 0.0, (1.0, -1.0), (-40.0 + 2.0 * 0.5, 40.0 - 2.0 * 1.0)),
        # 1 + 1/2 = 1.5; the next b is from 1/2 to 3/2
        ("_gain", 1.0, 1.0, (2.5,), 1.0),
        ("_gain", 1.0, 1.0, (-9.0,), 0.5),
        ("_gain", 1.0, 1.0, (6.0,), 1.5),
        ("_gain", 4.5, 1.0, (99.0,), 1.0),
        ("_gain", -4.5, -1.0, (-99.0,), -1.0),
        ("_gain", 1.0, 0.0, (1.2,), 0.2),
        ("_gain", 1.0, 0.0, (0.8,), -0.2),
        # w^2 / 2B + w B / 2C: 2^2 / 4 + 2 * 2 = 5, 4^2 / 4 + 4 * 2 = 12
        ("_speed_to_stop_in", 0.0, 0.0, (5.0,), 2.0),
        ("_speed_to_stop_in", 0.0, 0.0, (12.0,), 4.0),
        # 4 periods to -2 and as many back take 8 away; from b = 1 on, 5 to -3/2 and 3 back take 3.75
        ("_durations", 0.0, 0.0, (0.0, 0.0), (1, 0, 1)),
        ("_durations", 0.0, 0.0, (8.0, 0.0), (4, 0, 4)),
        ("_durations", 0.0, 0.0, (9.0, 0.0), (4, 1, 4)),
        ("_durations", 0.0, 0.0, (3.5, 1.0), (5, 0, 3)),
        ("_durations", 0.0, 0.0, (12.0, 1.0), (6, 3, 4)),
        ("_durations", 0.0, 0.0, (12.0, -1.0), (2, 3, 4)),
        ("_durations", 0.0, 0.0, (8.5, -1.9), (1, 3, 4)),
        ("_durations", 0.0, 0.0, (0.2, -1.0), (1, 0, 2)),
    ],
)
def test_by_hand(method: str, w: float, b: float, arguments: tuple, expected: float | tuple):
    moved = Axis(-40.0, 40.0, -6.0, 6.0, most_b=2.0, most_c=0.5, pause=2.0)
    moved.w, moved.b = w, b
    assert getattr(moved, method)(*arguments) == pytest.approx(expected)


def test_a_stop_fits_where_each_of_its_periods_does():
    rng, fits = np.random.default_rng(0), []
    for _ in range(1000):
        rise, hold, fall = (int(n) for n in rng.integers((1, 0, 1), (6, 4, 6)))
        b, peak = rng.uniform(-1.0, 2.0), rng.uniform(0.0, 1.0)
        c = -(peak + b) / rise
        speed = peak * ((rise + fall) / 2.0 + hold) - b * (rise - 1) / 2.0  # which the stop takes away
        changes = np.array([c] * rise + [0.0] * hold + [peak / fall] * fall)
        speeds = speed + np.cumsum(b + np.cumsum(changes))
        assert speeds[-1] == pytest.approx(0.0, abs=1e-12)
        way = np.cumsum(speeds)
        room = rng.uniform(0.0, 1.2, 3) * (max(speeds.max(), 0.1), max(way[-1], 0.1), max(-way.min(), 0.1))
        room[0] = max(room[0], speed)  # the axis moves so fast already
        if speed >= 0.0 or b >= 0.0:  # `_stop_from` mirrors the others
            fits.append(bool(speeds.max() <= room[0] and way[-1] <= room[1] and -way.min() <= room[2]))
            assert _fits(speed, b, c, (rise, hold, fall), peak, tuple(room)) == fits[-1]
    assert 100 < sum(fits) < 200


@pytest.mark.parametrize("jerk", [INF, 0.5])
@pytest.mark.parametrize(("target", "end"), [(4.0, 4.0), (-4.0, -4.0), (40.0, 10.0), (-40.0, -10.0)])
def test_it_comes_to_rest_at_a_position_without_passing_it(jerk: float, target: float, end: float):
    moved = Axis(-10.0, 10.0, -2.0, 2.0, most_b=1.0, most_c=jerk)
    moved.start(1.0)
    positions = [1.0, 1.0, 1.0, *(moved.rest_at(target) for _ in range(20))]
    ways = np.sign(end - 1.0) * np.diff(positions)
    assert (ways >= 0.0).all()
    assert positions[-1] == end
    assert moved.still
    assert (moved.low, moved.high) == (-10.0, 10.0)
    assert 0.8 < ways.max() <= 2.0
    assert np.abs(np.diff(ways)).max() <= 1.0
    assert np.abs(np.diff(ways, 2)).max() <= min(jerk, 2.0) + 1e-9
    assert moved.toward(end) == end  # no stop is left over


@pytest.mark.parametrize("period_s", [1e-6, 1e-3, 0.01, 0.1])
@pytest.mark.parametrize("speed", [0.3, 0.7, 1.0])
def test_a_velocity_that_stops_is_zero_and_not_what_rounding_leaves(period_s: float, speed: float):
    axis = Axis(-INF, INF, -speed * period_s, speed * period_s)
    axis.at_velocity(speed * period_s)
    axis.stop()
    axis.stop()
    assert axis.w == 0.0


def test_without_limits_everything_passes():
    free = Axis(-INF, INF, -INF, INF)
    for value in (3.0, -1e300, 0.1):
        assert free.toward(value) == free.p == value
    assert free.at_velocity(7.0) == free.w == 7.0
    assert free.rest_at(3.0) == free.p == 3.0
