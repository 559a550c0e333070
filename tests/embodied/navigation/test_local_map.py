"""Maps of a lidar: shortest paths around what was seen, and which goal is expected where."""

import math

import pytest
import torch

from embodied.navigation.local_map import LONGEST_M, LocalMap

ANGLES = tuple(math.radians(4.0) * beam - math.pi for beam in range(90))
MAP = LocalMap(ANGLES, 6.0, 0.1)
FAR = torch.full((1, 90), 6.0)
STILL = torch.zeros(1, 2)


def goal(x: float, y: float = 0.0) -> torch.Tensor:
    return torch.tensor([[x, y]])


def wall(ahead_m: float) -> torch.Tensor:
    """Ranges to a wall across the way, 6 m wide."""
    angles = torch.tensor(ANGLES)
    return torch.where(angles.abs() < 1.0, ahead_m / angles.cos(), 6.0).clamp_max(6.0).unsqueeze(0)


@pytest.mark.parametrize("direction", [0.0, 2.0, -3.0])
def test_in_the_open_waypoints_are_on_the_line_to_the_goal(direction):
    place = 5.0 * torch.tensor([[math.cos(direction), math.sin(direction)]])
    told = MAP.observe(MAP.begin(FAR, STILL, place))
    points = told["waypoints"].view(3, 2)
    aside = points @ torch.tensor([-math.sin(direction), math.cos(direction)])
    assert aside.abs().max() < 0.25
    for point, ahead_m in zip(points, MAP.ahead_m, strict=True):
        assert ahead_m - 0.15 <= float(point.norm()) <= ahead_m + 0.4
    assert float(told["path_cost"]) == pytest.approx(5.0, abs=0.4)


def test_a_wall_is_driven_around_also_when_it_is_seen_no_more():
    memory = MAP.begin(wall(2.0), STILL, goal(4.0))
    around = MAP.observe(memory)
    assert float(around["waypoints"][0, 5].abs()) > 0.5
    assert float(around["path_cost"]) > 5.0
    for _ in range(2 * MAP.every):
        MAP.update(memory, torch.full((1, 90), 0.7), STILL, goal(4.0))  # something near hides it
    assert float(MAP.observe(memory)["path_cost"]) > 5.0


def test_what_is_out_of_range_is_no_wall():
    assert not MAP.hit_cells(MAP.begin(FAR, STILL, goal(4.0))).any()
    assert MAP.hit_cells(MAP.begin(FAR - 0.5, STILL, goal(4.0))).sum() > 50


def test_the_goal_is_where_it_is_when_it_is_near():
    told = MAP.observe(MAP.begin(FAR, STILL, goal(0.3, 0.2)))["waypoints"]
    assert torch.allclose(told, torch.tensor([[0.3, 0.2] * 3]), atol=1e-6)


def test_paths_are_planned_now_and_then_and_hits_stored_in_every_period():
    memory = MAP.begin(FAR, STILL, goal(4.0))
    costs = []
    for _ in range(MAP.every):
        MAP.update(memory, wall(2.0), STILL, goal(4.0))
        assert MAP.hit_cells(memory).any()
        costs.append(float(MAP.observe(memory)["path_cost"]))
    assert costs[:-1] == [pytest.approx(4.0, abs=0.4)] * (MAP.every - 1)
    assert costs[-1] > 5.0


def test_a_vehicle_that_turns_and_drives_expects_its_goal_where_it_is():
    memory = MAP.begin(FAR, torch.tensor([[1.0, 1.0]]), goal(4.0))
    expected = MAP.expected(memory, torch.tensor([[1.0, 1.0]]))
    distance, angle = math.hypot(4.0 - 0.1 * math.cos(0.05), 0.1 * math.sin(0.05)), -0.1
    assert float(expected.norm()) == pytest.approx(distance, abs=1e-4)
    assert math.atan2(*expected[0].flip(0).tolist()) == pytest.approx(angle, abs=0.005)


def test_costs_are_finite_where_nothing_leads_to_the_goal():
    ring = LocalMap(ANGLES, 6.0, 0.1, blocked=math.inf)
    told = ring.observe(ring.begin(torch.full((1, 90), 1.0), STILL, goal(4.0)))
    assert float(told["path_cost"]) == LONGEST_M
    assert told["waypoints"].isfinite().all()


def test_rows_do_not_depend_on_others():
    lidar, goals = torch.cat((FAR, wall(2.0), wall(3.0))), torch.cat((goal(4.0), goal(5.0, 1.0), goal(4.0, -1.0)))
    together = MAP.begin(lidar, STILL.expand(3, 2), goals)
    for _ in range(MAP.every):
        MAP.update(together, lidar.flip(0), STILL.expand(3, 2), goals)
    for row in range(3):
        own = slice(row, row + 1)
        alone = MAP.begin(lidar[own], STILL, goals[own])
        for _ in range(MAP.every):
            MAP.update(alone, lidar.flip(0)[own], STILL, goals[own])
        assert torch.equal(together[own], alone)
        assert torch.equal(MAP.observe(together)["waypoints"][own], MAP.observe(alone)["waypoints"])


def post(x: float, y: float) -> torch.Tensor:
    """Ranges of one beam that hits at (x, y), m, base; the others hit nothing."""
    angles = torch.tensor(ANGLES)
    return torch.where((angles - math.atan2(y, x)).abs() < math.radians(2.0), math.hypot(x, y), 6.0).unsqueeze(0)


def remembered(chart: LocalMap, memory: torch.Tensor) -> dict[int, float]:
    """Ranges by the angle of the beam, degrees, where there are any."""
    found = chart.observe(memory)["remembered"][0]
    return {round(math.degrees(chart.angles[beam])): float(found[beam]) for beam in (found < 6.0).nonzero()[:, 0]}


def test_a_hit_is_remembered_where_it_is_while_the_vehicle_drives_and_turns():
    memory = MAP.begin(post(1.5, 0.0), STILL, goal(8.0))
    assert remembered(MAP, memory) == {0: pytest.approx(1.5)}
    for step in range(1, 11):  # 1 m ahead, without seeing it again
        MAP.update(memory, FAR, torch.tensor([[1.0, 0.0]]), goal(8.05 - 0.1 * step))
    assert remembered(MAP, memory) == {0: pytest.approx(0.55, abs=1e-3)}
    at, heading = 7.05, 0.0
    for _ in range(5):  # turns left by 60 degrees
        heading += math.radians(12.0)
        place = goal(at * math.cos(heading), -at * math.sin(heading))
        MAP.update(memory, FAR, torch.tensor([[0.0, math.radians(120.0)]]), place)
    ((angle, distance),) = remembered(MAP, memory).items()
    assert angle == pytest.approx(-60.0, abs=2.0)
    assert distance == pytest.approx(0.6, abs=0.06)


def test_hits_are_forgotten_after_a_while_and_told_up_to_three_metres():
    memory = MAP.begin(post(1.5, 0.0), STILL, goal(4.0))
    periods = MAP.scans * MAP.scans_every
    for _ in range(periods - 1):
        MAP.update(memory, FAR, STILL, goal(4.0))
    assert remembered(MAP, memory) == {0: pytest.approx(1.5)}
    MAP.update(memory, FAR, STILL, goal(4.0))
    assert remembered(MAP, memory) == {}
    assert remembered(MAP, MAP.begin(post(2.9, 0.0), STILL, goal(4.0))) == {0: pytest.approx(2.9)}
    assert remembered(MAP, MAP.begin(post(3.1, 0.0), STILL, goal(4.0))) == {}


def test_the_nearest_hit_in_a_beams_direction_counts_all_around():
    for x, y in ((1.0, 0.0), (0.7, 0.7), (0.0, 1.0), (-1.0, 0.3), (-1.0, -0.3), (0.2, -1.0)):
        memory = MAP.begin(post(x, y), STILL, goal(4.0))
        for _ in range(2):
            MAP.update(memory, post(1.2 * x, 1.2 * y), STILL, goal(4.0))
        ((angle, distance),) = remembered(MAP, memory).items()
        off = (angle - math.degrees(math.atan2(y, x)) + 180.0) % 360.0 - 180.0
        assert abs(off) <= 2.0
        assert distance == pytest.approx(math.hypot(x, y))


def test_what_lies_beside_the_field_of_view_falls_to_no_beam():
    front = LocalMap(ANGLES[30:61], 6.0, 0.1)  # 60 degrees to both sides
    memory = front.begin(torch.full((1, 31), 6.0).index_fill(1, torch.tensor(15), 1.0), STILL, goal(4.0))
    assert remembered(front, memory) == {0: pytest.approx(1.0)}
    for _ in range(15):  # 90 degrees to the left: it is on the right, where no beam looks
        place = front.expected(memory, torch.tensor([[0.0, math.radians(60.0)]]))
        front.update(memory, torch.full((1, 31), 6.0), torch.tensor([[0.0, math.radians(60.0)]]), place)
    assert remembered(front, memory) == {}


def test_what_has_moved_is_forgotten_after_a_while():
    memory = MAP.begin(wall(2.0), STILL, goal(4.0))
    count = int((MAP.hit_cells(memory) > 0).sum())
    MAP.update(memory, FAR, STILL, goal(4.0))
    assert int((MAP.hit_cells(memory) > 0).sum()) == count  # once is not enough
    for _ in range(4):
        MAP.update(memory, FAR, STILL, goal(4.0))
    assert int((MAP.hit_cells(memory) > 0).sum()) < 0.25 * count
    for _ in range(10):
        MAP.update(memory, wall(2.0), STILL, goal(4.0))
    assert int((MAP.hit_cells(memory) > 0).sum()) >= count  # what stays is kept
