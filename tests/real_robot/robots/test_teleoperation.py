"""An episode begins once the robot measures and is listened to, whatever a simulator's clock says."""

import numpy as np
import pytest

from embodied.errors import UserError
from real_robot.robots.robot import Reading
from real_robot.robots.teleoperation import FIRST_READING_S, Station, first_reading
from real_robot.safety.limits import Kind
from tests.real_robot.plant import DT_S, Plant


class Starting(Plant):
    """Measures from its fourth period on, and without a fault from its sixth; its simulator's clock comes late."""

    def read(self) -> Reading | None:
        self.position[:] = np.nan if self.ticks < 6 else 0.5
        return None if self.ticks < 4 else super().read()

    def clock(self) -> float:
        return 0.0 if self.ticks < 2 else 1000.0 + super().clock()


def station(robot: Starting, heard_at: int) -> tuple[Station, list[float]]:
    """One whose robot's time passes while it sleeps, with what it has slept; commands are heard from a tick on."""
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        robot.ticks += 1

    nothing = lambda: None  # noqa: E731
    return Station(
        robot, robot.contract, robot.clock, sleep, nothing, has_subscriber=lambda: robot.ticks >= heard_at
    ), slept


@pytest.mark.parametrize(("heard_at", "periods"), [(0, 6), (9, 9)])
def test_an_episode_begins_with_a_measurement_and_somebody_who_listens(heard_at: int, periods: int):
    made, slept = station(Starting(Kind.POSITION, np.zeros(2)), heard_at)
    assert first_reading(made).observation["position"].tolist() == [0.5, 0.5]
    assert slept == [DT_S] * periods


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        (-1000, "the robot gave no valid measurement in 5 s: is its driver running?"),
        (-495, "the robot gave no valid measurement in 5 s: position is not finite"),
        (0, "nobody listened to commands for 5 s: is safety_node running?"),
    ],
)
def test_what_is_missing_is_told(begin: int, why: str):
    robot = Starting(Kind.POSITION, np.zeros(2))
    robot.ticks = begin
    made, slept = station(robot, 1000)
    with pytest.raises(UserError) as raised:
        first_reading(made)
    assert str(raised.value) == why
    assert sum(slept) == pytest.approx(FIRST_READING_S)
