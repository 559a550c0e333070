"""The Gaussian policy: its log-probability by hand, and refused contracts."""

import math

import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.policy import unread_observations
from policies.encoders.base import EncoderKind
from policies.flow import FlowConfig
from policies.mlp import MLPConfig, MLPPolicy

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


def test_what_stood_still_keeps_its_unit():
    policy = MLPConfig(hidden=[8]).build(CONTRACT)
    seen = TensorDict({"x": torch.stack((torch.randn(500), torch.full((500,), 2.0)), 1)}, [500])
    policy.fit(seen, torch.zeros(1, 1))
    moved = TensorDict({"x": torch.tensor([[0.0, 2.5]])}, [1])
    assert policy.features(moved)[0, 1] == 0.5


@pytest.mark.parametrize("policy", [MLPConfig(hidden=[8]), FlowConfig(encoder=EncoderKind.PLAIN)])
@pytest.mark.parametrize("range_m", [1e-3, 1e-4])
def test_what_varies_by_little_is_normalised_by_its_measured_spread(policy: object, range_m: float):
    made = policy.build(CONTRACT)
    x = torch.stack((0.4 + range_m * torch.linspace(-1, 1, 500), torch.full((500,), 0.3)), 1)
    seen = TensorDict({"x": x}, [500])
    made.fit(seen, torch.zeros(2, 1))
    features = made.features(seen) if isinstance(made, MLPPolicy) else made.encoder(seen)
    torch.testing.assert_close(features[:, 0].std(), torch.tensor(1.0), rtol=1e-3, atol=0.0)
    assert features[:, 1].abs().max() < 1e-6  # a constant is left alone, rounding included
    if isinstance(made, MLPPolicy):  # deployed and differentiable forms divide by the same
        weight, bias = made.dense_layers()[0]
        folded = x @ weight.T + bias
        torch.testing.assert_close(folded, made.actor[0](features).detach(), rtol=0.0, atol=2e-3)
        torch.testing.assert_close(made.deployable().layers[0](x), features, rtol=0.0, atol=1e-4)


def test_behaviour_cloning_compares_in_half_ranges_of_the_actions():
    torch.manual_seed(0)
    policy = MLPConfig(hidden=[8]).build(CONTRACT)
    seen, valid = TensorDict({"x": torch.randn(5, 2)}, [5]), torch.ones(5, 3)
    policy.fit(seen, torch.zeros(1, 1))
    mean = policy.actions(seen).detach()
    assert policy.loss(seen, mean, valid).item() == pytest.approx(0.0, abs=1e-12)
    assert policy.loss(seen, mean + 0.5, valid).item() == pytest.approx((0.5 / 2) ** 2, rel=1e-4)
    beyond = mean.clone()
    beyond[:, 2] += 9.0
    valid[:, 2] = 0.0
    assert policy.loss(seen, beyond, valid).item() == pytest.approx(0.0, abs=1e-12)


def test_only_the_critic_reads_what_is_privileged_and_layers_are_the_actor():
    spec = {"wind": TensorSpec((2,), privileged=True), "x": TensorSpec((2,)), "y": TensorSpec((1, 2))}
    contract = Contract(spec, CONTRACT.action, 0.1)
    torch.manual_seed(0)
    policy = MLPConfig(hidden=[8, 8]).build(contract)
    for parameter in policy.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    seen = TensorDict({"wind": torch.randn(50, 2), "x": 3 + 2 * torch.randn(50, 2), "y": torch.randn(50, 1, 2)}, [50])
    policy.fit(seen, torch.zeros(1, 1))
    other = seen.clone()
    other["wind"] += 1.0
    assert torch.equal(policy.actions(seen), policy.actions(other))
    assert not torch.isclose(policy.value(seen), policy.value(other)).any()
    x = torch.cat((seen["x"], seen["y"].flatten(1)), -1)
    for weight, bias in policy.dense_layers():
        x = torch.tanh(x @ weight.T + bias)
    torch.testing.assert_close(policy.actions(seen).squeeze(1), 2 * x + 1)
    torch.testing.assert_close(policy.act(seen, deterministic=True).actions, policy.actions(seen))
    del seen["wind"]  # missing on a robot
    policy.act(seen, deterministic=True)


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


def test_distances_may_be_read_as_reciprocals():
    torch.manual_seed(0)
    near, far = TensorSpec((3,), unit="m"), TensorSpec((2,))
    contract = Contract({"near": near, "far": far}, CONTRACT.action, 0.1)
    policy = MLPConfig(hidden=[8], reciprocal=["near"]).build(contract)
    seen = TensorDict({"near": 0.2 + 5.0 * torch.rand(200, 3), "far": torch.randn(200, 2)}, [200])
    policy.fit(seen, torch.zeros(1, 1))
    read = torch.cat((1.0 / (seen["near"] + 0.1), seen["far"]), 1)
    torch.testing.assert_close(policy.features(seen), (read - read.mean(0)) / read.std(0))
    with pytest.raises(ValueError, match=r"train with policy\.reciprocal=\[\]"):
        policy.dense_layers()
    x = torch.cat((seen["near"], seen["far"]), 1)
    torch.testing.assert_close(policy.deployable()(x)[:, :, None], policy.actions(seen))
    x[0, 0], seen["near"][0, 0] = -1.0, 0.0  # noise of a sensor
    torch.testing.assert_close(policy.deployable()(x)[:, :, None], policy.actions(seen))
    with pytest.raises(ValueError, match=r"\['nearby'\]; expected some of near, far"):
        MLPConfig(reciprocal=["nearby"]).build(contract)


def test_what_it_does_not_read_is_named_with_its_kind():
    spec = {
        "front": TensorSpec((8, 8, 3), "uint8"),
        "words": TensorSpec((16,), "uint8", unit="utf-8"),
        "x": TensorSpec((2,)),
        "mode": TensorSpec((1,), "int64"),
        "secret": TensorSpec((8, 8, 3), "uint8", privileged=True),
    }
    policy = MLPConfig(hidden=[8]).build(Contract(spec, CONTRACT.action, 0.1))
    assert unread_observations(policy) == ["front (picture)", "words (text)", "mode (int64, 1)"]
    assert unread_observations(MLPConfig(hidden=[8]).build(CONTRACT)) == []
