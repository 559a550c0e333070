"""Neighbours, collisions, downwash, observations, and worlds; all by hand."""

from typing import Any

import pytest
import torch

from sims.quadrotor.physics.airframes import CRAZYFLIE, GRAVITY
from sims.quadrotor.physics.dynamics import DT_S, Options
from sims.quadrotor.starts import keys
from sims.swarm.mdp import (
    AWAY_M,
    CELLS,
    FLYING,
    HIT_DRONE,
    HIT_OBSTACLE,
    HIT_ROOM,
    OBSTACLE_RADIUS_M,
    RADIUS_M,
    Moment,
    Swarm,
    around,
    carrot,
    collisions,
    downwash,
    tokens,
)
from sims.swarm.ways import CLEAR_M, Ways
from sims.swarm.worlds import LEGS, Worlds, build

EYE = torch.eye(3, dtype=torch.float64).flatten()


def place(*points: tuple[float, float, float]) -> torch.Tensor:
    """Positions [1, M, 3]."""
    return torch.tensor([points], dtype=torch.float64)


def pillars(*points: tuple[float, float]) -> torch.Tensor:
    """Obstacles [1, C, 2], four at least."""
    missing = [(AWAY_M, AWAY_M)] * (4 - len(points))
    return torch.tensor([[*points, *missing]], dtype=torch.float64)


def worlds(count: int = 200, **numbers: float) -> Worlds:
    mdp = Swarm(**numbers)
    return build(mdp, CRAZYFLIE, Options(), keys("train", torch.arange(count)), mdp.density)


def test_the_nearest_are_found_in_order_and_only_those_that_fly():
    position = place((0, 0, 1), (1, 0, 1), (0, 2, 1), (0, 0, 4), (0, 0.5, 1))
    flying = torch.tensor([[True, True, True, True, False]])
    near = around(Swarm(drones=5), position, flying, pillars((0.5, 0.0), (-3.0, 0.0)))
    assert near.neighbour[0, 0].tolist() == [1, 2, 3]
    assert near.neighbour_gap[0, 0].tolist() == pytest.approx([1 - 2 * RADIUS_M, 2 - 2 * RADIUS_M, 3 - 2 * RADIUS_M])
    assert near.obstacle[0, 0, :2].tolist() == [0, 1]
    assert near.obstacle_gap[0, 0, :2].tolist() == pytest.approx(
        [0.5 - OBSTACLE_RADIUS_M - RADIUS_M, 3 - OBSTACLE_RADIUS_M - RADIUS_M]
    )


def test_where_there_are_fewer_than_are_seen_the_rest_is_far_away():
    near = around(Swarm(drones=2), place((0, 0, 1), (1, 0, 1)), torch.ones(1, 2, dtype=torch.bool), pillars())
    assert near.neighbour[0, :, 0].tolist() == [1, 0]
    assert (near.neighbour_gap[0, :, 1:] == AWAY_M).all()


@pytest.mark.parametrize(
    ("second", "obstacle", "expected"),
    [
        ((0.127, 0, 1), (2, 2), [FLYING, FLYING]),
        ((0.125, 0, 1), (2, 2), [HIT_DRONE, HIT_DRONE]),
        ((0, 0, 1.125), (2, 2), [HIT_DRONE, HIT_DRONE]),
        ((3, 0, 1), (0.364, 0), [FLYING, FLYING]),
        ((3, 0, 1), (0.362, 0), [HIT_OBSTACLE, FLYING]),
        ((4.936, 0, 1), (2, 2), [FLYING, FLYING]),
        ((4.938, 0, 1), (2, 2), [FLYING, HIT_ROOM]),
        ((0, -4.938, 1), (2, 2), [FLYING, HIT_ROOM]),
        ((2, 0, 0.064), (2, 2), [FLYING, FLYING]),
        ((2, 0, 0.062), (2, 2), [FLYING, HIT_ROOM]),
        ((2, 0, 9.938), (2, 2), [FLYING, HIT_ROOM]),
    ],
)
def test_rotor_tips_that_touch_are_a_collision(second, obstacle, expected):
    position = place((0, 0, 1), second)
    near = around(Swarm(drones=2), position, torch.ones(1, 2, dtype=torch.bool), pillars(obstacle))
    assert collisions(position, near)[0].tolist() == expected


def test_downwash_is_that_of_neural_swarm_below_within_its_column():
    position = place((0, 0, 2), (0, 0, 1.7), (0.09, 0, 1.5), (0.11, 0.0, 1.4), (3, 3, 1))
    flying = torch.ones(1, 5, dtype=torch.bool)
    # 8 g on 34 g at 0.3 m; from the first, 4 g at 0.5 m, and from the second, 10 g at 0.2 m; the fourth is beside the
    # first two, and 0.1 m under the third, 12 g.
    assert downwash(position, flying)[0].tolist() == pytest.approx([0.0, 8 / 34, (4 + 10) / 34, 12 / 34, 0.0])
    flying[0, 1] = False  # removed drones neither cause nor feel downwash
    assert downwash(position, flying)[0].tolist() == pytest.approx([0.0, 0.0, 4 / 34, 12 / 34, 0.0])
    assert downwash(place((0, 0, 2), (0, 0, 1.29)), flying[:, 3:])[0].tolist() == [0.0, 0.0]


def test_tokens_are_relative_and_empty_out_of_range():
    mdp = Swarm(drones=3)
    position, velocity = place((0, 0, 1), (0.326, 0, 1), (0, 3.5, 1)), place((0, 0, 1), (1, 0, 0), (0, 0, 0))
    cylinders = pillars((0, -0.563), (3, 3))
    near = around(mdp, position, torch.ones(1, 3, dtype=torch.bool), cylinders)
    neighbours, obstacles = tokens(mdp, position, velocity, cylinders, near)
    assert neighbours[0, 0, 0].tolist() == pytest.approx([0.326, 0, 0, 1, 0, -1, 0.5, 1])  # a gap of 0.2 m
    assert (neighbours[0, 0, 1:] == 0).all()
    assert obstacles[0, 0, 0].tolist() == pytest.approx([0, -0.563, 0.5, 1])
    assert (obstacles[0, 0, 1:] == 0).all()
    assert set(neighbours[..., 7].unique().tolist()) == {0.0, 1.0}
    assert [len(spec.names) for spec in mdp.OBSERVED.values()][-2:] == [8, 4]


def test_a_goal_far_away_is_seen_nearer_in_its_direction():
    ways = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.6, 0.8]])
    assert carrot(Swarm(), ways).flatten().tolist() == pytest.approx([1.2, 1.6, 0.0, 0.0, 0.6, 0.8], abs=1e-6)


def moment(position: torch.Tensor, velocity: torch.Tensor, way: torch.Tensor, *around: Any, turning: float = 0.0):
    level = EYE.expand(*position.shape[:2], 9)
    turn = torch.full_like(position, turning)
    return Moment(position, level, velocity, turn, way, way, torch.zeros(1, 1, 4), *around)


def test_the_reward_is_what_the_formula_says():
    mdp = Swarm(drones=2)
    position, still = place((0, 0, 2), (4, 4, 2)), place((0, 0, 0), (0, 0, 0))
    near = around(mdp, position, torch.ones(1, 2, dtype=torch.bool), pillars())
    at_goal = mdp.reward(moment(position, still, still, pillars(), near))
    assert at_goal[0].tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    # Far from the goal and standing: the whole of the wanted speed is missing.
    far = mdp.reward(moment(position, still, place((0, 0, 0), (0, 1000, 0)), pillars(), near))
    assert far[0].tolist() == pytest.approx([1.0, 1.0 - mdp.weight_velocity], abs=1e-4)
    turning = mdp.reward(moment(position, still, still, pillars(), near, turning=2.0))
    assert float(turning[0, 0]) == pytest.approx(1.0 - 12.0 * mdp.weight_angular_velocity, abs=1e-6)


def test_the_wanted_velocity_is_along_the_way_and_less_near_the_goal():
    mdp = Swarm(drones=2)
    position = place((0, 0, 2), (4, 4, 2))
    near = around(mdp, position, torch.ones(1, 2, dtype=torch.bool), pillars())
    way = place((300, 400, 0), (0, 0, mdp.slow_m))
    wanted = mdp.speed_m_s * place((0.6, 0.8, 0.0), (0.0, 0.0, 0.5**0.5))
    assert mdp.reward(moment(position, wanted, way, pillars(), near))[0].tolist() == pytest.approx([1.0, 1.0], abs=1e-4)


def planned(begin: torch.Tensor, goal: torch.Tensor, cylinders: torch.Tensor, **options) -> tuple[Worlds, Ways]:
    """A world of drones at `begin` [1, M, 3] that keep their goals [1, M, 3], and what they plan there."""
    mdp = Swarm(drones=begin.shape[1], **options)
    world = build(mdp, CRAZYFLIE, Options(), keys("train", torch.arange(1)), 0.0)
    world.goals = goal.unsqueeze(1).expand(-1, LEGS, -1, -1)
    world.cylinders = torch.nn.functional.pad(cylinders.float(), (0, 0, 0, CELLS - cylinders.shape[1]), value=AWAY_M)
    ways = Ways(mdp, world)
    ways.update(world, begin)
    return world, ways


def test_the_way_through_free_space_is_straight():
    begin = place((-3.1, -2.4, 1), (3.3, -3.0, 2), (0.2, 0.4, 3)).float()
    goal = place((2.5, 3.5, 2), (3.5, 2.5, 2), (0.5, 0.5, 1)).float()
    _, ways = planned(begin, goal, pillars())
    way = ways.along(goal - begin, begin)
    assert way.tolist()[0] == [pytest.approx(each, abs=0.25) for each in (goal - begin)[0].tolist()]
    assert way[0, 2].tolist() == pytest.approx((goal - begin)[0, 2].tolist())  # near the goal exactly


WALL = [(0.5, y) for y in (-2.5, -1.5, -0.5, 0.5, 1.5)]
"""Gaps of 0.4 m, which a drone hardly fits through."""


def fly(begin: torch.Tensor, goal: torch.Tensor, range_m: float) -> tuple[float, float]:
    """How far a drone flies to get around the wall when it sees obstacles so far away; and its smallest gap, m."""
    world, ways = planned(begin, goal, pillars(*WALL), obstacle_range_m=range_m)
    position, gap = begin.clone(), 9.0
    for count in range(2000):
        way = ways.along(goal - position, position)
        position = position + 0.01 * way / way.norm()
        ways.update(world, position)
        gap = min(gap, float(torch.cdist(position[..., :2], world.cylinders).min()) - OBSTACLE_RADIUS_M - RADIUS_M)
        if (goal - position).norm() < 0.02:
            return 0.01 * count, gap
    raise AssertionError("it did not arrive")


def test_ways_lead_around_walls_of_which_all_was_seen():
    begin, goal = place((-0.5, 0.5, 1)).float(), place((1.5, -0.5, 1)).float()
    flown, gap = fly(begin, goal, 9.0)
    # Around the end of the wall at y = 1.5, at the distance r: two tangents and an arc of 154 degrees.
    r = OBSTACLE_RADIUS_M + RADIUS_M + CLEAR_M
    tangents = (1.0 + 1.0 - r * r) ** 0.5 + (1.0 + 4.0 - r * r) ** 0.5
    assert gap > 0.8 * CLEAR_M
    assert tangents < flown < 1.1 * (tangents + 2.68 * r)


def test_what_was_not_seen_is_flown_to_and_what_was_seen_is_not_forgotten():
    begin, goal = place((-2.5, -1.5, 1)).float(), place((2.5, -1.5, 1)).float()
    flown, gap = fly(begin, goal, 9.0)
    longer, near = fly(begin, goal, 1.0)
    assert min(gap, near) > 0.5 * CLEAR_M
    assert 1.02 * flown < longer < 2.0 * flown  # who forgets turns round for ever


def test_each_drone_has_the_way_to_its_own_present_goal():
    found = worlds(8)
    ways = Ways(Swarm(), found)
    for leg in range(LEGS):
        found.steps[:] = int(5.0 * leg / DT_S)
        position = found.goals[:, leg] + torch.tensor([0.1, -0.1, 0.3])
        ways.update(found, position)
        assert torch.equal(ways.along(found.goals[:, leg] - position, position), found.goals[:, leg] - position)
        aside = position + torch.tensor([0.55, -0.55, 0.0])  # 0.9 m away
        way = ways.along(found.goals[:, leg] - aside, aside)[..., :2].norm(dim=-1)
        assert way.min() > 0.8
        assert way.median() < 1.1


def test_compiled_ways_are_those_in_torch():
    found = worlds(4)
    position = found.state[..., :3]
    native, torch_ = (Ways(Swarm(), found, backend) for backend in ("c", "torch"))
    native.update(found, position)
    torch_.update(found, position)
    assert torch.allclose(native.maps, torch_.maps, atol=1e-4)


def test_the_length_of_the_way_has_a_derivative():
    begin, goal = place((-2.5, -1.5, 1)).float(), place((2.5, -1.5, 1)).float()
    _, ways = planned(begin, goal, pillars())
    position = begin.requires_grad_()
    ways.along(goal - position, position)[..., 0].sum().backward()
    assert position.grad.flatten().tolist() == pytest.approx([-1.0, 0.0, 0.0], abs=0.05)


def test_margins_cost_what_is_entered_of_them_after_a_moment():
    mdp = Swarm(drones=2)
    gap = 0.2
    position = place((0, 0, 2), (gap + 2 * RADIUS_M, 0, 2))
    still, closing = place((0, 0, 0), (0, 0, 0)), place((0, 0, 0), (-0.2, 0, 0))
    near = around(mdp, position, torch.ones(1, 2, dtype=torch.bool), pillars())

    def cost(velocity: torch.Tensor, cylinders: torch.Tensor) -> list[float]:
        near = around(mdp, position, torch.ones(1, 2, dtype=torch.bool), cylinders)
        free = mdp.reward(moment(place((0, 0, 2), (4, 4, 2)), velocity, still, pillars(), alone))
        return (free - mdp.reward(moment(position, velocity, still, cylinders, near)))[0].tolist()

    alone = near._replace(neighbour_gap=torch.full_like(near.neighbour_gap, AWAY_M))
    share = 1.0 - gap / mdp.neighbour_margin_m
    assert cost(still, pillars()) == pytest.approx([mdp.weight_neighbour * share**2] * 2, abs=1e-4)
    share = 1.0 - (gap - 0.2 * mdp.foresight_s) / mdp.neighbour_margin_m
    assert cost(closing, pillars()) == pytest.approx([mdp.weight_neighbour * share**2] * 2, abs=1e-4)
    assert cost(-closing, pillars())[0] == pytest.approx(mdp.weight_neighbour * (1 - gap / mdp.neighbour_margin_m) ** 2)
    beside = pillars((-0.1 - OBSTACLE_RADIUS_M - RADIUS_M, 0.0))
    expected = mdp.weight_obstacle * (1.0 - 0.1 / mdp.obstacle_margin_m) ** 2
    assert cost(still, beside)[0] - cost(still, pillars())[0] == pytest.approx(expected, abs=1e-4)


def test_the_rewards_gradient_is_that_of_finite_differences():
    mdp = Swarm(drones=3)
    g = torch.Generator().manual_seed(0)
    position = place((0, 0, 0.3), (0.4, 0.1, 0.5), (0.2, 0.3, 0.2)).requires_grad_()
    velocity, way = (torch.randn(1, 3, 3, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2))
    cylinders = pillars((0.5, 0.6), (-0.4, 0.0))
    near = around(mdp, position.detach(), torch.ones(1, 3, dtype=torch.bool), cylinders)

    def total(position, velocity, way):
        return mdp.reward(moment(position, velocity, way, cylinders, near))

    assert torch.autograd.gradcheck(total, (position, velocity, way))


def test_a_world_has_its_share_of_obstacles_and_drones_begin_and_end_between_them():
    for density, count in ((0.2, 13), (0.8, 51), (0.0, 0)):
        found = worlds(density=density)
        there = found.cylinders[..., 0] < AWAY_M
        assert (there.sum(1) == count).all()
        for points in (found.state[..., :2], *found.goals[..., :2].unbind(1)):
            assert torch.cdist(points, found.cylinders).min() > 0.85  # the middle of a cell, or 0.14 m from it
            assert torch.cdist(points, points).add(9 * torch.eye(8)).min() > 0.8
            assert points.abs().max() <= 3.6
        for height in (found.state[..., 2], found.goals[..., 2]):
            assert height.min() >= 1.0
            assert height.max() <= 3.0
            assert height.std() == pytest.approx(2 / 12**0.5, rel=0.05)


def test_disturbances_have_their_deviations():
    force = worlds(2000).disturbance
    weight = CRAZYFLIE.mass_kg * GRAVITY
    scale = [weight / 50] * 3 + [weight / 10000] * 3
    assert force.flatten(0, 1).std(0).tolist() == pytest.approx(scale, rel=0.03)


def test_goals_are_exchanged_twice_and_no_drone_keeps_its_own():
    found = worlds()
    assert found.leg_s.min() >= 4.0
    assert found.leg_s.max() <= 5.0
    for before, after in zip(found.goals.unbind(1)[:-1], found.goals.unbind(1)[1:], strict=True):
        assert torch.equal(before.sum(1).round(decimals=3), after.sum(1).round(decimals=3))  # the same places
        assert (before - after).norm(dim=-1).min() > 0.5
    for leg in range(LEGS):
        found.steps[:] = ((leg + 0.5) * found.leg_s.unsqueeze(1) / 0.01).long()
        assert torch.equal(found.goal(), found.goals[:, leg])
    found.steps[:] = 10000
    assert torch.equal(found.goal(), found.goals[:, -1])


def test_a_world_is_made_of_its_key_alone():
    alone = build(Swarm(), CRAZYFLIE, Options(), keys("eval", torch.tensor([7])), 0.2)
    among = build(Swarm(), CRAZYFLIE, Options(), keys("eval", torch.tensor([3, 7])), 0.2)
    for name, values in alone.tensors().items():
        assert torch.equal(values[0], among.tensors()[name][1])
    assert not torch.equal(among.state[0], among.state[1])
    assert len(among.key.flatten(0, 1).unique(dim=0)) == 16
