"""Safety's limits hold for the hand that LIBERO's policies move, whatever they ask for."""

from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from real_robot.robots.robot import Reading
from real_robot.ros2.messages.frames import two_columns
from real_robot.ros2.robots import registry
from real_robot.ros2.robots.registry import robot_table
from real_robot.safety.limits import load_limits
from real_robot.safety.safety import Safety, State
from sims.libero.observation import contract

LIMITS = load_limits(Path(registry.__file__).parents[1] / "launch/config/arm_cartesian_limits.yaml")
LIBERO = contract(8, 4)
SCENE = [key for key in LIBERO.observation if key.startswith(("object_", "instruction"))]
TABLE = robot_table("cartesian", LIBERO, {"rate_hz": 20.0, "arrays": SCENE})
DT_S = 0.05


class Hand:
    """A hand that does what it is told; `commands` are the velocities that were written, None where it held."""

    contract = TABLE.contract

    def __init__(self) -> None:
        self.position, self.rotation, self.ticks = np.array([0.0, 0.0, 0.3]), Rotation.identity(), 0
        self.commands: list[np.ndarray | None] = []
        self.at_rest, self.stops_after_s = TABLE.at_rest, TABLE.stops_after_s

    def clock(self) -> float:
        return self.ticks * DT_S

    def read(self) -> Reading:
        specs = self.contract.observation
        shapes = {key: tuple(2 if size < 0 else size for size in spec.shape) for key, spec in specs.items()}
        seen = {key: np.zeros(shapes[key], spec.dtype) for key, spec in specs.items()}
        seen["end_effector_position"] = self.position.copy()
        seen["end_effector_rotation"] = two_columns(self.rotation.as_matrix())
        return Reading(seen, self.clock(), self.ticks)

    def write(self, action: np.ndarray) -> None:
        self.commands.append(action)
        self.position = self.position + DT_S * action[:3]
        self.rotation = Rotation.from_rotvec(DT_S * action[3:6]) * self.rotation

    def hold(self) -> None:
        self.commands.append(None)

    def close(self) -> None:
        self.hold()


class Asked:
    """An executor of the displacements that it is given."""

    def __init__(self) -> None:
        self.wanted = np.zeros(7)

    def reset(self) -> None:
        """Nothing to forget."""

    def observe(self, reading: Reading) -> None:
        """Reads nothing."""

    def action(self, now_s: float) -> np.ndarray:
        return self.wanted


def ready(hand: Hand) -> Safety:
    """Safety of `hand`, with as many measurements as it needs to start."""
    safety = Safety(hand, LIMITS, hand.clock)
    for _ in range(3):
        hand.ticks += 1
        safety.observe(hand.read())
    return safety


@pytest.mark.parametrize("seed", range(4))
def test_no_displacements_move_the_hand_out_of_its_limits(seed):
    generator, hand, asked = np.random.default_rng(seed), Hand(), Asked()
    safety, commands = ready(hand), TABLE.translate(asked)
    for step in range(600):
        if step % 40 == 0:
            way = generator.choice([-1.0, 1.0], 7)
        asked.wanted = way if generator.random() < 0.8 else generator.uniform(-3.0, 3.0, 7)
        hand.ticks += 1
        safety.command(commands.action(hand.clock()), hand.read())
        for axis, name in enumerate("xyz"):
            limits = LIMITS.commands[name]
            assert limits.low - 1e-6 <= hand.position[axis] <= limits.high + 1e-6
    written = np.array([command for command in hand.commands if command is not None])
    assert len(written) == 600
    for index, name in enumerate(("x", "y", "z", "rotation_x", "rotation_y", "rotation_z")):
        limits, velocity = LIMITS.commands[name], written[:, index]
        acceleration = np.diff(velocity, prepend=0.0) / DT_S
        assert np.abs(velocity).max() <= limits.velocity + 1e-9
        assert np.abs(acceleration).max() <= limits.acceleration + 1e-6
        assert np.abs(np.diff(acceleration, prepend=0.0)).max() / DT_S <= limits.jerk + 1e-3
    assert np.abs(written[:, :3]).max() > 0.2  # and yet it moves


def test_a_displacement_within_the_limits_arrives_unchanged():
    hand, asked = Hand(), Asked()
    safety, commands = ready(hand), TABLE.translate(asked)
    asked.wanted = np.array([0.5, -0.3, 0.2, 0.05, 0.0, -0.1, 1.0])
    for _ in range(6):
        hand.ticks += 1
        wanted = commands.action(hand.clock())
        verdict = safety.command(wanted, hand.read())
        assert (verdict.state, verdict.limited) == (State.ACTIVE, False)
        np.testing.assert_allclose(verdict.action, wanted)
