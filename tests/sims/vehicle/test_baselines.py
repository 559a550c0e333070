"""Classical planners: behaviour in simple situations; arrival without contact."""

import math

import pytest
import torch
from tensordict import TensorDict

from embodied import native
from embodied.contract import Contract
from embodied.evaluation import evaluation
from embodied.navigation.dynamic_window import SPEEDS, Weights, clearance
from embodied.policy import MEMORY, Decision
from embodied.rollout.memory import STARTED
from sims.vehicle.planners.gap import FollowTheGap
from sims.vehicle.planners.pursuit import Numbers, PurePursuit
from sims.vehicle.planners.raceline import Raceline, RacelineNumbers, _at, _box_programme, least_curvature
from sims.vehicle.task import NavigateTask, RaceTask
from sims.vehicle.vehicles import F1TENTH, JACKAL

NAVIGATE, RACE = NavigateTask(), RaceTask()
DWA, MAPPING = NAVIGATE.baselines().values()
needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")


def scene(distance: float = 6.0, direction: tuple[float, float] = (1.0, 0.0), speed: float = 0.5, **ranges: float):
    """Observations in the open, except `ranges` at beams "ahead", "left" or "right" and their neighbours."""
    lidar = torch.full((1, 90), 6.0)
    for side, value in ranges.items():
        middle = {"ahead": 45, "left": 67, "right": 22}[side]
        lidar[0, middle - 8 : middle + 9] = value
    return TensorDict(
        {
            "lidar": lidar,
            "goal_distance": torch.tensor([[distance]]),
            "goal_direction": torch.tensor([direction]),
            "velocity": torch.tensor([[speed, 0.0]]),
        },
        batch_size=[1],
    )


def dwa(**seen) -> tuple[float, float]:
    speed, turn = DWA.act(scene(**seen)).actions[0, 0].tolist()
    return speed, turn


def test_dwa_drives_straight_to_a_goal_ahead_and_turns_to_one_aside():
    speed, turn = dwa()
    assert speed == pytest.approx(1.0)
    assert abs(turn) < 0.1
    assert dwa(direction=(0.6, 0.8))[1] > 0.4
    assert dwa(direction=(0.6, -0.8))[1] < -0.4


def test_dwa_stays_inside_its_window():
    speed, turn = dwa(speed=0.0, direction=(0.0, 1.0))
    assert speed <= JACKAL.acceleration_m_s2 * Weights().window_s + 1e-6
    assert abs(turn) <= 1.5


def test_dwa_drives_no_faster_than_it_can_stop():
    before = 0.8
    for range_m in (0.55, 0.6, 0.65):
        speed, _ = dwa(ahead=range_m, left=range_m, right=range_m, speed=before)
        change = 0.1 * JACKAL.deceleration_m_s2  # in one control step, the shortest duration of a command
        speed = min(max(speed, before - change), before + change)
        room = range_m - 0.5 * JACKAL.length_m
        assert speed**2 / (2.0 * JACKAL.deceleration_m_s2) + 0.1 * speed <= room
    assert dwa(ahead=1.4, speed=0.8)[0] >= 0.5  # there is still time


def test_dwa_does_not_turn_on_the_spot_where_its_rectangle_has_no_room():
    lidar = torch.full((1, 90), 6.0)
    beams = NAVIGATE.environment(1, "rooms", "train").simulator.angles
    walls = beams.sin().abs() > 0.5  # a corridor that is as wide as the robot and 2 cm more, closed ahead
    lidar[0, walls] = (0.5 * JACKAL.width_m + 0.01) / beams[walls].sin().abs()
    lidar[0, 40:51] = 0.3
    observation = scene(speed=0.0).update({"lidar": lidar})
    speed, turn = DWA.act(observation).actions[0, 0].tolist()
    slowest = JACKAL.acceleration_m_s2 * Weights().window_s / (SPEEDS - 1)
    assert speed <= slowest + 1e-6
    assert abs(turn) < 0.2


def test_clearance_by_hand():
    half = 0.25, 0.2
    points = torch.tensor([[[1.25, 0.0], [0.0, -3.0], [1e3, 1e3]]])
    poses = torch.tensor([[[0.0, 0.0, 0.0], [0.0, 0.0, math.pi / 2.0], [1.2, 0.0, 0.3], [0.95, -0.6, 0.0]]])
    assert clearance(poses, points, half)[0].tolist() == pytest.approx(
        [1.0, 1.05, 0.0, math.hypot(0.05, 0.4)], abs=1e-6
    )


@needs_compiler
def test_compiled_clearance_is_that_of_torch():
    draw = torch.Generator().manual_seed(0)
    poses, points = torch.rand(5, 40, 3, generator=draw) - 0.5, 4.0 * torch.rand(5, 90, 2, generator=draw) - 2.0
    found = [clearance(poses, points, (0.25, 0.2), backend) for backend in ("c", "torch")]
    assert torch.allclose(*found, atol=1e-5)


def test_what_is_mapped_is_where_it_is():
    env = NAVIGATE.environment(4, "rooms", "train")
    observation, memory = env.reset(starts=torch.arange(4)), MAPPING.initial_memory(4)
    first, goal = env.now.state[:, :2].clone(), env.now.world["route"][:, 0]
    for step in range(60):
        started = torch.full((4,), step == 0)
        decision = MAPPING.act(observation.update({MEMORY: memory, STARTED: started}))
        memory, observation = decision.sample[MEMORY], env.step(decision.actions).observation
    x = (goal - first) / (goal - first).norm(dim=1, keepdim=True)  # the map's x axis is the line to the goal
    y = torch.stack((-x[:, 1], x[:, 0]), 1)
    for row in range(4):
        cells = MAPPING.map.hit_cells(memory)[row].nonzero()
        assert len(cells) > 60
        at = (cells + 0.5 - 0.5 * MAPPING.map.side) * MAPPING.map.cell_m
        place = 0.5 * (first + goal)[row] + at[:, :1] * x[row] + at[:, 1:] * y[row]
        circles, segments = env.now.world["circles"][row], env.now.world["segments"][row]
        apart = ((place.unsqueeze(1) - circles[:, :2]).norm(dim=2) - circles[:, 2]).abs().amin(1)
        edge = segments[:, 2:] - segments[:, :2]
        share = ((place.unsqueeze(1) - segments[:, :2]) * edge).sum(2) / edge.square().sum(1).clamp_min(1e-9)
        foot = segments[:, :2] + share.clamp(0.0, 1.0).unsqueeze(2) * edge
        apart = torch.minimum(apart, (place.unsqueeze(1) - foot).norm(dim=2).amin(1))
        assert apart.max() < 0.75 * MAPPING.map.cell_m + 0.05


def test_a_wall_that_was_seen_once_is_driven_around():
    observation, memory = scene(distance=4.0), MAPPING.initial_memory(1)
    started = torch.ones(1, dtype=torch.bool)
    ahead = NAVIGATE.environment(1, "rooms", "train").simulator.angles
    near = ahead.abs() < 1.0
    observation["lidar"][0, near] = 2.0 / ahead[near].cos()  # a wall 2 m ahead, 6.2 m wide
    memory = MAPPING.act(observation.update({MEMORY: memory, STARTED: started})).sample[MEMORY]
    blind = scene(distance=4.0).update({MEMORY: memory, STARTED: ~started})
    assert abs(float(MAPPING.act(blind).actions[0, 0, 1])) > 0.3
    blind[MEMORY] = MAPPING.initial_memory(1)
    blind[STARTED] = started
    assert abs(float(MAPPING.act(blind).actions[0, 0, 1])) < 0.2


def test_the_line_of_least_curvature_of_a_round_track_is_the_widest_circle():
    turn = torch.arange(128, dtype=torch.float64) * (2.0 * math.pi / 128)
    middle = 7.0 * torch.stack((turn.cos(), turn.sin()), 1).unsqueeze(0)
    line = least_curvature(middle, torch.full((1, 128), 0.8, dtype=torch.float64))
    assert torch.allclose(line.norm(dim=2), torch.tensor(7.8, dtype=torch.float64), atol=1e-3)


def bends(line):
    """Curvature [P], 1/m, at the points of a closed line [P, 2], and the vectors [P, 2] from each to the next."""
    before, after = line - line.roll(1, 0), line.roll(-1, 0) - line
    cross = before[:, 0] * after[:, 1] - before[:, 1] * after[:, 0]
    return cross.abs() / (before.norm(dim=1) * after.norm(dim=1) * (0.5 * (before + after)).norm(dim=1)), after


def test_a_raceline_stays_on_the_track_and_bends_less_at_the_speed_that_grip_allows():
    env = RACE.environment(8, "tracks", "train")
    observation = env.reset(starts=torch.arange(8))
    planner = Raceline(env.contract, F1TENTH, RACE._mdp, RacelineNumbers(margin_m=0.2, lateral_m_s2=6.0))
    planner.act(observation)
    nearest = []
    for row in range(8):
        middle, line, speed = planner.lines[0, row]
        walls = env.now.world["segments"][row, :, :2]
        nearest.append(torch.cdist(line, walls).amin())
        bend, after = bends(line)
        middle_bend, middle_after = bends(middle)
        assert (bend.square() * after.norm(dim=1)).sum() < 0.9 * (middle_bend.square() * middle_after.norm(dim=1)).sum()
        assert (speed.square() * bend).max() < 6.0 * 1.05
        slowed = (speed.square() - speed.roll(-1, 0).square()) / (2.0 * after.norm(dim=1))
        assert slowed.max() < planner.numbers.braking_m_s2 * 1.05
        assert speed.max() <= F1TENTH.speed_max_m_s
    # Every line uses the room that the margin leaves, at the apex of some bend.
    torch.testing.assert_close(torch.stack(nearest), torch.full((8,), 0.5 * F1TENTH.width_m + 0.2), atol=0.05, rtol=0.0)


def test_minimisers_in_a_box_fulfil_the_conditions_of_karush_kuhn_and_tucker():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(16, 8, 8, dtype=torch.float64, generator=generator)
    start = 3.0 * torch.randn(16, 8, dtype=torch.float64, generator=generator)
    matrix, room = root @ root.transpose(1, 2) + 0.1 * torch.eye(8), torch.full_like(start, 0.3)
    x = _box_programme(matrix, start, torch.zeros_like(start), room)
    slope = (matrix @ x.unsqueeze(2))[..., 0] + start
    assert bool((slope[x >= room] <= 0.0).all())
    assert bool((slope[x <= -room] >= 0.0).all())
    inside = x.abs() < room
    assert 0 < int(inside.sum()) < inside.numel()
    assert slope[inside].abs().max() < 1e-9


def test_pure_pursuit_steers_on_the_circle_through_the_point_ahead():
    pursuit = PurePursuit(RACE.environment(1, "tracks", "train").contract, F1TENTH, Numbers(ahead_m=0.9, ahead_s=0.05))
    route = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 3.0]]] * 3)
    # The points are (1, 0.5), (1, 0) and, at least 2.5 m ahead, (1, 1.5).
    curvature = pursuit.curvature(route, torch.tensor([12.0, 2.0, 12.0]), torch.tensor([0.0, 0.0, 2.5]))
    forward = 1.0 + F1TENTH.rear_axle_m
    expected = [2.0 * y / (forward**2 + y**2) for y in (0.5, 0.0, 1.5)]
    torch.testing.assert_close(curvature, torch.tensor(expected))


def test_values_between_two_points_of_a_line_are_interpolated():
    arc, values = torch.tensor([[0.0, 1.0, 3.0]] * 3), torch.tensor([[0.0, 10.0, 40.0]] * 3)
    wanted = torch.tensor([[0.5], [2.0], [9.0]])
    assert _at(arc, values, wanted).tolist() == [[5.0], [25.0], [40.0]]


def test_the_gap_is_followed_and_one_that_is_too_narrow_is_not():
    contract = RACE.contract("tracks")
    planner = FollowTheGap(contract, F1TENTH, RACE._lidar)
    lidar = torch.full((1, 55), 1.5)
    lidar[0, 30:37] = 6.0  # 15 to 45 degrees to the left
    steering, slow = planner.act(TensorDict({"lidar": lidar}, batch_size=[1])).actions[0, 0].tolist()
    assert steering > 0.1
    lidar[0, 31:36] = 1.5
    lidar[0, 24:31] = 4.0  # a gap ahead, and beside it one of a single beam: 8 cm
    lidar[0, 40] = 10.0
    steering, fast = planner.act(TensorDict({"lidar": lidar}, batch_size=[1])).actions[0, 0].tolist()
    assert abs(steering) < 0.05
    assert fast > slow


@pytest.mark.parametrize(
    ("task", "name", "least", "hits", "within"),
    [
        (NAVIGATE, "DWA", 0.6, 1, ("time_s", 14.0)),
        (NAVIGATE, "map and DWA", 1.0, 0, ("time_s", 10.5)),
        (RACE, "pure pursuit", 0.95, 0, ("lap_time_s", 13.0)),
        (RACE, "follow the gap", 0.8, 3, ("lap_time_s", 12.0)),
        (RACE, "raceline", 1.0, 0, ("lap_time_s", 9.5)),
    ],
)
def test_baselines_arrive_in_time_and_touch_nothing(monkeypatch, task, name, least, hits, within):
    monkeypatch.setattr(evaluation, "BLOCK", 16)
    env = task.environment(16, task.distributions[0], "train")
    found = evaluation.evaluate(env, task.baselines()[name], starts_per_task=16)
    metrics = found.summary()
    assert found.metrics["collision"].sum() <= hits
    assert found.success.float().mean() >= least
    assert metrics[within[0]] < within[1]


class Reckless:
    """Drives to the goal at full speed, straight through whatever is there."""

    def __init__(self, contract: Contract):
        self.contract = contract

    def act(self, observation, *, deterministic=False, generator=None) -> Decision:
        x, y = observation["goal_direction"].unbind(1)
        command = torch.stack((torch.ones_like(x), (2.0 * torch.atan2(y, x)).clamp(-1.5, 1.5)), 1)
        empty = TensorDict({}, batch_size=[len(x)])
        return Decision(command.unsqueeze(1), empty, torch.zeros(len(x), 1, 1))


def test_a_guard_keeps_a_reckless_policy_from_what_its_lidar_sees():
    alone, behind = (
        evaluation.evaluate(task.environment(32, "rooms", "eval"), Reckless(task.contract("rooms")), starts_per_task=32)
        for task in (NavigateTask(guard=guard) for guard in (False, True))
    )
    alone, behind = alone.summary(), behind.summary()
    assert alone["collision"] > 0.6
    assert behind["collision"] == 0.0
    assert behind["success"] > alone["success"] + 0.2
