"""One limited element in periods of 1/2 s: where it starts, what it can reach, and how far it moves; by hand."""

import math

import numpy as np
import pytest

from embodied.contract import Contract, TensorSpec
from real_robot.safety.element import LimitedElement, observed_element
from real_robot.safety.limits import ElementLimits, Kind, Limits
from tests.real_robot.plant import contract

INF = math.inf


def element(kind: Kind, stays: bool = True, **fields: float | str) -> LimitedElement:
    """Values count 4 times; a velocity of 12 is 6 per period, an acceleration of 8 is 2, a jerk of 4 is 1/2."""
    fields = {"scale": 4.0, "velocity": 12.0, "acceleration": 8.0, "jerk": 4.0, "measured": "position.a"} | fields
    limits = ElementLimits(kind, **fields)
    times = {"observation_timeout_s": 1.0, "clock_error_s": 0.25, "lag_s": 0.5, "following_s": 1.0}
    return LimitedElement(contract(0.5, ("a",)), Limits({"a": limits}, **times), 0, limits, (-10.0, 10.0), stays)


def at(position: float) -> dict[str, np.ndarray]:
    return {"position": np.array([position])}


@pytest.mark.parametrize(
    ("jerk", "value", "way"),
    [
        # w^2 / 2B + w (B / C + 1) / 2, with w = 2 value, B = 2 and C = 1/2
        (4.0, 2.0, 4.0 + 10.0),
        (4.0, -2.0, -4.0 - 10.0),
        (4.0, 0.5, 0.25 + 2.5),
        (24.0, 0.5, 0.25 + 0.5 * (2.0 / 3.0 + 1.0)),
        # without a limit of jerk: w^2 / 2B, or nothing where the next period is at rest
        (INF, 1.5, 2.25),
        (INF, 1.0, 0.0),
    ],
)
def test_way_of_a_stop(jerk: float, value: float, way: float):
    assert element(Kind.VELOCITY, jerk=jerk).travel(value) == pytest.approx(way)


@pytest.mark.parametrize(
    ("kind", "w", "b", "low", "high"),
    [
        # b changes by 1/2 to at most 2, w to at most 6; a value of 1 is 2 per period
        (Kind.VELOCITY, 1.0, 1.0, 0.75, 1.25),
        (Kind.VELOCITY, 5.5, 1.0, 3.0, 3.0),
        (Kind.VELOCITY, -5.5, -1.0, -3.0, -3.0),
        (Kind.VELOCITY, 0.0, 2.0, 0.75, 1.0),
        (Kind.VELOCITY, 0.0, -2.0, -1.0, -0.75),
        # from the position 3; a value of 1 is 4
        (Kind.POSITION, 1.0, 1.0, 4.5 / 4.0, 5.5 / 4.0),
    ],
)
def test_reach(kind: Kind, w: float, b: float, low: float, high: float):
    reaching = element(kind)
    axis = reaching._axis
    axis.p, axis.w, axis.b = 3.0, w, b
    assert reaching.reach() == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("error", "age", "moved"),
    # of the last steps 1, -2, 4, newest first, those until `age + error` periods ago may not be measured yet
    [
        (0.5, 1.5, (0.0, 1.0, 0.0)),
        (1.0, 1.5, (0.0, 1.0, 1.0)),
        (1.0, 0.5, (0.5, 0.5, 0.5)),
        (0.0, 0.0, (0.0, 0.0, 0.0)),
        (0.0, 9.0, (3.0, 0.0, 0.0)),
    ],
)
def test_motion_since_a_measurement(error: float, age: float, moved: tuple[float, float, float]):
    late = element(Kind.VELOCITY)
    late._error = error
    late._past.extendleft([4.0, -2.0, 1.0])
    assert late._moved(age) == pytest.approx(moved)


@pytest.mark.parametrize(
    ("stays", "periods", "measured", "start"),
    # commanded to 1.0 and then to 1.1; done a period late, and followed within 0.03
    [
        (True, 0, 1.05, 1.1),
        (True, 0, 1.12, 1.1),
        (True, 0, 1.14, 1.14),
        (True, 0, 0.98, 1.1),
        (True, 0, 0.96, 0.96),
        (True, 1, 1.09, 1.1),
        (True, 1, 1.0, 1.0),
        (True, 1_000_000, 1.09, 1.1),
        (False, 0, 1.05, 1.05),
    ],
)
def test_a_motion_starts_where_it_was_commanded_to_or_is_measured(
    stays: bool, periods: int, measured: float, start: float
):
    moving = element(Kind.POSITION, stays, acceleration=INF, jerk=INF)
    moving.start(at(1.0), 1)
    assert moving._axis.p == 1.0
    for position in (1.0, 1.1):
        assert moving.apply(position / 4.0, at(1.0), 0.0) == position / 4.0
    moving.start(at(measured), periods)
    assert moving._axis.p == pytest.approx(start)
    assert list(moving._past) == [moving._axis.p]


@pytest.mark.parametrize(
    ("kind", "silent", "stands", "w", "past"),
    [
        (Kind.VELOCITY, True, False, 0.5, [0.5, 0.5, 0.5]),
        (Kind.VELOCITY, True, True, 0.0, [0.0, 0.0, 0.5]),
        (Kind.DELTA, False, False, 0.5, [0.0, 0.0, 0.5]),
        (Kind.DELTA, True, False, 0.0, [0.0, 0.0, 0.5]),
        (Kind.POSITION, False, False, 0.5, [1.5, 1.5, 1.5]),
        (Kind.POSITION, True, False, 0.0, [1.5, 1.5, 1.5]),
    ],
)
def test_a_pause_of_two_periods(kind: Kind, silent: bool, stands: bool, w: float, past: list[float]):
    pausing = element(kind)
    pausing.start(at(1.0), 1)
    pausing.apply(9.0, at(1.0), 0.0)
    pausing.idle(2, silent, stands)
    assert pausing._axis.w == w
    assert list(pausing._past)[:3] == past
    assert pausing._since == (2 if kind is Kind.POSITION else 3)


@pytest.mark.parametrize(
    ("age", "measured", "leads"),
    # two periods since the accepted measurement, of the last steps 1, 2, 3: 3, or 5 a period earlier; at least 1 late
    [(0.0, 2.98, True), (0.0, 2.96, False), (0.0, 5.02, True), (0.0, 5.04, False), (0.5, 2.9, False), (1.5, 0.0, True)],
)
def test_where_commands_may_have_led_since_the_last_measurement(age: float, measured: float, leads: bool):
    led = element(Kind.VELOCITY)
    led._lag = 1
    led._past.extend([1.0, 2.0, 3.0])
    led._since = 2
    assert led.leads(at(7.0), at(7.0 + measured), age) is leads


def test_a_position_stops_at_its_rest_and_a_velocity_at_zero():
    gripper = element(Kind.POSITION, jerk=INF)
    gripper.start(at(1.0), 1)
    values = [gripper.stop(0.5) for _ in range(4)]
    assert values == [0.453125, 0.5, 0.5, 0.5]
    assert (gripper.stopped(0.5), gripper.stopped(0.6), gripper.stopped(math.nan)) == (True, False, True)
    base = element(Kind.VELOCITY, jerk=INF)
    base.apply(1.0, at(0.0), 0.0)
    assert not base.stopped(0.0)
    assert [(base.stop(0.0), base.stopped(0.0)) for _ in range(3)] == [(0.5, False), (0.0, False), (0.0, True)]


def test_the_past_reaches_as_far_back_as_a_measurement_may_lie():
    # following_s + lag_s; observation_timeout_s + clock_error_s + lag_s + 2 s; in periods, and the newest one
    assert element(Kind.POSITION)._past.maxlen == 4
    assert element(Kind.VELOCITY)._past.maxlen == 9


def test_elements_are_named_or_numbered():
    specs = {"named": TensorSpec((2,), names=("x", "y")), "numbered": TensorSpec((2,)), "image": TensorSpec((2, 2))}
    specs["hidden"] = TensorSpec((2,), privileged=True)
    observed = Contract(specs, TensorSpec((1,)), 0.5)
    assert observed_element(observed, "named.y") == ("named", 1)
    assert observed_element(observed, "numbered.1") == ("numbered", 1)
    for name in ("named.z", "numbered.2", "image.0", "hidden.0", "other.x"):
        with pytest.raises(ValueError, match=rf"no observed element '{name}'; .* \['named', 'numbered'\]"):
            observed_element(observed, name)
