"""Random platforms observed by a teacher, and platforms that are held out from training."""

import pytest
import torch

from embodied.seeding import generator
from sims.quadrotor.airframes import DRAWS, GRAVITY, PARAMETERS, Airframe, sample_platforms
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.task import AnyPlatformTask
from sims.quadrotor.tasks.any_platform import MEASURED, OUTSIDE, POSITION_LIMIT_M, UNSEEN, AnyHover
from sims.quadrotor.tasks.hover import Hover


@pytest.mark.parametrize("backend", ["c", "torch"])
def test_what_a_teacher_observes_makes_the_platform_that_flies(backend: str):
    env = QuadrotorEnvironment(20, mdp=AnyHover(), airframe=None, backend=backend)
    platform = env.reset(starts=torch.arange(20))["platform"]
    assert env.contract.observation["platform"].privileged
    torch.testing.assert_close(sample_platforms(platform.T), env._airframe[:, :20], rtol=1e-6, atol=0)
    assert platform.min() > 0
    assert platform.max() < 1
    assert len(platform.unique()) > 230
    after = env.step(torch.zeros(20, 1, 4)).observation
    torch.testing.assert_close(after["platform"], platform)


def test_compiled_and_stepwise_unrolls_of_a_teacher_agree():
    weights = 0.1 * torch.randn(4, 22 + DRAWS, generator=generator(0, "weights"))
    rollouts = []
    for backend in ("c", "torch"):
        env = QuadrotorEnvironment(5, mdp=AnyHover(), airframe=None, backend=backend)
        env.reset(starts=torch.arange(5))
        rollouts.append(env.unroll([(weights, torch.zeros(4))], 6))
    torch.testing.assert_close(rollouts[0].actions, rollouts[1].actions, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rollouts[0].reward, rollouts[1].reward, rtol=1e-4, atol=1e-5)


def test_the_unseen_are_ten_from_32_g_to_2400_g_which_no_training_can_draw():
    masses = [airframe.mass_kg for airframe in UNSEEN.values()]
    assert len(masses) == 10
    assert masses == sorted(masses)
    assert (masses[0], masses[-1]) == (0.032, 2.4)
    drawn = sample_platforms(torch.rand(DRAWS, 4096, generator=generator(0, "draws")))
    forward, sideways = (drawn[PARAMETERS.index(f"arm_{axis}_m")] for axis in "xy")
    assert torch.equal(forward, sideways)
    for airframe in UNSEEN.values():
        assert abs(airframe.arm_x_m / airframe.arm_y_m - 1.0) > 0.05
        assert airframe.inertia_z <= airframe.inertia_x + airframe.inertia_y
        assert 1.8 <= airframe.thrust_to_weight <= 5.0


def test_only_the_unseen_lie_inside_the_ranges_but_for_their_arms():
    """Thrust-to-weight, mass and rotor lags of platforms; their distribution is in `sample_platforms`."""
    draws = torch.rand(DRAWS, 1 << 16, generator=generator(1, "draws"))
    drawn = {name: row for name, row in zip(PARAMETERS, sample_platforms(draws), strict=True)}
    weight = drawn["mass_kg"] * GRAVITY
    thrust = 4.0 * (drawn["thrust_0_n"] + drawn["thrust_1_n"] + drawn["thrust_2_n"])
    ranges = {"thrust_to_weight": thrust / weight} | {
        name: drawn[name] for name in ("mass_kg", "lag_rise_s", "lag_fall_s")
    }

    def inside(airframe: Airframe) -> bool:
        slack = 1.0 + 1e-3
        return all(
            float(values.min()) / slack <= getattr(airframe, name) <= float(values.max()) * slack
            for name, values in ranges.items()
        )

    assert all(inside(airframe) for airframe in UNSEEN.values())
    assert not any(inside(airframe) for airframe in OUTSIDE.values())


def test_the_unseen_fly_as_themselves():
    hover = Hover(position_limit_m=POSITION_LIMIT_M)
    for airframe in MEASURED.values():
        env = QuadrotorEnvironment(1, mdp=hover, airframe=airframe, noise=False)
        env.reset(starts=torch.zeros(1))
        for _ in range(30):
            moved = env.step(torch.full((1, 1, 4), airframe.hover_action))
        assert not moved.terminated.any()


def test_the_task_trains_on_random_platforms_alone():
    task = AnyPlatformTask()
    assert task.distributions == ("random", *UNSEEN, "crazyflie", "crazyflie_21")
    assert task.environment(2, "random", "train").airframe is None
    for name, airframe in MEASURED.items():
        env = task.environment(2, name, "eval")
        assert env.airframe == airframe
        assert "platform" not in env.contract.observation
