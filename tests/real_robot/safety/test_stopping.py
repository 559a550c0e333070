"""Holding is the certified stop and then silence; afterwards the robot moves again on conditions."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import safety_faults
from real_robot.robots.robot import Reading
from real_robot.safety.limits import ElementLimits, Kind, Limits
from real_robot.safety.safety import Safety, State
from tests.real_robot.plant import DT_S, Plant, guarded, measure

RECOVERY = 5
"""Periods."""
POSITION = {
    name: ElementLimits(low=-2.0, high=2.0, velocity=1.0, acceleration=5.0, jerk=100.0, measured=f"position.{name}")
    for name in "ab"
}
NAN = np.full(2, np.nan)


def limits_of(kind: Kind, **others: float) -> Limits:
    each = {name: replace(limits, kind=kind) for name, limits in POSITION.items()}
    return Limits(each, recovery_s=RECOVERY * DT_S, **others)


def moving(kind: Kind, limits: Limits | None = None) -> tuple[Plant, Safety, np.ndarray]:
    """A robot at a constant speed, and the action of that speed's next period."""
    plant = Plant(kind, np.zeros(2))
    safety = guarded(plant, limits or limits_of(kind))
    for index in range(60):
        asked = {Kind.POSITION: 0.005 * index, Kind.VELOCITY: 0.5, Kind.DELTA: 0.005}[kind]
        assert safety.command(np.full(2, asked), plant.tick()).state is State.ACTIVE
    return plant, safety, np.full(2, 0.005 * 60 if kind is Kind.POSITION else asked)


def written(plant: Plant, after: int = 0) -> np.ndarray:
    return np.array([command for command in plant.commands[after:] if command is not None])


def steps(plant: Plant, kind: Kind, after: int) -> np.ndarray:
    """Motion of each period from the last command before `after` on."""
    actions = written(plant)[after - 1 :]
    if kind is Kind.POSITION:
        return np.diff(np.vstack([written(plant)[after - 2], actions]), axis=0)
    return actions * (DT_S if kind is Kind.VELOCITY else 1.0)


@pytest.mark.parametrize(
    ("how", "kind"),
    [(how, kind) for how in ("bad command", "no measurement", "no command", "trip", "settle") for kind in Kind]
    + [("silence", Kind.VELOCITY), ("hung", Kind.VELOCITY)],
)
def test_a_hold_slows_down_within_all_limits_and_then_is_silent(kind, how):
    plant, safety, _ = moving(kind)
    before = plant.position.copy()
    if how == "settle":
        safety.settle("deactivated", lambda seconds: plant.tick())
    if how == "trip":
        safety.trip("button")
    if how == "hung":
        plant.ticks += 10
    for _ in range(60):
        reading = plant.tick()
        if how == "bad command":
            safety.command(NAN, reading)
        elif how == "no measurement":
            safety.command(np.ones(2), None)
        elif how == "no command":
            safety.command(None, reading)
        else:
            safety.watch()
    moved = steps(plant, kind, 60)
    assert 10 < len(moved) < 20
    np.testing.assert_allclose(moved[0], 0.005)
    np.testing.assert_allclose(moved[-1], 0.0, atol=1e-12)
    assert np.abs(np.diff(moved, axis=0)).max() <= 5.0 * DT_S**2 * (1 + 1e-9)
    assert np.abs(np.diff(moved, 2, axis=0)).max() <= 100.0 * DT_S**3 * (1 + 1e-9)
    assert safety.state is (State.STOPPED if how == "trip" else State.HOLDING)
    # v^2 / 2a + v a / 2j, and a little for whole periods
    assert ((plant.position - before) <= 0.5**2 / 10.0 + 0.5 * 5.0 / 200.0 + 2 * 0.005).all()


def test_a_stop_that_two_callbacks_carry_on_makes_one_step_a_period():
    plant, safety, _ = moving(Kind.POSITION)
    reading = plant.tick()
    for _ in range(4):
        count = len(written(plant))
        safety.command(NAN, reading)
        safety.watch()
        assert len(written(plant)) == count + 1
        reading = plant.tick()


def test_a_stop_needs_no_fresh_measurement_and_does_not_go_where_an_old_one_was():
    plant, safety, _ = moving(Kind.POSITION)
    reading, last = plant.read(), plant.commands[-1]
    for _ in range(40):
        plant.tick()
        assert "stale" in safety.command(np.ones(2), reading).reason or safety.state is State.ACTIVE
    assert (np.diff(written(plant), axis=0) >= -1e-12).all()  # never back
    assert plant.commands[-1] is None
    assert (written(plant)[-1] > last).all()


@pytest.mark.parametrize("leap_s", [0.15, 10.0, -10.0])
def test_a_clock_that_leaps_is_no_pause_in_which_the_robot_would_have_stopped(leap_s: float):
    plant, leapt_s = Plant(Kind.VELOCITY, np.zeros(2)), 0.0
    safety = guarded(plant, limits_of(Kind.VELOCITY), lambda: plant.clock() + leapt_s, plant.clock)

    def ask() -> None:
        safety.command(np.full(2, 0.5), replace(plant.tick(), stamp_s=plant.clock() + leapt_s))

    for _ in range(60):
        ask()
    leapt_s = leap_s
    for _ in range(60):
        ask()
    moved = written(plant)
    assert np.abs(np.diff(moved, axis=0)).max() <= 5.0 * DT_S * (1 + 1e-9)  # it was 0.5 in one step
    np.testing.assert_allclose(moved[-1], 0.5)
    assert safety.state is State.ACTIVE


def test_a_part_of_a_measurement_from_the_future_is_refused():
    plant, safety, ask = moving(Kind.POSITION)
    reading = plant.tick()
    assert safety.command(ask, replace(reading, newest_s=reading.stamp_s + 0.04)).state is State.ACTIVE
    verdict = safety.command(ask, replace(plant.tick(), newest_s=reading.stamp_s + 10.0))
    assert verdict.reason.startswith("part of it from 9.99 s in the future")


def test_before_the_first_command_nothing_is_written():
    plant = Plant(Kind.POSITION, np.zeros(2))
    safety = guarded(plant, limits_of(Kind.POSITION))
    for action in (NAN, None, np.zeros(3)):
        safety.command(action, plant.tick())
        safety.hold("lifeless")
        safety.watch()
    safety.settle("deactivated", lambda seconds: pytest.fail("there is nothing to stop"))
    assert plant.commands == []
    assert safety.state is State.READY


def test_whoever_moves_a_held_robot_is_not_fought_and_it_goes_on_from_there():
    plant, safety, _ = moving(Kind.POSITION)
    for _ in range(40):
        safety.command(None, plant.tick())
    count = len(plant.commands)
    for _ in range(40):
        plant.position = plant.position - 0.02  # 0.8 rad in all
        safety.command(None, plant.tick())
    assert plant.commands[count:] == []
    at = plant.position.copy()
    safety.command(np.full(2, 9.0), plant.tick())
    assert safety.state is State.ACTIVE
    np.testing.assert_allclose(plant.commands[-1], at, atol=5.0 * DT_S**2)


@pytest.mark.parametrize("refused", [2, 9])
def test_a_start_that_is_refused_leaves_no_trace_in_the_next_one(refused):
    plant, safety, _ = moving(Kind.POSITION)
    for _ in range(40):
        safety.command(None, plant.tick())
    count, last = len(plant.commands), plant.position.copy()
    moved = np.array([last[0] + 0.5, 2.02])  # by hand; b is nearer to its limit of 2.0 than what it may be off
    for position in np.linspace(last, moved, 150):
        plant.position = position
        safety.observe(plant.tick())
    for _ in range(refused):
        assert "b is outside its limits" in safety.command(last, plant.tick()).reason
    assert all(command is None for command in plant.commands[count:])
    plant.position = inside = np.array([last[0] + 0.5, 1.99])
    while safety.command(last, plant.tick()).state is not State.ACTIVE:
        assert plant.ticks < 400
    # from rest where it is measured, neither from where it was commanded last nor from the limit
    np.testing.assert_allclose(plant.commands[-1], inside, atol=5.0 * DT_S**2)


def test_after_a_fault_commands_have_to_be_good_for_a_while_and_bad_ones_do_not_make_it_chatter():
    plant, safety, action = moving(Kind.VELOCITY)
    safety.command(NAN, plant.tick())
    for _ in range(30):  # one bad command in five
        for bad in (False, False, False, False, True):
            assert safety.command(NAN if bad else action, plant.tick()).state is State.HOLDING
    count = len(written(plant))
    states = [safety.command(action, plant.tick()).state for _ in range(RECOVERY + 1)]
    assert states == [State.HOLDING] * (RECOVERY - 1) + [State.ACTIVE] * 2
    np.testing.assert_allclose(written(plant)[count], 100.0 * DT_S**2)  # from rest, by the jerk
    slow, safety, action = moving(Kind.VELOCITY, limits_of(Kind.VELOCITY))
    safety._recovery = 2  # as soon as the stop has ended, not before
    safety.command(NAN, slow.tick())
    while safety.command(action, slow.tick()).state is State.HOLDING:
        assert slow.ticks < 200
    assert (slow.commands[-3] == 0.0).all()
    assert slow.commands[-2] is None


def test_a_missing_command_is_a_pause_from_which_motion_goes_on_at_once():
    plant, safety, action = moving(Kind.VELOCITY)
    for _ in range(3):
        assert safety.command(None, plant.tick()).reason == "no command"
    slowed = plant.commands[-1]
    assert safety.command(action, plant.tick()).state is State.ACTIVE
    assert (plant.commands[-1] >= slowed - 5.0 * DT_S).all()
    assert (plant.commands[-1] > 0.3).all()


@pytest.mark.parametrize("periods", [15, 6000])
@pytest.mark.parametrize("notices", ["watch", "command"])
@pytest.mark.parametrize("kind", [Kind.POSITION, Kind.DELTA])
def test_positions_and_displacements_stand_still_by_themselves_while_a_program_is_silent(kind, notices, periods):
    plant, safety, action = moving(kind)
    count, last = len(plant.commands), plant.position.copy()
    plant.ticks += periods
    if notices == "watch":
        for _ in range(10):
            safety.watch()
            plant.tick()
        assert len(written(plant, count)) == (kind is Kind.DELTA)  # one zero
        assert not np.diff([last, plant.position], axis=0).any()
    measure(plant, safety)
    safety.command(action, plant.tick())
    moved = plant.position - last
    np.testing.assert_allclose(moved, 100.0 * DT_S**3)  # from rest, by the jerk


@pytest.mark.parametrize("notices", ["watch", "command"])
@pytest.mark.parametrize(("stops_after_s", "periods"), [(None, 15), (None, 600), (0.5, 15), (0.5, 45)])
def test_a_velocity_goes_on_while_a_program_is_silent_until_the_robot_stops_it(notices, stops_after_s, periods):
    plant, safety, action = moving(Kind.VELOCITY)
    plant.stops_after_s = stops_after_s
    plant.ticks += periods  # from 1 to 2 times the command's time-out the next one was 0.01, from 0.5
    safety.watch() if notices == "watch" else safety.command(action, plant.tick())
    first = written(plant)[60:]
    assert len(first) == 1
    assert (np.abs(first - 0.5) <= 5.0 * DT_S).all()


@pytest.mark.parametrize("notices", ["watch", "command"])
def test_a_velocity_begins_at_rest_after_the_robot_has_stopped_it(notices):
    plant, safety, action = moving(Kind.VELOCITY)
    plant.stops_after_s = 0.5
    plant.ticks += 60
    for _ in range(5):
        safety.watch() if notices == "watch" else safety.command(action, plant.tick())
    if notices == "watch":
        assert not written(plant)[60:].any()
        assert len(written(plant)) == 61
    else:
        assert (np.diff(written(plant)[60:], axis=0, prepend=0.0) <= 5.0 * DT_S * (1 + 1e-9)).all()


class Stuck(Plant):
    """It can be blocked."""

    blocked = False

    def write(self, action: np.ndarray) -> None:
        before = self.position
        super().write(action)
        if self.blocked:
            self.position = before


def test_a_blocked_arm_is_noticed_and_stopped_where_it_was_commanded_to():
    plant = Stuck(Kind.POSITION, np.zeros(2))
    safety = guarded(plant, limits_of(Kind.POSITION))
    for index in range(60):
        safety.command(np.full(2, 0.005 * index), plant.tick())
    plant.blocked = True
    periods = 0
    while (verdict := safety.command(np.full(2, 0.005 * (60 + periods)), plant.tick())).state is State.ACTIVE:
        periods += 1
        assert periods < 100
    assert verdict.state is State.STOPPED
    assert "away from where it was commanded to: blocked, or moved by somebody else" in verdict.reason
    assert periods * DT_S <= 0.3 + 0.03 / 0.5 + 2 * DT_S  # the time it may last, and the way it may be off
    last = written(plant)[-2]
    for _ in range(200):
        safety.command(np.ones(2), plant.tick())
    moved = np.diff(written(plant), axis=0)
    assert (moved >= -1e-12).all()  # never towards where it is measured
    assert (written(plant)[-1] - last <= 0.5**2 / 10.0 + 0.5 * 5.0 / 200.0 + 2 * 0.005).all()
    assert np.abs(moved).max() <= DT_S * (1 + 1e-9)
    assert np.abs(np.diff(moved, axis=0)).max() <= 5.0 * DT_S**2 * (1 + 1e-9)
    assert plant.commands[-1] is None
    count = len(written(plant))
    for _ in range(20):
        assert safety.command(np.full(2, 0.3), plant.tick()).state is State.STOPPED
    assert len(written(plant)) == count


@pytest.mark.parametrize("late", [0, 5])
def test_an_arm_that_lags_but_follows_is_not_blocked(late):
    plant = Plant(Kind.POSITION, np.zeros(2))
    safety = guarded(plant, limits_of(Kind.POSITION))
    readings: list[Reading] = []
    for index in range(400):
        readings.append(plant.tick())
        lagging = readings[max(0, len(readings) - 20)].observation  # 0.2 s behind, up to 0.2 m
        reading = replace(readings[max(0, index - late)], observation={"position": lagging["position"] + 0.02})
        verdict = safety.command(np.full(2, math.sin(0.01 * index)), reading)
        assert verdict.state is State.ACTIVE


def test_a_robot_that_says_that_it_does_not_move_is_stopped_until_reset():
    plant, safety, action = moving(Kind.POSITION)
    for _ in range(30):
        verdict = safety.command(action, replace(plant.tick(), refusal="protective stop"))
    assert (verdict.state, verdict.reason, verdict.action) == (State.STOPPED, "protective stop", None)
    assert safety.command(action, plant.tick()).state is State.STOPPED
    safety.reset()
    measure(plant, safety)
    waiting = safety.command(action, replace(plant.tick(), refusal="idle"))
    assert (waiting.state, waiting.reason, waiting.action) == (State.READY, "idle", None)
    assert safety.command(action, plant.tick()).state is State.ACTIVE


def test_the_default_of_following_is_in_the_unit_of_what_is_measured():
    for unit, allowed in (("rad", 0.1), ("m", 0.03), ("mm", 0.05 * 4.0)):
        plant = Plant(Kind.POSITION, np.zeros(2))
        spec = replace(plant.contract.observation["position"], unit=unit)
        plant.contract = replace(plant.contract, observation={"position": spec})
        for off, state in ((0.99 * allowed, State.ACTIVE), (1.01 * allowed, State.STOPPED)):
            safety = guarded(plant, limits_of(Kind.POSITION))
            safety.command(np.zeros(2), plant.tick())
            for share in np.linspace(0.0, 1.0, 40):  # somebody pushes it
                moved = Reading({"position": np.array([0.0, share * off])}, plant.tick().stamp_s, plant.ticks)
                found = safety.command(np.zeros(2), moved).state
            assert found is state, unit
            plant.position[:] = 0.0


def test_a_clock_that_goes_back_is_told_and_forgotten():
    plant, safety, action = moving(Kind.VELOCITY)
    plant.ticks -= 50
    assert safety.command(action, plant.tick()).reason.startswith(
        "the clock went back by 0.49 s: the computers' clocks"
    )
    for _ in range(30):
        verdict = safety.command(action, plant.tick())
    assert verdict.state is State.ACTIVE


def test_clocks_that_differ_by_a_little_hold_nothing_by_default():
    plant, safety, action = moving(Kind.VELOCITY)
    for skew_s in (0.001, 0.02, 0.049):
        plant.tick()
        reading = plant.tick()
        verdict = safety.command(action, replace(reading, stamp_s=reading.stamp_s + skew_s))
        assert verdict.state is State.ACTIVE
    far = replace(plant.tick(), stamp_s=plant.clock() + 0.3)
    reason = safety.command(action, far).reason
    assert reason.startswith("measurement from 0.3 s in the future")
    assert "chrony" in reason


def test_a_wall_is_kept_although_the_driver_has_a_clock_that_is_ahead():
    plant = Plant(Kind.VELOCITY, np.zeros(2))
    element = ElementLimits(Kind.VELOCITY, low=-1.0, high=0.505, velocity=1.0, acceleration=5.0, measured="position.a")
    limits = Limits({"a": element, "b": replace(element, measured="position.b")})
    safety, readings = guarded(plant, limits), [plant.tick()]
    for index in range(300):
        late = readings[max(0, index - 5)]  # looks as if it was of now
        safety.command(np.ones(2), replace(late, stamp_s=late.stamp_s + 0.05))
        readings.append(plant.tick())
        assert (plant.position <= 0.505 + 1e-12).all()
    assert (plant.position > 0.5).all()


@pytest.mark.parametrize(
    ("kind", "limits", "message"),
    [
        (Kind.POSITION, limits_of(Kind.VELOCITY), "expected kind POSITION of 'a', .* keeping its value, got VELOCITY"),
        (
            Kind.VELOCITY,
            limits_of(Kind.POSITION),
            "expected kind VELOCITY or DELTA of 'a', .* the value 0, got POSITION",
        ),
    ],
)
def test_limits_of_another_kind_than_the_robots_commands_are_refused(kind, limits, message):
    plant = Plant(kind, np.zeros(2))
    with pytest.raises(ValueError, match=message):
        guarded(plant, limits)


SEQUENCES = 150


def test_random_faults_of_all_kinds_find_no_way_around_the_limits():
    found = safety_faults.run(SEQUENCES, seed=0)
    assert found["violations"] == []
    assert found["periods"] == SEQUENCES * safety_faults.PERIODS
    assert all(count > 5 for count in found["injected"].values())
    assert found["done"]["stops"] > SEQUENCES
    assert found["done"]["stop commands"] > 2 * SEQUENCES
    assert found["done"]["begun"] > SEQUENCES
