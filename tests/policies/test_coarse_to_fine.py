"""Codes of actions by hand, probabilities that add up to 1, and what the policy refuses."""

from itertools import product
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from policies.coarse_to_fine import CoarseToFineConfig, CoarseToFinePolicy
from real_robot.firmware.exporting import Export, Target, export


def make(horizon: int = 2, executed: int = 2, **options) -> CoarseToFinePolicy:
    torch.manual_seed(0)
    action = TensorSpec((2,), low=(-1.0, 0.0), high=(1.0, 4.0))
    contract = Contract({"x": TensorSpec((3,))}, action, 0.1, horizon, executed)
    policy = CoarseToFineConfig(hidden=[16, 16], **options).build(contract)
    policy.fit(TensorDict({"x": torch.randn(8, 3)}, [8]), torch.zeros(1))
    for parameter in policy.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    return policy


def test_codes_by_hand() -> None:
    policy = make(levels=2, bins=3)
    # nine points: -1, -0.75, .. 1 of the first element, 0, 0.5, .. 4 of the second; limits are points, too
    actions = torch.tensor([[[-1.0, 4.0], [-0.3, 2.1], [0.5, 0.2], [7.0, -7.0]]])
    points = torch.tensor([[0, 8], [3, 4], [6, 0], [8, 0]])
    code = torch.stack((points // 3, points % 3), 1)  # [k, L, A], the coarse level first
    assert torch.equal(policy.code(actions)[0], code)


@pytest.mark.parametrize("autoregressive", [True, False])
def test_sampled_actions_have_the_sampled_code(autoregressive: bool) -> None:
    policy = make(horizon=3, autoregressive=autoregressive)
    observation = TensorDict({"x": torch.randn(50, 3)}, [50])
    for deterministic in (True, False):
        decision = policy.act(observation, deterministic=deterministic)
        assert torch.equal(policy.code(decision.actions), decision.sample["code"].long())


def test_intervals_before_each_choice_by_hand() -> None:
    policy = make(levels=2, bins=3)
    code = policy.code(torch.tensor([[[-0.75, 4.0], [1.0, 0.0]]]))
    assert code[0].tolist() == [[[0, 2], [1, 2]], [[2, 0], [2, 0]]]
    # thirds of nine points have the centres -0.75, 0 and 0.75; the second choice of a level knows the first
    first = [[0.0, 0.0], [-0.75, 0.0], [-0.75, 0.75], [-0.75, 0.75]]
    second = [[0.0, 0.0], [0.75, 0.0], [0.75, -0.75], [1.0, -0.75]]
    expected = [[*each, 0.0, 0.0] for each in first] + [[-0.75, 1.0, *each] for each in second]
    assert policy._intervals(code).view(8, 4).tolist() == expected
    policy.config.autoregressive = False
    for number in (1, 5):  # within a level elements do not know one another
        expected[number] = expected[number - 1]
    expected[7] = expected[6]
    assert policy._intervals(code).view(8, 4).tolist() == expected


@pytest.mark.parametrize("autoregressive", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_probabilities_of_all_actions_add_up_to_one(autoregressive: bool, count: int) -> None:
    policy = make(levels=2, bins=2, autoregressive=autoregressive)
    observation = TensorDict({"x": torch.randn(1, 3)}, [1])
    codes = torch.tensor(list(product(range(2), repeat=4 * count))).view(-1, count, 2, 2)
    log_probs = policy.log_probs(observation.expand(len(codes)).contiguous(), codes)
    log_prob = log_probs.gather(-1, codes.unsqueeze(-1)).flatten(1).sum(1)
    assert float(log_prob.detach().std()) > 0.1
    assert float(log_prob.detach().exp().sum()) == pytest.approx(1.0, abs=1e-5)


def test_too_many_choices_are_refused() -> None:
    with pytest.raises(UserError, match=r"30 actions x 3 levels x 2 elements = 180 .* task\.horizon=1"):
        make(horizon=30, executed=1)
    make(horizon=30, executed=1, levels=2)  # the advice


def test_networks_without_layers_are_refused() -> None:
    with pytest.raises(UserError, match=r"policy\.hidden"):
        CoarseToFineConfig(hidden=[])


@pytest.mark.parametrize("target", [Target.c, Target.onnx])
def test_export_is_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="CoarseToFinePolicy cannot be exported; expected policy=mlp"):
        export(make(), Export(target), tmp_path / "export")
