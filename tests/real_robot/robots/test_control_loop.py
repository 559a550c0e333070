"""Deadlines on a clock of the test's own, and one real run."""

import subprocess
import sys
import time

import numpy as np
import pytest

from real_robot.robots.control_loop import Controller, ControlLoop, Watchdog
from real_robot.safety.consistency import START_READINGS
from real_robot.safety.limits import ElementLimits, Kind, Limits
from real_robot.safety.safety import Safety, State
from tests.real_robot.plant import Plant, guarded


class Time:
    """A clock that advances by sleeping or working."""

    def __init__(self, wakes_late_s: float = 0.0) -> None:
        self.now, self.wakes_late_s = 100.0, wakes_late_s

    def __call__(self) -> float:
        self.now += 1e-7  # so that spinning ends
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.wakes_late_s


def run(work_s: list[float], wakes_late_s: float = 0.0, **loop: float):
    clock = Time(wakes_late_s)
    began, work = [], iter(work_s)

    def step() -> None:
        began.append(clock.now - 100.0)
        clock.now += next(work)

    timing = ControlLoop(0.01, clock, clock.sleep, **loop).run(step, len(work_s))
    return np.array(began), timing


def test_lateness_never_adds_up():
    began, timing = run([0.004] * 1000, wakes_late_s=0.001)
    np.testing.assert_allclose(began[1:], 0.01 * np.arange(1, 1000) + 0.001, atol=1e-5)
    assert (timing.periods, timing.missed, timing.overruns) == (1000, 0, 0)
    assert timing.late_s["p50"] == pytest.approx(0.001, abs=1e-5)
    assert timing.work_s["max"] == pytest.approx(0.004, abs=1e-5)


def test_spinning_is_on_time_where_sleeping_is_late():
    began, timing = run([0.001] * 100, wakes_late_s=0.001, spin_s=0.002)
    np.testing.assert_allclose(began, 0.01 * np.arange(100), atol=1e-6)
    assert timing.late_s["max"] < 1e-6


def test_missed_deadlines_are_skipped_not_made_up_for():
    work = [0.001, 0.035, 0.001, 0.001, 0.012, 0.001, 0.001, 0.001, 0.001, 0.001]
    began, timing = run(work)
    np.testing.assert_allclose(began, [0.0, 0.01, 0.05, 0.06, 0.07, 0.09], atol=1e-5)
    assert (timing.periods, timing.missed, timing.overruns) == (6, 4, 2)
    _, timing = run([0.001, 0.001, 0.05])  # time after the last period violates no deadline
    assert (timing.periods, timing.missed, timing.overruns) == (3, 0, 1)


def test_a_step_that_ends_on_a_deadline_has_not_missed_it():
    now_s = [0.0]
    timing = ControlLoop(1.0, lambda: now_s[0]).run(lambda: now_s.append(now_s.pop() + 1.0), 3)
    assert (now_s, timing.periods, timing.missed, timing.overruns) == ([3.0], 3, 0, 0)


def test_a_step_can_stop_the_loop():
    loop = ControlLoop(1e-4)
    steps = []

    def step() -> None:
        steps.append(0)
        if len(steps) == 5:
            loop.stop()

    assert loop.run(step).periods == 5


def test_statistics_look_back_on_the_last_periods():
    _, timing = run([0.5e-2] * 50 + [1e-3] * 50, timed_periods=50)
    assert timing.periods == 100
    assert timing.work_s["max"] == pytest.approx(1e-3, abs=1e-6)


def test_a_real_clock():
    began = []
    timing = ControlLoop(0.005, spin_s=0.0005).run(lambda: began.append(time.monotonic()), 40)
    assert timing.periods + timing.missed == 40
    assert timing.periods == len(began)
    index = np.round((np.array(began) - began[0]) / 0.005).astype(int)
    assert (np.diff(index) >= 0).all()
    assert (np.array(timing.late_s["p50"]) >= 0).all()


WRONG = {"period_s": 0.0}, {"period_s": 0.01, "spin_s": -1.0}, {"period_s": 0.1, "timed_periods": 0}


@pytest.mark.parametrize("wrong", WRONG)
def test_impossible_loops_are_refused(wrong):
    with pytest.raises(ValueError, match="expected period_s > 0"):
        ControlLoop(**wrong)


class Ahead:
    """Commands what was measured, plus one."""

    def __init__(self) -> None:
        self.seen = None

    def reset(self) -> None:
        self.seen = None

    def observe(self, reading) -> None:
        self.seen = reading

    def action(self, now_s: float):
        return None if self.seen is None else self.seen.observation["position"] + 1.0


def make(dt_s: float = 0.01) -> tuple[Plant, Safety]:
    plant = Plant(Kind.VELOCITY, np.zeros(2), dt_s)
    return plant, Safety(
        plant, Limits({name: ElementLimits(Kind.VELOCITY, velocity=9.0) for name in "ab"}), plant.clock
    )


def test_a_controller_reads_decides_and_lets_safety_write():
    plant, safety = make()
    controller = Controller(plant, Ahead(), safety, plant.clock)
    for _ in range(3):
        plant.ticks += 1
        verdict = controller.tick()
    np.testing.assert_allclose(plant.commands[-1], 1.01**2)
    assert plant.commands[-1] is verdict.action


def test_executors_decide_by_no_measurement_that_contradicts_the_one_before():
    """An encoder jumps for a period: the policy goes on from the measurement before, as the limits do."""
    plant, _ = make()
    limits = Limits({name: ElementLimits(Kind.VELOCITY, velocity=1.0, measured=f"position.{name}") for name in "ab"})
    ahead = Ahead()
    controller = Controller(plant, ahead, guarded(plant, limits), plant.clock)
    measured = []
    for period in range(6):
        plant.ticks += 1
        position = plant.position.copy()
        plant.position = position + 5.0 * (period == 3)
        assert controller.tick().state is State.ACTIVE
        plant.position = plant.position - 5.0 * (period == 3)
        measured.append(float(ahead.seen.observation["position"][0] - position[0]))
    assert measured[:3] + measured[4:] == [0.0] * 5
    assert -0.02 < measured[3] < 0.0  # the one before
    plant.ticks += 1
    plant.position = np.full(2, np.nan)
    assert controller.tick().state is State.HOLDING
    assert ahead.seen.fault  # it drops what it was about to do


def test_a_watchdog_holds_when_the_program_hangs():
    plant, safety = make()
    watchdog = Watchdog(safety, 0.002)
    safety.command(np.ones(2), plant.tick())
    time.sleep(0.02)
    assert safety.state is State.ACTIVE  # the robot's time stands still
    plant.ticks += 20
    deadline = time.monotonic() + 10
    while safety.state is State.ACTIVE and time.monotonic() < deadline:
        time.sleep(0.001)
    watchdog.close()
    assert safety.state is State.HOLDING
    np.testing.assert_array_equal(plant.commands[1], np.zeros(2))  # after so long it stands still by itself


def test_a_watchdog_goes_on_after_a_robot_that_failed_while_it_was_stopped(caplog):
    plant, safety = make()
    write = plant.write

    def failing(action):
        raise OSError("no route to the robot")

    def hang() -> None:
        plant.ticks += 20
        deadline = time.monotonic() + 2
        while safety.state is State.ACTIVE and time.monotonic() < deadline:
            time.sleep(0.001)

    watchdog = Watchdog(safety, 0.002)
    safety.command(np.ones(2), plant.tick())
    plant.write = failing
    hang()
    assert safety.state is State.STOPPED
    plant.write = write
    safety.reset()
    for _ in range(START_READINGS):
        safety.command(np.ones(2), plant.tick())
    assert safety.state is State.ACTIVE
    hang()
    assert safety.state is State.HOLDING
    watchdog.close()
    assert "no route to the robot" in caplog.text


def test_real_time_is_asked_for_and_refusals_are_reported():
    # in a separate process, because it changes the process; without the right to lock memory or a priority, both are
    # refused
    code = (
        "import gc, os, resource\n"
        "from real_robot.robots.control_loop import prefer_real_time\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)); resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "print(*prefer_real_time(), sep='\\n'); print(gc.get_freeze_count() > 0)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    scheduling, memory, frozen = printed.splitlines()
    assert "rtprio 50" in scheduling
    assert "memlock unlimited" in memory
    assert frozen == "True"
