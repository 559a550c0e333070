"""Worlds: repeatable, disjoint between splits, passable."""

import numpy as np
import pytest
import torch

from sims.vehicle.geometry import FAR_M, touching
from sims.vehicle.navigate import Navigate
from sims.vehicle.places.tracks import POINTS
from sims.vehicle.race import Race
from sims.vehicle.vehicles import F1TENTH, JACKAL
from sims.vehicle.worlds import BLOCK, worlds


def test_a_number_is_a_world_whichever_others_are_asked_for():
    first = worlds(Navigate(), "train", torch.tensor([5, BLOCK + 2, 7]))
    again = worlds(Navigate(), "train", torch.tensor([7, 5]))
    assert torch.equal(first["circles"][[2, 0]], again["circles"])
    assert not torch.equal(first["circles"][0], worlds(Navigate(), "eval", torch.tensor([5]))["circles"][0])
    assert not torch.equal(first["circles"][0], worlds(Navigate(), "train", torch.tensor([BLOCK + 5]))["circles"][0])
    with pytest.raises(ValueError, match="split"):
        worlds(Navigate(), "test", torch.tensor([0]))


def test_starts_and_goals_of_rooms_are_free_and_far_apart():
    made, mdp = worlds(Navigate(), "eval", torch.arange(BLOCK)), Navigate()
    half = 0.5 * torch.tensor([[JACKAL.length_m, JACKAL.width_m]]).expand(BLOCK, 2)
    goal = torch.cat((made["route"][:, 0], made["pose"][:, 2:]), 1)
    for pose in (made["pose"], goal):
        assert not touching(pose, half, made["circles"], made["segments"]).any()
        assert (pose[:, :2].abs() <= mdp.half_m - mdp.gap_m).all()
    assert (made["length_m"] >= mdp.distance_m).all()
    obstacles = (made["circles"][..., 2] > 0).sum(1) + (made["segments"][:, 6:, 0] < FAR_M / 2).sum(1) // 4
    assert obstacles.min() >= 5
    assert 0.45 < (made["segments"][:, 4, :2].amax(1) < FAR_M / 2).float().mean() < 0.75  # divided by a wall


def test_every_goal_can_be_reached():
    # Flooding a grid of 10 cm with a disc as wide as the robot is diagonally.
    made, radius = worlds(Navigate(), "eval", torch.arange(40)), 0.5 * np.hypot(JACKAL.length_m, JACKAL.width_m)
    axis = torch.arange(-4.95, 5.0, 0.1)
    grid = torch.cartesian_prod(axis, axis)
    for world in made:
        apart = (grid[:, None] - world["circles"][:, :2]).norm(dim=-1) - world["circles"][:, 2]
        first, last = world["segments"][:, :2], world["segments"][:, 2:]
        share = ((grid[:, None] - first) * (last - first)).sum(-1) / (last - first).square().sum(-1).clamp_min(1e-9)
        foot = first + share.clamp(0.0, 1.0).unsqueeze(-1) * (last - first)
        gap = torch.minimum(apart.amin(1), (grid[:, None] - foot).norm(dim=-1).amin(1))
        free = (gap > radius).view(100, 100)
        reached = torch.zeros_like(free)
        reached[tuple(((world["pose"][:2] + 5.0) * 10.0).long().tolist())] = True
        while True:
            wider = torch.nn.functional.max_pool2d(reached[None, None].float(), 3, 1, 1)[0, 0].bool() & free | reached
            if torch.equal(wider, reached):
                break
            reached = wider
        assert reached[tuple(((world["route"][0] + 5.0) * 10.0).long().tolist())]


def test_tracks_are_closed_and_wide_enough_to_turn():
    made, mdp = worlds(Race(), "eval", torch.arange(BLOCK)), Race()
    line = made["route"]
    edge = (line.roll(-1, 1) - line).norm(dim=-1)
    assert torch.allclose(edge.sum(1), made["length_m"], rtol=1e-4)
    assert (edge / edge.mean(1, keepdim=True) - 1.0).abs().max() < 0.1  # equally far apart
    right, left = made["segments"].split(POINTS, 1)
    for wall in (right, left):
        assert torch.allclose(wall[:, :, 2:], wall[:, :, :2].roll(-1, 1))  # closed
        apart = (wall[:, :, :2] - line).norm(dim=-1)
        assert (apart > mdp.half_width_low_m - 1e-3).all()
        assert (apart < mdp.half_width_high_m + 1e-3).all()
        # no wall comes nearer to any part of the centre line than half the track is wide, but for its corners
        near = torch.cdist(wall[:, :, :2], line).amin(2)
        assert (near > 0.9 * apart.mean(1, keepdim=True)).all()
    half = 0.5 * torch.tensor([[F1TENTH.length_m, F1TENTH.width_m]]).expand(BLOCK, 2)
    assert not touching(made["pose"], half, made["circles"], made["segments"]).any()
