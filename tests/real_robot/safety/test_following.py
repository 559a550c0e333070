"""A robot that is commanded in velocities and does not move so is stopped, with the cause."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from real_robot.safety.following import Motion
from real_robot.safety.limits import ElementLimits, Kind, Limits
from real_robot.safety.safety import Safety, State
from tests.real_robot.plant import DT_S, Plant, guarded

SPEED, ALLOWED = 0.5, 0.03


@pytest.mark.parametrize(
    ("steps", "positions", "age", "errors"),
    # over two periods, at up to two periods late, less one period's motion
    [
        ([1, 1, 1, 1, 1], [0, 0, 0, 0, 0], 0.0, [0, 0, 0, 1, 1]),  # blocked: 2 were commanded, 1 is allowed
        ([1, 1, 1, 1, 1], [1, 2, 3, 4, 5], 0.0, [0, 0, 0, 0, 0]),
        ([1, 1, 1, 1, 1], [0, 0, 1, 2, 3], 0.0, [0, 0, 0, 0, 0]),  # two periods late
        ([0, 0, 0, 0, 0], [0.5, 1, 1.5, 2, 2.5], 0.0, [0, 0, 1, 1, 1]),  # moved by somebody
        ([0, 0, 0, 0, 0], [0.5, 1, 1.5, 2, 2.5], 1.0, [0, 0, 1, 1, 1]),
        ([4, 1, 1, 1, 1], [0, 0, 0, 0, 0], 0.0, [0, 0, 0, 2 - 4 * 0.75**3, 2 - 4 * 0.75**4]),  # which fades
        ([1, 1, 1, 1, 1], [0, -1, -2, -3, -4], 0.0, [0, 0, 2, 3, 3]),
        ([1, 1, 1, 1, 1], [0, -1, -2, -3, -4], 1.0, [0, 0, 1, 2, 3]),
    ],
)
def test_motion_by_hand(steps: list, positions: list, age: float, errors: list):
    motion = Motion(2, ALLOWED)
    measured = []
    for step, position in zip(steps, positions, strict=True):
        motion.move(step)
        measured.append(motion.away(position, age))
    assert measured == pytest.approx(errors)


class World:
    """A robot that follows late, measured late and not always, at a constant speed."""

    def __init__(self, kind: Kind, late: int = 0, kept: int = 1) -> None:
        limits = ElementLimits(kind, velocity=1.0, acceleration=20.0, measured="position.a", following=ALLOWED)
        self.plant = Plant(kind, np.zeros(1))
        self.safety = guarded(self.plant, Limits({"a": limits}, observation_timeout_s=0.2))
        self.action = np.full(1, SPEED if kind is Kind.VELOCITY else SPEED * DT_S)
        self.positions = deque([np.zeros(1)] * (late + 1), maxlen=late + 1)
        self.kept, self.reading = kept, self.plant.read()

    def run(self, periods: int, blocked: bool = False, moved: float = 0.0) -> None:
        for _ in range(periods):
            at = self.positions[-1] if blocked else self.plant.position
            self.positions.append(at + moved)
            self.plant.position = self.positions[-1]
            reading = self.plant.tick()
            if self.plant.ticks % self.kept == 0:
                self.reading = replace(reading, observation={"position": self.positions[0].copy()})
            self.safety.command(self.action, self.reading)


def test_a_robot_that_is_commanded_in_every_third_period_moves_on_between_its_commands():
    world = World(Kind.VELOCITY)
    for _ in range(40):
        world.run(1)
        for _ in range(2):
            world.plant.position = world.plant.position + world.action * DT_S
            world.plant.tick()
    assert world.safety.state is State.ACTIVE, world.safety.reason


@pytest.mark.parametrize("kind", [Kind.VELOCITY, Kind.DELTA])
@pytest.mark.parametrize(("late", "kept"), [(0, 1), (0, 15), (25, 1), (10, 10)])
def test_who_follows_late_and_is_measured_now_and_then_goes_on(kind: Kind, late: int, kept: int):
    world = World(kind, late, kept)
    fast = world.action
    for share in (1.0, 0.0, -1.0, 0.2):
        world.action = share * fast
        world.run(100)
        assert world.safety.state is State.ACTIVE


@pytest.mark.parametrize("kind", [Kind.VELOCITY, Kind.DELTA])
def test_who_is_blocked_is_stopped_with_the_cause(kind: Kind):
    world = World(kind)
    world.run(100)
    world.run(45, blocked=True)  # following_s, and as much again for who may be late
    assert world.safety.state is State.STOPPED
    assert "blocked, or moved by somebody else" in world.safety.reason
    assert world.plant.commands[-1] is None or world.plant.commands[-1] == pytest.approx(0.0)


def test_who_is_moved_while_it_is_to_stand_is_stopped():
    world = World(Kind.VELOCITY)
    world.action = np.zeros(1)
    world.run(100)
    assert world.safety.state is State.ACTIVE
    world.run(15, moved=0.005)
    assert world.safety.state is State.STOPPED


def test_without_a_tolerance_velocities_are_not_compared():
    world = World(Kind.VELOCITY)
    limits = ElementLimits(Kind.VELOCITY, velocity=1.0, measured="position.a")
    world.safety = Safety(world.plant, Limits({"a": limits}), world.plant.clock)
    world.run(200, blocked=True)
    assert world.safety.state is State.ACTIVE
