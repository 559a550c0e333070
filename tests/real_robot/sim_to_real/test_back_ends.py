"""A recording as a back end: what the policy decides now beside what it decided then, and how late commands were."""

from pathlib import Path

import numpy as np
import pytest
import torch

from policies.mlp import MLPConfig, MLPPolicy
from real_robot.recording.recorder import Recorder
from real_robot.recording.recording import Recording
from real_robot.robots.robot import Reading
from real_robot.safety.safety import State, Verdict
from real_robot.sim_to_real.back_ends import replayed, written
from real_robot.sim_to_real.results import discrepancy
from tests.embodied.reach import Reach
from tests.real_robot.recording.test_replay import EPISODES, STEPS, fly


def policy(seed: int) -> MLPPolicy:
    torch.manual_seed(seed)
    env = Reach(1, executed=1, horizon=4, tasks=1)
    made = MLPConfig(hidden=[8]).build(env.contract)
    made.fit(env.reset().expand(64).contiguous() + 0.0, torch.rand(64, 1))
    return made


@pytest.fixture
def bag(tmp_path: Path) -> Path:
    fly(tmp_path / "bag.mcap", policy(0), 2, sampled=False)
    return tmp_path / "bag.mcap"


def test_the_same_policy_decides_the_same_in_every_episode(bag: Path):
    run = replayed(bag, policy(0))
    assert sorted(run.actions) == [(0, number) for number in range(EPISODES)]
    assert run.actions[0, 0].shape == (STEPS // 2 * 4, 1)  # decisions of H = 4, every K = 2 steps
    spec = Recording(bag).contract.action
    assert discrepancy(run.actions, run.expected, spec).tolist() == [0.0] * EPISODES


def test_another_policy_differs(bag: Path):
    run = replayed(bag, policy(1))
    assert (discrepancy(run.actions, run.expected, Recording(bag).contract.action) > 1e-3).all()


def test_what_was_written_is_listed_by_episode(bag: Path):
    actions, latency_s = written(Recording(bag))
    assert [episode.shape for episode in actions] == [(STEPS, 1)] * EPISODES
    assert len(latency_s) == EPISODES * STEPS
    assert (latency_s == 0.0).all()  # a simulator's clock stands still meanwhile


def test_what_comes_before_the_first_episode_is_none(tmp_path: Path):
    contract = Reach(1, executed=1, horizon=1, tasks=1).contract
    with Recorder(tmp_path / "bag.mcap", contract) as recorder:
        recorder.write(0.0, Reading({}, 0.0, 0), None, Verdict(State.ACTIVE, np.zeros(1)))
    actions, latency_s = written(Recording(tmp_path / "bag.mcap"))
    assert actions == []
    assert len(latency_s) == 0
