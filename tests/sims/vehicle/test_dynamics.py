"""Equations of motion: circles and accelerations by hand, tyres within their friction, C against torch."""

import math

import pytest
import torch

from embodied import native
from sims.vehicle import dynamics
from sims.vehicle.geometry import FAR_M, Lidar
from sims.vehicle.simulator import Simulator
from sims.vehicle.vehicles import F1TENTH, JACKAL, PARAMETERS, SCATTERED, Model, Vehicle

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
VEHICLES = {Model.DIFFERENTIAL_DRIVE: JACKAL, Model.KINEMATIC_BICYCLE: F1TENTH, Model.DYNAMIC_BICYCLE: F1TENTH}


def parameters(vehicle: Vehicle, count: int = 1) -> torch.Tensor:
    return vehicle.scattered(torch.zeros(count, len(SCATTERED)), 0.0)


def drive(model: Model, command: tuple[float, float], seconds: float, dt_s: float = 0.005, **begin: float):
    state = torch.zeros(1, 7)
    for name, value in begin.items():
        state[0, dynamics.STATE.index(name)] = value
    for _ in range(round(seconds / dt_s)):
        state = dynamics.step(model, state, torch.tensor([command]), parameters(VEHICLES[model]), dt_s)
    return dict(zip(dynamics.STATE, state[0].tolist(), strict=True))


def test_a_differential_drive_drives_a_circle():
    # 1 m/s and 1 rad/s: after a quarter turn on a circle of 1 m it is at (1, 1)
    now = drive(Model.DIFFERENTIAL_DRIVE, (1.0, 1.0), math.pi / 2.0, math.pi / 2.0 / 300, forward=1.0, yaw_rate=1.0)
    assert now["x"] == pytest.approx(1.0, abs=1e-4)
    assert now["y"] == pytest.approx(1.0, abs=1e-4)
    assert now["yaw"] == pytest.approx(math.pi / 2.0, abs=1e-5)


def test_speed_follows_with_limited_acceleration_and_lag():
    # from rest towards 1 m/s: 2 m/s^2 while (1 - v) / 0.1 s is more than that, that is up to 0.8 m/s, 0.4 s
    assert drive(Model.DIFFERENTIAL_DRIVE, (1.0, 0.0), 0.2)["forward"] == pytest.approx(0.4, abs=1e-5)
    later = drive(Model.DIFFERENTIAL_DRIVE, (1.0, 0.0), 0.5)["forward"]
    assert later == pytest.approx(1.0 - 0.2 * math.exp(-1.0), abs=3e-3)


def test_a_kinematic_bicycle_turns_about_the_axis_of_its_rear_wheels():
    # tan(0.3) / 0.3302 m: the rear axle drives a circle of 1.067 m, the centre of mass is 0.17145 m ahead of it
    radius = (0.15875 + 0.17145) / math.tan(0.3)
    now = drive(Model.KINEMATIC_BICYCLE, (0.3, 2.0), 1.0, forward=2.0, steering=0.3)
    assert now["yaw"] == pytest.approx(2.0 / radius, rel=1e-5)
    assert now["leftward"] == pytest.approx(0.17145 * 2.0 / radius, rel=1e-5)


def test_a_slow_dynamic_bicycle_drives_like_a_kinematic_one_and_a_fast_one_slips():
    begin = {"forward": 1.2, "steering": 0.1}
    kinematic, slow = (drive(model, (0.1, 1.2), 2.0, **begin) for model in (1, 2) for model in [Model(model)])
    assert slow["yaw_rate"] == pytest.approx(kinematic["yaw_rate"], rel=0.02)
    begin = {"forward": 6.0, "steering": 0.3}
    kinematic, fast = (drive(Model(model), (0.3, 6.0), 2.0, **begin) for model in (1, 2))
    assert fast["yaw_rate"] < 0.5 * kinematic["yaw_rate"]


def test_tyres_give_no_more_than_friction():
    for steering in (0.1, 0.2, 0.4189):
        now = drive(Model.DYNAMIC_BICYCLE, (steering, 7.0), 3.0, forward=7.0)
        sideways = now["yaw_rate"] * math.hypot(now["forward"], now["leftward"])
        assert sideways <= 1.0489 * 9.81 * 1.01
    assert sideways > 0.5 * 1.0489 * 9.81


def test_side_slip_in_a_steady_curve_is_that_of_the_single_track_model():
    # Steady state at little slip: side force m v r is shared by the axles as load is, so that
    # r = v delta / (L + K v^2) with K = (1 / C_f - 1 / C_r) / (mu g).
    v, delta = 3.0, 0.02
    now = drive(Model.DYNAMIC_BICYCLE, (delta, v), 3.0, forward=v)
    under = (1.0 / 4.718 - 1.0 / 5.4562) / (1.0489 * 9.81)
    expected = now["forward"] * delta / (0.15875 + 0.17145 + under * now["forward"] ** 2)
    assert now["yaw_rate"] == pytest.approx(expected, rel=0.01)


def test_randomisation_varies_dynamics_and_leaves_the_outline():
    draws = torch.rand(50, len(SCATTERED)) * 2.0 - 1.0
    found = F1TENTH.scattered(draws, 0.2)
    friction = found[:, PARAMETERS.index("friction")] / F1TENTH.friction
    assert torch.allclose(friction, 1.0 + 0.2 * draws[:, SCATTERED.index(PARAMETERS.index("friction"))])
    assert (found[:, PARAMETERS.index("length_m")] == F1TENTH.length_m).all()


@needs_compiler
@pytest.mark.parametrize("model", list(Model))
def test_compiled_motion_is_that_of_torch(model: Model):
    count, g = 64, torch.Generator().manual_seed(0)
    vehicle = VEHICLES[model]
    given = vehicle.scattered(torch.rand(count, len(SCATTERED), generator=g) * 2.0 - 1.0, 0.3)
    state, frozen = torch.zeros(count, 7), torch.rand(count, generator=g) < 0.1
    state[:, 2] = 6.0 * torch.rand(count, generator=g)
    empty = torch.full((count, 1, 3), FAR_M), torch.full((count, 1, 4), FAR_M)
    both = [Simulator(model, Lidar(), dt_s=0.05, substeps=10, backend=backend) for backend in ("c", "torch")]
    ours = oracle = state
    for _ in range(40):
        command = torch.rand(count, 2, generator=g) * torch.tensor([0.8, 7.0]) - torch.tensor([0.4, 0.0])
        (ours, _), (oracle, _) = (
            simulator.advance(each, command, given, *empty, frozen)
            for simulator, each in zip(both, (ours, oracle), strict=True)
        )
    assert torch.allclose(ours, oracle, atol=2e-3, rtol=1e-3)
    assert torch.equal(ours[frozen], state[frozen])
    assert (ours[~frozen, :2] != 0).all()
