"""Running statistics equal those of all observations so far, and keep ratios at one."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.contract import Contract, TensorSpec
from embodied.rollout.rollout import Collector
from embodied.training.loop import train
from policies.mlp import MLPConfig, MLPPolicy
from policies.recurrent import RecurrentConfig
from tests.embodied.reach import Reach
from tests.embodied.windy_reach import WindyReach

CONTRACT = Contract({"x": TensorSpec((3,))}, TensorSpec((1,), low=(-1.0,), high=(1.0,)), control_dt_s=0.1)


def seen(count: int, seed: int) -> TensorDict:
    scale = torch.tensor([1.0, 30.0, 0.0])
    x = 5.0 * seed + scale * torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDict({"x": x}, [count])


def test_merged_statistics_are_those_of_all_observations_together():
    policy = MLPConfig(hidden=[4], running_statistics=True).build(CONTRACT)
    parts = [seen(40, 0), seen(7, 1), seen(300, 2).reshape(20, 15)]
    policy.fit(parts[0], torch.zeros(1, 1))
    for part in parts[1:]:
        policy.renormalise(part)
    together = torch.cat([part["x"].reshape(-1, 3) for part in parts])
    torch.testing.assert_close(policy.mean, together.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(policy.std[:2], together.std(0)[:2], rtol=1e-4, atol=1e-4)
    assert int(policy.count) == 347


def test_an_element_that_was_constant_at_first_is_measured_once_it_varies():
    policy = MLPConfig(hidden=[4], running_statistics=True).build(CONTRACT)
    parts = [seen(2048, 0)] + [seen(500, number) for number in range(1, 8)]
    for number, part in enumerate(parts):
        part["x"][:, 2] = 5.0 + number * 0.02 * torch.randn(len(part))
    policy.fit(parts[0], torch.zeros(1, 1))
    assert float(policy.scale[2]) == 1.0
    for part in parts[1:]:
        policy.renormalise(part)
    together = torch.cat([part["x"] for part in parts]).std(0)
    torch.testing.assert_close(policy.scale, together, rtol=1e-4, atol=0.0)


class Share:
    """One of two processes, here threads, whose sums wait for each other."""

    size = 2

    def __init__(self, rank: int, parts: list[torch.Tensor | None], barrier: Barrier) -> None:
        self.rank, self.parts, self.barrier = rank, parts, barrier

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.parts[self.rank] = values
        self.barrier.wait(10)
        total = self.parts[0] + self.parts[1]
        self.barrier.wait(10)
        return total


def test_statistics_are_of_the_observations_of_all_processes():
    policies = [MLPConfig(hidden=[4], running_statistics=True).build(CONTRACT) for _ in range(2)]
    parts, barrier = [None, None], Barrier(2)
    first, shares = seen(40, 0), [seen(30, 1), seen(90, 2)]
    for policy in policies:
        policy.fit(first, torch.zeros(1, 1))
    with ThreadPoolExecutor(2) as threads:
        worlds = [Share(rank, parts, barrier) for rank in range(2)]
        list(threads.map(lambda policy, share, world: policy.renormalise(share, world), policies, shares, worlds))
    together = torch.cat([part["x"] for part in (first, *shares)])
    for policy in policies:
        torch.testing.assert_close(policy.mean, together.mean(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(policy.scale[:2], together.std(0)[:2], rtol=1e-4, atol=1e-4)
        assert int(policy.count) == 160


def test_they_stay_as_they_are_unless_asked_for():
    policy = MLPConfig(hidden=[4]).build(CONTRACT)
    policy.fit(seen(40, 0), torch.zeros(1, 1))
    before = policy.mean.clone()
    policy.renormalise(seen(40, 3))
    assert torch.equal(policy.mean, before)


@pytest.mark.parametrize("kind", [MLPConfig, RecurrentConfig])
def test_a_loop_moves_them_between_an_update_and_the_next_rollout(kind: type[MLPConfig]):
    config = kind(hidden=[16], running_statistics=True)
    torch.manual_seed(0)
    env = WindyReach(16)
    policy = config.build(env.contract)
    learner = PPOConfig(rollout_length=8, minibatch=10**6, epochs=1, critic_warmup=0)
    counts = [int(policy.count) for _ in train(env, policy, learner, env_steps=400)]
    assert counts == [counts[0] + 128 * number for number in range(len(counts))]
    collector = Collector(WindyReach(16), policy, torch.Generator().manual_seed(1))
    rollout = collector.collect(4)
    scored = policy.evaluate(rollout.observation, rollout.sample) if kind is RecurrentConfig else None
    flat = rollout.observation.flatten(0, 1), rollout.sample.flatten(0, 1)
    found = scored.log_prob.flatten(0, 1) if scored else policy.evaluate(*flat).log_prob
    torch.testing.assert_close(found, rollout.log_prob.flatten(0, 1), rtol=1e-4, atol=1e-4)


def test_a_saved_policy_goes_on_with_them():
    policy, other = (MLPConfig(hidden=[4], running_statistics=True).build(CONTRACT) for _ in range(2))
    policy.fit(seen(40, 0), torch.zeros(1, 1))
    policy.renormalise(seen(40, 1))
    other.load_state_dict(policy.state_dict())
    for each in (policy, other):
        each.renormalise(seen(9, 2))
    assert torch.equal(policy.mean, other.mean)
    assert torch.equal(policy.std, other.std)


def test_it_learns_with_them() -> None:
    torch.manual_seed(0)
    env = Reach(64)
    policy: MLPPolicy = MLPConfig(hidden=[32], running_statistics=True).build(env.contract)
    learner = PPOConfig(rollout_length=16, minibatch=256, learning_rate=3e-3, target_kl=1.0, discount=0.9)
    shares = [step.ended["success"] for step in train(env, policy, learner, env_steps=80_000) if step.ended]
    assert sum(shares[-5:]) / 5 > sum(shares[:3]) / 3 + 0.2
