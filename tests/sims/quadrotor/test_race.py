"""Gates passed, hit, passed beside and backwards; laps."""

import math

import pytest
import torch

from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.physics.airframes import RACER_5_INCH
from sims.quadrotor.physics.dynamics import BODY_ROWS, Options
from sims.quadrotor.tasks.race import HALF_FRAME_M, HALF_OPENING_M, TRACK, Race
from tests.sims.quadrotor.test_unroll import both, compare, policy

EFFECTS = {"airframe": RACER_5_INCH, "options": Options(drag=True, delay_steps=1)}
FAST = 8.0


def make(num_envs=1, **options):
    mdp = Race(force_scale=0.0, torque_scale=0.0, **options)
    env = QuadrotorEnvironment(num_envs, mdp=mdp, noise=False, step_limit=500, **EFFECTS)
    env.reset()
    return env


def hovering(env):
    return torch.full((env.num_envs, 1, 4), RACER_5_INCH.hover_action)


def number(env):
    """The gate that comes next in environment 0."""
    return int(env.plan[0, 0] + env._record[3, 0]) % len(TRACK)


def cross(env, *, aside=0.0, above=0.0, speed=FAST):
    """Put environment 0 half a step from its next gate's plane, so that the step crosses there; returns the transition.

    `aside` and `above` are metres from the centre, to the left and up; a negative speed crosses from behind.
    """
    gate = TRACK[number(env)]
    nx, ny = gate.normal
    back = -0.5 * 0.01 * speed
    env._state = torch.zeros_like(env._state)
    env._state[0] = gate.x + back * nx - aside * ny
    env._state[1] = gate.y + back * ny + aside * nx
    env._state[2], env._state[3] = gate.z + above, 1.0
    env._state[7], env._state[8] = speed * nx, speed * ny
    env._state[BODY_ROWS:] = RACER_5_INCH.hover_action
    return env.step(hovering(env))


def test_every_gate_is_in_front_of_the_one_before():
    # Else a drone would have to go around the next gate before it can pass.
    for before, gate in zip(TRACK[-1:] + TRACK[:-1], TRACK, strict=True):
        nx, ny = gate.normal
        assert nx * (before.x - gate.x) + ny * (before.y - gate.y) < -2.0
    lap = sum(math.dist(a[:3], b[:3]) for a, b in zip(TRACK, TRACK[1:] + TRACK[:1], strict=True))
    assert lap == pytest.approx(30.0, abs=0.5)


def test_a_pass_through_the_opening_advances():
    env = make()
    first = number(env)
    for count in range(1, 4):
        transition = cross(env, aside=0.9 * HALF_OPENING_M, above=-0.9 * HALF_OPENING_M)
        assert not transition.done.any()
        assert number(env) == (first + count) % len(TRACK)


AROUND = [{"aside": 1.0}, {"aside": -1.0}, {"above": 1.0}, {"above": -1.0}]


def offsets(share, half_m, around):
    return {key: value * share * half_m for key, value in around.items()}


@pytest.mark.parametrize("speed", [FAST, -FAST])
@pytest.mark.parametrize("share_of", [(1.05, HALF_OPENING_M), (0.95, HALF_FRAME_M)])
@pytest.mark.parametrize("around", [*AROUND, {"aside": 1.0, "above": -1.0}])
def test_a_frame_that_is_hit_from_either_side_ends_the_race(around, share_of, speed):
    env = make()
    first = number(env)
    transition = cross(env, speed=speed, **offsets(*share_of, around))
    assert transition.terminated.all()
    assert transition.failures["hit a gate"].all()
    assert not transition.success.any()
    assert number(env) == first


def test_a_frame_that_is_not_the_next_ones_is_solid_too():
    env = make()
    cross(env)
    env._record[3] -= 1.0  # the one that was passed comes next again: its successor does not
    gate = TRACK[(number(env) + 2) % len(TRACK)]
    nx, ny = gate.normal
    aside = 1.2 * HALF_OPENING_M
    env._state[:3, 0] = torch.tensor([gate.x - 0.04 * nx - aside * ny, gate.y - 0.04 * ny + aside * nx, gate.z])
    env._state[7:9, 0] = FAST * torch.tensor([nx, ny])
    assert env.step(hovering(env)).failures["hit a gate"].all()


@pytest.mark.parametrize("around", AROUND)
def test_a_drone_that_flies_past_a_frame_races_on_and_is_led_back(around):
    env = make(height_limit_m=10.0, speed_m_s=FAST)
    first = number(env)
    gate = TRACK[first]
    transition = cross(env, **offsets(1.05, HALF_FRAME_M, around))
    assert not transition.done.any()
    assert number(env) == first
    # Rewards compare velocities with the way, which leads to 2 m before the gate.
    centre, normal = torch.tensor([gate.x, gate.y, gate.z]), torch.tensor([*gate.normal, 0.0])
    at, rewards = env.pose[0][0] + 0.5 * normal, []
    there = centre - 2.0 * normal - at
    for sign in (1.0, -1.0):
        env._state[:3, 0], env._state[7:10, 0] = at, sign * FAST * there / there.norm()
        rewards.append(float(env.step(hovering(env)).reward))
    assert rewards[0] > 0.8
    assert rewards[1] < -2.0
    assert cross(env).terminated.sum() == 0
    assert number(env) == (first + 1) % len(TRACK)


def test_a_pass_from_behind_neither_counts_nor_ends():
    env = make()
    first = number(env)
    transition = cross(env, speed=-FAST)
    assert not transition.done.any()
    assert number(env) == first
    assert env._record[3:, 0].tolist() == [0.0] * 4


def test_a_step_that_does_not_reach_the_plane_does_not_count():
    env = make()
    first = number(env)
    cross(env)
    env._record[3] -= 1.0
    env.step(hovering(env))  # already through: the plane is behind
    assert number(env) == first


def test_laps_are_counted_and_timed_and_three_are_a_win():
    env = make()
    gates = len(TRACK)
    for passed in range(1, 3 * gates + 1):
        transition = cross(env)
        assert transition.metrics["laps"].tolist() == [passed // gates]
        if passed < gates:
            assert transition.metrics["lap_time_s"].isnan().all()
        else:
            # One step a gate here, and one of waiting in the second lap.
            steps = gates * (passed // gates) + (passed >= 2 * gates)
            assert transition.metrics["lap_time_s"].tolist() == pytest.approx([0.01 * steps / (passed // gates)])
        assert transition.done.any() == (passed == 3 * gates)
        if passed == gates + 2:
            cross(env, speed=-FAST)
    assert transition.success.all()
    assert transition.truncated.all()
    assert not transition.terminated.any()


def test_leaving_the_flying_space_ends_the_race():
    env = make(32, initial_speed_m_s=0.0, initial_velocity_m_s=0.0)  # they fall where they are
    for _ in range(300):
        transition = env.step(-torch.ones(32, 1, 4))
    assert transition.terminated.all()
    assert transition.failures["out of bounds"].all()
    assert not transition.failures["hit a gate"].any()
    height = env.pose[0][:, 2]
    assert (height < 0.1).all()


def test_it_begins_between_two_gates_facing_and_approaching_the_next():
    env = QuadrotorEnvironment(3000, mdp=Race(), noise=False, **EFFECTS)
    seen = env.reset()
    first = env.plan[0].long()
    assert torch.bincount(first, minlength=len(TRACK)).float() == pytest.approx(
        torch.full((len(TRACK),), 3000 / len(TRACK)), rel=0.15
    )
    centres = torch.tensor([gate[:3] for gate in TRACK])
    position = env.pose[0]
    between = (position - centres[first - 1]).norm(dim=1) + (position - centres[first]).norm(dim=1)
    apart = (centres[first] - centres[first - 1]).norm(dim=1)
    assert (between < apart + 0.6).all()
    # In the body frame: x forward, y left. The gate is ahead, and what it is passed along points away.
    assert (seen["gate"][:, 0] > 0).float().mean() > 0.95
    assert (seen["gate"][:, 3] > 0).float().mean() > 0.95


def test_gates_are_seen_from_the_body():
    env = make(100)
    for _ in range(5):
        seen = env.step(hovering(env) + 0.1 * torch.randn(100, 1, 4)).observation
    position, rotation = env.pose
    for key, further in (("gate", 0), ("following_gate", 1)):
        gates = [TRACK[(int(first) + further) % len(TRACK)] for first in env.plan[0]]
        centres = torch.tensor([gate[:3] for gate in gates])
        normals = torch.tensor([(*gate.normal, 0.0) for gate in gates])
        expected = [torch.einsum("nji,nj->ni", rotation, vector) for vector in (centres - position, normals)]
        torch.testing.assert_close(seen[key], torch.cat(expected, 1), atol=1e-4, rtol=1e-4)
    world = torch.einsum("nij,nj->ni", rotation, seen["velocity"])
    torch.testing.assert_close(world, env._state[7:10, :100].t(), atol=1e-4, rtol=1e-4)


def test_on_the_axis_of_a_gate_at_the_wanted_speed_the_reward_is_one():
    env = make(speed_m_s=FAST)
    assert float(cross(env).reward) == pytest.approx(1.0, abs=2e-3)  # drag in one step
    standing = make(speed_m_s=FAST)
    assert float(cross(standing, speed=1e-3).reward) == pytest.approx(0.0, abs=2e-3)


def test_an_unroll_is_steps_one_at_a_time():
    compare(*both(24, policy(31), mdp=Race(), **EFFECTS))


def test_attitudes_at_the_start_are_rotations_that_tilt_in_all_directions():
    env = make(256)
    w, x, y, z = env._state[3:7]
    torch.testing.assert_close(w**2 + x**2 + y**2 + z**2, torch.ones(256))
    # Of the tilt (1, a, b, c) after the heading, a and b are half of `initial_tilt` at most; c turns them a little.
    a, b = (w * x + z * y) / (w**2 + z**2), (w * y - z * x) / (w**2 + z**2)
    most = 0.5 * env.mdp.initial_tilt
    for tilt in (a, b):
        assert 0.9 * most < tilt.max() < 1.1 * most
        assert -1.1 * most < tilt.min() < -0.9 * most
