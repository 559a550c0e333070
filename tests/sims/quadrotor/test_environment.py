"""The hover environment: initial states, disturbances, ends of episodes; gradients through steps."""

import math

import pytest
import torch

from embodied.environment import DifferentiableEnvironment
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.physics.airframes import CRAZYFLIE, GRAVITY, RACER_5_INCH
from sims.quadrotor.physics.dynamics import Options
from sims.quadrotor.starts import keys
from sims.quadrotor.tasks.hover import Hover

STILL = Hover(
    force_scale=0.0,
    torque_scale=0.0,
    origin_share=1.0,
    initial_velocity_m_s=0.0,
    initial_angular_velocity_rad_s=0.0,
    initial_rotor_speed=CRAZYFLIE.hover_speed,
)


def hover_actions(env, scatter=0.0, seed=0):
    noise = torch.randn(env.num_envs, 1, 4, generator=torch.Generator().manual_seed(seed))
    return CRAZYFLIE.hover_action + scatter * noise


def test_it_is_differentiable_and_says_what_its_task_is():
    env = QuadrotorEnvironment(1)
    assert isinstance(env, DifferentiableEnvironment)
    assert (env.task_names, env.instructions) == (("hover",), ("hover at the origin",))


def test_observations_are_22_or_146_numbers_and_the_rest_is_privileged():
    for history, size in ((1, 22), (32, 146)):
        specs = QuadrotorEnvironment(1, history=history).contract.observation
        assert sum(math.prod(spec.shape) for spec in specs.values() if not spec.privileged) == size
        assert [key for key, spec in specs.items() if spec.privileged] == ["force", "torque", "rotor_speed"]
        assert all(spec.unit for spec in specs.values())


def test_episodes_begin_as_in_the_paper():
    env = QuadrotorEnvironment(20000, noise=False)
    seen = env.reset()
    at_origin = (seen["position"] == 0).all(1)
    assert at_origin.float().mean() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(seen["rotation"][at_origin][0], torch.eye(3).flatten())
    elsewhere = seen[~at_origin]
    for key, bound in (("position", 0.2), ("velocity", 1.0), ("angular_velocity", 1.0)):
        for some in (elsewhere, seen) if key != "position" else (elsewhere,):
            assert some[key].abs().max() <= bound
            assert some[key].std(0) == pytest.approx([bound / math.sqrt(3)] * 3, rel=0.03)
    angle = torch.acos(((elsewhere["rotation"][:, [0, 4, 8]].sum(1) - 1) / 2).clamp(-1, 1))
    assert angle.max() <= math.pi / 2 + 1e-3
    # Uniform rotations below 90 degrees: the angle's distribution is (t - sin t) / (pi / 2 - 1).
    for t in (0.5, 1.0, 1.3):
        expected = (t - math.sin(t)) / (math.pi / 2 - 1)
        assert (angle < t).float().mean() == pytest.approx(expected, abs=0.012)
    assert (seen["rotor_speed"] * CRAZYFLIE.speed_max_rpm).mean() == pytest.approx(10851, abs=1)
    weight = CRAZYFLIE.mass_kg * GRAVITY
    assert seen["force"].std(0) == pytest.approx([weight / 20] * 3, rel=0.03)
    assert seen["torque"].std(0) == pytest.approx([weight / 10000] * 3, rel=0.03)
    assert seen["force"].mean(0) == pytest.approx([0.0] * 3, abs=4 * weight / 20 / math.sqrt(20000))
    pushed = torch.corrcoef(torch.cat((seen["force"], seen["torque"]), 1).t())
    assert (pushed - torch.eye(6)).abs().max() < 5 / math.sqrt(20000)  # each by itself


def test_noise_has_the_papers_deviations_and_is_new_every_step():
    starts = torch.arange(5000)
    noisy, clean = (QuadrotorEnvironment(5000, noise=noise) for noise in (True, False))
    differences = []
    seen = [env.reset(starts=starts) for env in (noisy, clean)]
    for step in range(2):
        differences.append(seen[0] - seen[1])
        seen = [env.step(hover_actions(env, 0.1, step)).observation for env in (noisy, clean)]
    for key, std in (("position", 0.001), ("rotation", 0.001), ("velocity", 0.002), ("angular_velocity", 0.002)):
        first, second = (difference[key].flatten() for difference in differences)
        assert float(first.std()) == pytest.approx(std, rel=0.03)
        assert abs(float(torch.corrcoef(torch.stack((first, second)))[0, 1])) < 5 / math.sqrt(len(first))
    assert (differences[0]["previous_action"] == 0).all()
    assert (differences[0]["rotor_speed"] == 0).all()


def test_left_alone_with_hovers_action_it_stays_and_the_reward_is_one():
    env = QuadrotorEnvironment(3, mdp=STILL, noise=False)
    env.reset()
    for _ in range(50):
        transition = env.step(hover_actions(env))
    assert transition.observation["position"].abs().max() < 1e-6
    assert transition.reward == pytest.approx(torch.ones(3, 1), abs=1e-6)


def test_the_reward_is_what_the_formula_says():
    env = QuadrotorEnvironment(40, noise=False)
    env.reset()
    before = env.step(hover_actions(env, 0.1, 0)).observation
    actions = hover_actions(env, 0.1, 1)
    transition = env.step(actions)
    seen, mdp = transition.observation, env.mdp
    quarter = (seen["rotation"][:, [0, 4, 8]].sum(1) + 1.0) / 4.0  # q_w^2, from the trace
    cost = mdp.weight_position * seen["position"].square().sum(1) + mdp.weight_rotation * (1.0 - quarter)
    cost += mdp.weight_velocity * seen["velocity"].square().sum(1)
    cost += mdp.weight_angular_velocity * seen["angular_velocity"].square().sum(1)
    cost += mdp.weight_action * (actions[:, 0] - CRAZYFLIE.hover_action).square().sum(1)
    cost += mdp.weight_action_change * (actions[:, 0] - before["previous_action"]).square().sum(1)
    assert transition.reward[:, 0] == pytest.approx(1.0 - cost, abs=1e-4)


def test_leaving_the_box_ends_the_episode_without_success():
    env = QuadrotorEnvironment(64)
    env.reset()
    for _ in range(100):
        before = env.steps.clone()
        transition = env.step(-torch.ones(64, 1, 4))
        assert torch.equal(env.steps - before, transition.executed[:, 0].long())
    assert transition.terminated.all()
    assert not transition.truncated.any()
    assert not transition.success.any()
    assert (transition.metrics["survive"] == 0).all()
    assert transition.metrics["position_error_m"].isnan().all()
    assert ((transition.observation["position"].abs().amax(1) - 0.6) > -0.005).all()  # noise


def test_a_crash_is_none_at_the_step_limit_and_afterwards_nothing_happens():
    def linear_decay(step_limit):
        env = QuadrotorEnvironment(1, mdp=STILL, noise=False, step_limit=step_limit)
        env.reset()
        transitions = [env.step(-torch.ones(1, 1, 4)) for _ in range(60)]
        return int(env.steps), transitions[int(env.steps) - 1 :]

    steps, _ = linear_decay(500)
    assert 30 < steps < 60  # 0.6 m
    for transition in linear_decay(steps)[1]:
        assert transition.terminated.all()
        assert not transition.truncated.any()
    steps, (last, *later) = linear_decay(20)
    assert steps == 20
    assert last.truncated.all()
    assert float(last.reward) != 0.0
    for transition in later:
        assert transition.truncated.all()
        assert float(transition.reward) == 0.0
        assert not transition.executed.any()


@pytest.mark.parametrize("rate", [3e3, 1e15])
def test_a_spin_that_numbers_cannot_follow_is_a_crash_and_affects_no_other(rate):
    env, alone = (QuadrotorEnvironment(4, noise=False) for _ in range(2))
    for each in (env, alone):
        each.reset()
    env._state[10:13, 1] = rate
    actions = hover_actions(env)
    transition, undisturbed = env.step(actions), alone.step(actions)
    assert transition.terminated.tolist() == [False, True, False, False]
    assert not (transition.success | transition.truncated).any()
    assert transition.reward.isfinite().all()
    assert all(part.isfinite().all() for part in transition.observation.values())
    others = torch.tensor([0, 2, 3])
    for key in transition.observation.keys():  # noqa: SIM118 - no dict
        assert torch.equal(transition.observation[key][others], undisturbed.observation[key][others])
    env.reset(mask=transition.terminated)
    assert not env.step(actions).terminated.any()


def test_a_spin_that_numbers_cannot_follow_leaves_gradients_finite():
    env = QuadrotorEnvironment(2, noise=False)
    env.reset()
    env._state[10:13, 1] = 3e3
    actions = hover_actions(env).requires_grad_()
    env.step(actions).reward.sum().backward()
    assert actions.grad.isfinite().all()


def test_at_the_step_limit_it_has_survived_and_the_error_is_that_of_the_last_second():
    env = QuadrotorEnvironment(2, mdp=STILL, noise=False, step_limit=130)
    env.reset()
    distances = []
    for step in range(130):
        transition = env.step(hover_actions(env) + 0.02 * (step < 30))
        assert transition.truncated.all() == (step == 129)
        distances.append(transition.observation["position"].norm(dim=1))
    assert transition.success.all()
    assert not transition.terminated.any()
    assert transition.metrics["survive"].tolist() == [1.0, 1.0]
    expected = torch.stack(distances[30:]).mean(0)
    assert transition.metrics["position_error_m"] == pytest.approx(expected, rel=1e-5)
    assert expected[0] > 0.01


def test_an_episode_does_not_depend_on_who_else_flies():
    many, few = QuadrotorEnvironment(100), QuadrotorEnvironment(3)
    starts = torch.arange(100) + 5
    here, there = many.reset(starts=starts), few.reset(starts=starts[[70, 3, 64]])
    for step in range(30):
        for key in there.keys():  # noqa: SIM118 - a TensorDict iterates over rows
            assert torch.equal(here[key][[70, 3, 64]], there[key])
        actions = hover_actions(many, 0.1, step)
        here, there = many.step(actions).observation, few.step(actions[[70, 3, 64]]).observation


def test_training_and_evaluation_share_no_start():
    first, second = (
        QuadrotorEnvironment(500, split=split).reset(starts=torch.arange(500)) for split in ("train", "eval")
    )
    shared = (first["force"].unsqueeze(0) == second["force"].unsqueeze(1)).all(2)
    assert not shared.any()
    with pytest.raises(ValueError, match="unknown split 'test'"):
        QuadrotorEnvironment(1, split="test").reset()


def test_a_named_start_leaves_the_stream_of_others_as_it_is():
    env, dealt = QuadrotorEnvironment(3, seed=4), []
    for starts in (None, torch.tensor([9, 9, 9]), None):
        env.reset(starts=starts)
        dealt.append(env.start.tolist())
    assert dealt[0] + dealt[2] == list(range(dealt[0][0], dealt[0][0] + 6))


def test_an_episode_begins_and_ends_with_a_history_of_its_own():
    env = QuadrotorEnvironment(2, history=3, step_limit=2)
    first = env.reset()["action_history"]
    for _ in range(2):
        last = env.step(hover_actions(env, 0.1)).observation["action_history"]
    assert torch.equal(env.step(hover_actions(env, 0.2)).observation["action_history"], last)  # it has ended
    begun = env.reset(mask=torch.tensor([True, False]))["action_history"]
    assert torch.equal(begun[0], first[0])
    assert torch.equal(begun[1], last[1])


def test_the_history_is_that_of_the_actions_oldest_first():
    env = QuadrotorEnvironment(2, history=3)
    names = env.contract.observation["action_history"].names
    assert names == tuple(f"{rotor}_{age}" for age in (3, 2, 1) for rotor in env.contract.action.names)
    assert env.reset()["action_history"].abs().max() < 1e-6  # rotors at half speed
    given = [hover_actions(env, 0.1, seed) for seed in range(4)]
    for action in given:
        seen = env.step(action).observation
    torch.testing.assert_close(seen["action_history"], torch.cat(given[1:], 1).flatten(1))


@pytest.mark.parametrize("backend", [None, "torch"])
def test_gradients_run_through_steps_and_end_at_detach(backend):
    env = QuadrotorEnvironment(5, backend=backend)
    env.reset()
    first, second = (hover_actions(env, 0.1, seed).requires_grad_() for seed in range(2))
    env.step(first)
    later = env.step(second)
    total = later.reward.sum() + later.observation["velocity"].sum()
    found = torch.autograd.grad(total, (first, second), retain_graph=True)
    assert all(gradient.abs().min() > 0 for gradient in found)
    env.detach()
    third = env.step(hover_actions(env).requires_grad_())
    remembers = QuadrotorEnvironment(5, backend=backend, history=3)
    remembers.reset()
    remembers.step(hover_actions(remembers).requires_grad_())
    remembers.detach()
    assert not remembers.observe()["action_history"].requires_grad
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(third.reward.sum(), first)
    with torch.no_grad():
        assert not env.step(second).reward.requires_grad


def test_gradients_of_reward_and_observation_equal_those_of_plain_torch():
    found = []
    for backend in (None, "torch"):
        env = QuadrotorEnvironment(30, backend=backend, history=2)
        env.reset()
        actions = [hover_actions(env, 0.1, seed).requires_grad_() for seed in range(6)]
        total = 0.0
        for action in actions:
            transition = env.step(action)
            total = total + transition.reward.sum()
            if transition.done.any() or len(actions) == 3:
                env.reset(mask=transition.done)
        for key in ("position", "rotation", "velocity", "angular_velocity", "action_history", "rotor_speed"):
            total = total + transition.observation[key].square().sum()
        found.append(torch.autograd.grad(total, actions))
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-4


def test_a_reset_of_some_leaves_gradients_of_others():
    env = QuadrotorEnvironment(4)
    env.reset()
    action = hover_actions(env).requires_grad_()
    env.step(action)
    env.reset(mask=torch.tensor([True, False, False, False]))
    (gradient,) = torch.autograd.grad(env.step(hover_actions(env)).reward.sum(), action)
    assert (gradient[0] == 0).all()
    assert (gradient[1:] != 0).all()


def test_platforms_differ_between_episodes_and_are_the_same_for_a_start():
    env = QuadrotorEnvironment(50, airframe=None, options=Options(drag=True, delay_steps=2))
    env.reset(starts=torch.arange(50))
    first = env._airframe[:, :50].clone()
    assert len(first[0].unique()) == 50
    env.reset(starts=torch.arange(50) + 50)
    assert not (env._airframe[0, :50] == first[0]).any()
    env.reset(starts=torch.arange(50))
    assert torch.equal(env._airframe[:, :50], first)
    assert env.step(hover_actions(env)).reward.isfinite().all()


def test_another_airframe_flies():
    env = QuadrotorEnvironment(4, airframe=RACER_5_INCH, mdp=Hover(origin_share=1.0))
    env.reset()
    transition = env.step(torch.full((4, 1, 4), RACER_5_INCH.hover_action))
    assert transition.reward.min() > 0.5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"num_envs": 0}, "num_envs=0"), ({"seed": -1}, "a seed in"), ({"history": 0}, "history=0")],
)
def test_impossible_environments_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        QuadrotorEnvironment(**{"num_envs": 2, **wrong})


def test_wrong_shapes_are_refused():
    env = QuadrotorEnvironment(3)
    env.reset()
    with pytest.raises(ValueError, match=r"actions of shape \(3, 1, 4\), got \(3, 4\)"):
        env.step(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"starts of shape \(3,\)"):
        env.reset(starts=torch.zeros(2))
    with pytest.raises(ValueError, match="initial states >= 0"):
        env.reset(starts=torch.tensor([0, -1, 2]))
    with pytest.raises(ValueError, match="has num_envs=70, got 3"):
        env.load_state_dict(QuadrotorEnvironment(70).state_dict())
    with pytest.raises(ValueError, match="the saved history has shape"):
        env.load_state_dict(QuadrotorEnvironment(3, history=4).state_dict())


def test_a_saved_state_holds_the_action_history():
    env = QuadrotorEnvironment(3, history=4, step_limit=20)
    env.reset()
    for seed in range(6):
        env.step(hover_actions(env, 0.1, seed))
    state = env.state_dict()
    expected = env.step(hover_actions(env, 0.1, 6)).observation["action_history"]
    env.step(hover_actions(env, 0.1, 7))
    env.load_state_dict(state)
    assert torch.equal(env.step(hover_actions(env, 0.1, 6)).observation["action_history"], expected)


def test_a_crash_at_the_step_limit_is_no_time_limit():
    falling = torch.full((1, 1, 4), -1.0)
    env = QuadrotorEnvironment(1, mdp=STILL)
    env.reset()
    steps = 1
    while not env.step(falling).terminated.any():
        steps += 1
    env = QuadrotorEnvironment(1, mdp=STILL, step_limit=steps)
    env.reset()
    for _ in range(steps):
        last = env.step(falling)
    assert last.terminated.all()
    assert not last.truncated.any()
    assert not last.success.any()
    assert (last.metrics["survive"] == 0).all()


def test_keys_depend_on_the_split_and_on_all_64_bits_of_a_start():
    numbers = torch.tensor([5, 6, 5 + (1 << 32), 5 + (1 << 62)])
    train, evaluation = (keys(split, numbers) for split in ("train", "eval"))
    assert (train != evaluation).all()
    assert train.unique(dim=1).shape == (2, 4)
