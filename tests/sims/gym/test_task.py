"""Tasks of Gymnasium: trained, evaluated by returns where success is not defined, filmed."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import sims.gym.task
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.command_line.config import compose
from embodied.contract import Contract, TensorSpec
from embodied.data.cache import VARIABLE
from embodied.data.episodes import Episodes, EpisodeWriter
from embodied.errors import UserError
from embodied.evaluation import video
from embodied.evaluation.evaluation import evaluate
from embodied.evaluation.means import difference_interval, mean_interval
from embodied.report.report import Report, result_text
from embodied.training.experiment import Experiment, ExperimentConfig
from embodied.training.logging import Logger
from embodied.training.loop import train
from policies.flow import FlowConfig
from policies.mlp import MLPConfig
from real_robot.recording.data_sets.matching import MatchOptions
from real_robot.recording.data_sets.outcomes import Rewards
from real_robot.recording.demonstrations import demonstrations
from real_robot.sim_to_real.results import BackEndRun, compare
from sims.gym.environment import GymEnvironment, resized
from sims.gym.task import GymTask
from tests.sims.gym import worlds
from train import GROUPS, TrainConfig

UNTOLD = {"told": None}


def still(env: GymEnvironment, push: float = 0.0):
    """A policy that always does the same."""
    policy = MLPConfig(hidden=[4]).build(env.contract)
    policy.fit(TensorDict({name: part.float() for name, part in env.reset().items()}, [env.num_envs]), torch.zeros(1))
    with torch.no_grad():
        for weight in policy.actor.parameters():
            weight.zero_()
        policy.actor[-2].bias.fill_(push)
    return policy


def test_a_rate_of_success_is_told_as_one_though_the_return_is_told_beside_it():
    env = GymEnvironment(2, "Line-v0", options=UNTOLD, success_return=-100.0)
    row = evaluate(env, still(env), starts_per_task=4).summary()
    assert row["return"] < 0.0
    assert result_text(row).startswith("success 100.0% [")


def test_returns_are_told_where_success_is_not_defined(tmp_path):
    env = GymEnvironment(2, "Line-v0", options=UNTOLD)
    before, after = evaluate(env, still(env, 0.2), starts_per_task=9), evaluate(env, still(env), starts_per_task=9)
    starts = [env.reset(starts=torch.tensor([start, 0]))["state"][0, 0] for start in range(9)]
    assert after.returns is not None
    assert after.returns[0].tolist() == pytest.approx([-6.0 * abs(float(x)) for x in starts], rel=1e-5)
    row = after.summary()
    assert (row["return"], row["low"], row["high"]) == pytest.approx(mean_interval(after.returns))
    assert "success" not in row
    assert row["per_task"][0]["return"] == row["return"]
    gain = after.gain_over(before)
    assert gain.difference == pytest.approx(float((after.returns - before.returns).mean()))
    paired = mean_interval(after.returns - before.returns)
    assert (gain.low, gain.high, gain.measure) == (pytest.approx(paired[1]), pytest.approx(paired[2]), "return")
    apart = replace(after, repeatable=False).gain_over(before)
    assert (apart.difference, apart.low, apart.high) == pytest.approx(
        difference_interval(after.returns, before.returns)
    )
    assert result_text(row).startswith(f"return {row['return']:.4g} [")
    report = Report("line", None, 0)
    report.add("start", "Line-v0", before)
    report.add("rl", "Line-v0", after)
    with Logger(tmp_path, config={}):
        pass
    report.write(tmp_path, {})
    page = (tmp_path / "report.md").read_text()
    assert "| return [95% interval] |" in page
    assert f"RL over start on Line-v0: return {gain.difference:+.4g} [" in page
    assert "success" not in page
    assert json.loads((tmp_path / "report.json").read_text())["gains"][0]["measure"] == "return"
    with pytest.raises(UserError, match="compares success rates"):
        compare([BackEndRun("simulator", after, {})], env.contract.action)


def test_one_episode_has_no_interval():
    env = GymEnvironment(2, "Line-v0", options=UNTOLD)
    row = evaluate(env, still(env), starts_per_task=1).summary()
    assert (row["low"], row["high"]) == (None, None)
    assert "[" not in result_text(row)


def test_training_tells_returns_and_no_success():
    env = GymEnvironment(8, "Line-v0", options=UNTOLD)
    policy = MLPConfig(hidden=[16], initial_std=0.3).build(env.contract)
    steps = list(train(env, policy, PPOConfig(rollout_length=8, minibatch=32, learning_rate=3e-3), env_steps=6_000))
    ended = [step.ended for step in steps if step.ended]
    assert all("success" not in each for each in ended)
    assert ended[-1]["episode_return"] > ended[0]["episode_return"] + 1.0


def test_a_run_from_its_options_to_its_report_and_film(tmp_path):
    options = ["task=gym", "task.id=tests.sims.gym.worlds:Line-v0", "task.executed=2", "task.options={told:success}"]
    config = compose(TrainConfig, "train", options, GROUPS)[0]
    task = config.task
    assert isinstance(task, GymTask)
    sizes = ExperimentConfig(num_envs=4, env_steps=64, evaluation_starts=4, evaluation_envs=4, video=True)
    learner = PPOConfig(rollout_length=4, minibatch=16)
    Experiment(sizes, task, MLPConfig(hidden=[8]), learner, tmp_path, record={}).run()
    row = json.loads((tmp_path / "report.json").read_text())["evaluations"][0]
    assert {"success", "return"} <= row.keys()  # both: the environment says which episodes succeeded
    assert (tmp_path / "video.mp4").stat().st_size > 0


def test_a_film_begins_at_the_start_that_is_asked_for(tmp_path, monkeypatch):
    filmed = []

    def film(env: GymEnvironment, *given: object):
        shown = video.film(env, *given)
        filmed.append(env.start.tolist())
        return shown

    monkeypatch.setattr(sims.gym.task, "film", film)
    policy = still(GymEnvironment(2, "Line-v0"))
    GymTask(id="Line-v0").video(tmp_path / "film.mp4", {"still": policy}, "cpu", "Line-v0", 7)
    GymTask(id="Line-v0").video(tmp_path / "film.mp4", {"still": policy}, "cpu")
    assert filmed == [[7, 8, 9, 10], [0, 1, 2, 3]]


def test_what_cannot_be_filmed_says_so(tmp_path, monkeypatch):
    def broken(_: object) -> None:
        raise RuntimeError("no display")

    monkeypatch.setattr(worlds.Line, "render", broken)
    policy = still(GymEnvironment(2, "Line-v0"))
    with pytest.raises(UserError, match=r"Line-v0 cannot be rendered here \(no display\); use video=false"):
        GymTask(id="Line-v0").video(tmp_path / "film.mp4", {"still": policy}, "cpu")


@pytest.mark.parametrize("size", ["executed", "step_limit"])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(UserError, match=f"{size}=0: expected a number of at least 1"):
        GymTask(**{size: 0})


def test_a_module_in_the_working_directory_is_recorded_with_its_folder(tmp_path, monkeypatch):
    registered = "gymnasium.register('Beside-v0', helper_beside_it.MADE, max_episode_steps=9)"
    (tmp_path / "beside_the_run.py").write_text(f"import gymnasium\nimport helper_beside_it\n{registered}\n")
    (tmp_path / "helper_beside_it.py").write_text("MADE = 'gymnasium.envs.classic_control:PendulumEnv'\n")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.chdir(tmp_path)
    name = "beside_the_run:Beside-v0"
    recorded = GymTask(id=name).recorded()["id"]
    monkeypatch.chdir("/")
    for id in (recorded, f"{tmp_path}/beside_the_run.py:Beside-v0"):
        task = GymTask(id=id)
        assert task.id == name  # on which seeds and the names of distributions depend
        assert task.recorded()["id"] == recorded
        assert task.environment(1, name, "train").step_limit == 9
    with pytest.raises(UserError, match=rf"there is no module moved in {tmp_path}; if it has moved, use task.id="):
        GymTask(id=f"{tmp_path}/moved.py:Beside-v0")
    (tmp_path / "json.py").touch()
    with pytest.raises(UserError, match=r"another module json, .* hides the one in .*; rename yours"):
        GymTask(id=f"{tmp_path}/json.py:Beside-v0")


def test_frames_of_the_renderer_are_pictures_of_a_policy(tmp_path):
    task = GymTask(id="Line-v0", images=["render"], image_size=4, privileged=["state"], horizon=3, executed=2)
    env = task.environment(2, "Line-v0", "train")
    assert env.contract == task.contract("Line-v0")
    assert (env.contract.horizon, env.contract.executed) == (3, 2)
    assert env.contract.observation["state"].privileged
    assert env.contract.observation["render_image"].camera == "render"
    assert (env.reset()["render_image"] == 0).all()
    ending = env.step(torch.zeros(2, 2, 2))
    assert ending.observation["render_image"].shape == (2, 4, 4, 3)
    assert (ending.observation["render_image"] == 20).all()  # 10 a step
    kept = env.reset(torch.tensor([True, False]))["render_image"]
    assert kept.amax((1, 2, 3)).tolist() == [0, 20]
    policy = FlowConfig(hidden=8).build(env.contract)
    *_, step = train(env, policy, PPOConfig(rollout_length=4, minibatch=8, epochs=1), env_steps=16)
    assert math.isfinite(step.metrics["policy_loss"])
    with pytest.raises(UserError, match=r"expected task.images=\[render\]"):
        GymTask(id="Line-v0", images=["front"])
    with pytest.raises(
        UserError, match=r"unknown observation 'pose' in task.privileged; expected some of camera, inner"
    ):
        GymTask(id="Line-v0", privileged=["pose"]).contract("Line-v0")


def test_the_middle_of_a_frame_is_averaged():
    frame = np.zeros((4, 8, 3), np.uint8)
    frame[:2, 2:4] = 200
    assert resized(frame, 2)[..., 0].tolist() == [[200, 0], [0, 0]]


def test_a_goal_environment_computes_rewards_of_recorded_episodes(tmp_path):
    achieved = torch.tensor([[0.0], [1.0], [5.0]])  # before each step of two episodes, of two steps and one
    goals = {"achieved_goal": achieved, "desired_goal": torch.full((3, 1), 2.0)}
    final = {"achieved_goal": torch.tensor([[2.0], [7.0]]), "desired_goal": torch.full((2, 1), 2.0)}
    after = TensorDict(final, [2])
    parts = [
        Episodes.of(TensorDict(goals, [3])[rows], torch.zeros(length, 1), final_observation=after[number])
        for number, (rows, length) in enumerate(((slice(0, 2), 2), (slice(2, 3), 1)))
    ]
    assert GymTask(id="Goal-v0").recorded_rewards(Episodes.join(parts)).tolist() == [-1.0, 0.0, -5.0]
    with pytest.raises(UserError, match="Line-v0 has no compute_reward"):
        GymTask(id="Line-v0").recorded_rewards(parts[0])
    without = replace(parts[0], final_observation=None)
    with pytest.raises(UserError, match="recorded episodes have no achieved_goal after every step"):
        GymTask(id="Goal-v0").recorded_rewards(without)


def test_rewards_of_the_task_are_computed_anew_in_every_run(tmp_path, monkeypatch):
    """Their program may have changed since the data set was decoded."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    goal = {"achieved_goal": TensorSpec((1,)), "desired_goal": TensorSpec((1,))}
    contract = Contract(goal, TensorSpec((1,)), control_dt_s=0.1)
    before = TensorDict({"achieved_goal": torch.zeros(1, 1), "desired_goal": torch.full((1, 1), 2.0)}, [1])
    with EpisodeWriter(tmp_path / "logs", contract) as writer:
        writer.add(Episodes.of(before, torch.zeros(1, 1), final_observation=before[0]))
    options = MatchOptions(rewards=Rewards.TASK)
    task = GymTask(id="Goal-v0")
    assert demonstrations(tmp_path / "logs", contract, tmp_path / "a", task, options=options).reward.tolist() == [-2.0]
    monkeypatch.setattr(
        worlds.Goal, "compute_reward", lambda self, achieved, desired, info: np.full(len(achieved), 3.0)
    )
    assert demonstrations(tmp_path / "logs", contract, tmp_path / "b", task, options=options).reward.tolist() == [3.0]
