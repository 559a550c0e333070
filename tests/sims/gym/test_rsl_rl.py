"""rsl_rl trains on our environments, unchanged."""

import pytest
import torch

from embodied.errors import UserError
from sims.gym.environment import GymEnvironment
from tests.embodied.counter import Counter
from tests.embodied.nameless import Nameless
from tests.sims.gym import worlds  # noqa: F401 - registers

pytest.importorskip("rsl_rl", reason="needs the extra rsl-rl")

from rsl_rl.runners import OnPolicyRunner

from sims.gym.rsl_rl import as_rsl_rl

MODEL = {"class_name": "MLPModel", "hidden_dims": [16], "activation": "elu", "obs_normalization": True}
TRAINING = {
    "num_steps_per_env": 8,
    "save_interval": 100,
    "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
    "actor": {
        **MODEL,
        "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 0.5, "std_type": "scalar"},
    },
    "critic": MODEL,
    "algorithm": {
        "class_name": "PPO",
        "num_learning_epochs": 4,
        "num_mini_batches": 2,
        "learning_rate": 3e-3,
        "gamma": 0.9,
        "lam": 0.95,
        "schedule": "fixed",
        "desired_kl": None,
    },
}


def test_its_runner_learns_and_the_environment_can_be_used_after_it():
    torch.manual_seed(0)
    env = GymEnvironment(16, "Line-v0", options={"spread": 0.0})
    vector = as_rsl_rl(env)
    runner = OnPolicyRunner(vector, {**TRAINING, "env": {}}, log_dir=None)
    policy = runner.get_inference_policy()
    returns = []
    for iterations in (0, 25):
        runner.learn(iterations, init_at_random_ep_len=True)
        env.reset()
        seen, total = vector._grouped(env.observe()), torch.zeros(16)
        for _ in range(6):
            seen, reward, _, _ = vector.step(policy(seen).detach())
            total += reward
        returns.append(float(total.mean()))
        env.observe()["state"].add_(1.0)  # nothing is left that cannot be written to
    assert returns[1] > returns[0] or returns[1] > -0.5
    assert env.steps.is_inference() is False


def test_time_limits_endings_and_true_observations():
    env = Counter(4, step_limit=7, executed=3, tasks=1)
    vector = as_rsl_rl(env)
    assert (vector.num_actions, vector.max_episode_length, vector.num_envs) == (3, 3, 4)
    seen = vector.get_observations()
    assert seen["policy"].shape == (4, 2)
    up = torch.tensor([[1.0], [0.0], [-1.0], [0.0]]).expand(4, 3)
    first = vector.step(up)
    assert not first[2].any()
    assert vector.episode_length_buf.tolist() == [1, 1, 1, 1]
    seen, reward, done, extras = vector.step(up)
    assert done.tolist() == [1, 0, 1, 0]  # at 5 and -5
    assert not extras["time_outs"].any()
    assert extras["final_obs"]["policy"][:, 0].tolist() == [5.0, 0.0, -5.0, 0.0]
    assert seen["policy"][:, 0].tolist() == [0.0] * 4
    assert reward.tolist() == [2.0, 3.0, 2.0, 3.0]
    assert vector.episode_length_buf.tolist() == [0, 2, 0, 2]
    assert float(extras["log"]["/success"]) == 0.5
    _, _, done, extras = vector.step(torch.zeros(4, 3))
    assert done.tolist() == [0, 1, 0, 1]
    assert extras["time_outs"].tolist() == [False, True, False, True]


def test_lengths_that_the_runner_draws_end_episodes_earlier():
    vector = as_rsl_rl(Counter(4, step_limit=9, executed=3, tasks=1))
    vector.episode_length_buf = torch.tensor([0, 1, 2, 0])
    assert vector.step(torch.zeros(4, 3))[2].tolist() == [0, 0, 1, 0]
    assert vector.step(torch.zeros(4, 3))[2].tolist() == [0, 1, 0, 0]


def test_actions_are_in_half_ranges_and_pictures_are_groups():
    env = GymEnvironment(2, "Line-v0", options={"spread": 0.0})
    vector = as_rsl_rl(env)
    seen = vector.step(torch.tensor([[0.5, 0.0], [0.0, -0.25]]))[0]
    assert env.observe()["state"][:, 0].tolist() == [0.5, -0.5]  # of limits 1 and 2
    assert seen["camera"].shape == (2, 3, 4, 5)
    assert seen["camera"].max() == pytest.approx(1 / 255)
    assert seen["policy"].shape == (2, 6)


def test_what_it_cannot_do_is_refused():
    vector = as_rsl_rl(GymEnvironment(2, "Line-v0"))
    assert "privileged" not in vector.get_observations()
    env = Nameless(2)
    env.step_limit = 5
    vector = as_rsl_rl(env)
    with pytest.raises(UserError, match="init_at_random_ep_len=False"):
        vector.episode_length_buf = torch.zeros(2)
