"""No command outside any limit reaches `write`, for any request; bad input stops at once; an e-stop latches.

Cases: one is one call of `Safety.command` (or of another method, in the last test). Their number is the product of
`examples` and of the calls in each, and is asserted where it is run: 259,000 in all.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real_robot.robots.robot import Reading
from real_robot.safety.limits import ElementLimits, Kind, Limits, ObservedRange
from real_robot.safety.safety import Command, State
from tests.real_robot.plant import DT_S, Plant, guarded

MOTION_EXAMPLES, MOTION_CALLS = 300, 200
FAULT_EXAMPLES, FAULT_CALLS = 400, 110
LATCH_EXAMPLES, LATCH_CALLS = 350, 100


def test_the_number_of_cases_is_as_promised():
    motion = len(Kind) * MOTION_EXAMPLES * MOTION_CALLS
    assert motion + FAULT_EXAMPLES * FAULT_CALLS + LATCH_EXAMPLES * LATCH_CALLS == 259_000


def exponential(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers of all magnitudes between two."""
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@dataclass(frozen=True)
class Drawn:
    """Limits of an element; each may be missing."""

    low: float
    high: float
    velocity: float
    acceleration: float
    jerk: float
    scale: float


@st.composite
def drawn_limits(draw: st.DrawFn) -> Drawn:
    velocity = draw(exponential(1e-2, 10.0))
    acceleration = draw(st.just(math.inf) | exponential(0.3, 300.0).map(lambda rate: rate * velocity))
    finite = velocity / DT_S if math.isinf(acceleration) else acceleration
    jerk = draw(st.just(math.inf) | exponential(1.0, 300.0).map(lambda rate: rate * finite))
    return Drawn(
        -draw(exponential(1e-3, 5.0)),
        draw(exponential(1e-3, 5.0)),
        velocity,
        acceleration,
        jerk,
        draw(st.sampled_from([1.0, 0.05, 3.0])),
    )


def demands(seed: int, style: str, drawn: Drawn, kind: Kind) -> np.ndarray:
    """What is asked for, [calls, 2], in physical units of the command."""
    rng, size = np.random.default_rng(seed), (MOTION_CALLS, 2)
    most = {Kind.POSITION: drawn.high - drawn.low, Kind.VELOCITY: drawn.velocity, Kind.DELTA: drawn.velocity * DT_S}[
        kind
    ]
    if style == "noise":
        return rng.uniform(-2.0 * most, 2.0 * most, size)
    if style == "steps":
        return np.repeat(rng.choice([-3.0, -1.0, 0.0, 1.0, 3.0], (MOTION_CALLS // 20, 2)) * most, 20, 0)
    if style == "walk":
        return rng.normal(0.0, 0.3 * drawn.velocity * DT_S if kind is Kind.POSITION else 0.1 * most, size).cumsum(0)
    return rng.choice([-1e300, -most, -1e-300, 0.0, 5e-324, most, 1e300], size)


def check(steps: np.ndarray, most: float, rounding: float, what: str) -> None:
    worst = np.abs(steps).max(initial=0.0)
    assert worst <= most + rounding, f"{what} of {worst}, limit {most}"


@pytest.mark.parametrize("kind", Kind)
@settings(max_examples=MOTION_EXAMPLES)
@given(
    drawn=drawn_limits(),
    seed=st.integers(0, 2**32),
    style=st.sampled_from(["noise", "steps", "walk", "extreme"]),
    place=st.floats(0.0, 1.0),
    holds=st.booleans(),
)
def test_no_command_outside_any_limit_reaches_write(kind, drawn, seed, style, place, holds):
    start = np.full(2, drawn.low + place * (drawn.high - drawn.low))
    plant = Plant(kind, start, scale=drawn.scale)
    limits = [
        ElementLimits(
            kind, drawn.scale, drawn.low, drawn.high, drawn.velocity, drawn.acceleration, drawn.jerk, f"position.{name}"
        )
        for name in ("a", "b")
    ]
    safety = guarded(plant, Limits(dict(zip("ab", limits, strict=True))))
    motion = [start if kind is Kind.POSITION else np.zeros(2)] * 3  # positions [2], or velocities x dt [2]
    for index, wanted in enumerate(demands(seed, style, drawn, kind) / drawn.scale):
        pauses = holds and index % 37 in (34, 35, 36)  # longer than some stops, shorter than others
        verdict = safety.command(None if pauses else wanted, plant.tick())
        assert (verdict.state is State.ACTIVE) != pauses
        if verdict.action is not None:
            assert any(verdict.action is command for command in plant.commands[-2:])  # a stop's last is before its hold
            motion.append(verdict.action * drawn.scale * (DT_S if kind is Kind.VELOCITY else 1.0))
        rounding = 1e-13 * max(1.0, float(np.abs(plant.position).max()))
        assert (plant.position >= drawn.low - rounding).all()
        assert (plant.position <= drawn.high + rounding).all()
    steps = np.diff(motion, axis=0) if kind is Kind.POSITION else np.array(motion)
    check(steps, drawn.velocity * DT_S, 1e-13, "velocity dt")
    check(np.diff(steps, axis=0), drawn.acceleration * DT_S**2, 2e-13, "acceleration dt^2")
    check(np.diff(steps, 2, axis=0), drawn.jerk * DT_S**3, 4e-13, "jerk dt^3")


def good(plant: Plant) -> tuple[Command, Reading]:
    return Command(np.full(2, 0.1), plant.clock(), "base", ("a", "b")), plant.read()


def observed(reading: Reading, value: object) -> Reading:
    return replace(reading, observation={"position": value})


FAULTS = {
    "NaN": lambda c, r: (replace(c, action=np.array([0.1, np.nan])), r),
    "infinite": lambda c, r: (replace(c, action=np.array([-np.inf, np.inf])), r),
    "short": lambda c, r: (replace(c, action=np.zeros(1)), r),
    "long": lambda c, r: (replace(c, action=np.zeros(3)), r),
    "a number": lambda c, r: (replace(c, action=np.array(0.1)), r),
    "text": lambda c, r: (replace(c, action=np.array(["0.1", "0.1"])), r),
    "objects": lambda c, r: (replace(c, action=np.array([None, {}])), r),
    "complex": lambda c, r: (replace(c, action=np.array([1j, 0])), r),
    "none": lambda c, r: (None, r),
    "frame of the command": lambda c, r: (replace(c, frame="camera"), r),
    "order of elements": lambda c, r: (replace(c, names=("b", "a")), r),
    "old command": lambda c, r: (replace(c, stamp_s=c.stamp_s - 0.2), r),
    "command from the future": lambda c, r: (replace(c, stamp_s=c.stamp_s + 0.2), r),
    "command without a time": lambda c, r: (replace(c, stamp_s=math.nan), r),
    "reordered command": lambda c, r: (replace(c, stamp_s=c.stamp_s - 1.5 * DT_S), r),
    "no measurement": lambda c, r: (c, None),
    "old measurement": lambda c, r: (c, replace(r, stamp_s=r.stamp_s - 0.2)),
    "measurement from the future": lambda c, r: (c, replace(r, stamp_s=r.stamp_s + 0.2)),
    "measurement without a time": lambda c, r: (c, replace(r, stamp_s=math.inf)),
    "reordered by number": lambda c, r: (c, replace(r, sequence=r.sequence - 2)),
    "reordered by time": lambda c, r: (c, replace(r, stamp_s=r.stamp_s - 1.5 * DT_S)),
    "same number, another time": lambda c, r: (c, replace(r, sequence=r.sequence - 1)),
    "NaN measured": lambda c, r: (c, observed(r, np.array([np.nan, 0.0]))),
    "too few measured": lambda c, r: (c, observed(r, np.zeros(1))),
    "nothing measured": lambda c, r: (c, replace(r, observation={})),
    "frame of the measurement": lambda c, r: (c, replace(r, frames={"position": "world"})),
}
"""What may be wrong, made from a good command and a good measurement, one period after good ones."""


@settings(max_examples=FAULT_EXAMPLES)
@given(st.lists(st.sampled_from(list(FAULTS)), min_size=FAULT_CALLS // 2, max_size=FAULT_CALLS // 2))
def test_bad_input_stops_within_the_period_it_comes_in(sequence):
    plant = Plant(Kind.VELOCITY, np.zeros(2))
    limits = {name: ElementLimits(Kind.VELOCITY, velocity=1.0, acceleration=5.0) for name in "ab"}
    safety = guarded(plant, Limits(limits, recovery_s=4 * DT_S))
    for fault in sequence:
        for _ in range(4):  # good inputs that end the fault before; the last one moves the robot
            plant.tick()
            verdict = safety.command(*good(plant))
        assert verdict.state is safety.state is State.ACTIVE
        plant.tick()
        verdict = safety.command(*FAULTS[fault](*good(plant)))
        assert verdict.state is safety.state is State.HOLDING, fault
        assert verdict.reason
        assert plant.commands[-1] is verdict.action
        assert (np.abs(plant.commands[-1]) < np.abs(plant.commands[-2])).all(), fault  # it slows down at once


METHODS = ("good", "good", "good", "bad", "none", "watch", "trip", "out of bounds", "reset")


@settings(max_examples=LATCH_EXAMPLES)
@given(st.lists(st.sampled_from(METHODS), min_size=LATCH_CALLS, max_size=LATCH_CALLS))
def test_a_stop_latches_until_reset(sequence):
    plant = Plant(Kind.VELOCITY, np.zeros(2))
    limits = {name: ElementLimits(Kind.VELOCITY, velocity=1.0, acceleration=5.0) for name in "ab"}
    safety = guarded(plant, Limits(limits, {"position.a": ObservedRange(-8.0, 8.0)}))
    stopped, stopping = False, 0
    for name in sequence:
        plant.tick()
        command, reading = good(plant)
        count = len(plant.commands)
        if name == "trip":
            safety.trip("button")
        elif name == "reset":
            safety.reset()
        elif name == "watch":
            safety.watch()
        elif name == "out of bounds":
            safety.command(command, observed(reading, np.array([9.0, 0.0])))
        else:
            action = {"bad": np.full(2, np.nan), "none": None}.get(name, command.action)
            safety.command(action, reading)
        stopped = (stopped or name in ("trip", "out of bounds")) and name != "reset"
        written = [action for action in plant.commands[count:] if action is not None]
        if stopped:
            stopping += 1
            assert not written or (stopping <= 5 and (np.abs(written[-1]) < 0.1).all())
        else:
            stopping = 0
        assert (safety.state is State.STOPPED) == stopped
        if stopped and name != "watch":
            assert plant.commands[-1] is None
