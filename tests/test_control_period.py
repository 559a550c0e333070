"""Periods between commands of a robot, by hand."""

import numpy as np
import pytest

from benchmarks import control_period


class Robot:
    """A robot that counts its commands."""

    contract = at_rest = stops_after_s = None

    def __init__(self) -> None:
        self.written = 0

    def write(self, action) -> None:
        self.written += 1


def test_periods_are_within_an_episode_and_the_measured_time() -> None:
    # before the time; two good ones; a late one; another episode; a late one; after the time
    times = [(0, 0.9), (0, 1.0), (0, 1.05), (0, 1.1), (0, 1.2), (1, 5.0), (1, 5.074), (1, 5.174), (1, 9.0), (1, 9.05)]
    result = control_period.statistics(times, 1.0, 8.0)
    assert result == {
        "periods": 5,  # 50, 50, 100, 74 and 100 ms
        "p50_ms": 74.0,
        "p99_ms": 100.0,
        "max_ms": 100.0,
        "misses": 2,
        "late_s": pytest.approx(0.1),
    }


def test_a_command_is_noted_with_its_episode_before_it_is_written() -> None:
    robot = Robot()
    timed = control_period.TimedRobot(robot)
    timed.write(np.zeros(1))
    timed.episode += 1
    timed.write(np.zeros(1))
    assert [episode for episode, _ in timed.commands] == [0, 1]
    assert robot.written == 2


def test_only_rows_of_updates_show_that_it_learns(tmp_path) -> None:
    assert control_period.rows_of(tmp_path, learning=False) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 8}\n{"step": 16, "rl/critic_loss": 1.0}\n')
    assert [row["step"] for row in control_period.rows_of(tmp_path, learning=True)] == [16]
    assert len(control_period.rows_of(tmp_path, learning=False)) == 2
