"""The attention policy: neighbours are a set, absent ones have no effect, and it learns from them."""

import pytest
import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.policy import DeterministicPolicy
from policies.attention import AttentionConfig, AttentionPolicy

NEIGHBOURS = TensorSpec((5, 4), names=("x", "y", "z", "present"))
OBSERVATION = {"state": TensorSpec((18,)), "neighbours": NEIGHBOURS, "obstacles": TensorSpec((3, 3))}
ACTION = TensorSpec((4,), low=(-1.0,) * 4, high=(1.0,) * 4)
CONTRACT = Contract(OBSERVATION | {"wind": TensorSpec((3,), privileged=True)}, ACTION, 0.01)


def observations(count: int, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    parts = {key: torch.randn(count, *spec.shape, generator=generator) for key, spec in CONTRACT.observation.items()}
    parts["neighbours"][..., 3] = (torch.rand(count, 5, generator=generator) < 0.6).float()
    parts["neighbours"][..., :3] = 3.0 + parts["neighbours"][..., :3]
    return TensorDict(parts, [count])


def make() -> AttentionPolicy:
    torch.manual_seed(0)
    policy = AttentionConfig().build(CONTRACT)
    policy.actor[-2].weight.data += 0.3 * torch.randn_like(policy.actor[-2].weight)
    policy.fit(observations(64), torch.zeros(1, 4))
    return policy


def test_it_is_small():
    assert 3000 < sum(parameter.numel() for parameter in make().mean_parameters()) < 4000
    assert isinstance(make(), DeterministicPolicy)
    assert make().dense_layers() is None


def test_neighbours_are_a_set_and_those_that_are_not_there_change_nothing():
    policy, seen = make(), observations(20, seed=1)
    before = policy.act(seen, deterministic=True).actions
    order = torch.tensor([3, 0, 4, 1, 2])
    shuffled = seen.clone().set("neighbours", seen["neighbours"][:, order])
    torch.testing.assert_close(policy.act(shuffled, deterministic=True).actions, before)
    present = seen["neighbours"][..., 3:]
    elsewhere = seen["neighbours"] + torch.tensor([9.0, 9.0, 9.0, 0.0]) * (1.0 - present)
    assert torch.equal(policy.act(seen.clone().set("neighbours", elsewhere), deterministic=True).actions, before)
    nearer = seen["neighbours"] + torch.tensor([1.0, 0.0, 0.0, 0.0]) * present
    changed = (
        (policy.act(seen.clone().set("neighbours", nearer), deterministic=True).actions != before).any(-1).squeeze()
    )
    assert torch.equal(changed, present.squeeze(-1).any(1))


def test_tokens_share_the_statistics_of_the_rows_that_are_there():
    policy, seen = make(), observations(64)
    there = seen["neighbours"][seen["neighbours"][..., 3] == 1.0]
    for row in range(5):
        columns = slice(18 + 4 * row, 18 + 4 * row + 3)
        torch.testing.assert_close(policy.mean[columns], there[:, :3].mean(0))
        torch.testing.assert_close(policy.std[columns], there[:, :3].std(0))
        assert (policy.mean[columns.stop], policy.std[columns.stop]) == (0.0, 1.0)
    obstacles = seen["obstacles"].flatten(0, 1)
    torch.testing.assert_close(policy.mean[38:47], obstacles.mean(0).repeat(3))
    torch.testing.assert_close(policy.mean[47:], seen["wind"].mean(0))  # the critic's


def test_samples_are_scored_as_they_were_drawn():
    policy, seen = make(), observations(20, seed=1)
    decision = policy.act(seen, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(policy.evaluate(seen, decision.sample).log_prob, decision.log_prob)
    assert policy.value(seen).shape == (20,)
    blind = seen.exclude("wind")
    assert torch.equal(policy.act(blind, deterministic=True).actions, policy.act(seen, deterministic=True).actions)


def test_it_learns_to_look_at_the_nearest():
    policy, seen = make(), observations(256, seed=2)
    distance = seen["obstacles"].norm(dim=-1)
    nearest = seen["obstacles"][torch.arange(256), distance.argmin(1)]
    actions = torch.zeros(256, 1, 4)
    actions[:, 0, :3] = 0.6 * nearest.clamp(-1.0, 1.0)
    optimiser = torch.optim.Adam(policy.actor_parameters(), 1e-2)
    losses = []
    for _ in range(200):
        loss = policy.loss(seen, actions, torch.ones(256, 1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.35 * actions.square().mean()


@pytest.mark.parametrize("missing", ["state", "neighbours"])
def test_what_it_cannot_serve_is_one_line(missing: str):
    observation = {key: spec for key, spec in OBSERVATION.items() if key not in (missing, "obstacles")}
    with pytest.raises(ValueError, match="use policy=mlp") as caught:
        AttentionConfig().build(Contract(observation, ACTION, 0.01))
    assert "\n" not in str(caught.value)


def test_reciprocals_of_tokens_are_refused():
    AttentionConfig(reciprocal=["state"]).build(CONTRACT)
    with pytest.raises(ValueError, match="which are tokens"):
        AttentionConfig(reciprocal=["state", "neighbours"]).build(CONTRACT)
