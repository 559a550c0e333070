"""Supervised training: chunks of episodes, the moving average, and exact resuming."""

import copy
import math

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.imitation.sft import SFT, SFTConfig
from embodied.data.episodes import Episodes
from policies.mlp import MLPConfig, MLPPolicy
from tests.embodied.reach import Reach


def make(seed: int = 0, **settings) -> tuple[MLPPolicy, SFT]:
    torch.manual_seed(seed)
    env = Reach(64)
    policy = MLPConfig(hidden=[32]).build(env.contract)
    policy.fit(env.reset(starts=torch.arange(64)), torch.zeros(1, 1))
    config = SFTConfig(**({"steps": 100, "batch": 16, "learning_rate": 1e-2} | settings))
    return policy, config.build(policy, torch.Generator().manual_seed(seed))


def shown() -> Episodes:
    position = torch.linspace(-0.8, 0.8, 40).unsqueeze(1)
    seen = TensorDict({"position": position, "task": torch.zeros(40, 1)}, [40])
    return Episodes.of(seen, -0.25 * position.sign())


def weights(policy: MLPPolicy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.actor_parameters()])


def test_the_policy_is_the_moving_average_of_what_is_trained():
    policy, learner = make(average=0.9)
    expected = weights(policy).clone()
    # (1 + step) / (10 + step) keeps less than 0.9 until step 80
    for step, keep in enumerate((2 / 11, 3 / 12, 4 / 13), start=1):
        learner.fit(shown(), 1)
        expected = keep * expected + (1 - keep) * weights(learner.trained)
        assert learner.gradient_steps == step
        torch.testing.assert_close(weights(policy), expected)
    learner.fit(shown(), 97)
    before = weights(policy).clone()
    learner.fit(shown(), 1)
    torch.testing.assert_close(weights(policy), 0.9 * before + 0.1 * weights(learner.trained))
    assert not torch.equal(weights(policy), weights(learner.trained))


def test_training_leaves_the_critic_alone():
    policy, learner = make()
    before = [parameter.clone() for parameter in policy.critic_parameters()]
    learner.fit(shown(), 5)
    assert all(map(torch.equal, before, policy.critic_parameters()))


def test_the_learning_rate_falls_by_a_cosine_and_then_stays():
    _, learner = make(steps=10, learning_rate=1e-2, final_learning_rate=1e-3)
    rates = []
    for _ in range(13):
        learner.fit(shown(), 1)
        rates.append(learner.optimiser.param_groups[0]["lr"])
    assert rates[:10] == pytest.approx([5.5e-3 + 4.5e-3 * math.cos(0.1 * math.pi * step) for step in range(10)])
    assert rates[10:] == pytest.approx([1e-3] * 3)
    _, unplanned = make(steps=0, learning_rate=1e-2, final_learning_rate=1e-3)
    unplanned.fit(shown(), 1)
    assert unplanned.optimiser.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_the_learning_rate_rises_in_the_first_steps():
    _, learner = make(steps=100, learning_rate=1e-2, final_learning_rate=1e-2, warmup=4)
    rates = []
    for _ in range(6):
        rates.append(learner._learning_rate(0.0))
        learner.gradient_steps += 1
    assert rates == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, 1e-2, 1e-2])
    _, short = make(steps=20, learning_rate=1e-2, final_learning_rate=1e-2, warmup=1000)
    assert short._learning_rate(0.0) == pytest.approx(1e-2 / 3)  # a tenth of the planned steps at most
    _, plain = make(steps=20, learning_rate=1e-2, final_learning_rate=1e-2)
    assert plain._learning_rate(0.0) == 1e-2


def test_it_learns_what_it_is_shown():
    policy, learner = make(steps=300)
    learner.fit(shown(), 300)
    seen = TensorDict({"position": torch.tensor([[-0.5], [0.5]]), "task": torch.zeros(2, 1)}, [2])
    actions = policy.act(seen, deterministic=True).actions.squeeze(-1)
    torch.testing.assert_close(actions, torch.tensor([[0.25, 0.25], [-0.25, -0.25]]), atol=0.03, rtol=0)


def test_a_resumed_learner_takes_the_same_steps():
    policy, learner = make()
    learner.fit(shown(), 7)
    state = copy.deepcopy(learner.state_dict())
    metrics = learner.fit(shown(), 20)
    other_policy, other = make(seed=5)
    other_policy.load_state_dict(policy.state_dict())  # normalisation; the weights come from the state
    other.load_state_dict(state)
    assert other.fit(shown(), 20) == metrics
    assert other.gradient_steps == learner.gradient_steps
    assert torch.equal(weights(other_policy), weights(policy))
    assert torch.equal(weights(other.trained), weights(learner.trained))
