"""Drones of six and eight rotors, told what four would do."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from embodied.errors import UserError
from embodied.seeding import generator
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.physics.airframes import CRAZYFLIE, CRAZYFLIE_21, RACER_5_INCH
from sims.quadrotor.physics.dynamics import BODY_ROWS, DT_S, SAG_S, Options
from sims.quadrotor.physics.rotors import COUNTS, MOST, Rotors, place
from sims.quadrotor.physics.simulator import Simulator
from sims.quadrotor.platforms import Ranges
from sims.quadrotor.tasks.any_platform import AnyHover
from sims.quadrotor.viewing import BACK, FRONT, drone
from sims.tracer.kernels import pad
from tests.sims.quadrotor.flights import PLAIN, oracle

FOUR = [(1.0, -1.0, -1.0), (-1.0, -1.0, 1.0), (-1.0, 1.0, -1.0), (1.0, 1.0, 1.0)]
"""Front, left and spin of four rotors."""
UNSYMMETRIC = replace(CRAZYFLIE_21, arm_x_m=0.035)


def flown(airframe, actions, *, options=PLAIN, steps=1, first=None) -> torch.Tensor:
    """States [S, B] of drones at rest, all rotors at `first` or hover speed, after `steps` with `actions` [4, B]."""
    options = options if options.many_rotors else options.of_rotors(int(airframe.rotors))
    speed = first or airframe.hover_speed
    state = torch.zeros(options.state_rows, actions.shape[1], dtype=torch.float64)
    state[3], state[13:BODY_ROWS] = 1.0, speed - airframe.hover_speed
    state[BODY_ROWS : BODY_ROWS + 4 * options.past_actions] = 2.0 * speed - 1.0
    if options.many_rotors:
        state[-MOST:] = speed - airframe.hover_speed
    disturbance = torch.zeros(options.disturbance_rows, actions.shape[1], dtype=torch.float64)
    for _ in range(steps):
        state = oracle(state, actions.double(), disturbance, airframe, options)
    return state


@pytest.mark.parametrize("count", COUNTS)
def test_rotors_stand_evenly_around_and_neighbours_turn_against_each_other(count: int):
    places = [place(rotor, count) for rotor in range(count)]
    assert [math.hypot(x, y) for x, y, _ in places] == pytest.approx([math.sqrt(2.0)] * count)
    angles = [math.degrees(math.atan2(y, x)) for x, y, _ in places]
    assert angles[0] == pytest.approx(-180.0 / count)  # right of the front, then clockwise
    steps = [(before - after) % 360.0 for before, after in pairwise(angles)]
    assert steps == pytest.approx([360.0 / count] * (count - 1))
    assert [spin for *_, spin in places] == [-1.0, 1.0] * (count // 2)
    for axis in range(3):  # no part disturbs another, nor the total
        assert sum(at[axis] for at in places) == pytest.approx(0.0, abs=1e-12)
        for other in range(axis):
            assert sum(at[axis] * at[other] for at in places) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("count", COUNTS)
def test_what_is_mixed_joins_to_what_was_told(count: int):
    rotors = Rotors.of(torch.tensor(float(count), dtype=torch.float64))
    told = torch.randn(4, 5, generator=generator(0, "told"), dtype=torch.float64)
    each = rotors.mixed(list(told))
    torch.testing.assert_close(torch.stack(rotors.joined(each)), told)
    for rotor in range(count):  # by hand: the plane through four values, and the spin
        x, y, spin = place(rotor, count)
        parts = [(told * torch.tensor([[s[axis]] for s in FOUR])).mean(0) for axis in range(3)]
        torch.testing.assert_close(each[rotor], told.mean(0) + x * parts[0] + y * parts[1] + spin * parts[2])
    if count == 4:
        torch.testing.assert_close(torch.stack(each[:4]), told)


def test_four_rotors_fly_as_without_the_rows_for_more():
    options = Options(drag=True, ground_effect=True, delay_steps=2, sag=True)
    frame = replace(UNSYMMETRIC, drag_x=0.02, delay_s=0.012, sag=0.1)
    actions = torch.rand(4, 6, generator=generator(0, "actions")) * 1.6 - 0.6
    plain = flown(frame, actions, options=options, steps=20)
    more = flown(frame, actions, options=options.of_rotors(8), steps=20)
    torch.testing.assert_close(more[: len(plain)], plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("axis", ["roll", "pitch", "yaw"])
def test_each_rotor_turns_the_body_by_its_place_and_spin(count: int, axis: str):
    # Small commands around hover turn a drone of N as one of four, whichever way: thrust over arm and inertia by hand.
    frame = replace(UNSYMMETRIC, rotors=float(count), lag_fall_s=UNSYMMETRIC.lag_rise_s)
    signs = {"roll": (-1, -1, 1, 1), "pitch": (-1, 1, 1, -1), "yaw": (-1, 1, -1, 1)}[axis]
    small = 1e-4
    told = frame.hover_action + small * torch.tensor(signs, dtype=torch.float64).unsqueeze(1)
    rates = flown(frame, told)[10:13, 0]
    speed = 0.5 * small * (DT_S - frame.lag_rise_s * (1.0 - math.exp(-DT_S / frame.lag_rise_s)))  # its integral
    thrust = 4.0 * (frame.thrust_1_n + 2.0 * frame.hover_speed * frame.thrust_2_n) * speed
    per_axis = {
        "roll": thrust * frame.arm_y_m / frame.inertia_x,
        "pitch": thrust * frame.arm_x_m / frame.inertia_y,
        "yaw": thrust * frame.torque_per_thrust_m / frame.inertia_z,
    }
    expected = [per_axis[name] if name == axis else 0.0 for name in ("roll", "pitch", "yaw")]
    assert rates.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-6 * max(per_axis.values()))


@pytest.mark.parametrize("count", COUNTS)
def test_the_total_is_that_of_four_and_hover_an_equilibrium(count: int):
    frame = replace(RACER_5_INCH, rotors=float(count))
    assert frame.thrust_to_weight == RACER_5_INCH.thrust_to_weight
    at_hover = flown(frame, torch.full((4, 1), frame.hover_action, dtype=torch.float64), steps=50)
    assert at_hover[:13, 0].tolist() == pytest.approx([0.0, 0.0, 0.0, 1.0] + [0.0] * 9, abs=1e-6)
    climbs = flown(frame, torch.ones(4, 1), first=1.0)[9, 0]
    assert float(climbs) == pytest.approx(9.81 * (frame.thrust_to_weight - 1.0) * DT_S, rel=1e-5)


def test_a_rotor_at_its_limit_turns_the_body_less():
    # All of the roll that four could have: of six, the two at the sides would have to pass the limit.
    told = torch.tensor([[-1.0], [-1.0], [1.0], [1.0]])
    rolls = [float(flown(replace(CRAZYFLIE, rotors=n), told, first=0.5)[10, 0]) for n in (4.0, 6.0)]
    # y times command: of four, 4 x 1 x 1; of six, two thirds of (4 x 0.707 x 0.707 + 2 x 1.414 x 1), not x 1.414.
    assert rolls[1] / rolls[0] == pytest.approx((4.0 * 0.5 + 2.0 * 2.0**0.5) * (4.0 / 6.0) / 4.0, rel=1e-3)


def test_all_rotors_load_the_battery():
    frame, options = replace(CRAZYFLIE, rotors=6.0, sag=0.1), Options(sag=True).of_rotors(6)
    told = torch.tensor([[-1.0], [0.0], [1.0], [0.5]])
    once, twice = (flown(frame, told, options=options, steps=steps, first=0.5) for steps in (1, 2))
    lacking, after = (float(state[BODY_ROWS + 4, 0]) for state in (once, twice))
    speeds = once[-MOST:, 0][:6] + frame.hover_speed
    assert speeds.std() > 0.01
    assert after == pytest.approx(lacking + (0.1 * float((speeds**3).mean()) - lacking) * DT_S / SAG_S, rel=1e-6)


@pytest.mark.parametrize("backend", ["c", "torch"])
def test_hexarotors_keep_their_rotors_between_steps_and_saves(backend: str):
    frame = replace(RACER_5_INCH, rotors=6.0)
    env = QuadrotorEnvironment(8, airframe=frame, backend=backend, noise=False)
    env.reset(starts=torch.arange(8))
    actions = torch.rand(8, 1, 4, generator=generator(0, "actions")) - 0.5
    env.step(actions)
    speeds = env._state[-MOST:, :8]
    assert speeds[:6].std(0).min() > 1e-3
    saved = env.save()
    first = env.step(actions).observation["rotor_speed"]
    env.restore(saved)
    assert torch.equal(env.step(actions).observation["rotor_speed"], first)
    rotors = Rotors.of(torch.full((8,), 6.0))
    seen = torch.stack(rotors.joined(list(env._state[-MOST:, :8])), 1) + frame.hover_speed
    torch.testing.assert_close(seen, env.observe()["rotor_speed"], rtol=1e-5, atol=1e-6)


def test_kernels_and_their_gradients_agree_with_torch():
    flights = []
    for backend in ("c", "torch"):
        env = QuadrotorEnvironment(12, mdp=AnyHover(), airframe=None, backend=backend, noise=False)
        env.reset(starts=torch.arange(12))
        assert env._airframe[-1, :12].unique().tolist() == [4.0, 6.0, 8.0]
        actions = (torch.rand(12, 1, 4, generator=generator(0, "actions")) - 0.3).requires_grad_()
        total = sum(env.step(actions).reward.sum() for _ in range(10))
        (gradient,) = torch.autograd.grad(total, actions)
        flights.append((env._state[:, :12].detach(), gradient))
    torch.testing.assert_close(flights[0][0], flights[1][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flights[0][1], flights[1][1], rtol=1e-3, atol=1e-4)


def test_environments_of_four_alone_have_no_rows_for_more():
    four = QuadrotorEnvironment(1, mdp=AnyHover(), airframe=None, platforms=Ranges(rotors=[4]))
    assert not four.options.many_rotors
    assert len(four._state) == BODY_ROWS + 4


def test_the_simulator_alone_flies_six_rotors():
    simulator = Simulator(replace(CRAZYFLIE, rotors=6.0))
    lanes = pad(1)
    state = torch.zeros(simulator.options.state_rows, lanes)
    state[3], state[-MOST:] = 1.0, -CRAZYFLIE.hover_speed
    after = simulator.step(state, torch.ones(4, lanes), torch.zeros(6, lanes))
    assert (after[-MOST:] + CRAZYFLIE.hover_speed > 0.06).all()
    assert (after[9] < 0.0).all()


def test_other_numbers_of_rotors_are_refused():
    with pytest.raises(UserError, match="rotors as one of 4, 6, 8, got 5"):
        replace(CRAZYFLIE, rotors=5.0)


@pytest.mark.parametrize(("count", "front", "others"), [(4, 2, 2), (6, 2, 4), (8, 4, 4)])
def test_rotors_in_front_are_drawn_red_and_those_at_the_sides_are_not(count: int, front: int, others: int):
    drawn = drone(replace(CRAZYFLIE, rotors=float(count))).colours[:, :3]
    red, grey = ((drawn == np.array(colour)).all(1).sum() for colour in (FRONT, BACK))
    assert red * others == grey * front > 0
