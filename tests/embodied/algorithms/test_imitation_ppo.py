"""Self-imitation hands over to PPO where it should, and with the network that it trained."""

import pytest
import torch

from embodied.algorithms.imitation_ppo import ImitationPPOConfig
from embodied.algorithms.ppo import PPOConfig
from embodied.algorithms.self_imitation import SelfImitationConfig
from embodied.algorithms.sft import SFTConfig
from embodied.rollout import Collector
from policies.mlp import MLPConfig
from tests.embodied.algorithms.test_self_imitation import demonstrations
from tests.embodied.reach import Reach


def test_ppo_goes_on_from_what_self_imitation_ends_with() -> None:
    torch.manual_seed(0)
    policy = MLPConfig(hidden=[32], initial_std=0.4).build(Reach(1).contract)
    policy.fit(Reach(32).reset(starts=torch.arange(32)), torch.zeros(1, 1))
    sft = SFTConfig(steps=400, batch=64, average=0.9)
    config = ImitationPPOConfig(
        0.5, SelfImitationConfig(rounds=1, gradient_steps=20, capacity=5000, sft=sft), PPOConfig(critic_warmup=1)
    )
    learner = config.build(policy, demonstrations(), Reach(32), torch.Generator().manual_seed(0))
    collector = Collector(Reach(32), policy, torch.Generator().manual_seed(0), learner.starts)
    before = policy.actor[0].weight.clone()
    assert "kl" not in learner.update(collector.collect(5), 0.3)
    assert torch.equal(policy.actor[0].weight, before)
    assert "kl" not in learner.update(collector.collect(5), 0.6)
    imitator = policy.actor[0].weight.clone()
    assert not torch.equal(imitator, before)
    assert learner.gradient_steps == 40
    assert learner.update(collector.collect(5), 0.8)["kl"] == pytest.approx(0.0, abs=1e-6)  # the critic alone
    assert torch.equal(policy.actor[0].weight, imitator)
    learner.update(collector.collect(5), 1.0)
    assert not torch.equal(policy.actor[0].weight, imitator)
    assert learner.gradient_steps > 40


def test_settings_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="expected imitation between 0 and 1, got 0"):
        ImitationPPOConfig(imitation=0.0)
    with pytest.raises(ValueError, match="expected as many decisions of both learners"):
        ImitationPPOConfig(ppo=PPOConfig(decisions=7))
