"""The benchmark of random faults in every row: a few sequences of each, and faults of ours that it has to find."""

import math
from collections.abc import Callable

import pytest

from benchmarks import safety_faults_rows as rows
from benchmarks.safety_checker import ViolationError
from real_robot.ros2 import ros_robot, topics
from real_robot.ros2.engagement import Engagement
from real_robot.ros2.nodes import safety
from real_robot.ros2.partners import Partners
from real_robot.ros2.robots.registry import ROBOTS
from real_robot.ros2.robots.tables import Table
from real_robot.safety.consistency import Consistency
from real_robot.safety.safety import Safety

RESET = Safety.reset


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sequence replaces in nodes is put back."""
    replaced = (ros_robot, "types"), (topics, "types"), (safety, "read_contract"), (safety, "read_limits")
    for module, name in replaced:
        monkeypatch.setattr(module, name, getattr(module, name))


def test_no_row_publishes_anything_outside_its_limits_or_its_mode():
    commanded = dict.fromkeys(ROBOTS, 0)
    for number in range(50_000, 50_000 + 2 * len(rows.ROWS)):
        row, _, done = rows.run_one(number)
        commanded[row] += done["commands"]
    assert min(commanded.values()) > 0


def reset_without_time(safety: Safety) -> None:
    """A reset after which commands that were issued before it count, too."""
    RESET(safety)
    safety._reset_s = -math.inf


def found(row: str) -> str:
    """The first violation in a row."""
    first = next(index for index, (name, _, _) in enumerate(rows.ROWS) if name == row)
    for number in range(20):
        try:
            rows.run_one(first + number * len(rows.ROWS))
        except ViolationError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("row", "owner", "name", "broken", "violation"),
    [
        ("joint_trajectory", Table, "within", lambda table, limits: table, "commanded ["),
        ("forward_position", Safety, "reset", reset_without_time, "before the reset"),
        ("forward_position", Consistency, "_contradiction", lambda *_: "", "consistent measurements"),
        ("ur", Partners, "refusal", property(lambda partners: ""), "publishes on"),
        ("fr3", Partners, "refusal", property(lambda partners: ""), "nothing was heard on"),
        ("px4_actuators", Engagement, "commands", property(lambda engagement: True), "does not take commands"),
        ("px4_actuators", Engagement, "beats", property(lambda engagement: True), "a heartbeat"),
    ],
)
def test_a_fault_of_ours_is_found(
    monkeypatch: pytest.MonkeyPatch, row: str, owner: type, name: str, broken: Callable[..., object], violation: str
):
    monkeypatch.setattr(owner, name, broken)
    assert violation in found(row)
