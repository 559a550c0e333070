"""The Gaussian policy: its log-probability by hand, and what it cannot read."""

import math

import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from policies.mlp import MLPConfig

CONTRACT = Contract({"x": TensorSpec((2,))}, TensorSpec((1,), low=(-1.0,), high=(3.0,)), 0.1, horizon=3, executed=2)


def test_log_prob_is_that_of_the_executed_actions_before_clamping():
    torch.manual_seed(0)
    policy = MLPConfig(hidden=[8], initial_std=0.5).build(CONTRACT)
    seen = TensorDict({"x": torch.randn(5, 2)}, [5])
    policy.fit(seen, torch.zeros(1, 1))
    decision = policy.act(seen, generator=torch.Generator().manual_seed(1))
    mean = policy.actor(policy._inputs(seen))
    z = (decision.sample["raw"] - mean) / 0.5
    elementwise = -0.5 * z.square() - math.log(0.5) - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(decision.log_prob, elementwise[:, :2].sum(1, keepdim=True))  # executed is 2 of 3
    # raw actions are in half ranges around the middle: -1 and 3 are 2 around 1
    torch.testing.assert_close(decision.actions.squeeze(-1), decision.sample["raw"].clamp(-1, 1) * 2 + 1)
    entropy = policy.evaluate(seen, decision.sample).entropy
    torch.testing.assert_close(entropy, torch.full((5, 1), 2 * (0.5 + 0.5 * math.log(2 * math.pi) + math.log(0.5))))


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        ({"objects": TensorSpec((-1, 3))}, CONTRACT.action, r"got \['objects'\]: use policy=flow"),
        ({"words": TensorSpec((3,), dtype="int64")}, CONTRACT.action, "got none"),
        (CONTRACT.observation, TensorSpec((1,)), "needs action limits"),
    ],
)
def test_what_it_cannot_serve_is_one_line(observation, action, message):
    with pytest.raises(ValueError, match=message) as caught:
        MLPConfig().build(Contract(observation, action, 0.1))
    assert "\n" not in str(caught.value)
