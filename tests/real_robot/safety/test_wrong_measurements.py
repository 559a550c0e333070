"""An arm whose measurements lie, that sags or lags, and a program that stalls: what it does after the fault."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from embodied.contract import Contract, TensorSpec
from real_robot.robots.robot import Reading
from real_robot.safety.consistency import Consistency, _speed
from real_robot.safety.limits import ElementLimits, Kind, Limits
from real_robot.safety.safety import Command, Safety, State
from tests.real_robot.plant import DT_S as PLANT_DT_S
from tests.real_robot.plant import Plant, guarded

DT_S = 0.02
NAMES = ("a", "b", "c")
START = np.array([-1.4, 0.3, 0.2])
LIMITS = {
    name: ElementLimits(low=-3.0, high=3.0, velocity=0.5, acceleration=2.0, measured=f"joint_position.{name}")
    for name in NAMES
}
STOP_RAD = 0.5**2 / (2 * 2.0) + 3 * 0.5 * DT_S
"""Distance of the certified stop from full speed, whole periods included."""


class Arm:
    """It goes where it is commanded to, `sag` below; `lie` replaces its measurements."""

    at_rest = (math.nan,) * 3
    stops_after_s = None

    def __init__(self, sag: float = 0.0) -> None:
        spec = TensorSpec((3,), unit="rad", names=NAMES)
        self.contract = Contract({"joint_position": spec}, spec, DT_S)
        self.position, self.sag, self.lie = START.copy(), sag, None
        self.commands: list[np.ndarray] = []
        self.periods = 0

    def clock(self) -> float:
        return self.periods * DT_S

    def read(self) -> Reading:
        measured = self.position - self.sag if self.lie is None else np.asarray(self.lie, np.float64)
        return Reading({"joint_position": measured.copy()}, self.clock(), self.periods)

    def tick(self) -> Reading:
        self.periods += 1
        return self.read()

    def write(self, action: np.ndarray) -> None:
        self.position = action.copy()
        self.commands.append(action.copy())

    def hold(self) -> None: ...

    def close(self) -> None: ...


def test_consistent_measurements_are_counted():
    consistency = Consistency(Arm().contract, Limits(dict(LIMITS), recovery_s=0.1))

    def settled(stamp_s: float, position: float = 0.0, newest_s: float | None = None) -> bool:
        at = {"joint_position": np.full(3, position)}
        consistency.take(Reading(at, stamp_s, sequence=next(numbers), newest_s=newest_s or stamp_s), math.inf, True)
        return consistency.settled

    numbers = itertools.count()
    assert [settled(1.0 + 0.02 * index) for index in range(3)] == [False, False, True]
    assert settled(1.04, newest_s=1.05)  # the same positions with news of another part
    assert not settled(1.08, position=1.0)  # within 0.04 s
    assert (consistency.rejected, consistency.fault[:31]) == (1, "a is measured 1 from where it w")
    assert not settled(1.1, position=1.0)
    # where it was: for 5 periods without another contradiction
    assert [settled(2.0 + 0.02 * index) for index in range(5)] == [False] * 4 + [True]
    assert not settled(2.1, position=1.0)
    assert [settled(0.02 + 0.02 * index) for index in range(5)] == [False] * 4 + [True]  # by another clock


@pytest.mark.parametrize(
    ("kind", "velocity", "speed"),
    # the action is from -1 to 2, a value of 1 is 3 of the limits' unit, and a period lasts 0.02 s
    [
        (Kind.POSITION, 5.0, 5.0),
        (Kind.VELOCITY, 5.0, 5.0),
        (Kind.VELOCITY, 7.0, 6.0),
        (Kind.DELTA, 301.0, 300.0),
        (Kind.DELTA, 5.0, 5.0),
    ],
)
def test_the_largest_speed_that_an_action_allows(kind: Kind, velocity: float, speed: float):
    action = TensorSpec((2,), low=(-9.0, -1.0), high=(9.0, 2.0))
    assert _speed(Contract({}, action, DT_S), ElementLimits(kind, 3.0, velocity=velocity), 1) == pytest.approx(speed)


def moving(arm: Arm) -> Safety:
    """Safety of the arm, which moves its first joint at full speed."""
    safety = Safety(arm, Limits(dict(LIMITS)), arm.clock)
    for _ in range(3):
        safety.observe(arm.tick())
    for _ in range(40):
        assert safety.command(Command(START + 9.0, arm.clock()), arm.tick()).state is State.ACTIVE
    return safety


def go_on(arm: Arm, safety: Safety, periods: int) -> float:
    """Whatever the policy wants for some periods; returns how far the arm moved."""
    before = arm.position.copy()
    for _ in range(periods):
        safety.command(Command(START + 9.0, arm.clock()), arm.tick())
    return float(np.abs(arm.position - before).max())


@pytest.mark.parametrize("lie", [np.zeros(3), np.full(3, -math.pi)])
def test_one_wrong_measurement_is_rejected_and_the_arm_goes_on(lie):
    arm = Arm()
    safety = moving(arm)
    arm.lie = lie
    verdict = safety.command(Command(START + 9.0, arm.clock()), arm.tick())
    arm.lie = None
    assert (verdict.state, safety.rejected) == (State.ACTIVE, 1)
    assert go_on(arm, safety, 5) == pytest.approx(5 * 0.5 * DT_S)
    assert safety.state is State.ACTIVE


@pytest.mark.parametrize("declared", [False, True])
def test_positions_are_compared_by_their_own_time_not_by_that_of_older_parts(declared):
    arm = Arm()
    limits = {name: replace(each, following=0.005) for name, each in LIMITS.items()}  # a period's motion is 0.01
    safety = Safety(arm, Limits(limits), arm.clock)
    for _ in range(3):
        safety.observe(arm.tick())
    for _ in range(40):
        reading = arm.tick()
        stamps = {"joint_position": reading.stamp_s} if declared else {}
        # first the joints have news, and another part that has the time of the period before
        safety.observe(replace(reading, stamp_s=reading.stamp_s - DT_S, sequence=2 * arm.periods, stamps=stamps))
        safety.command(Command(START + 9.0, arm.clock()), replace(reading, sequence=2 * arm.periods + 1, stamps=stamps))
    assert (safety.rejected == 0) == declared


@pytest.mark.parametrize("back", [0.2, 1.0])  # where commands have led lately, and farther away
def test_a_wrong_measurement_that_comes_again_with_news_of_another_part_counts_once(back):
    arm = Arm()
    safety = moving(arm)
    for lies in [True] + [False] * 5:
        reading = arm.tick()
        if lies:
            reading = replace(reading, observation={"joint_position": arm.position - back * np.eye(3)[0]})
        stamps = {"joint_position": reading.stamp_s}
        older = replace(reading, stamp_s=reading.stamp_s - DT_S, sequence=2 * arm.periods, stamps=stamps)
        safety.observe(older)  # the joints have news, then another part
        again = replace(reading, sequence=2 * arm.periods + 1, stamps=stamps)
        assert safety.command(Command(START + 9.0, arm.clock()), again).state is State.ACTIVE
        assert safety.rejected == 1


@pytest.mark.parametrize("way", [0.3, 0.8])
@pytest.mark.parametrize("idle", [0, 30])
def test_while_nothing_is_measured_a_robot_moves_by_commands_or_later_by_hand(way, idle):
    arm = Arm()
    safety = moving(arm)
    safety.settle("no measurement", lambda _: arm.tick())
    arm.periods += idle
    arm.lie = arm.position + way * np.eye(3)[0]
    safety.observe(arm.tick())
    assert safety.rejected == (idle == 0)  # 3 rad/s by hand; 0.5 rad/s by commands, for 0.3 s


@pytest.mark.parametrize("lie", [np.zeros(3), np.full(3, -math.pi)])
@pytest.mark.parametrize("ends", ["", "trip"])
def test_one_that_persists_stops_the_arm_where_it_is(lie, ends):
    arm = Arm()
    safety = moving(arm)
    arm.lie = lie
    go_on(arm, safety, 7)  # the last good measurement gets stale
    assert safety.state is State.STOPPED
    assert "check the sensor" in safety.reason
    if ends == "trip":
        safety.trip("button")
    at = arm.position.copy()
    assert go_on(arm, safety, 400) <= STOP_RAD
    assert (arm.position >= at - 1e-12).all()  # it was 1.4 rad away from the zeros, and did not move there
    arm.lie = None
    assert go_on(arm, safety, 50) == 0.0  # until a reset
    safety.reset()
    assert safety.command(Command(START, arm.clock() - DT_S), arm.tick()).action is None  # issued before it
    assert go_on(arm, safety, 50) > 0.2
    assert safety.state is State.ACTIVE


def test_a_reset_does_not_make_a_wrong_measurement_true():
    arm = Arm()
    safety = moving(arm)
    arm.lie = np.zeros(3)
    go_on(arm, safety, 30)
    safety.reset()
    assert go_on(arm, safety, 100) == 0.0


def test_a_motion_does_not_begin_from_a_measurement_that_contradicts_the_others():
    arm = Arm()
    safety = Safety(arm, Limits(dict(LIMITS)), arm.clock)
    for _ in range(10):
        safety.command(None, arm.tick())
    arm.lie = np.zeros(3)
    assert go_on(arm, safety, 5) == 0.0  # it was 1.5 rad in 20 ms
    arm.lie = None
    assert go_on(arm, safety, 23) == 0.0  # recovery_s without another contradiction
    assert 0.0 < go_on(arm, safety, 4) < 0.02


@pytest.mark.parametrize("sag", [0.0, 0.06])
def test_an_arm_that_sags_neither_jumps_at_a_restart_nor_creeps_down(sag):
    arm = Arm(sag)
    safety = moving(arm)
    rests = []
    for _ in range(5):
        for _ in range(60):
            safety.command(None, arm.tick())
        rests.append(arm.position.copy())
        for _ in range(3):
            safety.command(Command(rests[-1], arm.clock()), arm.tick())
    assert np.abs(np.diff(rests, axis=0)).max() <= 1e-9  # it was 0.058 in one period
    assert np.abs(np.diff(arm.commands, axis=0)).max() <= 0.5 * DT_S * (1 + 1e-9)


class Base:
    """A vehicle that does in `late` periods what it is commanded to, at a wall at 1 m."""

    at_rest = (0.0,)
    stops_after_s = None

    def __init__(self, late: int) -> None:
        spec = TensorSpec((1,), unit="m", names=("x",))
        action = TensorSpec((1,), unit="m/s", names=("v",), low=(-1.0,), high=(1.0,))
        self.contract = Contract({"position": spec}, action, DT_S)
        self.x, self.pending, self.periods = 0.0, [0.0] * (late + 1), 0
        self.velocities: list[float] = []

    def clock(self) -> float:
        return self.periods * DT_S

    def read(self) -> Reading:
        return Reading({"position": np.array([self.x])}, self.clock(), self.periods)

    def tick(self) -> Reading:
        self.periods += 1
        self.pending.append(self.pending[-1])
        self.x += self.pending.pop(0) * DT_S
        return self.read()

    def write(self, action: np.ndarray) -> None:
        self.pending[-1] = float(action[0])
        self.velocities.append(float(action[0]))

    def hold(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("late", [0, 5, 15])
@pytest.mark.parametrize("stall", [0, 4])
def test_a_base_that_lags_and_a_program_that_stalls_pass_no_wall(late, stall):
    base = Base(late)
    element = ElementLimits(Kind.VELOCITY, high=1.0, velocity=1.0, acceleration=1.0, measured="position.x")
    safety = Safety(base, Limits({"v": element}, lag_s=late * DT_S), base.clock)
    for period in range(600):
        reading = base.tick()
        if stall and period % 40 > 40 - stall:
            continue
        safety.command(np.ones(1), reading)
    assert 0.9 < base.x <= 1.0 + 1e-9  # 28 to 87 mm beyond it before
    assert np.abs(np.diff(base.velocities)).max() <= 1.0 * DT_S * (stall + 1) * (1 + 1e-9)


def test_a_loop_that_stalled_goes_on_from_the_velocity_that_the_robot_has():
    base = Base(0)
    element = ElementLimits(Kind.VELOCITY, velocity=1.0, acceleration=1.0, measured="position.x")
    safety = Safety(base, Limits({"v": element}), base.clock)
    for _ in range(80):
        safety.command(np.ones(1), base.tick())
    assert base.velocities[-1] == pytest.approx(1.0)
    for _ in range(7):  # 1.4 times the time-out
        reading = base.tick()
    safety.command(np.ones(1), reading)
    assert base.velocities[-1] >= 1.0 - DT_S * (1 + 1e-9)  # it was 0.02


def test_limits_with_numbers_that_are_none_are_refused():
    for fields in ({"command_timeout_s": math.nan}, {"observation_timeout_s": math.inf}, {"lag_s": -1.0}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            Limits(dict(LIMITS), **fields)
    for fields in ({"velocity": math.nan}, {"scale": math.inf}, {"low": math.nan}, {"following": math.nan}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            replace(LIMITS["a"], **fields)


@pytest.mark.parametrize("kind", [Kind.VELOCITY, Kind.DELTA])
def test_a_sensor_that_stands_still_where_commands_pass_by_stays_rejected(kind):
    limits = Limits({name: ElementLimits(kind, measured=f"position.{name}", velocity=5.0) for name in "ab"})
    plant = Plant(kind, np.array([-0.5, -0.5]))
    safety = guarded(plant, limits)
    action = np.full(2, 5.0 if kind is Kind.VELOCITY else 5.0 * PLANT_DT_S)
    for _ in range(20):
        assert safety.command(action, plant.tick()).state is State.ACTIVE
    stuck = plant.position + 0.3  # commands lead there in six periods
    states = [safety.command(action, replace(plant.tick(), observation={"position": stuck})).state for _ in range(40)]
    assert states[0] is State.ACTIVE
    assert states[-1] is not State.ACTIVE
    assert safety.rejected >= 10
    assert (plant.position < stuck + 0.4).all()


def test_a_jump_as_far_as_the_way_before_the_last_accepted_measurement_stays_rejected():
    limits = Limits({name: ElementLimits(Kind.VELOCITY, measured=f"position.{name}", velocity=5.0) for name in "ab"})
    plant = Plant(Kind.VELOCITY, np.array([-2.5, -2.5]))
    safety, action, ahead = guarded(plant, limits), np.full(2, 5.0), 19 * 5.0 * PLANT_DT_S
    for _ in range(20):
        assert safety.command(action, plant.tick()).state is State.ACTIVE
    for _ in range(20):  # as if the way since the start had been made once more
        verdict = safety.command(action, replace(plant.tick(), observation={"position": plant.position + ahead}))
    assert verdict.state is not State.ACTIVE
    assert safety.rejected >= 5


def test_a_clock_that_goes_back_makes_no_old_measurement_new():
    each = ElementLimits(Kind.VELOCITY, velocity=1.0, acceleration=0.5, measured="position.a")
    limits = Limits({"a": each, "b": replace(each, measured="position.b")}, recovery_s=0.05)
    plant, back_s = Plant(Kind.VELOCITY, np.zeros(2)), 0.0
    safety = guarded(plant, limits, lambda: plant.clock() - back_s, plant.clock)

    def command() -> State:
        reading = plant.tick()
        if lies:
            reading = replace(reading, observation={"position": reading.observation["position"] + 1.0})
        stamp_s = reading.stamp_s - back_s
        return safety.command(Command(np.full(2, 0.5), stamp_s), replace(reading, stamp_s=stamp_s)).state

    lies = False
    assert [command() for _ in range(120)][-1] is State.ACTIVE
    lies = True
    assert [command() for _ in range(15)][-1] is State.STOPPED
    back_s = 0.5
    command()
    safety.reset()  # the stop, from 0.5 m/s in 1 s, goes on
    assert State.ACTIVE not in [command() for _ in range(60)]
