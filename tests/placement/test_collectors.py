"""When rollouts are asked for, how old those are that are learned from, and what is counted; without Ray."""

import pickle
from collections import deque
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from embodied import seeding
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.placement import worker
from embodied.placement.collectors import CollectorHandle, CollectorPool, RemoteCollectors
from embodied.placement.worker import CollectorHost, CollectorRecipe, CollectorSpec, Worker, part_of, software
from embodied.rollout.joining import joined
from embodied.rollout.rollout import Collector, Rollout
from embodied.training.loop import build, iterations
from policies.mlp import MLPConfig, MLPPolicy
from sims.quadrotor.task import HoverTask
from sims.registry import in_processes
from tests.embodied.reach import Reach

SHARE = 3
"""Environments of each collector."""


def part(first: int, count: int, seed: int) -> Reach:
    return Reach(count, seed=seed)


@pytest.fixture
def policy() -> MLPPolicy:
    torch.manual_seed(0)
    env = Reach(8)
    policy = MLPConfig(hidden=[8]).build(env.contract)
    policy.fit(env.reset(), torch.rand(100, 1) - 0.5)
    return policy


@dataclass
class Seat(CollectorHandle):
    worker: Worker
    ready: bool = True


class Fake(CollectorPool):
    """A pool in this process: those whose `turns` come give the next rollout they were asked for."""

    def __init__(self, policy: MLPPolicy, count: int, turns: list[int] | None = None, seed: int = 0) -> None:
        recipe = CollectorRecipe(part, Collector, lambda env, generator: None, policy, seed)
        self.handles = [Seat(CollectorSpec(number, SHARE * number, SHARE), Worker()) for number in range(count)]
        self.turns = deque(turns or [])
        self.asked: list[tuple[int, int]] = []  # collector and version
        for handle in self.handles:
            handle.worker.build(recipe, handle.spec)

    def publish(self, weights: dict) -> None:
        self.weights = {name: value.clone() for name, value in weights.items()}

    def request(self, handle: Seat, version: int, decisions: int) -> None:
        self.asked.append((handle.spec.number, version))
        handle.requests.append((version, self.weights, decisions))
        self.sent_bytes += 10

    def receive(self) -> list[tuple[Seat, Rollout]]:
        turn = self.turns.popleft() if self.turns else next(each.spec.number for each in self.handles if each.requests)
        handle = self.handles[turn]
        version, weights, decisions = handle.requests.popleft()
        return [(handle, handle.worker.collect(weights, version, decisions))]


def alone(policy: MLPPolicy, *own: int) -> Collector:
    """What a collector of that number, and with so many before it, should be like."""
    worker = Worker()
    worker.build(
        CollectorRecipe(part, Collector, lambda env, generator: None, policy, 0),
        CollectorSpec(own[0], 0, SHARE, own[1]),
    )
    return worker.collector


def test_synchronous_rollouts_are_those_of_the_newest_policy_in_order(policy: MLPPolicy) -> None:
    pool = Fake(policy, 2, turns=[1, 0, 0, 1])
    collectors, expected = RemoteCollectors(pool, policy), [alone(policy, 0, 0), alone(policy, 1, 0)]
    for version in range(2):
        rollout = collectors.collect(4)
        for each in expected:
            each.version, each.policy = version, policy
        both = joined([each.collect(4) for each in expected])
        assert torch.equal(rollout.actions, both.actions)
        assert rollout.policy_version == version
        assert rollout.placement_metrics["staleness"] == 0.0
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += 0.1
        collectors.version += 1
    assert pool.asked == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_one_collector_gives_the_numbers_of_a_run_in_one_process(policy: MLPPolicy) -> None:
    ours = RemoteCollectors(Fake(policy, 1), policy)
    theirs = Collector(Reach(SHARE), policy, seeding.generator(0, "noise"))
    for _ in range(2):
        assert torch.equal(ours.collect(4).log_prob, theirs.collect(4).log_prob)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_what_equally_fast_collectors_give_is_never_too_old(count: int, staleness: int, policy: MLPPolicy) -> None:
    """Each gives what it was asked for in its turn: none is dropped, and during an update all have something to do."""
    pool = Fake(policy, count, turns=list(range(count)) * 40)
    collectors = RemoteCollectors(pool, policy, max_staleness=staleness)
    ages = []
    for _ in range(8):
        rollout = collectors.collect(3)
        assert rollout.done.shape == (3, count * SHARE)
        ages.append(rollout.placement_metrics["staleness"])
        assert all(handle.pending for handle in pool.handles)
        assert sum(handle.pending for handle in pool.handles) + len(collectors.waiting) <= staleness * count
        collectors.version += 1
    assert ages[0] == 0.0
    assert 1.0 <= ages[-1] <= staleness
    assert collectors.dropped == 0


def test_a_rollout_that_comes_too_late_is_dropped_and_counted(policy: MLPPolicy) -> None:
    """The first collector is four times as fast: what the other began at version 0 comes at version 2."""
    pool = Fake(policy, 2, turns=[0, 0, 0, 0, 0, 1, 0])
    collectors = RemoteCollectors(pool, policy, max_staleness=1)
    dropped = []
    for _ in range(3):
        rollout = collectors.collect(3)
        dropped.append(rollout.placement_metrics["dropped_rollouts"])
        assert collectors.version - rollout.policy_version <= 1
        collectors.version += 1
    assert dropped == [0.0, 0.0, 1.0]


def test_what_died_is_told_once_and_its_episodes_are_lost(policy: MLPPolicy) -> None:
    pool = Fake(policy, 2)
    collectors = RemoteCollectors(pool, policy)
    pool.lost_collectors, pool.lost_episodes, pool.handles[1].ready = 1, SHARE, False
    collectors._started = True
    rollout = collectors.collect(3)
    assert rollout.done.shape == (3, SHARE)  # the run goes on with those that are there
    assert rollout.odd_episodes() == {"diverged": SHARE, "lost": SHARE, "pushed": 0}
    assert rollout.placement_metrics["lost_collectors"] == 1.0
    assert rollout.placement_metrics["collectors"] == 1.0
    pool.handles[1].ready = True
    rollout = collectors.collect(3)
    assert rollout.done.shape == (3, 2 * SHARE)
    assert (rollout.odd_episodes()["lost"], rollout.placement_metrics["lost_collectors"]) == (0, 0.0)


def test_a_resumed_run_draws_other_numbers(policy: MLPPolicy) -> None:
    first = RemoteCollectors(Fake(policy, 1), policy)
    first.version = 3
    again = RemoteCollectors(Fake(policy, 1), policy)
    again.load_state_dict(first.state_dict())
    assert again.version == 3
    assert again.pool.handles[0].spec.restarts == 1
    a, b = alone(policy, 0, 0), alone(policy, 0, 1)
    assert not torch.equal(a.collect(3).sample["raw"], b.collect(3).sample["raw"])
    moved = RemoteCollectors(Fake(policy, 1), policy)
    here = Collector(Reach(SHARE), policy, torch.Generator())
    moved.load_state_dict(here.state_dict())  # the run was in one process before
    assert moved.pool.handles[0].spec.restarts == 1
    here.load_state_dict(first.state_dict())  # and goes on in one
    assert here.version == 3


def test_a_worker_writes_into_weights_of_its_own(policy: MLPPolicy) -> None:
    worker = Worker()
    worker.build(CollectorRecipe(part, Collector, lambda env, generator: None, policy), CollectorSpec(0, 0, SHARE))
    before = policy.actor[0].weight.clone()
    other = {name: value + 1.0 for name, value in policy.state_dict().items()}
    worker.collect(other, 0, 2)
    assert torch.equal(policy.actor[0].weight, before)


def test_it_learns_from_old_rollouts(policy: MLPPolicy) -> None:
    env = Reach(SHARE)
    algorithm = PPOConfig(rollout_length=8, minibatch=64, critic_warmup=0, importance_limit=2.0)
    learner, _ = build(env, policy, algorithm, None, 0)
    collectors = RemoteCollectors(Fake(policy, 2), policy, max_staleness=2)
    steps = list(iterations(learner, collectors, 8, 600))
    assert steps[-1].env_steps >= 600
    last = steps[-1].logged
    shares = [last[f"placement/share_of_staleness_{age}"] for age in range(3)]
    assert sum(shares) == pytest.approx(1.0)
    assert last["placement/staleness"] == pytest.approx(shares[1] + 2 * shares[2])
    assert last["placement/staleness"] >= 1.0
    assert steps[-1].logged["rl/importance"] == pytest.approx(1.0, abs=0.5)
    assert steps[-1].logged["rl/importance"] != 1.0


def test_a_task_in_child_processes_can_be_sent_to_collectors() -> None:
    task = in_processes(HoverTask(processes=2))
    sent = pickle.loads(pickle.dumps(partial(part_of, task, "cpu")))
    assert sent.args[0].processes == 2
    assert sent.args[0].name == task.name
    assert sent.args[0]._pool is not task._pool


def test_software_that_differs_is_named_and_builds_of_one_version_do_not_differ() -> None:
    ours = software()
    assert ours["torch"] == torch.__version__
    assert CollectorHost("node", ours).differences(ours) == ""
    assert (
        CollectorHost("node", ours | {"torch": "2.1.0"})
        .differences(ours)
        .startswith("torch 2.1.0 where the learner has")
    )
    assert (
        CollectorHost("node", ours | {"code": "0" * 12})
        .differences(ours)
        .startswith("code 000000000000 where the learner")
    )
    cuda = ours | {"torch": ours["torch"].partition("+")[0] + "+cu128", "cuda": "12.8"}
    assert CollectorHost("node", cuda).differences(ours) == ""
    assert CollectorHost("node", {}).differences({"numpy": "2.0"}) == "numpy none where the learner has 2.0"


def test_signals_count_in_the_size_of_a_rollout(policy: MLPPolicy) -> None:
    rollout = Collector(Reach(4), policy, torch.Generator()).collect(3)
    with_cost = replace(rollout, signals={"cost": torch.zeros(3, 4, 2)})
    assert worker._bytes(with_cost) - worker._bytes(replace(rollout, signals={})) == 3 * 4 * 2 * 4
