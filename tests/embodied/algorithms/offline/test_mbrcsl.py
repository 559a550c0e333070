"""MBRCSL: the choice of model rollouts by hand, learning from them, refusals."""

import copy

import pytest
import torch

from embodied.algorithms.offline.dynamics import DynamicsConfig
from embodied.algorithms.offline.mbrcsl import MBRCSL, MBRCSLConfig
from embodied.errors import UserError
from embodied.policy import TrainablePolicy
from policies.flow import FlowConfig
from policies.mlp import MLPConfig
from tests.embodied.algorithms.offline.test_offline import success
from tests.embodied.reach import Reach
from tests.embodied.recorded_reach import recorded
from tests.embodied.saving.test_tree import same

MODEL = DynamicsConfig(models=3, elites=2, hidden=[32, 32], learning_rate=3e-3, batch=64)
SMALL = {"steps": 900, "batch": 64, "discount": 0.9, "learning_rate": 3e-3, "rollouts": 64, "dynamics": MODEL}


def make(**options) -> tuple[TrainablePolicy, MBRCSL]:
    torch.manual_seed(0)
    policy = FlowConfig(width=16, hidden=32, turn_rad=0.0).build(Reach(1).contract)
    policy.fit(*recorded().by_weight())
    return policy, MBRCSLConfig(**SMALL | options).build(policy, torch.Generator().manual_seed(0))


def test_imitates_the_best_rollouts_of_a_behaviour_that_fails() -> None:
    policy, learner = make(model_share=0.4, behaviour_share=0.3)
    learner.fit(recorded(), 630)
    assert learner.kept is None
    assert success(policy) < 0.3
    learner.fit(recorded(), 10)
    # a resumed learner goes on alike, from the rollouts that were kept
    other_policy, other = make(model_share=0.4, behaviour_share=0.3)
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    metrics = []
    for each in (learner, other):
        torch.manual_seed(0)
        metrics.append(each.fit(recorded(), 2))
    assert metrics[0] == metrics[1]
    assert same(dict(other_policy.state_dict()), dict(policy.state_dict()))
    assert same(other.state_dict(), learner.state_dict())
    metrics = learner.fit(recorded(), 258)
    assert metrics["held_out_model_error"] < 0.2
    assert metrics["kept_return"] > 2.0 * metrics["recorded_return"]
    assert learner.gradient_steps == 900
    assert success(policy) > 0.7


def test_the_best_rollouts_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    _, learner = make(rollouts=2, starts=3, warmup=4)
    learner.gradient_steps = learner.model_steps
    assert learner._learning_rate(0.0) == pytest.approx(3e-3 / 5)  # the first step of imitation
    chunks, calls = torch.tensor([0.1, -0.2, 0.2, -0.1, 0.05, 0.1]), []
    monkeypatch.setattr(learner.policy, "generate", lambda observation, noise: chunks.view(6, 1, 1).repeat(1, 2, 1))

    def step(observation, actions):
        calls.append(observation["position"].squeeze(1).clone())
        after = observation.copy().update({"position": observation["position"] + actions.sum(1)})
        reward = after["position"].squeeze(1) - 0.6
        return after, reward, torch.full_like(reward, 0.4)

    monkeypatch.setattr(learner.dynamics, "step", step)
    episodes = recorded()
    learner.fit(episodes, 0)
    kept = learner._best_rollouts(learner.transitions)
    # starts of episodes 0, 20 and 40 of 60, two rollouts each, and four decisions as the longest episode has 7 steps
    begin = torch.tensor([0, *episodes.ends.tolist()[:-1]])
    assert len(calls) == 4
    expected = episodes.observation["position"][begin[[0, 20, 40]]].squeeze(1)
    assert torch.equal(calls[0], expected.repeat_interleave(2))
    moved = 2.0 * chunks
    # R = sum_t 0.9^(2t) 0.6^t r_t, r_t = x_0 + (t + 1) moved - 0.6
    returns = sum(0.81**t * 0.6**t * (calls[0] + (t + 1) * moved - 0.6) for t in range(4)).view(3, 2)
    best = returns.argmax(1)
    is_kept = returns.amax(1) > learner.transitions.returns[begin].mean()
    assert 0 < int(is_kept.sum()) < 3
    mean = float(returns.amax(1)[is_kept].mean()) * learner.transitions.scale
    assert learner.metrics["kept_return"] == pytest.approx(mean, rel=1e-5)
    # a rollout goes on with probability 0.6, then 0.36: two decisions of two steps
    assert kept.ends.tolist() == [4 * (number + 1) for number in range(int(is_kept.sum()))]
    expected = torch.stack([chunks.view(3, 2)[row, best[row]] for row in is_kept.nonzero().squeeze(1)])
    torch.testing.assert_close(kept.actions.view(-1, 4), expected.unsqueeze(1).expand(-1, 4))
    assert kept.first.tolist() == list(range(0, 4 * int(is_kept.sum()), 2))


def test_what_mbrcsl_cannot_learn_is_refused() -> None:
    with pytest.raises(UserError, match="use policy=flow or diffusion"):
        MBRCSLConfig().build(MLPConfig(hidden=[8]).build(Reach(1).contract), torch.Generator())
    with pytest.raises(UserError, match="model_share"):
        MBRCSLConfig(model_share=0.6)
    _, learner = make()
    with pytest.raises(UserError, match="learns in one process"):
        learner.fit(recorded(), 1, type("Two", (), {"size": 2, "rank": 0})())
    learner.fit(recorded(), 0)
    learner.transitions.returns += 100.0
    with pytest.raises(UserError, match="no rollout of the model is better"):
        learner._best_rollouts(learner.transitions)
