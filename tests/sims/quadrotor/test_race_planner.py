"""The planner of the race: splines, what they ask of rotors, the lap, and flights."""

import copy
import math

import pytest
import torch

from embodied.evaluation.evaluation import evaluate
from sims.quadrotor.physics.airframes import AIRFRAMES, GRAVITY, RACER_5_INCH
from sims.quadrotor.physics.dynamics import BODY_ROWS, DT_S, Options, step
from sims.quadrotor.planners import lap as laps
from sims.quadrotor.planners.lap import Limits, derivatives, fastest, rotors, spline, thrust, turned
from sims.quadrotor.planners.raceline import Numbers
from sims.quadrotor.task import RaceTask
from sims.quadrotor.tasks.race import HALF_OPENING_M, TRACK

TASK = RaceTask(airframe="racer_5_inch", step_limit=2000)
MOST_N = RACER_5_INCH.thrust_2_n


def some(pieces=5):
    generator = torch.Generator().manual_seed(3)
    points = torch.randn(pieces, 3, generator=generator, dtype=torch.float64)
    return points, 0.4 + torch.rand(pieces, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def planner():
    return TASK.baselines()["raceline"]


def test_a_spline_goes_through_its_points_and_is_smooth_in_time():
    points, times = some()
    coefficients = spline(points, times)
    position, velocity, acceleration = (each.view(5, 1000, 3) for each in derivatives(coefficients, times, 1000))
    torch.testing.assert_close(position[:, 0], points)
    for order in range(7):  # the sixth derivative is the last one without a jump
        powers = [
            [math.perm(power, order) * share ** max(power - order, 0) for power in range(8)] for share in (0.0, 1.0)
        ]
        begin, end = (torch.einsum("k,skx->sx", points.new_tensor(each), coefficients) for each in powers)
        scale = times.unsqueeze(1) ** order
        torch.testing.assert_close((end / scale), (begin / scale).roll(-1, 0), rtol=1e-6, atol=1e-6)
    dt = (times / 1000).view(-1, 1, 1)
    torch.testing.assert_close((position[:, 2:] - position[:, :-2]) / (2 * dt), velocity[:, 1:-1], rtol=0, atol=1e-3)
    torch.testing.assert_close(
        (velocity[:, 2:] - velocity[:, :-2]) / (2 * dt), acceleration[:, 1:-1], rtol=0, atol=1e-2
    )


def test_a_detour_through_another_point_costs_snap():
    points, times = some()
    more = spline(
        torch.cat((points, 0.5 * (points[-1:] + points[:1]))), torch.cat((times[:-1], times[-1:] / 2, times[-1:] / 2))
    )
    through = spline(points, times)

    def snap(coefficients, times):
        share = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
        powers = torch.stack([math.perm(k, 4) * share ** max(k - 4, 0) for k in range(8)], 1)
        fourth = torch.einsum("pk,skx->spx", powers, coefficients) / times.view(-1, 1, 1) ** 4
        return float((fourth.square().sum(2).mean(1) * times).sum())

    assert snap(through, times) < snap(more, torch.cat((times[:-1], times[-1:] / 2, times[-1:] / 2)))


def test_the_thrust_of_a_motion_gives_that_motion_in_the_dynamics():
    velocity, acceleration = torch.tensor([[6.0, -3.0, 2.0]]).double(), torch.tensor([[8.0, 12.0, -4.0]]).double()
    force = thrust(velocity, acceleration, RACER_5_INCH)[0]
    up = force / force.norm()
    half = torch.tensor([1.0 + up[2], -up[1], up[0], 0.0]).double()  # turns the z axis to `up`
    speed = (force.norm() / 4.0 / MOST_N).sqrt()
    excess = float(speed) - RACER_5_INCH.hover_speed
    options = Options(drag=True)
    state = [*[0.0] * 3, *(half / half.norm()).tolist(), *velocity[0].tolist(), *[0.0] * 3, *[excess] * 4, *[0.0] * 4]
    state = [torch.tensor([value], dtype=torch.float64) for value in state]
    assert len(state) == BODY_ROWS + 4
    action = [torch.tensor([2.0 * float(speed) - 1.0], dtype=torch.float64)] * 4
    zero = [torch.zeros(1, dtype=torch.float64)] * options.disturbance_rows
    after = step(state, action, zero, RACER_5_INCH, options)
    gained = torch.cat([b - a for a, b in zip(state[7:10], after[7:10], strict=True)]) / DT_S
    torch.testing.assert_close(gained, acceleration[0], rtol=0, atol=0.1)  # drag changes within the step


def test_a_direction_that_turns_at_a_constant_rate_has_that_rate():
    angle = torch.arange(400, dtype=torch.float64) / 400 * 2.0 * math.pi
    up = torch.stack((angle.cos(), angle.sin(), torch.zeros_like(angle)), 1)
    times = torch.tensor([0.5, 1.5], dtype=torch.float64)  # the second half turns three times as slowly
    turning, spinning = turned(up, times, 200)
    assert turning[100].tolist() == pytest.approx([0.0, 0.0, 2.0 * math.pi], abs=1e-3)
    assert turning[300].tolist() == pytest.approx([0.0, 0.0, 2.0 * math.pi / 3.0], abs=1e-3)
    assert spinning[100].norm() < 1e-6


def test_rotors_carry_a_quarter_each_and_tilt_by_the_difference():
    hover = torch.tensor([0.0, 0.0, RACER_5_INCH.mass_kg * GRAVITY], dtype=torch.float64)
    still = rotors(hover, torch.zeros(3), RACER_5_INCH)
    assert [float(each) for each in still] == pytest.approx([RACER_5_INCH.mass_kg * GRAVITY / 4.0] * 2)
    high, low = rotors(hover, torch.tensor([100.0, 100.0, 0.0]) / 2.0**0.5, RACER_5_INCH)
    # About a diagonal of the X: two rotors, each an arm's diagonal away, make the torque.
    assert float(high - low) * 0.078 * 2.0**0.5 == pytest.approx(RACER_5_INCH.inertia_x * 100.0, rel=1e-6)


def test_the_lap_passes_every_opening_within_the_rotors_limits(planner):
    lap, limits = planner.lap, planner.numbers.limits
    apart = len(lap.position) // len(TRACK)
    for number, gate in enumerate(TRACK):
        offset = lap.position[number * apart] - torch.tensor(gate[:3], dtype=torch.float64)
        normal = torch.tensor([*gate.normal, 0.0], dtype=torch.float64)
        assert abs(float(offset @ normal)) < 1e-6
        assert float(offset.abs().max()) <= limits.opening * HALF_OPENING_M + 1e-6
        assert float(lap.velocity[number * apart] @ normal) > 5.0
    force = thrust(lap.velocity, lap.acceleration, RACER_5_INCH)
    high, low = rotors(force, lap.spinning, RACER_5_INCH)
    assert float(high.max()) < (limits.highest + 0.02) * MOST_N
    assert float(low.min()) > (limits.lowest - 0.02) * MOST_N
    assert 2.0 < lap.duration_s < 2.3
    length = (lap.position.roll(-1, 0) - lap.position).norm(dim=1).sum()
    assert float(length) == pytest.approx(float(lap.velocity.norm(dim=1).mean()) * lap.duration_s, rel=0.05)


def test_weaker_rotors_take_longer(monkeypatch):
    monkeypatch.setattr(laps, "STEPS", 150)
    taken = [fastest(TRACK, RACER_5_INCH, Limits(highest=share)).duration_s for share in (0.85, 0.5)]
    assert taken[1] > 1.2 * taken[0]


def test_it_races_without_touching_a_gate_and_as_fast_as_planned(planner):
    env = TASK.environment(64, "track", "train")
    found = evaluate(env, planner, starts_per_task=64)
    assert found.success.all()
    assert float(found.metrics["lap_time_s"].mean()) == pytest.approx(planner.lap.duration_s, rel=0.05)


def test_its_commands_for_a_thrust_and_a_torque_are_the_rotors_speeds_that_make_them(planner):
    speed = torch.full((1, 4), 0.5)
    calm = copy.copy(planner)
    calm.numbers = Numbers(lead_s=10.0)  # set-points without a lead
    told = calm._commands(torch.tensor([16.0]), torch.tensor([[0.1, -0.2, 0.02]]), speed)
    forces = MOST_N * (0.5 * (told[0] + 1.0)).square()
    arm, yaw = RACER_5_INCH.arm_x_m, RACER_5_INCH.torque_per_thrust_m
    front_right, back_right, back_left, front_left = forces.tolist()
    assert sum(forces.tolist()) == pytest.approx(16.0, rel=1e-4)
    assert arm * (back_left + front_left - front_right - back_right) == pytest.approx(0.1, rel=1e-3)
    assert arm * (back_right + back_left - front_right - front_left) == pytest.approx(-0.2, rel=1e-3)
    assert yaw * (back_right + front_left - front_right - back_left) == pytest.approx(0.02, rel=1e-3)
    # Yaw gets what tilting and thrust leave: of 4 N a rotor, all but 0.3 / 4a of tilting.
    spun = calm._commands(torch.tensor([16.0]), torch.tensor([[0.1, -0.2, 9.0]]), speed)
    forces = (MOST_N * (0.5 * (spun[0] + 1.0)).square()).tolist()
    spare = 4.0 - 0.3 / (4.0 * arm)
    tilting = [each / (4.0 * arm) for each in (0.1, -0.3, -0.1, 0.3)]
    assert forces == pytest.approx(
        [4.0 + t + s * spare for t, s in zip(tilting, (-1, 1, -1, 1), strict=True)], abs=0.01
    )
    hard = calm._commands(torch.tensor([100.0]), torch.tensor([[0.5, 0.0, 9.0]]), speed)
    forces = MOST_N * (0.5 * (hard[0] + 1.0)).square()
    front_right, back_right, back_left, front_left = forces.tolist()
    # Beyond what rotors have, tilting comes before thrust and yaw.
    assert arm * (back_left + front_left - front_right - back_right) == pytest.approx(0.5, rel=1e-3)
    assert float(forces.max()) == pytest.approx(MOST_N, rel=1e-3)


@pytest.mark.parametrize("name", AIRFRAMES)
def test_every_airframe_has_a_lap(name, monkeypatch):
    monkeypatch.setattr(laps, "STEPS", 60)
    assert 1.0 < fastest(TRACK, AIRFRAMES[name], Limits()).duration_s < 20.0
