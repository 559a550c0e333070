"""Worlds of Gymnasium as ours, beside Gymnasium's own loop."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.report.report import Report
from embodied.rollout.random_play import first_decisions
from embodied.rollout.rollout import Collector
from embodied.saving.tree import load_tree, save_tree
from embodied.seeding import derive
from policies.mlp import MLPConfig
from sims.gym.environment import GymEnvironment, _warn_once, make
from tests.sims.gym import worlds

OPTIONS = "spread", "told", "broken_at", "seeded", "noisy", "modifies", "solved_beyond"


def line(num_envs: int = 3, **options) -> GymEnvironment:
    given = {name: options.pop(name) for name in OPTIONS if name in options}
    return GymEnvironment(num_envs, "Line-v0", options=given, **options)


def chunks(env: GymEnvironment, seed: int = 0) -> torch.Tensor:
    """Actions [N, K, A], also beyond the limits; the first world stands still."""
    shape = env.num_envs, env.contract.executed, *env.contract.action.shape
    drawn = 2.0 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn * (torch.arange(env.num_envs) > 0).view(-1, 1, 1)


def test_the_contract_names_what_gymnasium_tells():
    contract = line(executed=2, control_dt_s=0.02).contract
    seen = contract.observation
    assert list(seen) == ["camera", "inner.bounded", "mode", "state"]
    assert (seen["camera"].dtype, seen["camera"].camera) == ("uint8", "camera")
    assert (seen["state"].dtype, seen["state"].shape, seen["state"].low) == ("float32", (2,), ())
    assert (seen["inner.bounded"].low, seen["inner.bounded"].high) == ((-5.0,), (5.0,))
    assert seen["mode"].shape == (3,)
    assert (contract.action.low, contract.action.high) == ((-1.0, -2.0), (1.0, 2.0))
    assert (contract.control_dt_s, contract.horizon, contract.executed) == (0.02, 2, 2)
    assert line().contract.control_dt_s == 0.1  # of render_fps
    assert GymEnvironment(1, "Pendulum-v1").contract.control_dt_s == 0.05  # of dt


def test_every_episode_is_that_of_gymnasiums_own_loop():
    # To the true end, clipped, and not a step further.
    env = line(executed=4)
    first = env.reset(starts=torch.tensor([7, 8, 9]))
    made = [env.step(chunks(env, seed)) for seed in range(2)]
    actions = torch.cat([chunks(env, seed) for seed in range(2)], 1).numpy()
    lengths = []
    for row in range(3):
        world = gymnasium.make("Line-v0")
        seen, _ = world.reset(seed=derive(7 + row, "Line-v0", "train") % 2**31)
        assert first["state"][row].tolist() == pytest.approx(seen["state"].tolist())
        rewards, done = [], False
        while not done:
            action = actions[row, len(rewards)].astype(np.float64).reshape(2, 1)
            clipped = action.clip(world.action_space.low, world.action_space.high)
            seen, reward, terminated, truncated, info = world.step(clipped)
            rewards.append(reward)
            done = terminated or truncated
        last = made[-1]
        found = torch.cat([each.reward[row][each.executed[row]] for each in made])
        assert found.tolist() == pytest.approx(rewards)
        assert (bool(last.terminated[row]), bool(last.truncated[row])) == (terminated, truncated and not terminated)
        assert bool(last.success[row]) == info["is_success"]
        assert last.observation["state"][row].tolist() == pytest.approx(seen["state"].tolist())
        assert (last.observation["camera"][row] == len(rewards)).all()
        assert last.observation["mode"][row].argmax() == seen["mode"] - 1
        assert last.observation["inner.bounded"][row].tolist() == pytest.approx(seen["inner"]["bounded"].tolist())
        lengths.append(len(rewards))
    assert min(lengths) < 6 == max(lengths)


def test_training_and_evaluation_begin_elsewhere():
    train, eval_ = (line(split=split).reset() for split in ("train", "eval"))
    assert not (train["state"][:, 0] == eval_["state"][:, 0]).any()


def test_success_is_what_the_last_step_says_or_a_return_or_not_defined():
    right = torch.tensor([[[0.4, 0.0]], [[0.0, 0.0]], [[-0.4, 0.0]]])

    def end(env: GymEnvironment):
        env.reset()
        for _ in range(6):
            transition = env.step(right)
            assert (transition.success <= transition.done).all()
        return transition

    said = end(line(spread=0.0, told="success"))
    assert said.success.tolist() == [True, False, False]
    assert said.has_success
    assert said.metrics["return"].tolist() == pytest.approx([-8.4, 0.0, -8.4])
    env = line(spread=0.0, success_return=0.0)  # who stands still earns just that
    for _ in range(2):  # and no return goes over to the next episode
        enough = end(env)
        assert (enough.success.tolist(), enough.has_success) == ([False, True, False], True)
        assert enough.metrics["return"].tolist() == pytest.approx([-8.4, 0.0, -8.4])
    unknown = end(line(spread=0.0, told=None))
    assert (unknown.success.tolist(), unknown.has_success, unknown.metrics) == ([False] * 3, False, {})


def test_numbers_that_are_not_finite_end_an_episode_and_are_not_seen(caplog):
    env = line(broken_at=3)
    env.reset()
    for _ in range(3):
        broken = env.step(torch.zeros(3, 1, 2))
    assert broken.events["diverged"].all()
    assert broken.terminated.all()
    assert torch.equal(broken.observation["state"][:, 1], torch.full((3,), 2.0))
    assert "diverged in Line-v0" in caplog.text


def test_one_world_that_breaks_leaves_the_others_alone():
    env = line()
    env.worlds[1].unwrapped.broken_at = 2
    env.reset()
    for step in (1, 2, 3):
        transition = env.step(torch.zeros(3, 1, 2))
        assert transition.done.tolist() == [False, step > 1, False]
        assert transition.observation["state"][:, 1].tolist() == [step, 1.0, step]


def test_success_counts_where_the_step_limit_ends_an_episode_before_the_world_does():
    env = line(spread=0.0)
    env.reset()
    env.steps = torch.tensor([4, 0, 0])  # as rsl_rl does to begin at different times
    right = torch.zeros(3, 1, 2) + torch.tensor([1.0, 0.0])
    assert [env.step(right).success.tolist() for _ in range(2)] == [[False] * 3, [True, False, False]]


def test_a_resumed_episode_keeps_its_return():
    env, other = (line(spread=0.0, success_return=-1e9, executed=3) for _ in range(2))
    env.reset()
    env.step(torch.full((3, 3, 2), 0.1))
    other.load_state_dict(env.state_dict())
    found = [each.step(torch.full((3, 3, 2), -0.2)).metrics["return"] for each in (env, other)]
    assert torch.equal(*found)
    assert (found[0] < -2.0).all()


def test_the_highest_score_is_chosen():
    env = GymEnvironment(3, "Choices-v0", step_limit=5, control_dt_s=0.1)
    assert env.contract.action.names == ("choice_-1", "choice_0", "choice_1")
    env.reset()
    transition = env.step(torch.tensor([[[0.1, 0.0, -1.0]], [[-0.5, 0.9, 0.0]], [[-0.1, -0.2, 0.3]]]))
    assert transition.reward.flatten().tolist() == [-1.0, 0.0, 1.0]
    assert transition.observation["observation"].flatten().tolist() == [99, 100, 101]


def test_a_world_that_is_not_the_same_twice_is_not_resumed(tmp_path):
    for seeded in (True, False):
        env, other = (line(seeded=seeded, executed=2) for _ in range(2))
        env.reset()
        env.step(chunks(env))
        save_tree(tmp_path / str(seeded), env.state_dict())
        if seeded:
            other.load_state_dict(load_tree(tmp_path / str(seeded)))
        else:
            with pytest.raises(UserError, match="not the same twice"):
                other.load_state_dict(load_tree(tmp_path / str(seeded)))


@pytest.mark.parametrize(
    ("id", "options", "said"),
    [
        ("Pendulun-v1", {}, "knows no environment 'Pendulun-v1'; did you mean Pendulum-v1"),
        ("Pendulum-v9", {}, "did you mean Pendulum-v1"),
        ("nowhere:Thing-v0", {}, "nowhere:Thing-v0 cannot be made: No module named 'nowhere'"),
        ("Line-v0", {"weight": 1}, "Line-v0 cannot be made: .*unexpected keyword argument 'weight'"),
    ],
)
def test_what_is_not_there_is_one_line(id, options, said):
    with pytest.raises(UserError, match=said) as caught:
        make(id, options=options)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_used_says_what_to_do():
    with pytest.raises(UserError, match=r"no time limit; set task\.step_limit"):
        make("Choices-v0")
    with pytest.raises(UserError, match=r"time between its steps; set task\.control_dt_s"):
        GymEnvironment(1, "Choices-v0", step_limit=5)
    for space in (spaces.MultiDiscrete([2, 2]), spaces.Text(3)):
        with pytest.raises(UserError, match="expected a Box or Discrete"):
            GymEnvironment(1, "Choices-v0", options={"actions": space}, step_limit=5, control_dt_s=0.1)
    endless = {"actions": spaces.Box(-np.inf, np.inf, (2,))}
    with pytest.raises(UserError, match=r"no limits; set task\.action_limit"):
        GymEnvironment(1, "Choices-v0", options=endless, step_limit=5, control_dt_s=0.1)
    env = GymEnvironment(1, "Choices-v0", options=endless, step_limit=5, control_dt_s=0.1, action_limit=0.5)
    assert (env.contract.action.low, env.contract.action.high) == ((-0.5, -0.5), (0.5, 0.5))


def test_warnings_about_a_model_are_logged_once(caplog, capfd):
    _warn_once.cache_clear()
    for _ in range(2):
        make("HalfCheetah-v5").close()
    assert sum("settotalmass" in each for each in caplog.messages) == 1
    assert capfd.readouterr().err.count("settotalmass") <= 1  # that of logging, without MuJoCo's own


def test_a_world_that_resets_itself_is_refused():
    def itself() -> gymnasium.Env:
        return gymnasium.wrappers.Autoreset(worlds.Line())

    gymnasium.register("Itself-v0", itself, max_episode_steps=5)
    try:
        with pytest.raises(UserError, match="resets itself"):
            make("Itself-v0")
    finally:
        del gymnasium.registry["Itself-v0"]


def test_a_world_that_modifies_its_actions_is_resumed_with_the_actions_of_the_policy(tmp_path):
    env = line(modifies=True)
    env.reset(starts=torch.tensor([0, 1, 2]))
    actions = chunks(env, 1)
    before = env.step(actions).observation
    save_tree(tmp_path / "state", env.state_dict())
    again = line(modifies=True)
    assert (again.load_state_dict(load_tree(tmp_path / "state"))["state"] == before["state"]).all()
    assert torch.equal(env.step(chunks(env, 2)).reward, again.step(chunks(env, 2)).reward)


def test_actions_of_a_rollout_and_of_statistics_are_not_those_that_a_world_modified():
    env = line(modifies=True, executed=2)
    policy = MLPConfig(hidden=[8]).build(env.contract)
    _, actions = first_decisions(env, torch.Generator().manual_seed(0))
    assert actions.any()
    policy.fit(*first_decisions(env, torch.Generator().manual_seed(0)))
    modified = _Modifying(line(executed=2))
    rollout = Collector(modified, policy, torch.Generator().manual_seed(0), None).collect(3)
    plain = Collector(line(executed=2), policy, torch.Generator().manual_seed(0), None).collect(3)
    assert torch.equal(rollout.actions, plain.actions)


class _Modifying:
    """`env`, whose step overwrites the chunk that it is given, as an environment from outside may."""

    def __init__(self, env: GymEnvironment) -> None:
        self.env = env

    def __getattr__(self, name: str):
        return getattr(self.env, name)

    def step(self, actions: torch.Tensor):
        transition = self.env.step(actions)
        actions.zero_()
        return transition


def evaluated(**options):
    env = line(**options)
    policy = MLPConfig(hidden=[8]).build(env.contract)
    policy.fit(*first_decisions(env, torch.Generator().manual_seed(0)))
    return evaluate(env, policy, starts_per_task=8)


@pytest.mark.parametrize("fault", [{"seeded": False}, {"noisy": True}])
def test_an_evaluation_of_a_world_that_ignores_its_seed_says_that_it_is_not_repeatable(fault):
    assert evaluated().repeatable
    assert not evaluated().remarks()
    result = evaluated(**fault)
    assert not result.repeatable
    assert "ignores its seeds" in result.remarks()[0]
    assert result.summary()["repeatable"] is False


def test_success_at_reset_is_counted_apart():
    result = evaluated(solved_beyond=-9.0, spread=0.1)  # every episode begins solved
    assert result.metrics["success_at_reset"].flatten().tolist() == [1.0] * 8
    assert result.immediate == int(result.success.sum())
    before = evaluated(solved_beyond=9.0)  # none does
    assert before.immediate == int((before.success & (before.steps <= 1)).sum())
    report = Report("line", None, 0)
    report.add("rl", "Line-v0", replace(result, success=torch.ones_like(result.success)))
    assert "8 of 8 successful episodes" in " ".join(report.to_dict()["notes"])
