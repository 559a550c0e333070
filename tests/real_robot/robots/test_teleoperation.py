"""An episode begins once the robot measures and is listened to, whatever a simulator's clock says."""

from pathlib import Path

import numpy as np
import pytest

from embodied.errors import UserError
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Recording
from real_robot.robots.robot import Reading
from real_robot.robots.teleoperation import FIRST_READING_S, Driver, Session, Station, first_reading
from real_robot.safety.limits import ElementLimits, Kind, Limits
from real_robot.safety.safety import Safety
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


class Absent:
    """A person who begins episodes and leaves the robot to the policy."""

    pressed = frozenset[str]()

    def wait_for(self, *buttons: str, sleep: object) -> str:
        return "go"

    def action(self, proposed: np.ndarray | None) -> None:
        return None


class Counting:
    """An executor that counts how often an episode begins."""

    episodes = 0

    def reset(self) -> None:
        self.episodes += 1

    def observe(self, reading: Reading) -> None: ...

    def action(self, now_s: float) -> np.ndarray:
        return np.full(2, 0.001)


class Present(Absent):
    """A person whose device gives `command` and `pressed`, or an error."""

    def __init__(self, command: np.ndarray | OSError | None, *pressed: str) -> None:
        self.command, self.pressed = command, frozenset(pressed)

    def action(self, proposed: np.ndarray | None) -> np.ndarray | None:
        if isinstance(self.command, OSError):
            raise self.command
        return self.command


@pytest.mark.parametrize(
    ("person", "reasons", "human", "action"),
    [
        (Present(None), [], False, [0.001, 0.001]),
        (Present(np.ones(2)), [], True, [1.0, 1.0]),
        (Present(np.ones(2), "stop"), ["stopped by a person"], True, [1.0, 1.0]),
        (Present(OSError("unplugged")), ["the person's controls are gone: unplugged"], False, [0.001, 0.001]),
    ],
)
def test_a_person_replaces_the_policy_and_stops_the_robot(person: Present, reasons, human, action):
    tripped: list[str] = []
    driver = Driver(person, Counting(), tripped.append)
    assert driver.action(0.0).tolist() == driver.proposed_action.tolist() == action
    assert (tripped, driver.human, driver.lost is not None) == (reasons, human, isinstance(person.command, OSError))


def test_a_policy_begins_every_episode_anew(tmp_path: Path):
    robot = Plant(Kind.DELTA, np.zeros(2))
    policy = Counting()
    begun: list[int] = []
    made = Station(
        robot,
        robot.contract,
        robot.clock,
        lambda seconds: robot.tick() and None,
        lambda: begun.append(robot.ticks),
        lambda: True if robot.ticks > begun[-1] + 9 else None,
    )
    within = ElementLimits(Kind.DELTA, velocity=1.0)
    safety = Safety(robot, Limits({"a": within, "b": within}), robot.clock)
    with Recorder(tmp_path / "a.mcap", robot.contract, clock=robot.clock) as recorder:
        session = Session(made, safety, Driver(Absent(), policy, safety.trip), recorder, "push", lambda: False)
        assert session.run(2) == [True, True]
    assert policy.episodes == 2
    assert Recording(tmp_path / "a.mcap").outcomes() == {0: True, 1: True}
