"""A guard replaces commands that leave no room to stop, those alone, and says what it needs."""

import math
from dataclasses import replace

import pytest
import torch

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.navigation.dynamic_window import Drive
from embodied.navigation.guard import Guard

BEAMS = 180
ANGLES = tuple(-math.pi + 2.0 * math.pi / BEAMS * beam for beam in range(BEAMS))
DRIVE = Drive(0.5, 0.4, 2.0, 2.0, 6.0, 0.1, ANGLES, range_m=6.0)
WAYPOINTS = TensorSpec((4,), unit="m", frame="base", names=("x_0.5_m", "y_0.5_m", "x_1_m", "y_1_m"))
CONTRACT = Contract(
    {
        "lidar": TensorSpec((BEAMS,), unit="m"),
        "remembered": TensorSpec((BEAMS,), unit="m"),
        "velocity": TensorSpec((2,), unit="m/s, rad/s"),
        "waypoints": WAYPOINTS,
    },
    TensorSpec((2,), unit="m/s, rad/s", names=("speed", "yaw_rate"), low=(0.0, -1.5), high=(1.0, 1.5)),
    0.1,
)


def seen(*walls_m: float, speed: float = 1.0, way: tuple[float, float] = (0.5, 0.8)) -> dict[str, torch.Tensor]:
    """Vehicles before walls at `walls_m` in front of their middle, whose waypoint 1 m away is at `way`."""
    cosines = torch.tensor(ANGLES).cos()
    ranges = [torch.where(cosines > 0.05, wall / cosines.clamp_min(0.05), 6.0).clamp_max(6.0) for wall in walls_m]
    count = len(walls_m)
    return {
        "lidar": torch.stack(ranges),
        "remembered": torch.full((count, BEAMS), 6.0),
        "velocity": torch.tensor([[speed, 0.0]]).expand(count, 2).clone(),
        "waypoints": torch.tensor([[9.0, 9.0, *way]]).expand(count, 4).clone(),
    }


AHEAD = torch.tensor([[1.0, 0.0]])


@pytest.mark.parametrize(
    ("wall", "speed", "stops"),
    # from 1 m/s it stops in a control step of 0.1 m, 0.25 m of braking and what the lag takes; its front is at 0.25 m
    [(0.55, 1.0, False), (0.9, 1.0, True), (0.55, 0.0, True), (0.26, 0.0, False)],
)
def test_a_command_needs_room_to_stop_afterwards(wall: float, speed: float, stops: bool):
    guard = Guard(CONTRACT, DRIVE)
    command, replaced = guard.command(seen(wall, speed=speed), AHEAD.clone())
    assert bool(replaced) is not stops
    assert torch.equal(command, AHEAD) is stops


def test_what_is_only_remembered_is_not_driven_into_either():
    guard, open_space = Guard(CONTRACT, DRIVE), seen(5.0)
    command, replaced = guard.command(open_space | {"remembered": seen(0.55)["lidar"]}, AHEAD.clone())
    assert bool(replaced)
    assert command[0, 0] < 1.0
    assert not guard.command(open_space | {"remembered": seen(5.0)["lidar"]}, AHEAD.clone())[1]


def test_turning_where_a_corner_would_touch_is_replaced_too():
    guard, turn = Guard(CONTRACT, DRIVE), torch.tensor([[0.0, 1.5]])
    assert guard.command(seen(0.28, speed=0.0), turn)[1].tolist() == [True]  # corners are 0.32 m from the middle
    assert guard.command(seen(0.45, speed=0.0), turn)[1].tolist() == [False]


def test_only_dangerous_commands_are_replaced_and_by_safe_ones_towards_the_waypoint():
    guard = Guard(CONTRACT, DRIVE)
    given = torch.tensor([[1.0, 0.3], [1.0, 0.3], [0.9, -0.2]])
    observation = seen(4.0, 0.5, 5.0, speed=0.7)
    command, replaced = guard.command(observation, given.clone())
    assert replaced.tolist() == [False, True, False]
    assert torch.equal(command[[0, 2]], given[[0, 2]])
    assert bool(guard.window.admissible(observation["lidar"], observation["velocity"], command).all())
    assert command[1, 0] < 0.7  # it brakes
    left = guard.command(seen(0.5, speed=0.7), AHEAD)[0]
    right = guard.command(seen(0.5, speed=0.7, way=(0.5, -0.8)), AHEAD)[0]
    assert left[0, 1] > 0.5 > -0.5 > right[0, 1]  # the waypoint 1 m away, not the one at (9, 9)


def test_what_cannot_be_guarded_is_named():
    blind = {key: spec for key, spec in CONTRACT.observation.items() if key != "waypoints"}
    with pytest.raises(UserError, match=r"needs the observations lidar, .*; the policy has no waypoints"):
        Guard(replace(CONTRACT, observation=blind), DRIVE)
    with pytest.raises(UserError, match="the policy executes 2 at once"):
        Guard(replace(CONTRACT, horizon=2, executed=2), DRIVE)


def test_a_vehicle_that_can_neither_drive_on_nor_turn_backs_out_if_it_may_and_can():
    backwards = replace(CONTRACT, action=replace(CONTRACT.action, low=(-0.3, -1.5)))
    caught = seen(0.256, speed=0.0, way=(0.0, 1.0))  # its front is at 0.25 m, and its corners need 0.32 m to turn
    aside = (torch.tensor(ANGLES).abs() - math.pi / 2.0).abs() < 0.9
    caught["lidar"][:, aside] = 0.23 / torch.tensor(ANGLES)[aside].sin().abs()  # walls close to both sides
    forward, turn = AHEAD, torch.tensor([[0.0, 1.5]])
    for command in (forward, turn):
        assert Guard(CONTRACT, DRIVE).command(caught, command.clone())[0].tolist() == [[0.0, 0.0]]
        assert Guard(backwards, DRIVE).command(caught, command.clone())[0][0].tolist() == pytest.approx([-0.3, 0.0])
    behind = dict(caught, lidar=torch.minimum(caught["lidar"], seen(0.256)["lidar"].roll(BEAMS // 2, 1)))
    assert Guard(backwards, DRIVE).command(behind, forward.clone())[0].tolist() == [[0.0, 0.0]]
    open_space = Guard(backwards, DRIVE).command(seen(0.4, speed=0.0), forward.clone())[0]
    assert open_space[0, 0] >= 0.0  # it turns instead


def test_a_vehicle_drives_backwards_only_where_its_lidar_looks():
    backwards = replace(CONTRACT, action=replace(CONTRACT.action, low=(-0.3, -1.5)))
    front = replace(DRIVE, angles=ANGLES[20:161])  # 280 degrees
    with pytest.raises(UserError, match=r"needs a lidar that sees all around; use task\.vehicle\.speed_min_m_s=0"):
        Guard(backwards, front)
    Guard(CONTRACT, front)
    Guard(backwards, replace(DRIVE, angles=ANGLES[::10]))
