"""References and their observations."""

import dataclasses
import math

import pytest
import torch

from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.physics.airframes import CRAZYFLIE
from sims.quadrotor.physics.dynamics import DT_S
from sims.quadrotor.task import TrackTask
from sims.quadrotor.tasks.track import AHEAD_S, SETTLING_STEPS, Track, position, velocity
from tests.sims.quadrotor.test_unroll import both, compare, policy

REFERENCES = TrackTask.MDPS
CALM = {
    "force_scale": 0.0,
    "torque_scale": 0.0,
    "initial_position_m": 0.0,
    "initial_velocity_m_s": 0.0,
    "initial_angular_velocity_rad_s": 0.0,
    "initial_tilt": 0.0,
    "initial_rotor_speed": CRAZYFLIE.hover_speed,
}


def plans(mdp, count=200):
    env = QuadrotorEnvironment(count, mdp=mdp)
    env.reset()
    return env.plan.double()


def hovering(env):
    return torch.full((env.num_envs, 1, 4), CRAZYFLIE.hover_action)


@pytest.mark.parametrize("name", REFERENCES)
def test_the_velocity_is_the_derivative_of_the_position(name):
    plan, width = list(plans(REFERENCES[name])), 1e-5
    for t in (0.0, 0.37, 4.2):
        ends = (torch.stack(position(plan, t + sign * width)) for sign in (1, -1))
        slope = next(ends) - next(ends)
        torch.testing.assert_close(torch.stack(velocity(plan, t)), slope / (2 * width), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("speed", [1, 2, 3])
def test_a_figure_eight_is_gerono_s_and_as_fast_as_its_name_says(speed):
    plan = list(plans(REFERENCES[f"figure_eight_{speed}"]))
    t = torch.linspace(0.0, 10.0, 4001, dtype=torch.float64).unsqueeze(1)
    x, y, z = (torch.as_tensor(row) for row in position([row.unsqueeze(0) for row in plan], t))
    torch.testing.assert_close(x.pow(4) - x.pow(2) + y.pow(2), torch.zeros_like(x), atol=1e-5, rtol=0)
    assert (x.amax(0) - 1.0).abs().max() < 1e-3
    assert z.abs().max() == 0
    fastest = torch.stack(velocity([row.unsqueeze(0) for row in plan], t)).norm(dim=0).amax(0)
    assert fastest == pytest.approx(torch.full_like(fastest, speed), abs=5e-3)


def test_random_references_keep_their_limits_and_differ():
    mdp = REFERENCES["random"]
    plan = [row.unsqueeze(0) for row in plans(mdp, 500)]
    t = torch.arange(0.0, 10.0, 0.01, dtype=torch.float64).unsqueeze(1)
    moving = torch.stack(velocity(plan, t))
    speed = moving.norm(dim=0).amax(0)
    acceleration = (moving.diff(dim=1) / 0.01).norm(dim=0).amax(0)
    assert speed.max() < mdp.speed_high_m_s + 1e-5
    assert speed.max() > 2.0
    assert speed.min() < 0.6
    assert acceleration.max() < mdp.acceleration_m_s2 + 1e-3
    assert len({tuple(column) for column in torch.stack(plan).squeeze(1).t().tolist()}) == 500


def test_a_random_reference_is_no_harder_than_its_acceleration_allows_however_fast_it_may_be():
    gentle = dataclasses.replace(REFERENCES["random"], acceleration_m_s2=1.0)
    t = torch.arange(0.0, 10.0, 0.01, dtype=torch.float64).unsqueeze(1)
    moving = torch.stack(velocity([row.unsqueeze(0) for row in plans(gentle)], t))
    acceleration = (moving.diff(dim=1) / 0.01).norm(dim=0).amax(0)
    assert 0.5 < acceleration.max() < 1.0 + 1e-3


def test_shares_of_references_are_those_that_are_asked_for():
    plan = plans(Track(eight_share=0.25, lissajous_share=0.5), 4000)
    planar, third = (plan[4:6] == 0).all(0), (plan[1] == 0)  # amplitudes of z; the second sine of x
    assert planar.float().mean() == pytest.approx(0.25, abs=0.03)
    assert (third & ~planar).float().mean() == pytest.approx(0.5, abs=0.03)


def test_observed_errors_are_those_to_the_reference_now_and_ahead():
    env = QuadrotorEnvironment(50, mdp=Track(), noise=False)
    env.reset()
    for _ in range(7):
        seen = env.step(hovering(env)).observation
    at, moving = env._state[:3, :50], env._state[7:10, :50]
    plan, t = list(env.plan), 7 * DT_S
    error = torch.stack(position(plan, t)) - at
    torch.testing.assert_close(seen["position_error"].t(), error, atol=1e-5, rtol=1e-4)
    velocity_error = torch.stack(velocity(plan, t)) - moving
    torch.testing.assert_close(seen["velocity_error"].t(), velocity_error, atol=1e-5, rtol=1e-4)
    for number, ahead in enumerate(AHEAD_S):
        expected = torch.stack(position(plan, t + ahead)) - at - ahead * moving
        found = seen["position_error_ahead"][:, 3 * number : 3 * number + 3].t()
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_an_episode_begins_where_and_how_the_reference_does():
    env = QuadrotorEnvironment(100, mdp=Track(**CALM), noise=False)
    seen = env.reset()
    assert seen["position_error"].abs().max() == 0
    assert seen["velocity_error"].abs().max() == 0
    assert torch.stack(velocity(list(env.plan), 0.0)).norm(dim=0).max() > 1.5


def test_the_error_is_the_root_mean_square_after_the_first_second():
    limit = SETTLING_STEPS + 30
    slow = Track(**CALM, eight_share=1.0, speed_low_m_s=0.3, speed_high_m_s=0.3)
    env = QuadrotorEnvironment(5, mdp=slow, noise=False, step_limit=limit)
    env.reset()
    squares = []
    for step in range(limit):
        transition = env.step(hovering(env))
        assert transition.metrics["position_error_m"].isnan().all() == (step < limit - 1)
        squares.append(transition.observation["position_error"].square().sum(1))
    assert transition.success.all()
    expected = torch.stack(squares[SETTLING_STEPS:]).mean(0).sqrt()
    assert expected.min() > 0.01
    torch.testing.assert_close(transition.metrics["position_error_m"], expected, rtol=1e-4, atol=1e-6)


def test_losing_the_reference_ends_the_episode():
    fast = Track(**CALM, eight_share=1.0, speed_low_m_s=3.0, speed_high_m_s=3.0)
    env = QuadrotorEnvironment(20, mdp=fast, noise=False)
    env.reset()
    for _ in range(200):
        transition = env.step(hovering(env))  # straight on
    assert transition.terminated.all()
    assert not transition.success.any()
    assert ((transition.observation["position_error"].abs().amax(1) - 1.0) < 0.1).all()


def test_following_exactly_without_turning_or_acting_is_worth_one():
    env = QuadrotorEnvironment(3, mdp=dataclasses.replace(Track(**CALM), speed_low_m_s=0.0, speed_high_m_s=0.0))
    env.reset()
    assert env.step(hovering(env)).reward == pytest.approx(torch.ones(3, 1), abs=1e-5)


def test_an_unroll_is_steps_one_at_a_time():
    compare(*both(24, policy(34), mdp=Track(), step_limit=17))


def test_rates_of_random_references_are_within_their_bounds():
    mdp = REFERENCES["random"]
    rates = plans(mdp)[6:12]
    assert rates.min() >= mdp.rate_low_rad_s
    assert rates.max() <= mdp.rate_high_rad_s + 1e-6
    assert math.isclose(float(rates.mean()), (mdp.rate_low_rad_s + mdp.rate_high_rad_s) / 2, rel_tol=0.05)
