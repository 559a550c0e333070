"""Maps by compiled C have the numbers of `LocalMap`, bit for bit, in rooms that vehicles drive through."""

import pytest
import torch

from embodied import native
from embodied.navigation.compiled_map import CompiledMap
from embodied.navigation.local_map import LocalMap
from sims.vehicle.environment import VehicleEnvironment
from sims.vehicle.mapping import local_map
from sims.vehicle.navigate import Navigate
from sims.vehicle.vehicles import JACKAL

N = 21
"""Not a multiple of the maps that are planned together."""
PLANNER = {"side": 96, "cell_m": 0.125, "every": 1, "ahead_m": (1.0,)}
BESIDE = {"side": 20, "every": 2, "near_m": 1.0}
"""A map that ends before the room does."""

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")


@pytest.mark.parametrize("others", [{}, PLANNER, BESIDE], ids=["policy's", "planner's", "small"])
def test_compiled_maps_are_those_of_torch(others):
    env = VehicleEnvironment(N, mdp=Navigate(), vehicle=JACKAL)
    env.reset(starts=torch.arange(N))
    compiled = local_map(env.simulator.lidar, JACKAL, 0.1, **others)
    assert isinstance(compiled, CompiledMap)
    reference = LocalMap(compiled.angles, compiled.range_m, compiled.dt_s, compiled.lidar_x_m, **others)
    seen = env._measured()
    memories = compiled.begin(*seen), reference.begin(*seen)
    late = torch.arange(N) % 3 == 0  # they are due at other times than the others
    draws = torch.rand(8, N, 1, 2, generator=torch.Generator().manual_seed(0))
    for actions in draws:
        env.step(actions * torch.tensor([1.0, 2.0]) - torch.tensor([0.0, 1.0]))
        seen = env._measured()
        for each, memory in zip((compiled, reference), memories, strict=True):
            each.update(memory, *seen)
            memory[late] = each.begin(*(part[late] for part in seen))
        assert torch.equal(*memories)
        told = compiled.observe(memories[0]), reference.observe(memories[1])
        assert torch.equal(told[0]["waypoints"], told[1]["waypoints"])
        assert torch.equal(told[0]["path_cost"], told[1]["path_cost"])
        assert torch.equal(told[0]["remembered"], told[1]["remembered"])
        late = torch.zeros(N, dtype=torch.bool)
    assert (compiled.hit_cells(memories[0]) > 0.0).sum() > 10 * N


def test_a_goal_beyond_reach_and_a_lidar_that_fails_are_those_of_torch():
    angles = tuple(torch.linspace(-3.0, 3.0, 31).tolist())
    compiled, reference = (kind(angles, 6.0, 0.1, blocked=torch.inf) for kind in (CompiledMap, LocalMap))
    lidar = torch.full((3, 31), 1.0)
    lidar[1, ::4], lidar[2] = torch.nan, 6.0
    seen = lidar, torch.zeros(3, 2), torch.tensor([[4.0, 0.0], [3.0, -1.0], [300.0, 5.0]])
    memories = [each.begin(*seen) for each in (compiled, reference)]
    told = [each.observe(memory) for each, memory in zip((compiled, reference), memories, strict=True)]
    for key in ("waypoints", "path_cost", "remembered"):
        assert torch.equal(told[0][key], told[1][key])
        assert told[0][key].isfinite().all()
    nowhere = seen[0], seen[1], torch.full((3, 2), torch.nan)  # a simulation that has diverged
    for each, memory in zip((compiled, reference), memories, strict=True):
        for _ in range(each.every):
            each.update(memory, *nowhere)
    assert torch.allclose(*memories, rtol=0.0, atol=0.0, equal_nan=True)
