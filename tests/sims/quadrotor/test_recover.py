"""Random throws, and the condition of recovery."""

import math

import pytest
import torch

from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.physics.airframes import CRAZYFLIE
from sims.quadrotor.physics.dynamics import BODY_ROWS
from sims.quadrotor.tasks.recover import Recover
from tests.sims.quadrotor.test_unroll import both, compare, policy

STILL = {"force_scale": 0.0, "torque_scale": 0.0}


def hovering(env):
    return torch.full((env.num_envs, 1, 4), CRAZYFLIE.hover_action)


def put(env, *, tilt=0.0, speed=0.0, turning=0.0):
    """Environments at rest, level, but for these; tilted about x, falling, turning about z."""
    env._state = torch.zeros_like(env._state)
    env._state[3], env._state[4] = math.cos(tilt / 2), math.sin(tilt / 2)
    env._state[9], env._state[12] = -speed, turning
    env._state[BODY_ROWS:] = CRAZYFLIE.hover_action


def test_it_begins_upside_down_moving_and_spinning():
    env = QuadrotorEnvironment(5000, mdp=Recover(), noise=False)
    seen = env.reset()
    tilt = torch.acos(seen["rotation"][:, 8].clamp(-1, 1))
    assert tilt.min() >= 2 * math.pi / 3 - 1e-3
    assert float(tilt.mean()) == pytest.approx(5 * math.pi / 6, abs=0.02)
    matrix = seen["rotation"].view(-1, 3, 3)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(3).expand_as(matrix), atol=1e-5, rtol=0)
    # Any direction: the body's z axis points to all sides, and so does its x axis.
    for column in (0, 2):
        heading = torch.atan2(matrix[:, 1, column], matrix[:, 0, column])
        assert float(heading.cos().mean()) == pytest.approx(0.0, abs=0.05)
        assert float(heading.sin().mean()) == pytest.approx(0.0, abs=0.05)
    assert seen["velocity"].std(0) == pytest.approx([2.0 / math.sqrt(3)] * 3, rel=0.04)
    assert seen["angular_velocity"].std(0) == pytest.approx([6.0 / math.sqrt(3)] * 3, rel=0.04)
    assert "position" not in seen.keys()  # noqa: SIM118 - a TensorDict


@pytest.mark.parametrize(
    ("state", "calm"),
    [
        ({}, True),
        ({"tilt": math.radians(19.0)}, True),
        ({"tilt": math.radians(21.0)}, False),
        ({"speed": 0.45}, True),
        ({"speed": 0.55}, False),
        ({"turning": 0.95}, True),
        ({"turning": -1.05}, False),
        ({"tilt": math.pi}, False),
    ],
)
def test_calm_is_upright_slow_and_hardly_turning(state, calm):
    env = QuadrotorEnvironment(1, mdp=Recover(**STILL), noise=False)
    env.reset()
    put(env, **state)
    env.step(hovering(env))
    assert (env._record[3, 0] > 0) == calm


def test_the_recovery_time_is_that_of_the_last_time_it_became_calm():
    env = QuadrotorEnvironment(2, mdp=Recover(**STILL, within_s=0.2), noise=False, step_limit=30)
    env.reset()
    for step in range(1, 31):
        # The first becomes calm in step 5, leaves in step 12 and is calm again from step 15 on; the other from 25 on.
        put(env)
        env._state[9, 0] = 0.0 if 5 <= step < 12 or step >= 15 else -3.0
        env._state[9, 1] = 0.0 if step >= 25 else -3.0
        transition = env.step(hovering(env))
        assert transition.metrics["recovery_s"].isnan().all() == (step < 30)
        assert not transition.success.any() or step == 30
    assert transition.metrics["recovery_s"].tolist() == pytest.approx([0.15, 0.25])
    assert transition.success.tolist() == [True, False]  # within 0.2 s


def test_who_is_not_calm_at_the_end_has_not_recovered():
    env = QuadrotorEnvironment(1, mdp=Recover(**STILL), noise=False, step_limit=10)
    env.reset()
    for step in range(10):
        put(env, speed=3.0 * (step == 9))
        transition = env.step(hovering(env))
    assert transition.truncated.all()
    assert transition.metrics["survive"].all()
    assert transition.metrics["recovery_s"].isnan().all()
    assert not transition.success.any()


def test_falling_five_metres_ends_the_episode():
    env = QuadrotorEnvironment(20, mdp=Recover(), step_limit=400)
    env.reset()
    for _ in range(200):
        transition = env.step(-torch.ones(20, 1, 4))
    assert transition.terminated.all()
    assert not transition.success.any()
    assert (transition.metrics["survive"] == 0).all()


def test_upright_at_rest_is_worth_one_and_upside_down_two_weights_less():
    env = QuadrotorEnvironment(1, mdp=Recover(**STILL, weight_velocity=0.0), noise=False)
    env.reset()
    for tilt, cost in ((0.0, 0.0), (math.pi / 2, 1.0), (math.pi, 2.0)):
        put(env, tilt=tilt)
        reward = float(env.step(hovering(env)).reward)
        assert reward == pytest.approx(1.0 - Recover.weight_rotation * cost, abs=1e-4)


def test_an_unroll_is_steps_one_at_a_time():
    compare(*both(24, policy(19), mdp=Recover(), step_limit=17))
