"""Action tokens of a small random model: bins, likelihood at a temperature, and L1 regression."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.contract import TensorSpec
from embodied.errors import UserError
from policies.vla.inputs import PAD
from policies.vla.tokens import Head, Part, Reading, TokensConfig, TokensPolicy, bins_of, centres
from tests.policies.vla.test_pi0 import SEEING, seen


def policy(**options: object) -> TokensPolicy:
    torch.manual_seed(0)
    made = TokensConfig(**{"hidden": 16, **options}).build(SEEING)
    made.fit(seen(16), torch.rand(50, 4, 3) * torch.tensor([1.0, 2.0, 3.0]))
    made.model.native.get_input_embeddings().weight.data[-made.bins :] *= 8.0  # so that some tokens are much likelier
    return made


def test_bins_are_those_of_openvla() -> None:
    x = torch.cat((torch.linspace(-1.2, 1.2, 4001), torch.tensor([-1.0, 1.0])))
    edges = np.linspace(-1.0, 1.0, 256)
    token = 32000 - np.digitize(x.clamp(-1.0, 1.0).numpy(), edges.astype(np.float32))
    assert (bins_of(x, 256) - torch.from_numpy(token - (32000 - 256))).abs().max() <= 1  # at edges, by rounding
    assert (bins_of(x, 256) == torch.from_numpy(token - (32000 - 256))).float().mean() > 0.99
    bins = torch.arange(256)
    middle = (edges[:-1] + edges[1:]) / 2
    expected = middle[np.clip(256 - bins.numpy() - 1, 0, 254)]
    torch.testing.assert_close(centres(bins, 256), torch.from_numpy(expected).float(), atol=1e-6, rtol=0.0)
    assert (centres(bins_of(x, 256), 256) - x.clamp(-1.0, 1.0)).abs().max() <= 1 / 255 + 1e-6


@pytest.mark.parametrize("temperature", [0.6, 1.6])
def test_the_likelihood_is_that_of_the_tempered_tokens_in_acting_and_in_scoring(temperature: float) -> None:
    made, observation = policy(temperature=temperature), seen(6)
    decision = made.act(observation, generator=torch.Generator().manual_seed(0))
    scored = made.evaluate(observation, decision.sample)
    with torch.no_grad():
        weight = made.model.native.get_input_embeddings().weight[-32:]
        logits = made._read(observation) @ weight.T / temperature
    shares = (logits - logits.amax(-1, keepdim=True)).double().exp()
    shares = shares / shares.sum(-1, keepdim=True)
    expected = shares.gather(-1, decision.sample["bins"].long().unsqueeze(-1)).squeeze(-1).log()[:, :2].flatten(1)
    for log_prob in (decision.log_prob, scored.log_prob):
        torch.testing.assert_close(log_prob.double(), expected, atol=1e-5, rtol=0.0)
    entropy = -(shares * shares.log()).sum(-1)[:, :2].flatten(1)
    torch.testing.assert_close(scored.entropy.double(), entropy, atol=1e-5, rtol=0.0)


def test_deterministic_tokens_are_the_most_likely_of_weights_and_medians_otherwise() -> None:
    observation, shares = seen(6), torch.zeros(6, 4, 3, 256)
    shares[..., 40], shares[..., 100:110], shares[..., 255] = 0.3, 0.03, 0.4  # mode 255; half is reached within 100:110
    shares[1, 2, 0] = torch.eye(256)[255]
    expected = {Reading.MODE: 255, Reading.MEDIAN: 106, Reading.AUTO: 106}
    for reading, bin_number in expected.items():
        made = policy(reading=reading, bins=256)
        made._log_probs = lambda hidden: shares.log()  # type: ignore[method-assign]
        bins = made.act(observation, deterministic=True).sample["bins"].long()
        assert bins[0].unique().tolist() == [bin_number]
        assert int(bins[1, 2, 0]) == 255


def test_medians_are_exact_within_bins() -> None:
    made, shares = policy(bins=32), torch.zeros(6, 4, 3, 32)
    shares[..., 3], shares[..., 20] = 0.4, 0.6  # half is reached after a sixth of bin 20, counted from its upper edge
    shares[1] = torch.eye(32)[31]
    made._log_probs = lambda hidden: shares.log()  # type: ignore[method-assign]
    decision = made.act(seen(6), deterministic=True)
    x = made.normalised(decision.actions)
    upper = 2.0 * (31 - 20 + 1) / 31 - 1.0
    torch.testing.assert_close(x[0], torch.full((4, 3), upper - 2.0 / 31 / 6), atol=1e-4, rtol=0.0)
    torch.testing.assert_close(x[1], torch.full((4, 3), -30 / 31), atol=1e-4, rtol=0.0)  # the middle of the lowest


def test_drawn_chunks_follow_the_distribution_and_the_observation_alone() -> None:
    made, observation = policy(reading=Reading.DRAWN, bins=4), seen(200)
    observation["fingers"] = torch.randn_like(observation["fingers"])
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(200, 4, 3, 4)
    made._log_probs = lambda hidden: shares[: len(hidden)].log()  # type: ignore[method-assign]
    drawn = made.act(observation, deterministic=True)
    bins = drawn.sample["bins"].long()
    assert torch.bincount(bins.flatten()) / bins.numel() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.03)
    assert len(bins.flatten(1).unique(dim=0)) > 190  # other states, other chunks,
    again = made.act(observation[50:60], deterministic=True)  # and the same in any batch
    assert torch.equal(again.actions, drawn.actions[50:60])


def test_bins_are_few_from_scratch_and_as_many_as_asked_for() -> None:
    observation = seen(2)
    for asked, bins in {None: 32, 7: 7, 256: 256}.items():
        made = policy(bins=asked)
        drawn = made.act(observation).sample["bins"]
        assert made._log_probs(made._read(observation)).shape == (2, 4, 3, bins)
        assert int(drawn.max()) < bins
    for wrong in (1, 257):
        with pytest.raises(UserError, match=f"bins={wrong}: expected a number of at least 2 and of at most 256"):
            TokensConfig(bins=wrong)
    with pytest.raises(UserError, match=r"256 bins, and policy\.bins=32"):
        TokensConfig(weights="somewhere", bins=32)


def test_tokens_are_drawn_from_the_tempered_distribution() -> None:
    made, same = policy(temperature=1.6), seen(1).expand(400).contiguous()
    decision = made.act(same, generator=torch.Generator().manual_seed(0))
    scored = made.evaluate(same[:1], decision.sample[:1])
    drawn = decision.log_prob.double()  # [400, 6]
    noise = drawn.std(0) / 400**0.5
    assert ((drawn.mean(0) + scored.entropy[0]).abs() < 4.0 * noise).all()  # E[log p] = -entropy
    with torch.no_grad():
        shares = made._log_probs(made._read(same[:1]))[0].exp()
    likely, bins = shares.max(-1)
    counted = (decision.sample["bins"].long() == bins).double().mean(0)
    assert ((counted - likely).abs() < 4.0 * (likely * (1 - likely) / 400).sqrt() + 1e-9).all()
    assert likely.max() > 0.05


def test_parts_are_tokens_actions_or_the_chunk_of_what_is_executed() -> None:
    observation, made = seen(3), {part: policy(part=part) for part in Part}
    sample = made[Part.TOKEN].act(observation).sample
    token, action, chunk = (made[part].evaluate(observation, sample).log_prob for part in Part)
    assert (token.shape, action.shape, chunk.shape) == ((3, 6), (3, 2), (3, 1))
    torch.testing.assert_close(action, token.unflatten(1, (2, 3)).sum(-1))
    torch.testing.assert_close(chunk, token.sum(-1, keepdim=True))
    changed = sample.clone()
    changed["bins"][:, 2:] += 1
    assert torch.equal(made[Part.TOKEN].evaluate(observation, changed).log_prob, token)
    changed["bins"][:, 1, 2] += 1
    assert ((made[Part.TOKEN].evaluate(observation, changed).log_prob != token).sum(0) > 0).tolist() == [False] * 5 + [
        True
    ]


def test_every_token_attends_to_every_other_and_to_no_padding() -> None:
    made, observation = policy(), seen(2)
    before = made._read(observation)
    made.model.native.get_input_embeddings().weight.data[PAD] = 9.0
    assert torch.equal(made._read(observation), before)
    made.model.empty.data[-1] += 1.0
    assert (made._read(observation)[:, 0, 0] - before[:, 0, 0]).abs().amax() > 1e-4


def test_cameras_words_and_state_are_read_and_what_is_privileged_is_not() -> None:
    made, before = policy(), seen(2)
    hidden, value = made._read(before), made.value(before)
    for key, changed in {"front": 0, "wrist": 0, "fingers": 3.0, "instruction": 97, "depth": 0, "cube": 9.0}.items():
        after = before.clone()
        after[key][1] = changed
        reads = key not in ("depth", "cube")
        assert bool((made._read(after)[1] != hidden[1]).any()) == reads
        assert bool(made.value(after)[1] != value[1]) == reads


def test_demonstrations_between_their_quantiles_are_between_minus_one_and_one() -> None:
    made = policy()
    actions = torch.stack(
        [torch.linspace(0.0, 1.0, 1001), torch.linspace(-2.0, 2.0, 1001), torch.full((1001,), 3.0)], 1
    )
    made.fit(seen(16), actions)
    torch.testing.assert_close(made.action_from, torch.tensor([0.01, -1.96, 2.6]))  # the limits are 4 apart: 20% is 0.8
    torch.testing.assert_close(made.action_to, torch.tensor([0.99, 1.96, 3.4]))
    back = made.to_robot(made.normalised(actions))
    torch.testing.assert_close(back, actions, atol=1e-5, rtol=0.0)
    assert made.to_robot(torch.full((1, 3), 9.0)).tolist() == [[1.0, 2.0, 4.0]]


def test_the_loss_is_the_cross_entropy_of_the_demonstrated_tokens() -> None:
    made, observation = policy(temperature=3.0), seen(4)
    actions, valid = torch.rand(4, 4, 3), torch.tensor([[1.0, 1.0, 1.0, 0.0]] * 4)
    logits = made.model.logits(made._read(observation))[:, :3]
    bins = bins_of(made.normalised(actions), made.bins)[:, :3]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 2), bins.flatten())
    torch.testing.assert_close(made.loss(observation, actions, valid), expected)


def test_regression_learns_to_act_as_shown() -> None:
    made, observation = policy(head=Head.L1), seen(4)
    made.regression.fc2.weight.data *= 0.1  # so that no action is clamped
    actions, valid = torch.rand(4, 4, 3) * torch.tensor([1.0, 2.0, 3.0]), torch.ones(4, 4)
    before = made.loss(observation, actions, valid)
    error = made.normalised(made.act(observation).actions) - made.normalised(actions)
    torch.testing.assert_close(before, error.abs().mean(), atol=1e-5, rtol=1e-5)
    optimiser = torch.optim.Adam(made.actor_parameters(), 1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        made.loss(observation, actions, valid).backward()
        optimiser.step()
    assert made.loss(observation, actions, valid) < 0.3 * before
    assert (made.act(observation).actions - actions).abs().mean() < 0.3


def test_regression_is_refused_for_reinforcement_in_one_line() -> None:
    made = policy(head=Head.L1)
    with pytest.raises(UserError, match=r"head=l1 has no likelihood; use policy\.head=bins"):
        made.evaluate(seen(2), made.act(seen(2)).sample)
    with pytest.raises(UserError, match=r"log-probability for algorithm=ppo; use .*policy\.head=bins"):
        PPOConfig().build(made, None, None, torch.Generator())  # type: ignore[arg-type]


def test_what_it_cannot_work_with_is_one_line() -> None:
    blind = {key: spec for key, spec in SEEING.observation.items() if not spec.is_picture}
    with pytest.raises(UserError, match=r"policy=tokens reads pictures, .* name cameras in task\.images"):
        TokensConfig().build(replace(SEEING, observation=blind))
    with pytest.raises(UserError, match="policy=tokens needs action limits"):
        TokensConfig().build(replace(SEEING, action=TensorSpec((3,))))
    for options in ({"temperature": 0.0}, {"temperature": float("nan")}, {"hidden": 0}):
        with pytest.raises(UserError, match=r"(temperature|hidden)=.* (above 0|at least 1)"):
            TokensConfig(**options)
