"""Motion inside all limits passes unchanged; other targets are reached in nearly minimal time, without overshoot."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real_robot.safety.axis import INF, Axis

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
    rng, found = np.random.default_rng(0), 0
    for _ in range(3000):
        moved = axis(jerk=rng.choice([200.0, 2000.0]), reach=0.02)
        box = (moved.low, moved.high, moved.slowest, moved.fastest)
        p, w, b = rng.uniform(-1.0, 1.0, 3) * (moved.high, 0.2 * moved.fastest, moved.most_b)
        if (stop := moved._stop_from(p, w, b, box)) is None:
            continue
        found += 1
        for c in [c for c, periods in stop for _ in range(periods)]:
            b += c
            w += b
            p += w
            assert abs(c) <= moved.most_c * (1 + 1e-9)
            assert abs(b) <= moved.most_b * (1 + 1e-9)
            assert moved.slowest - 1e-12 <= w <= moved.fastest + 1e-12
            assert moved.low - 1e-12 <= p <= moved.high + 1e-12
        assert w == pytest.approx(0.0, abs=1e-12)
        assert b == pytest.approx(0.0, abs=1e-12)
    assert 1000 < found < 2900


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
    assert [free.toward(value) for value in (3.0, -1e300, 0.1)] == [3.0, -1e300, 0.1]
    assert free.at_velocity(7.0) == 7.0
