"""Rollouts of several collectors, joined, are what one collector of all environments would have."""

from dataclasses import fields, replace

import pytest
import torch
from tensordict import TensorDict

from embodied.rollout.joining import consecutive, joined, since
from embodied.rollout.rollout import Collector, Rollout
from policies.mlp import MLPConfig
from tests.embodied.reach import FixedStarts, Reach

STARTS = [0, 3, 5, 10, 2]


class Steady:
    """Goes towards the origin, without the collector's noise: episodes are as long as their start is far."""

    def __init__(self, policy) -> None:
        self.policy, self.contract = policy, policy.contract

    def act(self, observation, *, deterministic=False, generator=None):
        decision = self.policy.act(observation, deterministic=True)
        decision.actions = (-0.12 * observation["position"].sign()).unsqueeze(1).expand_as(decision.actions)
        decision.value = self.policy.value(observation).detach()
        return decision


def collected(policy, starts: list[int], tasks: int = 1) -> list[Rollout]:
    env = Reach(len(starts), tasks=tasks)
    collector = Collector(env, Steady(policy), torch.Generator(), FixedStarts(starts))
    rollouts = [collector.collect(5) for _ in range(2)]
    return [replace(each, simulation_s=0.0, policy_s=0.0) for each in rollouts]


@pytest.fixture
def policy():
    torch.manual_seed(3)
    policy = MLPConfig(hidden=[8]).build(Reach(1).contract)
    policy.fit(Reach(32).reset(starts=torch.arange(32)), torch.rand(100, 1) - 0.5)
    with torch.no_grad():
        for parameter in policy.actor_parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return policy


def same(one, other) -> None:
    """But for the rounding of a network on another number of rows."""
    for field in fields(Rollout):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(ours, TensorDict):
            assert ours.batch_size == theirs.batch_size, field.name
            torch.testing.assert_close(dict(ours), dict(theirs), rtol=0.0, atol=1e-6)
        elif isinstance(ours, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-6, msg=field.name)
        else:
            assert ours == theirs, field.name


def test_two_collectors_side_by_side_are_one_of_all_environments(policy) -> None:
    """Episodes end inside rollouts at different times, so that true observations lie between them."""
    for whole, left, right in zip(
        collected(policy, STARTS), collected(policy, STARTS[:2]), collected(policy, STARTS[2:]), strict=True
    ):
        assert len(whole.final_rows) > len(left.final_rows) > 0
        assert len((whole.final_rows // len(STARTS)).unique()) > 2
        same(joined([left, right]), whole)
        torch.testing.assert_close(
            joined([left, right]).next_observation()["position"], whole.next_observation()["position"]
        )


def test_what_is_counted_is_counted_together(policy) -> None:
    one, other = collected(policy, STARTS[:2])
    one = replace(one, vanished=2, policy_version=4, simulation_s=3.0, placement_metrics={"cpu_s": 1.0})
    other = replace(other, vanished=1, policy_version=3, simulation_s=2.0, placement_metrics={"cpu_s": 0.5})
    both = joined([one, other])
    assert (both.vanished, both.policy_version) == (3, 3)
    assert both.simulation_s == 3.0  # they ran side by side
    assert both.placement_metrics == {"cpu_s": 1.5}
    assert both.env_steps == one.env_steps + other.env_steps


def test_one_rollout_alone_is_copied(policy) -> None:
    one = collected(policy, STARTS)[0]
    copy = joined([one])
    same(copy, one)
    copy.reward.add_(1.0)
    assert not torch.equal(copy.reward, one.reward)


def test_rollouts_that_do_not_go_together_are_refused(policy) -> None:
    one, other = collected(policy, STARTS[:2])
    with pytest.raises(ValueError, match="expected all rollouts with value, or none"):
        joined([one, replace(other, value=None)])
    short = Collector(Reach(2, tasks=1), Steady(policy), torch.Generator()).collect(3)
    with pytest.raises(ValueError, match=r"expected rollouts of one length, got \[5, 3\] decisions"):
        joined([one, short])


def test_two_rollouts_one_after_the_other_are_a_longer_one(policy) -> None:
    """Also where an episode ends with the last decision of the first: the observation after it is not lost."""
    whole = Collector(Reach(5), Steady(policy), torch.Generator(), FixedStarts(STARTS)).collect(12)
    for length in range(1, 12):
        collector = Collector(Reach(5), Steady(policy), torch.Generator(), FixedStarts(STARTS))
        both = consecutive(collector.collect(length), collector.collect(12 - length))
        same(replace(both, simulation_s=0.0, policy_s=0.0), replace(whole, simulation_s=0.0, policy_s=0.0))
        assert torch.equal(both.next_observation()["position"], whole.next_observation()["position"])
        later = since(whole, length)
        assert torch.equal(later.next_observation()["position"], whole.next_observation()["position"][length:])
        assert torch.equal(later.reward, whole.reward[length:])
