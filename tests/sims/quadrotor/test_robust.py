"""Hover as real drones do it: latencies, batteries, air, ground and errors of measurement, each by itself."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.episode import Moment
from sims.quadrotor.flights import swept
from sims.quadrotor.physics import air
from sims.quadrotor.physics.airframes import CRAZYFLIE, CRAZYFLIE_21, GRAVITY, PARAMETERS
from sims.quadrotor.physics.dynamics import AIR_ROWS, DT_S, SAG_S, Body, Options
from sims.quadrotor.physics.variation import DRAWS, LEAST_THRUST_TO_WEIGHT, TRAINED, Variation
from sims.quadrotor.task import HoverTask
from sims.quadrotor.tasks.hover import Hover
from sims.quadrotor.tasks.robust import DISTURBED, OPTIONS, RobustHover

CALM = replace(
    DISTURBED,
    force_scale=0.0,
    torque_scale=0.0,
    origin_share=1.0,
    initial_velocity_m_s=0.0,
    initial_angular_velocity_rad_s=0.0,
    initial_rotor_speed=CRAZYFLIE.hover_speed,
)


def made(num_envs=4, mdp=CALM, variation=Variation(), noise=False, **options):  # noqa: B008 - it is frozen
    options = {"options": OPTIONS, "airframe": CRAZYFLIE, "split": "eval", **options}
    env = QuadrotorEnvironment(num_envs, mdp=mdp, variation=variation, noise=noise, **options)
    env.reset(starts=torch.arange(num_envs))
    return env


def test_its_reward_damps_and_smooths_what_hovers_does_not():
    def cost(mdp, position=0.0, velocity=0.0, change=0.0):
        body = Body([position, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, velocity, 0.0], [0.0] * 3, [0.0] * 4)
        action = [CRAZYFLIE.hover_action] * 4
        now = Moment(body, 1.0, [], [], CRAZYFLIE, action=action, previous=[action[0] - change, *action[1:]])
        return mdp.reward_alive - mdp.reward(now)

    hover, robust = Hover(), RobustHover()
    assert cost(robust, position=0.2) == pytest.approx(2.0 * cost(hover, position=0.2))
    assert cost(robust, velocity=0.5) == pytest.approx(10.0 * cost(hover, velocity=0.5))
    assert cost(hover, change=0.1) == pytest.approx(0.0)
    assert cost(robust, change=0.1) == pytest.approx(20.0 * hover.weight_action * 0.1**2)


def some_actions(num_envs, step, around=CRAZYFLIE.hover_action):
    return around + 0.1 * torch.randn(num_envs, 1, 4, generator=torch.Generator().manual_seed(step))


def test_without_any_departure_it_is_the_mdp_of_learning_to_fly():
    robust = made(64, DISTURBED, noise=True)
    plain = QuadrotorEnvironment(64, mdp=Hover(), split="eval")
    plain.reset(starts=torch.arange(64))
    for step in range(40):
        given, expected = (env.step(some_actions(64, step)) for env in (robust, plain))
        assert torch.equal(given.terminated, expected.terminated)
        for key in ("position", "rotation", "velocity", "previous_action"):
            torch.testing.assert_close(given.observation[key], expected.observation[key], atol=2e-4, rtol=1e-3)


def test_nominal_training_is_that_mdp_and_its_22_inputs():
    task = HoverTask(nominal=True)
    assert task.distributions == ("disturbed",)
    ours = task.environment(3, "disturbed", "train")
    theirs = QuadrotorEnvironment(3)
    assert (ours.step_limit, ours.options, ours.mdp, ours.variation) == (500, Options(), Hover(), None)
    assert ours.contract == theirs.contract
    assert torch.equal(ours.reset()["position"], theirs.reset()["position"])


def test_training_episodes_are_short_and_evaluations_are_not():
    task = HoverTask()
    assert task.distributions == ("robust",)
    assert task.environment(1, "robust", "train").step_limit == 150
    assert task.environment(1, "robust", "eval").step_limit == 500
    names = [key for key, spec in task.contract("robust").observation.items() if not spec.privileged]
    assert names == ["position", "rotation", "velocity", "angular_velocity", "action_history"]


def test_measurements_are_as_old_as_the_airframe_says():
    moving = replace(CALM, initial_velocity_m_s=1.0)
    envs = {age: made(8, moving, Variation(observation_delay_s=(age, age))) for age in (0.0, 0.005, 0.01)}
    before = envs[0.0].observe()
    seen = {}
    for age, env in envs.items():
        assert torch.equal(env.observe()["position"], before["position"])  # measured at rest, long ago
        seen[age] = env.step(some_actions(8, 0)).observation
        assert torch.equal(seen[age]["previous_action"], some_actions(8, 0)[:, 0])  # what was sent is known at once
    for key in ("position", "velocity", "angular_velocity"):
        torch.testing.assert_close(seen[0.01][key], before[key], atol=1e-6, rtol=0)
        torch.testing.assert_close(seen[0.005][key], 0.5 * (before[key] + seen[0.0][key]), atol=1e-6, rtol=0)
    assert (seen[0.0]["position"] - before["position"]).abs().max() > 1e-3


def test_commands_arrive_as_late_as_the_airframe_says():
    late, punctual = (made(2, variation=Variation(action_delay_s=(delay, delay))) for delay in (0.02, 0.0))
    full = torch.ones(2, 1, 4)
    for _ in range(2):
        late.step(full)
    torch.testing.assert_close(late.rotors[0], punctual.rotors[0])  # still at hover's speed
    late.step(full)
    punctual.step(full)
    torch.testing.assert_close(late.rotors[0], punctual.rotors[0])
    assert (punctual.rotors[0] > CRAZYFLIE.hover_speed + 0.01).all()


def test_a_battery_sags_under_load_and_takes_thrust():
    env = made(1, replace(CALM, position_limit_m=100.0), Variation(sag=(0.2, 0.2)))
    lacking, speed, full = 0.0, CRAZYFLIE.hover_speed, torch.ones(1, 1, 4)
    for _ in range(60):
        lacking += (0.2 * speed**3 - lacking) * DT_S / SAG_S
        before = float(env.body.velocity[2])
        env.step(full)
        speed = float(env.rotors[0][0, 0])
    assert float(env._state[env.options.dynamic_rows - 1, 0]) == pytest.approx(lacking, rel=1e-3)
    assert 0.12 < lacking < 0.2
    gained = (float(env.body.velocity[2]) - before) / DT_S
    thrust = 4.0 * CRAZYFLIE.thrust_2_n * speed**2 * (1.0 - lacking)
    assert gained == pytest.approx(thrust / CRAZYFLIE.mass_kg - GRAVITY, rel=0.01)


def test_gusts_have_the_deviations_and_time_constants_of_drydens_spectra():
    g, lanes, W = torch.Generator().manual_seed(0), 4000, 4.0
    wind = [torch.full((lanes,), W), torch.zeros(lanes), torch.zeros(lanes)]
    states = air.begin(list(torch.randn(5, lanes, generator=g)))
    first = torch.stack(air.velocity(states, wind))
    for _ in range(100):
        states = air.after(states, wind, list(torch.randn(3, lanes, generator=g)))
    later = torch.stack(air.velocity(states, wind))
    expected = torch.tensor([0.2 * W, 0.2 * W, 0.1 * W])
    for each in (first, later):
        torch.testing.assert_close(each.std(1), expected, rtol=0.06, atol=0)
        torch.testing.assert_close(each.mean(1), torch.tensor([W, 0.0, 0.0]), rtol=0, atol=0.06)
    correlation = torch.corrcoef(torch.stack((first[0], later[0])))[0, 1]
    assert float(correlation) == pytest.approx(math.exp(-1.0 * W / 7.9), abs=0.04)  # e^-t/T, T = L / W


def test_wind_pushes_and_no_wind_has_no_gusts():
    drag = Variation(drag_per_s=(0.25, 0.25))
    still, windy = made(64, variation=drag), made(64, replace(CALM, wind_m_s=2.0), drag)
    for env in (still, windy):
        for _ in range(20):
            seen = env.step(torch.full((64, 1, 4), CRAZYFLIE.hover_action)).observation
    assert still.body.velocity[0].abs().max() < 1e-3
    speed = windy._disturbance[6:8, :64].norm(dim=0)
    pushed = seen["velocity"][:, :2].norm(dim=1)
    assert torch.corrcoef(torch.stack((speed, pushed)))[0, 1] > 0.9
    assert (pushed / speed).mean() == pytest.approx(0.25 * 0.2, rel=0.2)  # drag over mass, for 0.2 s


def test_gusts_of_each_step_are_new():
    env = made(500, replace(CALM, wind_m_s=2.0))
    wind = env._disturbance[6:8, :500]
    # u' = k u + sqrt(1 - k^2) n with k = 1 - W dt / L
    decay = 1.0 - wind.norm(dim=0) * DT_S / air.ALONG_M
    along = [env._state[-AIR_ROWS, :500]]
    for _ in range(3):
        env.step(torch.full((500, 1, 4), CRAZYFLIE.hover_action))
        along.append(env._state[-AIR_ROWS, :500])
    noise = torch.stack([(after - decay * now) / (1.0 - decay**2).sqrt() for now, after in pairwise(along)])
    assert noise.std(1) == pytest.approx([1.0] * 3, abs=0.15)
    correlation = torch.corrcoef(noise)
    assert correlation.fill_diagonal_(0.0).abs().max() < 0.2


def test_errors_of_measurement_last_for_an_episode_and_turn_no_drone():
    biased = made(2000, replace(CALM, bias_velocity_m_s=0.05, bias_attitude_rad=0.02))
    seen = biased.observe()
    assert seen["velocity"].std(0) == pytest.approx([0.05] * 3, rel=0.08)
    tilt = torch.acos(seen["rotation"][:, 8].clamp(max=1.0))
    assert tilt.square().mean().sqrt() == pytest.approx(0.02 * math.sqrt(2.0), rel=0.08)
    later = biased.step(torch.full((2000, 1, 4), CRAZYFLIE.hover_action)).observation
    torch.testing.assert_close(later["velocity"], seen["velocity"], atol=1e-4, rtol=0)
    assert biased.body.velocity[0].abs().max() < 1e-5


def test_it_stands_on_the_ground_until_it_lifts():
    env = made(3, replace(CALM, take_off_share=1.0, ground_m=0.4, heading_rad=0.0))
    assert (env.observe()["position"][:, 2] == -0.4).all()
    assert (env.observe()["previous_action"] == -1.0).all()
    assert (env.rotors[0] == 0.0).all()
    for _ in range(30):
        transition = env.step(torch.full((3, 1, 4), CRAZYFLIE.hover_action - 0.4))
    assert not transition.terminated.any()
    assert (transition.observation["position"][:, 2] == -0.4).all()
    for _ in range(60):
        transition = env.step(torch.full((3, 1, 4), CRAZYFLIE.hover_action + 0.2))
    assert (transition.observation["position"][:, 2] > -0.35).all()


def test_what_falls_onto_the_ground_has_crashed_and_says_so():
    env = made(2, replace(CALM, ground_m=0.4))
    for _ in range(60):
        transition = env.step(-torch.ones(2, 1, 4))
    assert transition.terminated.all()
    assert transition.failures["hit the ground"].all()
    assert not transition.failures["out of bounds"].any()
    assert (env.body.position[2] == -torch.tensor(0.4)).all()
    out = made(2, CALM)
    for _ in range(60):
        transition = out.step(-torch.ones(2, 1, 4))
    assert transition.failures["out of bounds"].all()


def test_some_take_over_with_a_history_of_standstill():
    env = made(2000, replace(CALM, take_over_share=0.25))
    previous = env.observe()["previous_action"]
    unknown = (previous == -1.0).all(1)
    assert float(unknown.float().mean()) == pytest.approx(0.25, abs=0.04)
    assert previous[~unknown].mean() == pytest.approx(CRAZYFLIE.hover_action, abs=1e-4)
    assert (env.rotors[0] > 0.6).all()  # they turn all the same


def test_drones_differ_within_the_ranges_and_can_climb():
    draws = torch.rand(DRAWS, 4000, generator=torch.Generator().manual_seed(0))
    trained = replace(TRAINED, other=CRAZYFLIE_21)
    found = dict(zip(PARAMETERS, trained.airframes(CRAZYFLIE, draws), strict=True))
    assert found["delay_s"].min() < 0.001
    assert 0.024 < found["delay_s"].max() <= 0.025
    assert 0.0095 < found["observation_delay_s"].max() <= 0.01
    assert 0.0216 <= found["mass_kg"].min() < 0.0222
    assert 0.037 < found["mass_kg"].max() <= 1.2 * 0.0319
    assert found["lag_rise_s"].min() < 0.06
    thrust = 4.0 * sum(found[f"thrust_{power}_n"] for power in range(3)) * (1.0 - found["sag"])
    ratio = thrust / (found["mass_kg"] * GRAVITY)
    assert ratio.min() >= LEAST_THRUST_TO_WEIGHT - 1e-4
    assert ratio.max() > 2.5
    same = Variation().airframes(CRAZYFLIE_21, draws)
    torch.testing.assert_close(same, torch.tensor(CRAZYFLIE_21.values()).unsqueeze(1).expand(-1, 4000))


def test_a_share_of_thrust_that_is_told_is_not_raised():
    (found,) = Variation(thrust=(0.5, 0.5)).airframes(CRAZYFLIE, torch.rand(DRAWS, 1)).T
    assert float(found[PARAMETERS.index("thrust_2_n")]) == pytest.approx(0.5 * CRAZYFLIE.thrust_2_n)


def test_points_of_a_sweep_depart_from_the_mdp_by_what_they_name():
    heavy, late = swept(CRAZYFLIE, "mass=1.3"), swept(CRAZYFLIE, "latency=0.04")
    assert (heavy.variation.mass, heavy.mdp, heavy.variation.thrust) == ((1.3, 1.3), DISTURBED, (1.0, 1.0))
    assert late.variation.action_delay_s == (0.04, 0.04)
    assert late.options.delay_steps >= 5
    for wrong, message in (("mass=heavy", "a number"), ("charm=1", "unknown quantity 'charm'")):
        with pytest.raises(ValueError, match=message):
            swept(CRAZYFLIE, wrong)
    with pytest.raises(ValueError, match="unknown distribution 'calm'; expected one of robust, disturbed, late_10_ms"):
        HoverTask().environment(1, "calm", "eval")


@pytest.mark.parametrize("wrong", [{"mass": (1.2, 0.8)}, {"sag": (-0.1, 0.0)}])
def test_ranges_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match=r"as \[lowest, highest\] of at least 0"):
        Variation(**wrong)


def test_a_floor_needs_the_rows_of_the_wind():
    with pytest.raises(ValueError, match="set wind=true too"):
        Options(floor=True)


def test_compiled_code_and_torch_agree_on_everything_at_once():
    found = []
    for backend in ("c", "torch"):
        env = made(64, RobustHover(), TRAINED, noise=True, backend=backend, history=3)
        actions = [some_actions(64, step).requires_grad_() for step in range(8)]
        total = sum(env.step(action).reward.sum() for action in actions)
        found.append((total.detach(), *torch.autograd.grad(total, actions)))
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-3
