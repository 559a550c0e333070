"""The scripted expert, its demonstrations, and a run from beginning to end."""

import json

import pytest
import torch

import train
from embodied.errors import UserError
from sims.robosuite.environment import RobosuiteEnvironment
from sims.robosuite.expert import act
from sims.robosuite.task import RobosuiteTask
from sims.robosuite.world import Options


def test_the_expert_lifts_the_cube_wherever_it_lies():
    env = RobosuiteEnvironment(1, options=Options("Lift"), step_limit=60)
    for start in range(6):
        observation = env.reset(starts=torch.tensor([start]))
        while not bool(env.done):
            observation = env.step(act(observation).unsqueeze(1)).observation
        assert env.success.all(), start


def test_demonstrations_are_made_once_and_end_in_success(tmp_path):
    task = RobosuiteTask(shaped=False, horizon=8, executed=4, episodes=2)
    made = task.demonstrations(tmp_path, seed=0)
    assert (len(made.ends), made.success.tolist(), made.terminated.tolist()) == (2, [True] * 2, [True] * 2)
    assert made.reward.sum() == 2
    read = task.demonstrations(tmp_path, seed=0)
    assert (read.actions == made.actions).all()
    with pytest.raises(UserError, match="was made for something else"):
        task.demonstrations(tmp_path, seed=1)
    assert RobosuiteTask().demonstrations(tmp_path, seed=0) is None


def test_an_expert_is_promised_for_lift_alone():
    with pytest.raises(UserError, match="the scripted expert does Lift"):
        RobosuiteTask(env_name="Door", episodes=1)
    with pytest.raises(UserError, match="unknown distribution 'wide'; expected one of placed"):
        RobosuiteTask().contract("wide")


def test_a_run_reports_before_and_after(tmp_path):
    options = ["num_envs=2", "env_steps=104", "evaluation_starts=2", "evaluation_envs=2", "sft.steps=20"]
    options += ["task.episodes=1", "task.step_limit=12", "algorithm.gradient_steps=5", "video=false", "control=false"]
    train.run(["task=robosuite_lift", f"output={tmp_path}", *options])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["task"] == "robosuite_lift"
    assert (tmp_path / "report.md").exists()
