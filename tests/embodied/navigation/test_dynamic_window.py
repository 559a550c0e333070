"""Predictions, scores and directions of the dynamic window approach, by hand."""

import math

import pytest
import torch

from embodied.contract import Contract, TensorSpec
from embodied.native import choose
from embodied.navigation.dynamic_window import FAR_M, RATES, SPEEDS, Drive, DynamicWindow, Weights, clearance

ANGLES = (0.0, 0.5 * math.pi, math.pi, -0.5 * math.pi)
DRIVE = Drive(0.4, 0.3, 1.0, 2.0, 4.0, 0.1, ANGLES, range_m=10.0, lidar_x_m=0.1)
WEIGHTS = Weights(1.0, 0.5, 0.06, 0.05, 0.25, 1.0, goal=2.0, heading=0.5, clearance=1.5, speed=0.25)
SPEC = TensorSpec((2,), names=("speed", "yaw_rate"), low=(-0.3, -1.5), high=(1.0, 1.5))
CONTRACT = Contract({}, SPEC, 0.1)
WINDOW = DynamicWindow(CONTRACT, DRIVE, WEIGHTS, backs=True)
RING = [(0.5 * math.cos(0.01 * angle), 0.5 * math.sin(0.01 * angle)) for angle in range(75, 554, 5)]
"""Points all around but in front."""
NOWHERE = torch.full((1, 1, 2), FAR_M)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values])


def test_what_it_computes_from_the_contract_and_the_drive():
    assert WINDOW.radius == pytest.approx(0.25 + 0.05)  # half of the diagonal, and room to turn
    assert (WINDOW.slowest, WINDOW.fastest, WINDOW.backwards, WINDOW.turning) == (0.0, 1.0, -0.3, 1.5)
    assert DynamicWindow(CONTRACT, DRIVE).backwards == 0.0
    # two substeps of a command, and 0.7 s of braking: v / a and twice the lag
    assert (WINDOW.step, WINDOW.braking) == (2, 2 + 14)
    hits = DRIVE.points(row(1.0, 2.0, 10.0, 0.5))[0]
    torch.testing.assert_close(hits[[0, 1, 3]], torch.tensor([[1.1, 0.0], [0.1, 2.0], [0.1, -0.5]]))
    assert hits[2, 0] == 0.1 - FAR_M  # not a hit


@pytest.mark.parametrize("commanded", [None, 1])
def test_a_predicted_path(commanded: int | None):
    path = WINDOW._foresee(row(1.0, 0.0), row(0.5), row(1.0), 3, commanded)
    # 2 m/s^2 and 4 rad/s^2 for 0.05 s each; after one substep it may brake, from 0.2 rad/s by its lag
    rate = 0.4 if commanded is None else 0.2 - 0.05 * 2.0
    middle = 0.01 + 0.025 * rate
    x = 0.05 * (0.9 * math.cos(0.005) + 0.8 * math.cos(middle))
    y = 0.05 * (0.9 * math.sin(0.005) + 0.8 * math.sin(middle))
    torch.testing.assert_close(path, torch.tensor([[[[x, y, 0.01 + 0.05 * rate]]]]))  # every second pose


@pytest.mark.parametrize("backend", ["c", "torch"])
def test_distance_of_the_outline(backend: str):
    if backend == "c" and choose(None, torch.device("cpu")) != "c":
        pytest.skip("no compiler")
    poses = torch.tensor([[[1.0, 2.0, 0.5 * math.pi], [1.0, 2.0, 0.0]]])  # to the left, and ahead
    for point, distances in (
        ((1.0, 2.5), (0.3, 0.35)),
        ((1.55, 2.0), (0.4, 0.35)),
        ((1.55, 2.5), (0.5, math.hypot(0.35, 0.35))),
        ((0.9, 1.9), (0.0, 0.0)),
    ):
        points = torch.tensor([[point, (FAR_M, FAR_M)]])
        torch.testing.assert_close(clearance(poses, points, WINDOW.half, backend), row(*distances))


def test_reachable_speeds_and_rates():
    for velocity, ends in (((0.9, 0.2), (0.0, 1.0, -1.5, 1.5)), ((0.2, -1.4), (0.0, 0.7, -1.5, 0.6))):
        speed, turn = (each.view(SPEEDS, RATES) for each in WINDOW._window(row(*velocity)))
        slowest, fastest, right, left = ends
        torch.testing.assert_close(speed[:, 0], torch.linspace(slowest, fastest, SPEEDS))
        torch.testing.assert_close(turn[0], torch.linspace(right, left, RATES))
        assert (speed == speed[:, :1]).all()
        assert (turn == turn[0]).all()


def test_required_clearance_is_at_most_what_there_is():
    torch.testing.assert_close(WINDOW._margin(row(0.5, 0.01, 0.001)), row(0.06, 0.01, 0.005))


def test_cost_of_a_pose_is_its_distance_and_where_it_is_not_near_its_direction():
    yaw = math.atan2(0.4, 0.3)
    cost = WINDOW._cost(row(0.3, 0.03), row(0.4, 0.04), row(yaw - 0.2, yaw + 0.2))
    torch.testing.assert_close(cost, row(2.0 * 0.5 + 0.5 * 0.2, 2.0 * 0.05 + 0.5 * 0.2 * 0.1))


def test_a_command_is_admissible_if_it_can_stop_before_the_wall():
    # speeds of 1 for two substeps, then 0.9 to 0.2, and from there by the lag
    way = 0.05 * (2.0 + 4.4 + 0.1 * (2.0 - 0.5**5))
    least = 0.2 + way + 0.06 - 0.1
    for gap, admissible in ((0.001, True), (-0.001, False)):
        ranges = row(least + gap, 9.0, 9.0, 9.0)
        assert WINDOW.admissible(ranges, row(1.0, 0.0), row(1.0, 0.0)).item() is admissible
    points = torch.tensor([[[way, 0.301]], [[way, 0.299]]])  # a circle of 0.3 m around where it stops
    commands = (each.repeat(2, 1) for each in (row(1.0, 0.0), row(1.0), row(0.0), row(0.06)))
    safe, turnable = WINDOW._admissible(points, *commands)
    assert (safe.tolist(), turnable.tolist()) == ([[True], [True]], [[True], [False]])


@pytest.mark.parametrize(
    ("goal", "wall", "score"),
    [
        (3.0, FAR_M, 0.25 + 1.5 - 2.0 * 2.0),  # 1 m in the horizon
        (0.5, FAR_M, 0.25 + 1.5),  # it passes the goal
        (3.0, 0.9, 0.25 + 1.5 * 0.52 - 2.0 * 2.4),  # 0.6 m, with clearances of 0.6 to 0.1 m of 0.25 m
        (3.0, 0.3, 0.25 - 2.0 * 3.0),  # nothing of the path is free
    ],
)
def test_score_of_driving_straight_on(goal: float, wall: float, score: float):
    points = torch.tensor([[[wall, 0.0]]])
    result = WINDOW._score(points, row(1.0, 0.0), row(1.0), row(0.0), row(0.06), row(goal, 0.0))
    assert result.item() == pytest.approx(score, abs=1e-5)


def test_a_curve_that_ends_at_the_goal_costs_nothing():
    command = row(1.0, 0.5), row(1.0), row(1.0)
    goal = WINDOW._foresee(*command, 20)[0, :, -1, :2]
    score = WINDOW._score(NOWHERE, *command, row(0.06), goal)
    assert score.item() == pytest.approx(0.25 + 1.5)


@pytest.mark.parametrize(
    ("points", "goal", "degrees"),
    [
        ([(FAR_M, FAR_M)], (0.0, 2.0), 90.0),
        # a circle of 0.3 m passes a point that is 0.5 m away at more than 37 degrees; of ten degrees each
        ([(0.5, 0.0)], (2.0, 0.0), 40.0),
        ([(0.5, 0.05)], (2.0, 0.0), -40.0),
        ([(-0.5, 0.0)], (2.0, 0.0), 0.0),
        ([(0.5, 0.0)], (0.1, 0.0), 0.0),  # the goal is nearer
        ([(1.4, 0.0)], (2.0, 0.0), 0.0),  # and 1 m is enough
        ([(1.2, 0.0)], (2.0, 0.0), 20.0),
        ([*RING, (0.9, 0.0)], (0.0, 2.0), 0.0),  # nothing is free: where there is most room
    ],
)
def test_the_free_direction_nearest_to_the_goal(points: list, goal: tuple[float, float], degrees: float):
    direction = WINDOW._free_direction(torch.tensor([points]), row(*goal))
    assert math.degrees(direction.item()) == pytest.approx(degrees, abs=1e-3)


def test_turning_in_place():
    rate, score = WINDOW._turn(NOWHERE, torch.tensor([0.1]), row(0.0, 2.0))
    remaining = 0.5 * math.pi - 1.5  # of the bearing, after the horizon
    assert (rate.item(), score.item()) == pytest.approx((1.5, 1.5 * 0.4 - (2.0 * 2.0 + 0.5 * remaining)))
    rate, score = WINDOW._turn(NOWHERE, torch.tensor([9.0]), row(2.0 * math.cos(0.31), -2.0 * math.sin(0.31)))
    assert (rate.item(), score.item()) == pytest.approx((-0.31 / 0.3, 1.5 - 2.0 * 2.0))
    ahead = WINDOW._turn(NOWHERE, torch.tensor([9.0]), row(2.0 * math.cos(0.29), 2.0 * math.sin(0.29)))
    assert ahead[1].item() == -FAR_M  # so far off it drives on
    blocked = WINDOW._turn(torch.tensor([[[0.0, 0.5]]]), torch.tensor([9.0]), row(0.0, 2.0))
    assert blocked[1].item() == -FAR_M


def test_commands():
    ranges = row(9.0, 9.0, 9.0, 9.0)
    ahead = WINDOW.command(ranges, row(0.6, 0.0), row(5.0, 0.0))[0].tolist()
    assert ahead == pytest.approx([1.0, 0.0], abs=1e-6)
    for goal, rate in ((1.0, 1.5), (-1.0, -1.5)):
        turning = WINDOW.command(ranges, row(0.0, 0.0), row(-3.0, goal))[0].tolist()
        assert turning == pytest.approx([0.0, rate], abs=1e-6)
    walled = row(0.11, 0.16, 9.0, 0.16)  # neither on nor round: back
    assert WINDOW.command(walled, row(0.0, 0.0), row(3.0, 0.0))[0].tolist() == pytest.approx([-0.3, 0.0])
    stays = DynamicWindow(CONTRACT, DRIVE, WEIGHTS)
    assert stays.command(walled, row(0.0, 0.0), row(3.0, 0.0))[0].tolist() == [0.0, 0.0]
