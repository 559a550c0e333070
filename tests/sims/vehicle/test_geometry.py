"""Ray casting and contact: numbers by hand, C against torch on random shapes."""

import math

import pytest
import torch

from embodied import native
from sims.vehicle.geometry import FAR_M, Lidar, cast, noisy, touching
from sims.vehicle.simulator import Simulator
from sims.vehicle.vehicles import F1TENTH, JACKAL, SCATTERED, Model

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
NOWHERE = torch.full((1, 1, 4), FAR_M)
NO_CIRCLE = torch.tensor([[[FAR_M, FAR_M, 0.0]]])


def seen(angle: float, circles=NO_CIRCLE, segments=NOWHERE) -> float:
    return float(cast(torch.zeros(1, 2), torch.tensor([[angle]]), circles, segments, 10.0))


def test_distances_by_hand():
    circle = torch.tensor([[[3.0, 0.0, 0.5]]])
    assert seen(0.0, circle) == pytest.approx(2.5)
    assert seen(math.asin(0.4 / 3.0), circle) == pytest.approx(math.sqrt(9.0 - 0.16) - 0.3, rel=1e-5)
    assert seen(math.pi, circle) == 10.0  # behind
    assert seen(0.0, torch.tensor([[[0.1, 0.0, 0.5]]])) == 10.0  # from inside
    wall = torch.tensor([[[2.0, -1.0, 2.0, 1.0]]])
    assert seen(0.0, segments=wall) == pytest.approx(2.0)
    assert seen(math.atan(0.4), segments=wall) == pytest.approx(2.0 / math.cos(math.atan(0.4)))
    assert seen(math.atan(0.6), segments=wall) == 10.0  # past its end
    assert seen(0.0, circle, wall) == pytest.approx(2.0)  # the nearer one


def test_beams_of_a_full_turn_and_of_a_part():
    assert Lidar(beams=4).angles().tolist() == pytest.approx([-math.pi, -math.pi / 2.0, 0.0, math.pi / 2.0])
    half = Lidar(beams=3, field_rad=math.pi).angles().tolist()
    assert half == pytest.approx([-math.pi / 2.0, 0.0, math.pi / 2.0])
    with pytest.raises(ValueError, match="beams"):
        Lidar(beams=1)


def test_noise_is_a_function_of_key_and_step_with_the_deviation_asked_for():
    lidar = Lidar(beams=2000, noise_m=0.05)
    ranges = torch.full((2, 2000), 5.0)
    ranges[:, 0] = lidar.range_m
    key, steps = torch.tensor([7, 8], dtype=torch.int32), torch.tensor([3, 3], dtype=torch.int32)
    found = noisy(ranges, key, steps, lidar)
    assert (found[:, 0] == lidar.range_m).all()  # nothing was hit there
    assert found[:, 1:].mean() == pytest.approx(5.0, abs=0.005)
    assert found[:, 1:].std() == pytest.approx(0.05, rel=0.05)
    assert torch.equal(found, noisy(ranges, key, steps, lidar))
    assert not torch.equal(found, noisy(ranges, key, steps + 1, lidar))
    assert abs(float(torch.corrcoef(found[:, 1:])[0, 1])) < 0.1


@pytest.mark.parametrize(
    ("circle", "hit"),
    [((0.7, 0.0, 0.21), True), ((0.7, 0.0, 0.19), False), ((0.7, 0.4, 0.29), True), ((0.7, 0.4, 0.27), False)],
)
def test_a_rectangle_touches_a_circle(circle, hit: bool):
    # 1 m by 0.4 m: its front is at 0.5 m, its corner 0.2828 m from (0.7, 0.4)
    pose, half = torch.zeros(1, 3), torch.tensor([[0.5, 0.2]])
    assert bool(touching(pose, half, torch.tensor([[circle]]), NOWHERE)) is hit
    turned = torch.tensor([[2.0, 1.0, math.pi / 2.0]])  # the same, a quarter turn further and elsewhere
    moved = torch.tensor([[(2.0 - circle[1], 1.0 + circle[0], circle[2])]])
    assert bool(touching(turned, half, moved, NOWHERE)) is hit


@pytest.mark.parametrize(
    ("segment", "hit"),
    [
        ((0.49, -1.0, 0.49, 1.0), True),
        ((0.51, -1.0, 0.51, 1.0), False),
        ((-0.1, 0.0, 0.1, 0.05), True),  # inside
        ((0.3, 0.5, 0.8, 0.0), False),  # past the corner
        ((0.3, 0.35, 0.65, 0.0), True),  # across the corner
    ],
)
def test_a_rectangle_touches_a_segment(segment, hit: bool):
    pose, half = torch.zeros(1, 3), torch.tensor([[0.5, 0.2]])
    assert bool(touching(pose, half, NO_CIRCLE, torch.tensor([[segment]]))) is hit


def scene(count: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    state = torch.randn(count, 7, generator=g) * torch.tensor([2.0, 2.0, 3.0, 2.0, 0.0, 0.0, 0.0])
    circles = torch.rand(count, 12, 3, generator=g) * torch.tensor([12.0, 12.0, 0.6]) - torch.tensor([6.0, 6.0, 0.0])
    first = torch.rand(count, 60, 2, generator=g) * 16.0 - 8.0
    segments = torch.cat((first, first + torch.randn(count, 60, 2, generator=g)), 2)
    return state, circles, segments


@needs_compiler
@pytest.mark.parametrize("field_deg", [360.0, 270.0, 30.0])
@pytest.mark.parametrize("beams", [8, 73, 1080])
def test_compiled_scans_are_those_of_torch(beams: int, field_deg: float):
    state, circles, segments = scene(40)
    lidar = Lidar(beams=beams, field_rad=math.radians(field_deg), range_m=7.0, noise_m=0.02)
    key, steps = torch.arange(40, dtype=torch.int32) * 99991 - 7, torch.arange(40, dtype=torch.int32)
    given = F1TENTH.scattered(torch.zeros(40, len(SCATTERED)), 0.0)
    ours, oracle = (
        Simulator(Model.DYNAMIC_BICYCLE, lidar, dt_s=0.05, substeps=1, backend=backend).scan(
            state, given, circles, segments, key, steps
        )
        for backend in ("c", "torch")
    )
    assert ((ours - oracle).abs() > 2e-3).float().mean() < 3e-4  # beams that graze an end may miss it
    assert (oracle < 7.0).float().mean() > 0.3


@needs_compiler
def test_compiled_contact_is_that_of_torch_and_stops_there():
    state, circles, segments = scene(200, seed=1)
    given = JACKAL.scattered(torch.zeros(200, len(SCATTERED)), 0.0)
    command, frozen = torch.ones(200, 2), torch.zeros(200, dtype=torch.bool)
    ours, oracle = (
        Simulator(Model.DIFFERENTIAL_DRIVE, Lidar(), dt_s=0.5, substeps=10, backend=backend).advance(
            state, command, given, circles, segments, frozen
        )
        for backend in ("c", "torch")
    )
    assert torch.equal(ours[1], oracle[1])
    assert torch.allclose(ours[0], oracle[0], atol=1e-4)
    assert 0.2 < ours[1].float().mean() < 0.95


def test_a_backend_that_is_not_here_is_refused():
    with pytest.raises(ValueError, match="backend"):
        Simulator(Model.KINEMATIC_BICYCLE, Lidar(), dt_s=0.1, substeps=1, backend="fortran")
