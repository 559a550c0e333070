"""Physics that can be worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from sims.quadrotor.physics.airframes import AIRFRAMES, CRAZYFLIE, CRAZYFLIE_21, GRAVITY, RACER_5_INCH
from sims.quadrotor.physics.dynamics import DT_S, Body, Options
from tests.sims.quadrotor.flights import PLAIN, oracle, states


def at_rest(speed, *, height=0.0, airframe=CRAZYFLIE, options=PLAIN) -> torch.Tensor:
    """Level, at rest, all rotors and remembered commands at `speed`, a fraction of the highest: [S, 1]."""
    state = torch.zeros(options.state_rows, 1, dtype=torch.float64)
    state[2], state[3], state[13:17], state[17:] = height, 1.0, speed - airframe.hover_speed, 2.0 * speed - 1.0
    return state


def fly(state, action, steps=1, *, force=(0.0,) * 6, airframe=CRAZYFLIE, options=PLAIN):
    action = torch.tensor(action, dtype=torch.float64).expand(4).unsqueeze(1)
    disturbance = torch.tensor(force, dtype=torch.float64).unsqueeze(1)
    for _ in range(steps):
        state = oracle(state, action, disturbance, airframe, options)
    return state[:, 0]


def test_the_crazyflie_hovers_where_the_paper_says():
    assert CRAZYFLIE.hover_action == pytest.approx(0.334, abs=5e-4)
    assert CRAZYFLIE.hover_speed * CRAZYFLIE.speed_max_rpm == pytest.approx(14475, abs=5)
    assert CRAZYFLIE.thrust_to_weight == pytest.approx(2.25, abs=5e-3)


@pytest.mark.parametrize("name", AIRFRAMES)
def test_hover_is_an_equilibrium(name):
    airframe = AIRFRAMES[name]
    start = at_rest(airframe.hover_speed, airframe=airframe)
    assert (fly(start, airframe.hover_action, 100, airframe=airframe) - start[:, 0]).abs().max() < 1e-12


def test_without_thrust_it_falls():
    state = fly(at_rest(0.0, height=1.0), -1.0, 50)
    t = 50 * DT_S
    assert state[2] == pytest.approx(1.0 - GRAVITY * t * t / 2.0, abs=1e-12)
    assert state[9] == pytest.approx(-GRAVITY * t, abs=1e-12)
    assert state[3:7].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_rotors_follow_commands_with_their_time_constants():
    rise, fall = CRAZYFLIE_21.lag_rise_s, CRAZYFLIE_21.lag_fall_s
    for first, command, lag in ((0.2, 0.6, rise), (0.6, 0.2, fall)):
        after = fly(at_rest(first, airframe=CRAZYFLIE_21), 2.0 * command - 1.0, 10, airframe=CRAZYFLIE_21)
        speeds = after[13:17] + CRAZYFLIE_21.hover_speed
        expected = command + (first - command) * math.exp(-10 * DT_S / lag)
        assert speeds == pytest.approx([expected] * 4, abs=2e-6)


@pytest.mark.parametrize(("command", "limit"), [(1.5, 1.0), (-1.5, -1.0)])
def test_commands_beyond_the_limits_are_clipped(command, limit):
    start = at_rest(CRAZYFLIE.hover_speed)
    assert torch.equal(fly(start, command, 5), fly(start, limit, 5))


@pytest.mark.parametrize(
    ("rotor", "roll", "pitch", "yaw"), [(0, -1, -1, -1), (1, -1, 1, 1), (2, 1, 1, -1), (3, 1, -1, 1)]
)
def test_each_rotor_turns_the_body_its_own_way(rotor, roll, pitch, yaw):
    # Front-right, back-right, back-left, front-left; x forward, y left: more lift on the right rolls to the left (-),
    # more lift in front pitches the nose up (-). The reaction opposes the rotor.
    action = [CRAZYFLIE.hover_action] * 4
    action[rotor] += 0.1
    after = fly(at_rest(CRAZYFLIE.hover_speed), action)
    p, q, r = after[10:13].sign().tolist()
    assert (p, q, r) == (roll, pitch, yaw)
    # Its extra thrust lifts the mass and, on its arm, turns the body: m v_z = I_x |p| / y.
    turned = CRAZYFLIE.inertia_x * abs(float(after[10])) / CRAZYFLIE.arm_y_m
    assert CRAZYFLIE.mass_kg * float(after[9]) == pytest.approx(turned, rel=1e-4)


def test_yaw_torque_over_roll_torque_is_the_rotor_constant_over_the_arm():
    action = [CRAZYFLIE.hover_action + 0.1, *[CRAZYFLIE.hover_action] * 3]
    p, _, r = fly(at_rest(CRAZYFLIE.hover_speed), action)[10:13]
    torque = r * CRAZYFLIE.inertia_z / (p * CRAZYFLIE.inertia_x)
    assert torque == pytest.approx(CRAZYFLIE.torque_per_thrust_m / CRAZYFLIE.arm_y_m, rel=1e-4)


def test_thrust_is_along_the_body_and_full_thrust_accelerates_as_thrust_to_weight_says():
    state = at_rest(1.0)
    half = math.sqrt(0.5)
    state[3], state[5] = half, half  # pitched by 90 degrees about y: the body's z is the world's x
    velocity = fly(state, 1.0)[7:10]
    assert velocity[0] == pytest.approx(CRAZYFLIE.thrust_to_weight * GRAVITY * DT_S, rel=1e-9)
    assert velocity[2] == pytest.approx(-GRAVITY * DT_S, rel=1e-9)


def test_a_force_pushes_in_the_world_and_a_torque_turns_in_the_body():
    state = at_rest(CRAZYFLIE.hover_speed)
    state[3], state[6] = math.sqrt(0.5), math.sqrt(0.5)  # yawed by 90 degrees
    after = fly(state, CRAZYFLIE.hover_action, force=(0.01, 0.0, 0.0, 1e-6, 0.0, 0.0))
    assert after[7:10] == pytest.approx([0.01 / 0.027 * DT_S, 0.0, 0.0], abs=1e-6)
    assert after[10:13] == pytest.approx([1e-6 / 3.85e-6 * DT_S, 0.0, 0.0], abs=1e-9)


def test_free_rotation_keeps_energy_and_angular_momentum():
    # No rotor turns and none shall; this one has thrust at standstill, so take that away.
    frame = type(CRAZYFLIE_21)(**{**vars(CRAZYFLIE_21), "thrust_0_n": 0.0})
    state = states(frame)
    state[13:17], state[10:13] = -frame.hover_speed, 4.0 * state[10:13]
    inertia = torch.tensor([[frame.inertia_x], [frame.inertia_y], [frame.inertia_z]], dtype=torch.float64)

    def constants(rows):
        body = Body.of(rows)
        rate = torch.stack(body.angular_velocity)
        rotation = torch.stack(body.rotation()).view(3, 3, -1)
        energy = (inertia * rate * rate).sum(0) / 2.0
        return energy, torch.einsum("ijl,jl->il", rotation, inertia * rate)

    action, disturbance = -torch.ones(4, state.shape[1], dtype=torch.float64), torch.zeros_like(state[:6])
    energy, momentum = constants(state)
    for _ in range(200):
        state = oracle(state, action, disturbance, frame)
    later_energy, later_momentum = constants(state)
    assert ((later_energy - energy).abs() < 1e-6 * energy).all()
    assert ((later_momentum - momentum).norm(dim=0) < 1e-5 * momentum.norm(dim=0)).all()
    assert torch.allclose(torch.stack(Body.of(state).quaternion).norm(dim=0), torch.ones(1, dtype=torch.float64))


def test_drag_brings_it_to_the_speed_of_the_wind():
    options = Options(drag=True, wind=True)
    start = at_rest(RACER_5_INCH.hover_speed, airframe=RACER_5_INCH, options=options)
    wind = (0.0,) * 6 + (2.0, -1.0, 0.0)
    after = fly(start, RACER_5_INCH.hover_action, 50, force=wind, airframe=RACER_5_INCH, options=options)
    share = 1.0 - math.exp(-RACER_5_INCH.drag_x / RACER_5_INCH.mass_kg * 50 * DT_S)
    assert after[7:10] == pytest.approx([2.0 * share, -1.0 * share, 0.0], abs=1e-9)


def test_drag_is_along_the_bodys_axes():
    frame = replace(RACER_5_INCH, drag_x=0.3, drag_y=0.2, drag_z=0.1)
    state, tilt, speed = at_rest(frame.hover_speed, airframe=frame), 0.5, 20.0
    state[3], state[5], state[7] = math.cos(tilt / 2), math.sin(tilt / 2), speed  # nose down, along the world's x
    dragged, free = (fly(state, frame.hover_action, airframe=frame, options=o) for o in (Options(drag=True), PLAIN))
    force = (dragged - free)[7:10] / DT_S * frame.mass_kg
    sin, cos = math.sin(tilt), math.cos(tilt)
    expected = [-speed * (0.3 * cos**2 + 0.1 * sin**2), 0.0, speed * (0.3 - 0.1) * sin * cos]
    assert force == pytest.approx(expected, rel=0.01, abs=1e-9)


def test_near_the_ground_there_is_more_thrust():
    options = Options(ground_effect=True, ground_z_m=0.0)
    radius = CRAZYFLIE.rotor_radius_m
    after = fly(at_rest(CRAZYFLIE.hover_speed, height=radius, options=options), CRAZYFLIE.hover_action, options=options)
    assert after[9] == pytest.approx(GRAVITY * DT_S / 15.0, rel=1e-2)  # 1 / (1 - 1/16) - 1
    high = fly(at_rest(CRAZYFLIE.hover_speed, height=100.0, options=options), CRAZYFLIE.hover_action, options=options)
    assert abs(float(high[9])) < 1e-6


def test_a_delayed_command_arrives_later():
    options = Options(delay_steps=2)
    for delay_s, expected in ((0.0, [1.0, 1.0, 1.0]), (0.01, [0.0, 1.0, 1.0]), (0.015, [0.0, 0.5, 1.0])):
        frame = type(CRAZYFLIE)(**{**vars(CRAZYFLIE), "delay_s": delay_s})
        state = at_rest(0.5, options=options)
        for share in expected:
            before = float(state[13, 0]) + frame.hover_speed
            state = fly(state, 1.0, airframe=frame, options=options).unsqueeze(1)
            target = 0.5 + 0.5 * share
            expected = target + (before - target) * math.exp(-DT_S / frame.lag_rise_s)
            assert float(state[13, 0]) + frame.hover_speed == pytest.approx(expected, abs=1e-7)


def test_commands_are_clipped():
    assert torch.equal(fly(at_rest(0.5), 3.0), fly(at_rest(0.5), 1.0))


def test_impossible_options_are_refused():
    with pytest.raises(ValueError, match="drag=true"):
        Options(wind=True)
    with pytest.raises(ValueError, match="delay_steps from 0 to 8, got 9"):
        Options(delay_steps=9)
