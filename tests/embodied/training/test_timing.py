"""Phases add up to the total."""

import pytest

from embodied.training import timing
from embodied.training.timing import PhaseTimer


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    return clock


def test_inner_phases_are_not_counted_twice(clock):
    timer = PhaseTimer()
    with timer("evaluation"):
        clock.now += 1
        with timer("simulation"):
            clock.now += 4
            with timer("rendering"):
                clock.now += 2
        clock.now += 3
        timer.add("policy", 1.5)
    with timer("simulation"):
        clock.now += 10
    assert timer.seconds == {"rendering": 2, "simulation": 14, "policy": 1.5, "evaluation": 2.5}
    assert sum(timer.seconds.values()) == clock.now


def test_a_phase_that_raises_is_counted_and_a_resumed_timer_goes_on(clock):
    timer = PhaseTimer({"update": 5.0})

    def fail() -> None:
        with timer("update"):
            clock.now += 2
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert timer.seconds == {"update": 7}
