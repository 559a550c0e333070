"""An episode begins once the robot measures, however its clock does."""

import numpy as np
import pytest

from embodied.errors import UserError
from real_robot.robots.robot import Reading
from real_robot.robots.teleoperation import FIRST_READING_S, first_reading
from real_robot.safety.limits import Kind
from tests.real_robot.plant import DT_S, Plant


class Starting(Plant):
    """Measures from its fourth period on, and without a fault from its sixth; its simulator's clock comes late."""

    def read(self) -> Reading | None:
        self.position[:] = np.nan if self.ticks < 6 else 0.5
        return None if self.ticks < 4 else super().read()

    def clock(self) -> float:
        return 0.0 if self.ticks < 2 else 1000.0 + super().clock()


def test_the_first_measurement_is_waited_for_in_real_time():
    robot, waited = Starting(Kind.POSITION, np.zeros(2)), []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        robot.ticks += 1

    assert first_reading(robot, sleep).observation["position"].tolist() == [0.5, 0.5]
    assert waited == [DT_S] * 6


@pytest.mark.parametrize(("ticks", "why"), [(0, "is its driver running?"), (4, "position is not finite")])
def test_a_robot_that_does_not_measure_is_told(ticks: int, why: str):
    robot, waited = Starting(Kind.POSITION, np.zeros(2)), []
    robot.ticks = ticks
    with pytest.raises(UserError, match=f"the robot gave no valid measurement in 5 s: .*{why}"):
        first_reading(robot, waited.append)
    assert sum(waited) == pytest.approx(FIRST_READING_S)
