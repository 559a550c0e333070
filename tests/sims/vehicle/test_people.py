"""People: where they walk, whom they avoid, what vehicles see and touch of them."""

import math

import numpy as np
import pytest
import torch

from sims.vehicle.environment import VehicleEnvironment
from sims.vehicle.navigate import REPLACED, Navigate
from sims.vehicle.places import people
from sims.vehicle.task import NavigateTask
from sims.vehicle.vehicles import JACKAL
from sims.vehicle.worlds import worlds

PEOPLE = Navigate(people=6)


def crowded(count: int) -> VehicleEnvironment:
    env = VehicleEnvironment(count, mdp=PEOPLE, vehicle=JACKAL)
    env.reset(starts=torch.arange(count))
    return env


def states(env: VehicleEnvironment) -> torch.Tensor:
    """Of all people of all worlds, [N, P, STATE]."""
    return PEOPLE._people(env.now)


def used(env: VehicleEnvironment) -> torch.Tensor:
    return env.now.world["walks"][:, :, 0, 0].abs() < 1e5


def stand(env: VehicleEnvironment, steps: int) -> torch.Tensor:
    """Let people walk about vehicles that stand; their states [T, N, P, STATE]."""
    found = []
    for _ in range(steps):
        env.step(torch.zeros(env.num_envs, 1, 2))
        found.append(states(env).clone())
    return torch.stack(found)


def test_rooms_are_the_same_with_people_in_them():
    alone, together = (worlds(mdp, "train", torch.arange(40)) for mdp in (Navigate(), PEOPLE))
    for name in ("circles", "segments", "pose", "route"):
        assert torch.equal(alone[name], together[name])
    count = (together["walks"][:, :, 0, 0].abs() < 1e5).sum(1)
    assert count.min() == 0
    assert 4 <= count.max() <= 6


def test_what_pushes_people_away_decays_with_its_distance_and_is_bounded():
    apart = torch.tensor([[0.6, 0.8], [0.0, -2.0], [0.01, 0.0], [0.0, 0.0]])
    # 3 exp(min((1 - d) / 0.25, 2)) m/s^2 at the distances d = 1, 2, 0.01 and 0 m
    expected = torch.tensor([[1.8, 2.4], [0.0, -3.0 * math.exp(-4.0)], [3.0 * math.exp(2.0), 0.0], [0.0, 0.0]])
    torch.testing.assert_close(people._away(apart, 1.0, 3.0, 0.25), expected)


def test_they_walk_to_and_fro_without_walking_into_walls_or_a_vehicle_that_stands():
    env = crowded(32)
    walked = stand(env, 200)
    there = used(env)
    assert there.sum() > 30
    speed = walked[..., 2:4].norm(dim=-1)[:, there]
    assert 0.3 < float(speed.mean()) < 1.0
    assert speed.max() < 1.3 * people.PACE_M_S[1] + 1e-5
    turns = (walked[1:, :, :, 4] != walked[:-1, :, :, 4])[:, there].sum(0)
    assert turns.float().mean() > 2
    for row in range(32):
        circles, segments = env.now.world["circles"][row].numpy(), env.now.world["segments"][row].numpy()
        for person in range(6):
            if there[row, person]:
                places = walked[:, row, person, :2].numpy()
                assert people._clearance(places, circles, segments).min() > people.RADIUS_M - 0.02  # they may brush one
    assert not env.now.hit.any()


def test_a_vehicle_sees_them_and_fails_when_it_drives_into_one():
    env = crowded(8)
    row = int(used(env).any(1).nonzero()[0])
    person = int(used(env)[row].nonzero()[0])
    env.now.state[:, :3] = torch.tensor([0.0, 0.0, 0.0])
    env.now.world["circles"][:], env.now.world["segments"][:] = 1e6, 1e6
    memory = states(env).view(8, 6, people.STATE)
    memory[row, person, :4] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    env.now.world["walks"][row, person] = torch.tensor([[-3.0, 0.0], [1.0, 0.0]])  # through the vehicle
    env.now.memory[row, REPLACED + 1 :] = memory[row].flatten()
    found = env.step(torch.zeros(8, 1, 2)).observation["lidar"][row]
    ahead = len(found) // 2
    assert float(found[ahead]) == pytest.approx(1.0 - people.RADIUS_M, abs=0.1)
    for _ in range(20):
        found = env.step(torch.tensor([[[1.0, 0.0]]]).expand(8, 1, 2))
        if found.terminated[row]:
            break
    assert found.terminated[row]
    assert not found.success[row]
    assert env.now.hit[row]


def test_people_go_on_where_they_were_saved():
    env = crowded(4)
    stand(env, 5)
    saved, before = env.state_dict(), states(env).clone()
    after = stand(env, 5)
    env.load_state_dict(saved)
    assert torch.equal(states(env), before)
    assert torch.equal(stand(env, 5), after)


def test_lines_are_free_and_begin_away_from_the_vehicle():
    made = Navigate().worlds(np.random.default_rng(3), 12)
    walks = people.lines(np.random.default_rng(4), made, 6, 5.0)["walks"]
    for row in range(12):
        for first, second in walks[row][np.abs(walks[row, :, 0, 0]) < 1e5]:
            points = first + np.linspace(0.0, 1.0, 50)[:, None] * (second - first)
            clear = people._clearance(points, made["circles"][row], made["segments"][row])
            assert clear.min() > people.CLEAR_M - 0.1  # between the points that were tested
            assert np.linalg.norm(first - made["pose"][row, :2]) > people.AWAY_M
            assert np.linalg.norm(second - first) > people.SHORTEST_M


def test_the_distribution_has_people_and_the_viewer_shows_them():
    env = NavigateTask().environment(8, "people", "eval")
    env.reset(starts=torch.arange(8))
    row = int(used(env).any(1).nonzero()[0])
    view = env.view()
    names = [body.name for body in view.scene(row).bodies]
    assert names[2:] == [f"person {number}" for number in range(1, int(used(env)[row].sum()) + 1)]
    before = view.poses(row)
    assert len(before) == len(names)
    stand(env, 10)
    moved = np.abs(view.poses(row) - before)[:, :2].max(1)
    assert moved[1] == 0.0
    assert moved[2:].max() > 0.1
