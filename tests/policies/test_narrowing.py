"""The range of learned noise narrows late in training, and is saved with the weights."""

import pytest
import torch

from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.errors import UserError
from policies.flow import Sampler
from policies.mlp import MLPConfig
from tests.embodied.reach import Reach
from tests.policies.observations import observations
from tests.policies.test_flow import make

OPTIONS = {"std_min": 0.1, "std_max": 0.5}


@pytest.mark.parametrize(
    ("progress", "largest"),
    [(0.0, 0.5), (0.35, 0.5), (0.675, 0.44), (1.0, 0.38)],  # 0.3 * 0.1 + 0.7 * 0.5 = 0.38
)
def test_the_upper_bound_is_held_and_then_falls(progress: float, largest: float) -> None:
    policy, constant = make(Sampler.REINFLOW, noise_decay=0.3, **OPTIONS), make(Sampler.REINFLOW, **OPTIONS)
    for each in (policy, constant):
        each.anneal(progress)
    assert policy.largest_std(policy.config) == pytest.approx(largest)
    assert constant.largest_std(constant.config) == 0.5
    assert policy.sampling.std_max == pytest.approx(largest)
    observation = observations(20, seed=1)
    decision = policy.act(observation)
    torch.testing.assert_close(policy.evaluate(observation, decision.sample).log_prob, decision.log_prob)


def test_the_range_is_saved_and_weights_of_a_constant_one_are_read() -> None:
    policy, constant, other = (make(Sampler.FLOW_NOISE, noise_decay=share, **OPTIONS) for share in (0.5, 0.0, 0.5))
    policy.anneal(1.0)
    other.load_state_dict(policy.state_dict())
    assert other.largest_std(other.config) == pytest.approx(0.3)
    assert policy.with_new_weights().largest_std(policy.config) == pytest.approx(0.3)
    other.load_state_dict(constant.state_dict())
    assert other.largest_std(other.config) == pytest.approx(0.3)
    assert "narrowing" not in constant.state_dict()


def test_noise_that_is_not_learned_has_no_range() -> None:
    with pytest.raises(UserError, match=r"policy\.noise_decay narrows learned noise: use policy\.sampler=reinflow"):
        make(Sampler.FLOW_SDE, noise_decay=0.3)


def test_a_policy_without_noise_is_not_compared_with_its_start() -> None:
    policy = MLPConfig(hidden=[8]).build(Reach(2).contract)
    with pytest.raises(UserError, match=r"algorithm\.wasserstein compares chunks generated from noise"):
        PPOConfig(wasserstein=1.0).check("algorithm=ppo", policy)
