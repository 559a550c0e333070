"""Shortest paths to the goal: by hand in an empty room and around a wall, and never shorter than the straight line."""

import math

import pytest
import torch

from embodied import native
from sims.vehicle.geometry import FAR_M
from sims.vehicle.navigate import Navigate
from sims.vehicle.shortest_paths import CELL_M, path_length_at, path_lengths, shortest_distances
from sims.vehicle.worlds import worlds

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
NO_CIRCLE = torch.tensor([[[FAR_M, FAR_M, 0.0]]])


def test_without_obstacles_it_is_nearly_the_straight_line():
    goal = torch.tensor([[3.0, 1.0]])
    lengths = path_lengths(NO_CIRCLE, torch.full((1, 1, 4), FAR_M), goal, 5.0)
    for x, y in ((-3.0, 1.0), (3.0, -4.0), (-2.0, -4.0), (3.1, 1.1)):
        straight = math.hypot(x - 3.0, y - 1.0)
        found = float(path_length_at(lengths, torch.tensor([[x, y]]), 5.0))
        assert straight - 1e-4 <= found <= 1.09 * straight + CELL_M  # eight directions: 8 % longer at worst


def test_paths_lead_around_a_wall():
    wall = torch.tensor([[[0.0, -3.0, 0.0, 5.0]]])  # from the upper side of the room down, with a gap below
    lengths = path_lengths(NO_CIRCLE, wall, torch.tensor([[2.0, 3.0]]), 5.0)
    found = float(path_length_at(lengths, torch.tensor([[-2.0, 3.0]]), 5.0))
    assert found == pytest.approx(2.0 * (4.2 + 2.0 * math.sqrt(2.0)), rel=0.05)  # straight and diagonal steps
    assert float(path_length_at(lengths, torch.tensor([[0.0, 4.0]]), 5.0)) > 1.0
    closed = torch.tensor([[[0.0, -5.0, 0.0, 5.0]]])
    shut = path_lengths(NO_CIRCLE, closed, torch.tensor([[2.0, 3.0]]), 5.0)
    assert path_length_at(shut, torch.tensor([[-2.0, 3.0]]), 5.0).isinf()


@needs_compiler
def test_compiled_path_lengths_are_those_of_torch():
    made = worlds(Navigate(), "train", torch.arange(64))
    given = made["circles"], made["segments"], made["route"][:, 0], 5.0
    assert torch.equal(path_lengths(*given, backend="c"), path_lengths(*given, backend="torch"))


@needs_compiler
def test_compiled_lengths_at_places_are_those_of_torch():
    made = worlds(Navigate(), "train", torch.arange(64))
    places = 12.0 * torch.rand(64, 2, generator=torch.Generator().manual_seed(0)) - 6.0  # also outside
    places[:3] = torch.tensor([[1e9, 0.0], [0.0, -1e9], [torch.inf, 0.0]])
    found = [path_length_at(made["path_length"], places, 5.0, backend=backend) for backend in ("c", "torch")]
    assert torch.allclose(*found, rtol=1e-6)
    assert 0.3 < found[0].isfinite().float().mean() < 1.0


@needs_compiler
def test_compiled_distances_over_uneven_cells_are_those_of_torch():
    draws = torch.rand(8, 30, 30, generator=torch.Generator().manual_seed(0))
    cost = torch.where(draws < 0.3, torch.inf, 1.0 + 9.0 * draws)
    start = torch.full_like(cost, torch.inf)
    start[:, 4, 7] = 0.0
    found = [shortest_distances(start, cost, 0.1, backend=backend) for backend in ("c", "torch")]
    assert torch.equal(*found)
    assert 0.5 < found[0].isfinite().float().mean() < 0.8


def test_every_room_has_a_path_from_start_to_goal():
    made = worlds(Navigate(), "eval", torch.arange(256))
    found = path_length_at(made["path_length"], made["pose"][:, :2], 5.0)
    assert found.isfinite().all()
    assert (found >= made["length_m"] - 1e-3).all()
    assert (found > 1.3 * made["length_m"]).float().mean() > 0.05  # some paths lead around a wall
