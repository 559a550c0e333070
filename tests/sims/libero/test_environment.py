import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from mujoco import MjData, mj_kinematics
from tensordict import TensorDict

from embodied.contract import Contract
from embodied.environment import NumberedStarts
from embodied.evaluation.evaluation import evaluate
from embodied.policy import Decision
from embodied.report.report import Report
from embodied.rollout.rollout import Collector
from embodied.text import decode
from sims.libero.assets import find_assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.physics.backend import LiberoSim
from sims.libero.suite import load_tasks
from tests.embodied.reach import FixedStarts

TASKS = load_tasks("libero_object", [0, 3])
pytestmark = pytest.mark.assets
ASSETS = find_assets(os.environ.get("LIBERO_ASSETS") or "stand-in")


def make(num_envs=4, **options):
    options = {"executed": 4, "step_limit": 10, "distribution": "wide"} | options
    return LiberoEnvironment(TASKS, num_envs, assets=ASSETS, threads=1, **options)


def random_actions(env, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(env.num_envs, env.contract.executed, 7, generator=generator) * 2 - 1


def equal(first, second):
    return all(torch.equal(first[key], second[key]) for key in first.keys())  # noqa: SIM118 - not a dict


def finish(env, index):
    """Put the target of environment `index` into its basket."""
    simulation, scene = env.simulation, env.simulation.scenes[index]
    qpos = simulation.data[index].qpos.copy()
    target, basket = (scene.object_qposadr[scene.objects.index(name)] for name in scene.task.problem.obj_of_interest)
    qpos[target : target + 2] = qpos[basket : basket + 2]
    qpos[target + 2] = qpos[basket + 2] + 0.12
    simulation.write(index, qpos, np.zeros(scene.model.nv))


def test_it_is_an_environment_with_a_readable_contract_before_the_first_reset():
    env = make()
    assert isinstance(env, NumberedStarts)
    assert Contract.from_dict(env.contract.to_dict()) == env.contract
    assert env.task_index.tolist() == [0, 1, 0, 1]


def test_observations_fit_the_contract_and_belong_to_the_state():
    env = make()
    env.reset()
    observation = env.step(random_actions(env)).observation
    for key, spec in env.contract.observation.items():
        shape = observation[key].shape[1:]
        assert all(want in (-1, got) for want, got in zip(spec.shape, shape, strict=True)), key
        assert str(observation[key].dtype) == f"torch.{spec.dtype}"
    scene, data = env.simulation.scenes[1], MjData(env.simulation.scenes[1].model)
    data.qpos[:] = env.simulation.data[1].qpos
    mj_kinematics(scene.model, data)
    hand = data.site_xmat[scene.grip_site].reshape(3, 3)
    body = scene.object_body[2]
    expected = {
        "joint_position": data.qpos[scene.arm_qposadr],
        "gripper_position": data.qpos[scene.gripper_qposadr],
        "end_effector_position": data.site_xpos[scene.grip_site],
        "end_effector_rotation": np.concatenate((hand[:, 0], hand[:, 1])),
    }
    for key, value in expected.items():
        np.testing.assert_allclose(observation[key][1].numpy(), value, atol=1e-6)
    np.testing.assert_allclose(observation["object_position"][1, 2].numpy(), data.xpos[body], atol=1e-6)
    matrix = data.xmat[body].reshape(3, 3)
    np.testing.assert_allclose(observation["object_rotation"][1, 2].numpy(), matrix[:, :2].T.ravel(), atol=1e-6)


def test_the_gripper_command_shows_how_hard_fingers_press_though_they_no_longer_move():
    env = make()
    opened = env.reset()["gripper_command"]
    closing = torch.zeros(env.num_envs, env.contract.executed, 7)
    closing[..., 6] = 1.0
    torch.testing.assert_close(opened, torch.full_like(opened, -1.0))  # five steps of 25 x 0.01 from 0, while settling
    commands = env.step(closing).observation["gripper_command"]
    torch.testing.assert_close(commands, (-1.0 + 0.25 * torch.full_like(commands, env.contract.executed)).clamp_max(1))


def test_texts_name_each_environments_own_task():
    env = make()
    observation = env.reset()
    for index, task in enumerate(TASKS):
        assert decode(observation["instruction"][index].numpy()) == task.language
        assert [decode(name) for name in observation["object_names"][index].numpy()] == list(task.problem.objects)
        assert observation["object_mask"][index].all()


def test_a_chunk_equals_its_single_steps():
    chunked, single = make(executed=4), make(executed=1)
    chunked.reset()
    single.reset()
    actions = random_actions(chunked)
    together = chunked.step(actions).observation
    for step in range(4):
        apart = single.step(actions[:, step : step + 1]).observation
    assert equal(together, apart)


def test_the_step_limit_cuts_inside_a_chunk_and_then_everything_freezes():
    env = make(step_limit=6)
    env.reset()
    first = env.step(random_actions(env))
    assert first.executed.all()
    assert not first.done.any()
    second = env.step(random_actions(env, 1))
    assert second.executed.tolist() == [[True, True, False, False]] * 4
    assert second.truncated.all()
    assert not second.terminated.any()
    third = env.step(random_actions(env, 2))
    assert not third.executed.any()
    assert third.truncated.all()
    assert equal(third.observation, second.observation)
    assert env.steps.tolist() == [6] * 4


def test_success_is_rewarded_once_at_its_step_and_freezes_that_environment():
    env = make()
    env.reset()
    finish(env, 2)
    transition = env.step(torch.zeros(4, 4, 7))
    assert transition.success.tolist() == [False, False, True, False]
    assert transition.terminated.tolist() == transition.success.tolist()
    executed = int(transition.executed[2].sum())
    assert transition.reward[2].tolist() == [float(step == executed - 1) for step in range(4)]
    assert transition.reward.sum() == 1
    again = env.step(torch.zeros(4, 4, 7))
    assert again.reward.sum() == 0
    assert again.success[2]
    assert not again.executed[2].any()
    assert torch.equal(again.observation["object_position"][2], transition.observation["object_position"][2])


def test_a_success_at_the_step_limit_is_a_termination():
    env = make()
    env.reset()
    finish(env, 2)
    needed = int(env.step(torch.zeros(4, 4, 7)).executed[2].sum())
    env = make(step_limit=needed)
    env.reset()
    finish(env, 2)
    transition = env.step(torch.zeros(4, 4, 7))
    assert env.steps.tolist() == [needed] * 4
    assert transition.terminated.tolist() == [False, False, True, False]
    assert transition.truncated.tolist() == [True, True, False, True]


def test_physics_that_diverges_fails_that_episode_alone(caplog):
    env, alone = make(), make()
    started, _ = env.reset(), alone.reset()
    env.simulation.data[2].qvel[:7] = 1e9
    transition, undisturbed = env.step(random_actions(env)), alone.step(random_actions(alone))
    assert transition.events["diverged"].tolist() == transition.terminated.tolist() == [False, False, True, False]
    assert transition.executed[2].tolist() == [True, False, False, False]  # the action that it ended with
    assert not (transition.truncated | transition.success).any()
    assert transition.reward.sum() == 0
    assert torch.equal(transition.observation["object_position"][2], started["object_position"][2])
    assert all(torch.isfinite(part.float()).all() for part in transition.observation.values())
    assert all(equal(transition.observation[i], undisturbed.observation[i]) for i in (0, 1, 3))
    assert "the simulation diverged" in caplog.text

    saved = env.state_dict()
    again = env.step(random_actions(env, 1))
    assert not again.executed[2].any()
    env.load_state_dict(saved)
    assert env.step(random_actions(env, 1)).events["diverged"][2], "a restored environment goes on with it"
    env.reset(mask=torch.arange(4) == 2)
    after = env.step(random_actions(env, 2))
    assert after.executed[2].all()
    assert not after.done[2]
    assert torch.isfinite(after.observation["object_position"]).all()


class Diverges(LiberoEnvironment):
    """It diverges in the second chunk of initial state 3 of the first task."""

    def step(self, actions):
        for i in ((self.start == 3) & (self.task_index == 0) & (self.steps == 4)).nonzero().flatten().tolist():
            self.simulation.data[i].qvel[:7] = 1e9
        return super().step(actions)


class Still:
    """Commands no motion."""

    def __init__(self, env):
        self.contract = env.contract

    def act(self, observation, *, deterministic=False, generator=None):
        actions = torch.zeros(len(observation), self.contract.horizon, 7)
        terms = torch.zeros(len(observation), self.contract.executed, 1)
        return Decision(actions, TensorDict({}, [len(observation)]), terms)


def test_an_evaluation_counts_what_diverged_as_failed_and_goes_on(tmp_path):
    env = Diverges(TASKS, 2, assets=ASSETS, threads=1, executed=4, step_limit=8)
    result = evaluate(env, Still(env), starts_per_task=5)
    assert result.count("diverged") == result.summary()["diverged"] == 1
    assert result.steps.tolist() == [[8, 8, 8, 5, 8], [8] * 5]
    assert not result.success.any()
    report = Report("libero_pick", "stand-in", seed=0)
    report.add("rl", "wide", result)
    assert "10 episodes, 1 diverged" in report.summary(tmp_path)
    report.write(tmp_path, {})
    assert "| 10, 1 diverged |" in (tmp_path / "report.md").read_text()


def test_training_goes_on_after_a_divergence_and_does_not_learn_from_it():
    env = Diverges(TASKS[:1], 2, assets=ASSETS, threads=1, executed=4, step_limit=8)
    rollout = Collector(env, Still(env), torch.Generator(), FixedStarts([2, 3])).collect(4)
    assert rollout.odd_episodes()["diverged"] == 2  # the same start again
    assert rollout.own.tolist() == [[True, True], [True, False]] * 2
    assert rollout.terminated.tolist() == [[False, False], [False, True]] * 2
    assert rollout.truncated.tolist() == [[False, False], [True, False]] * 2
    assert all(part.isfinite().all() for part in rollout.next_observation().float().values())


def test_a_masked_reset_leaves_the_others_where_they_are():
    env = make()
    env.reset()
    before = env.step(random_actions(env)).observation
    after = env.reset(mask=torch.tensor([False, True, False, False]))
    assert env.steps.tolist() == [4, 0, 4, 4]
    for index in (0, 2, 3):
        assert equal(before[index], after[index])
    assert not torch.equal(before["object_position"][1], after["object_position"][1])


@pytest.mark.parametrize("distribution", ["official", "wide"])
def test_a_named_initial_state_is_the_same_wherever_and_whenever_it_starts(distribution):
    first, second = make(distribution=distribution), make(6, distribution=distribution, seed=5)
    one = first.reset(starts=torch.tensor([7, 8, 9, 10]))
    second.reset()
    second.step(random_actions(second))
    two = second.reset(starts=torch.tensor([9, 1, 3, 8, 7, 10]))
    for here, there in ((0, 4), (1, 3), (2, 0), (3, 5)):
        assert equal(one[here], two[there])


def test_the_stream_never_repeats_a_start_and_depends_on_the_seed_alone():
    env = make(seed=3)
    seen = []
    for _ in range(3):
        env.reset()
        seen.append(env.start.tolist())
    starts = [start for row in seen for start in row]
    assert len(set(starts[::2])) == len(starts[::2])
    again, other = make(seed=3), make(seed=4)
    again.reset()
    assert again.start.tolist() == seen[0]
    other.reset()
    assert not set(other.start.tolist()) & set(starts)


def test_training_and_evaluation_begin_in_states_of_their_own():
    starts = torch.zeros(4, dtype=torch.long)
    first, second = (make(split=split).reset(starts=starts)["object_position"] for split in ("train", "eval"))
    assert not torch.isclose(first[..., :2], second[..., :2]).any()
    assert not torch.isclose(first[0, ..., :2], first[1, ..., :2]).any()  # nor do two tasks


def test_a_seed_says_which_official_state_is_first():
    env = make(distribution="official", seed=48)
    env.reset()
    assert env.start.tolist() == [48, 48, 49, 49]
    env.reset()
    assert env.start.tolist() == [0, 0, 1, 1]


def test_official_starts_rest_and_are_close_to_what_libero_stored():
    env = make(distribution="official")
    observation = env.reset(starts=torch.tensor([0, 49, 48, 1]))
    assert torch.isfinite(observation["object_position"]).all()
    for index, start in ((0, 0), (2, 48)):
        qpos = env._placements[0](start).qpos
        moved = observation["object_position"][index, :, :2].numpy() - qpos[9:58].reshape(7, 7)[:, :2]
        assert np.abs(moved).max() < 0.02


def test_a_restored_environment_continues_bit_for_bit():
    env, other = make(), make(seed=9)
    env.reset()
    env.step(random_actions(env))
    env.reset(mask=torch.tensor([True, False, False, False]))
    state = env.state_dict()
    now = env.reset(mask=torch.zeros(4, dtype=torch.bool))
    expected = [env.step(random_actions(env, seed)).observation for seed in (1, 2)]
    fresh = env.reset()
    assert equal(other.load_state_dict(state), now)
    for seed, observation in zip((1, 2), expected, strict=True):
        assert equal(other.step(random_actions(other, seed)).observation, observation)
    assert equal(other.reset(), fresh)


def test_results_do_not_depend_on_the_number_of_threads():
    one, two = (LiberoEnvironment(TASKS, 4, assets=ASSETS, threads=threads, executed=4) for threads in (1, 2))
    assert equal(one.reset(), two.reset())
    assert equal(one.step(random_actions(one)).observation, two.step(random_actions(two)).observation)


def test_actions_beyond_the_limits_are_clipped():
    one, two = make(), make()
    one.reset()
    two.reset()
    actions = 3 * random_actions(one)
    assert equal(one.step(actions).observation, two.step(actions.clamp(-1, 1)).observation)


def test_objects_of_a_fresh_episode_are_at_rest():
    env = make()
    env.reset()
    observations = [env.step(torch.tensor([0.0] * 6 + [-1.0]).expand(4, 4, 7)).observation for _ in range(2)]
    for before, after in pairwise(observations):
        moved = (after["object_position"] - before["object_position"]).norm(dim=-1)
        assert moved.max() < 5e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"distribution": "nope"}, "unknown distribution 'nope'"),
        ({"split": "test"}, "unknown split 'test'"),
        ({"num_envs": 0}, "at least one"),
        ({"step_limit": 0}, "at least one"),
        ({"seed": -1}, "expected a seed"),
    ],
)
def test_bad_settings_are_refused_in_one_line(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        make(**change)
    assert "\n" not in str(caught.value)


def test_bad_calls_are_refused_in_one_line():
    env = make()
    with pytest.raises(ValueError, match="call reset"):
        env.step(random_actions(env))
    env.reset()
    with pytest.raises(ValueError, match=r"shape \(4, 4, 7\)"):
        env.step(torch.zeros(4, 2, 7))
    with pytest.raises(ValueError, match=r"environments \[1\] are not finite"):
        env.step(torch.where(torch.arange(4).view(4, 1, 1) == 1, torch.nan, torch.zeros(4, 4, 7)))
    with pytest.raises(ValueError, match="mask of shape"):
        env.reset(mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="initial states >= 0"):
        env.reset(starts=torch.full((4,), -1))


def test_mjwarp_shows_what_mujoco_shows():
    """Same starts, same chunks, fixtures and instructions; a saved state continues; the physics is single precision."""
    ours, warp = (make(num_envs=3, sim=sim) for sim in (LiberoSim.mujoco, LiberoSim.mjwarp))
    assert ours.contract == warp.contract
    starts = torch.tensor([3, 1, 4])
    ours.reset(starts=starts), warp.reset(starts=starts)
    actions = random_actions(ours)
    expected, got = ours.step(actions), warp.step(actions)
    for name, values in expected.observation.items():
        torch.testing.assert_close(got.observation[name], values, rtol=0, atol=2e-4, msg=name)  # 5e-6 is MuJoCo's sleep
    assert torch.equal(got.executed, expected.executed)
    state = warp.state_dict()
    after = warp.step(actions).observation
    warp.load_state_dict(state)
    assert equal(warp.step(actions).observation, after)
