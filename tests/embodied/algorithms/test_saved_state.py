"""What learners and collectors save is all that they go on with: another one that loads it saves the same."""

import copy
from typing import Any

import pytest
import torch

from embodied import seeding
from embodied.algorithms.imitation.distillation import DistillationConfig
from embodied.algorithms.off_policy.flash_sac import FlashSACConfig
from embodied.algorithms.off_policy.sac import SACConfig
from embodied.algorithms.off_policy.td3 import TD3Config
from embodied.algorithms.on_policy.bptt import BPTTConfig
from embodied.algorithms.on_policy.grpo import GRPOConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.rollout.starts import RetryStarts
from embodied.task import Learner, LearnerConfig
from embodied.training.loop import build
from policies.mlp import MLPConfig
from tests.embodied.saving.test_tree import same
from tests.embodied.smooth_reach import SmoothReach
from tests.embodied.windy_reach import WindyReach

PPO = PPOConfig(rollout_length=9, minibatch=16, critic_warmup=0)
LEARNERS = {
    "ppo": PPO,
    "ppo with a curriculum": PPOConfig(rollout_length=9, minibatch=16, critic_warmup=0, curriculum=0.5),
    "grpo": GRPOConfig(rollout_length=7, minibatch=16, group=4),
    "td3": TD3Config(rollout_length=8, warmup=1, gradient_steps=2, lookahead=2),
    "sac": SACConfig(rollout_length=8, warmup=1, updates=0.03, hidden=[8]),
    "flash_sac": FlashSACConfig(rollout_length=8, warmup=1, updates=0.03, hidden=[8], minibatch=32),
    "bptt": BPTTConfig(rollout_length=4, critic=True, discount=0.9),
    "distillation": DistillationConfig(
        MLPConfig(hidden=[8]), PPO, privileged=["wind"], teacher_steps=100, rollout_length=8, minibatch=4
    ),
}


def make(config: LearnerConfig, seed: int) -> tuple[Learner, Any]:
    torch.manual_seed(seed)
    kind = WindyReach if isinstance(config, DistillationConfig) else SmoothReach
    env, generator = kind(8), seeding.generator(seed, "fit")
    policy = MLPConfig(hidden=[8]).build(env.contract)
    policy.fit(kind(8).reset(), torch.rand(64, 1, 1, generator=generator) - 0.5)
    return build(env, policy, config, None, seed)


@pytest.mark.parametrize("name", LEARNERS)
def test_another_learner_goes_on_with_everything_that_was_saved(name: str) -> None:
    config = LEARNERS[name]
    (learner, collector), (other, again) = make(config, 0), make(config, 1)
    for each, collecting, count in ((learner, collector, 3), (other, again, 4)):
        for iteration in range(count):
            each.update(collecting.collect(config.rollout_length), 0.1 * iteration * count)
    state = copy.deepcopy({"learner": learner.state_dict(), "collector": collector.state_dict()})
    kept = copy.deepcopy(state)
    other.load_state_dict(state["learner"])
    again.load_state_dict(state["collector"])
    assert same(other.state_dict(), kept["learner"])
    assert same(again.state_dict(), kept["collector"])


def test_retried_starts_go_on_with_everything_that_was_saved() -> None:
    made = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        starts = RetryStarts(torch.arange(4) % 2, retry=0.5, attempts=3, generator=generator)
        for _ in range(3 + seed):
            starts(torch.ones(4, dtype=torch.bool), torch.tensor([True, False, False, True]))
        made.append(starts)
    state = copy.deepcopy(made[0].state_dict())
    made[1].load_state_dict(copy.deepcopy(state))
    assert same(made[1].state_dict(), state)
