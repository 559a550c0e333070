"""Neighbours, collisions, downwash, observations, and worlds; all by hand."""

import pytest
import torch

from sims.quadrotor.airframes import CRAZYFLIE, GRAVITY
from sims.quadrotor.dynamics import Options
from sims.quadrotor.starts import keys
from sims.swarm.mdp import (
    AWAY_M,
    FLYING,
    HIT_DRONE,
    HIT_OBSTACLE,
    HIT_ROOM,
    OBSTACLE_RADIUS_M,
    RADIUS_M,
    Flight,
    Swarm,
    around,
    carrot,
    collisions,
    downwash,
    reward,
    tokens,
    wanted_velocity,
)
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
    assert [len(spec.names) for spec in mdp.specs().values()][-2:] == [8, 4]


def test_a_goal_far_away_is_seen_nearer_in_its_direction():
    ways = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.6, 0.8]])
    assert carrot(Swarm(), ways).flatten().tolist() == pytest.approx([1.2, 1.6, 0.0, 0.0, 0.6, 0.8], abs=1e-6)


def flight(position: torch.Tensor, velocity: torch.Tensor, to_goal: torch.Tensor, turning: float = 0.0) -> Flight:
    level = EYE.expand(*position.shape[:2], 9)
    return Flight(position, level, velocity, torch.full_like(position, turning), to_goal, torch.zeros(1, 1, 4))


def test_the_reward_is_what_the_formula_says():
    mdp = Swarm(drones=2)
    position, still = place((0, 0, 2), (4, 4, 2)), place((0, 0, 0), (0, 0, 0))
    near = around(mdp, position, torch.ones(1, 2, dtype=torch.bool), pillars())
    at_goal = reward(mdp, flight(position, still, still), pillars(), near)
    assert at_goal[0].tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    # Far from the goal and standing: the whole of the wanted speed is missing.
    far = reward(mdp, flight(position, still, place((0, 0, 0), (0, 1000, 0))), pillars(), near)
    assert far[0].tolist() == pytest.approx([1.0, 1.0 - mdp.weight_velocity], abs=1e-4)
    turning = reward(mdp, flight(position, still, still, turning=2.0), pillars(), near)
    assert float(turning[0, 0]) == pytest.approx(1.0 - 12.0 * mdp.weight_angular_velocity, abs=1e-6)


@pytest.mark.parametrize(
    ("cylinder", "expected"),
    [
        ((0.5, 0.0), (0.0, 0.0)),  # at its surface nothing flows towards it,
        ((0.0, 0.5), (2.0, 0.0)),  # beside it twice as fast
        ((1.0, 0.0), (0.75, 0.0)),
        ((0.5, 0.5), (1.0, -0.5)),  # aside
        ((AWAY_M, AWAY_M), (1.0, 0.0)),
    ],
)
def test_the_wanted_velocity_flows_around_obstacles(cylinder, expected):
    mdp = Swarm(speed_m_s=1.0, flow_radius_m=0.5)
    wanted = wanted_velocity(mdp, place((1e4, 0, 0)), torch.tensor([[[cylinder]]], dtype=torch.float64))
    assert wanted.flatten().tolist() == pytest.approx([*expected, 0.0], abs=1e-4)
    near = wanted_velocity(mdp, place((0, 0, 1)), torch.full((1, 1, 1, 2), AWAY_M, dtype=torch.float64))
    assert near.flatten().tolist() == pytest.approx([0, 0, 0.5**0.5], abs=1e-4)


def test_margins_cost_what_is_entered_of_them_after_a_moment():
    mdp = Swarm(drones=2)
    gap = 0.2
    position = place((0, 0, 2), (gap + 2 * RADIUS_M, 0, 2))
    still, closing = place((0, 0, 0), (0, 0, 0)), place((0, 0, 0), (-0.2, 0, 0))
    near = around(mdp, position, torch.ones(1, 2, dtype=torch.bool), pillars())

    def cost(velocity: torch.Tensor, cylinders: torch.Tensor) -> list[float]:
        near = around(mdp, position, torch.ones(1, 2, dtype=torch.bool), cylinders)
        free = reward(mdp, flight(place((0, 0, 2), (4, 4, 2)), velocity, still), pillars(), alone)
        return (free - reward(mdp, flight(position, velocity, still), cylinders, near))[0].tolist()

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
    velocity, to_goal = (torch.randn(1, 3, 3, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2))
    cylinders = pillars((0.5, 0.6), (-0.4, 0.0))
    near = around(mdp, position.detach(), torch.ones(1, 3, dtype=torch.bool), cylinders)

    def total(position, velocity, to_goal):
        return reward(mdp, flight(position, velocity, to_goal), cylinders, near)

    assert torch.autograd.gradcheck(total, (position, velocity, to_goal))


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
