"""ReinFlow, VLA-RL and SRPO with what their authors add, on the small control task; their terms by hand."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.algorithms.on_policy.grpo import GRPOConfig, Outcome
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.errors import UserError
from embodied.rollout.curriculum import Favours
from embodied.saving.tree import load_tree, save_tree
from embodied.training.loop import build
from embodied.world import ALONE
from policies.encoders.base import EncoderKind
from policies.flow import FlowConfig, Sampler
from policies.generation.base import Aggregate
from policies.mlp import MLPConfig
from tests.embodied.reach import Reach

REINFLOW = FlowConfig(
    encoder=EncoderKind.FLAT,
    hidden=32,
    width=32,
    initial_std=0.4,
    sampler=Sampler.REINFLOW,
    aggregate=Aggregate.STEP_MEAN,
    std_min=0.1,
    std_max=0.24,
    noise_decay=0.3,
)
PPO = {"minibatch": 256, "target_kl": 1.0, "discount": 0.9, "epochs": 5}


def make(algorithm: Any, policy: Any = None, envs: int = 64, seed: int = 0) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    env = Reach(envs)
    policy = (policy or MLPConfig(hidden=[32], initial_std=0.5)).build(env.contract)
    policy.fit(Reach(32).reset(starts=torch.arange(32)), torch.tensor([[-0.25], [0.25]]))
    policy.start_critic()
    return policy, *build(env, policy, algorithm, None, seed)


def rates(learner: Any, collector: Any, iterations: int, decisions: int) -> list[float]:
    found = []
    for iteration in range(iterations):
        rollout = collector.collect(decisions)
        found.append(float(rollout.success.sum() / rollout.done.sum().clamp_min(1)))
        learner.update(rollout, iteration / iterations)
    return found


def test_reinflow_learns_while_its_noise_narrows() -> None:
    config = PPOConfig(**PPO, learning_rate=1e-3, critic_warmup=1, wasserstein=0.01)
    policy, learner, collector = make(config, REINFLOW)
    success = rates(learner, collector, 30, 8)
    assert success[0] < 0.6
    assert sum(success[-3:]) / 3 > 0.9
    assert policy.largest_std(policy.config) < 0.21  # 0.198 at the end


def test_the_distance_from_the_start_is_that_of_chunks_from_the_same_noise() -> None:
    policy, learner, collector = make(PPOConfig(wasserstein=2.0), REINFLOW, envs=5)
    observation = collector.collect(1).observation[0]
    assert not learner._start_distance(observation).any()
    with torch.no_grad():
        for parameter in policy.velocity.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    state = learner.noise.get_state()
    found = learner._start_distance(observation)
    learner.noise.set_state(state)
    noise = torch.randn(5, 2, 1, generator=learner.noise)
    now, start = (each.generate(observation, noise) for each in (policy, learner.reference))
    # half a range is 0.25
    torch.testing.assert_close(found, (((now - start) / 0.25) ** 2).mean((1, 2)))
    assert (found > 0.0).all()


def test_the_distance_from_the_start_is_in_the_loss() -> None:
    losses = {}
    for weight in (0.0, 3.0):
        policy, learner, collector = make(PPOConfig(wasserstein=weight or 1.0, critic_warmup=0), REINFLOW, envs=5)
        learner.config.wasserstein = weight
        rollout = collector.collect(2)
        with torch.no_grad():
            for parameter in policy.velocity.parameters():
                parameter += 0.05
        batch, _ = learner._prepare(rollout, ALONE)
        losses[weight] = learner._losses(batch.flatten(0, 1), 10.0)
    plain, weighed = losses[0.0], losses[3.0]
    torch.testing.assert_close(weighed[0] - plain[0], 3.0 * weighed[1]["start_distance"] / 10.0)


def test_a_curriculum_of_failures_learns() -> None:
    config = PPOConfig(**PPO, learning_rate=3e-3, critic_warmup=2, curriculum=0.5, curriculum_favours=Favours.FAILURES)
    _, learner, collector = make(config)
    success = rates(learner, collector, 30, 16)
    assert success[0] < 0.6
    assert sum(success[-3:]) / 3 > 0.9


def test_failures_are_ranked_by_what_the_policy_at_the_start_sees() -> None:
    config = GRPOConfig(
        group=8,
        minibatch=256,
        epochs=4,
        learning_rate=1e-3,
        target_kl=1.0,
        outcome=Outcome.PROGRESS,
        progress_features=True,
    )
    policy, learner, collector = make(config, REINFLOW)
    start = copy.deepcopy(policy.state_dict())
    success = rates(learner, collector, 30, 8)
    assert success[0] < 0.6
    assert sum(success[-3:]) / 3 > 0.9
    assert all(torch.equal(value, start[name]) for name, value in learner.reference.state_dict().items())
    rollout = collector.collect(8)
    points = rollout.observation[:2].transpose(0, 1)
    features = torch.stack([learner.reference.features(points[:, t]) for t in range(2)], 1)
    found = learner.progress_reward.encoder(points).view(64, 2, -1)
    torch.testing.assert_close(found[:, 1], features[:, 1] - features[:, 0], rtol=1e-5, atol=1e-5)


def test_a_choice_among_states_that_are_not_repeated_is_refused() -> None:
    with pytest.raises(UserError, match=r"algorithm\.curriculum_favours .*algorithm\.curriculum=0 repeats none"):
        PPOConfig(curriculum_favours=Favours.FAILURES)


def test_features_without_progress_are_refused() -> None:
    with pytest.raises(UserError, match=r"algorithm\.progress_features is for algorithm\.outcome=progress"):
        GRPOConfig(progress_features=True)


@pytest.mark.parametrize(
    ("algorithm", "policy"),
    [
        (PPOConfig(minibatch=20, wasserstein=0.1, critic_warmup=0), REINFLOW),
        (PPOConfig(minibatch=20, curriculum=0.5, curriculum_favours=Favours.FAILURES, critic_warmup=0), None),
        (GRPOConfig(minibatch=20, group=4, outcome=Outcome.PROGRESS, progress_features=True), REINFLOW),
    ],
    ids=["ReinFlow", "VLA-RL", "SRPO"],
)
def test_a_resumed_learner_goes_on_bit_for_bit(tmp_path: Path, algorithm: Any, policy: Any) -> None:
    runs = [make(algorithm, policy, envs=16, seed=seed) for seed in range(2)]
    mine, learner, collector = runs[0]
    for progress in (0.4, 0.6):
        learner.update(collector.collect(8), progress)
    for name, each in (("learner", learner), ("collector", collector), ("policy", mine)):
        save_tree(tmp_path / name, dict(each.state_dict()))
    for name, each in zip(("policy", "learner", "collector"), runs[1], strict=True):
        each.load_state_dict(load_tree(tmp_path / name))
    found = [each.update(gather.collect(8), 0.8) for _, each, gather in runs]
    assert found[0] == found[1]
    assert all(torch.equal(value, runs[1][0].state_dict()[name]) for name, value in mine.state_dict().items())
