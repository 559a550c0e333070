"""Self-imitation learns only from demonstrations and its successes, and resumes exactly."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.imitation.self_imitation import SelfImitation, SelfImitationConfig
from embodied.algorithms.imitation.sft import SFTConfig
from embodied.data.episodes import Episodes
from embodied.evaluation.evaluation import evaluate
from embodied.rollout.rollout import Collector
from policies.mlp import MLPConfig, MLPPolicy
from tests.embodied.reach import Reach


def demonstrations() -> Episodes:
    """One start of each side, pushed slowly."""
    episodes = []
    for task in range(2):
        position = (1.0 - 2.0 * task) * torch.linspace(0.4, 0.05, 6)
        seen = TensorDict({"position": position[:5, None], "task": torch.full((5, 1), float(task))}, [5])
        episodes.append(Episodes.of(seen, position.diff()[:, None], task_index=task))
    return Episodes.join(episodes)


def demonstrated(learner: SelfImitation) -> list[list[float]]:
    """All chunks of the demonstrations."""
    episodes = learner.demonstrations
    return episodes.chunks(torch.arange(len(episodes)), 2)["actions"].flatten(1).tolist()


def make(
    seed: int = 0, envs: int = 32, *, running_statistics: bool = False, **settings
) -> tuple[MLPPolicy, SelfImitation, Collector]:
    torch.manual_seed(seed)
    policy = MLPConfig(hidden=[32], initial_std=0.4, running_statistics=running_statistics).build(Reach(1).contract)
    policy.fit(Reach(32).reset(starts=torch.arange(32)), torch.zeros(1, 1))
    sft = SFTConfig(steps=400, batch=64, learning_rate=5e-3, final_learning_rate=5e-3, average=0.9)
    config = SelfImitationConfig(**({"gradient_steps": 30, "capacity": 5000, "sft": sft} | settings))
    learner = config.build(policy, demonstrations(), Reach(envs), torch.Generator().manual_seed(seed))
    return policy, learner, Collector(Reach(envs), policy, torch.Generator().manual_seed(seed), learner.starts)


def test_the_network_of_a_round_reads_observations_by_the_statistics_of_the_policy():
    policy, learner, collector = make(running_statistics=True)
    rollout = collector.collect(6)
    policy.renormalise(rollout.observation.apply(lambda each: each + 3.0))  # as the loop does after each update
    learner.update(rollout, 0.0)
    for network in (learner.sft.policy, learner.sft.trained):
        other = dict(network.named_buffers())
        assert all(torch.equal(each, other[name]) for name, each in policy.named_buffers())


def test_only_chunks_of_successful_episodes_are_kept():
    _, learner, collector = make()
    kept = 0
    for _ in range(4):
        rollout = collector.collect(6)
        learner.update(rollout, 0.0)
        rows = learner.replay.succeeded()
        if not len(rows):
            continue
        held = learner.replay.chunks(rows, 2)
        # a success ends inside |x| < 0.1: from the last decision kept, its valid actions lead there
        ends = ~held["valid"].all(-1)
        landed = held["observation", "position"][:, 0] + (held["actions"][..., 0] * held["valid"]).sum(-1)
        assert (landed[ends].abs() < 0.1).all()
        kept = len(held)
    assert kept > 0


def test_without_a_success_demonstrations_alone_are_imitated():
    _, learner, collector = make(envs=1)
    metrics = learner.update(collector.collect(1), 0.05)  # no episode can end in one chunk
    assert metrics["imitated_chunks"] == 0
    shown = {tuple(row) for row in demonstrated(learner)}
    assert all(tuple(row) in shown for row in learner._batch()["actions"].flatten(1).tolist())


def test_a_new_network_takes_over_at_the_end_of_a_round_and_only_then():
    policy, learner, collector = make(rounds=2)
    before = copy.deepcopy(policy.state_dict())
    learner.update(collector.collect(5), 0.4)
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())
    trained = learner.sft.policy
    learner.update(collector.collect(5), 0.5)
    pairs = zip(policy.actor_parameters(), trained.actor_parameters(), strict=True)
    assert all(torch.equal(mine, learned) for mine, learned in pairs)
    assert learner.sft.gradient_steps == 0
    assert learner.gradient_steps == 60
    assert not torch.equal(policy.actor[0].weight, learner.sft.policy.actor[0].weight)
    last = learner.sft.policy
    learner.update(collector.collect(5), 1.0)
    pairs = zip(policy.actor_parameters(), last.actor_parameters(), strict=True)
    assert all(torch.equal(mine, learned) for mine, learned in pairs)
    assert learner.sft.policy is last  # the last round ends with the run: no unused network is made


def test_a_warm_start_goes_on_with_the_weights_of_the_round_before():
    policy, learner, collector = make(rounds=2, warm_start=True)
    for part in (0.5, 0.8):
        weights = {name: value.clone() for name, value in policy.state_dict().items()}
        new = learner.sft.policy.state_dict()
        assert all(torch.equal(new[name], value) for name, value in weights.items())
        assert learner.sft.trained is not learner.sft.policy is not policy
        learner.update(collector.collect(4), part)
    assert all(torch.equal(policy.state_dict()[name], value) for name, value in weights.items())


def test_the_learning_rate_falls_in_each_round():
    sft = SFTConfig(batch=64, learning_rate=3e-3, final_learning_rate=1e-3)
    _, learner, collector = make(rounds=2, gradient_steps=10, sft=sft)
    rates = []
    for progress in (0.5, 0.75):
        trained = learner.sft
        learner.update(collector.collect(5), progress)
        rates.append(trained.optimiser.param_groups[0]["lr"])
    # the last of ten steps is at 9/10 of the first round, then at 9/20 of the second
    assert rates == pytest.approx([2e-3 + 1e-3 * math.cos(math.pi * part) for part in (0.9, 0.45)])


def test_minibatches_hold_their_share_of_demonstrations_and_tasks_equally():
    _, learner, collector = make(demonstration_share=0.25)
    for _ in range(3):
        learner.update(collector.collect(6), 0.0)
    often = replace(demonstrations().part(1, 2), actions=torch.full((5, 1), 0.2))
    learner.replay.add_episodes(Episodes.join(90 * [often]))  # one task succeeds far more often
    learner.update(collector.collect(1), 0.0)
    shown = {tuple(row) for row in demonstrated(learner)}
    batch = learner._batch()
    assert len(batch) == 64
    own = [tuple(row) not in shown for row in batch["actions"].flatten(1).tolist()]
    assert sum(own) == 48
    assert int(batch["observation", "task"][own].sum()) == 24


def test_a_task_without_a_success_keeps_its_share_by_its_demonstrations():
    _, learner, collector = make(demonstration_share=0.25)
    for _ in range(3):
        learner.update(collector.collect(6), 0.0)
    del learner.by_task[0]
    batch = learner._batch()
    assert len(batch) == 64
    shown = {tuple(row) for row in demonstrated(learner)}
    own = [tuple(row) not in shown for row in batch["actions"].flatten(1).tolist()]
    assert sum(own) == 24
    assert (batch["observation", "task"][own] == 1.0).all()
    assert int((batch["observation", "task"][40:] == 0.0).sum()) == 24  # behind shown and own ones
    assert 24 < int((batch["observation", "task"] == 0.0).sum()) < 40


def success_rate(policy: MLPPolicy) -> float:
    return evaluate(Reach(16), policy, starts_per_task=22).summary()["success"]


def test_learns_to_reach_where_demonstrations_alone_do_not():
    policy, learner, collector = make(rounds=4, seed=2)
    learner.sft.fit(demonstrations(), 100)
    policy.load_state_dict(learner.sft.policy.state_dict())
    for iteration in range(12):
        learner.update(collector.collect(12), (iteration + 1) / 12)
    control, supervised, _ = make()
    supervised.sft.fit(demonstrations(), learner.gradient_steps)
    assert success_rate(control) < 0.7
    assert success_rate(policy) > 0.95


def test_a_resumed_learner_takes_the_same_steps():
    policy, learner, collector = make()
    for _ in range(2):
        learner.update(collector.collect(5), 0.0)
    state = copy.deepcopy({"learner": learner.state_dict(), "collector": collector.state_dict()})
    first = [learner.update(collector.collect(5), 0.0) for _ in range(2)]
    other_policy, other, other_collector = make(seed=3)
    other_policy.load_state_dict(policy.state_dict())
    other.load_state_dict(state["learner"])
    other_collector.load_state_dict(state["collector"])
    assert [other.update(other_collector.collect(5), 0.0) for _ in range(2)] == first
    assert all(torch.equal(value, other_policy.state_dict()[name]) for name, value in policy.state_dict().items())


def test_beyond_its_end_the_last_round_goes_on_at_its_final_rate():
    sft = SFTConfig(steps=400, batch=64, learning_rate=5e-3, final_learning_rate=1e-4, average=0.9)
    policy, learner, collector = make(rounds=2, sft=sft)
    for progress in (0.5, 1.0):
        learner.update(collector.collect(4), progress)
    last = learner.sft
    for _ in range(2):
        before = copy.deepcopy(policy.state_dict())
        learner.update(collector.collect(4), 1.0)
        assert learner.sft is last
        assert last.optimiser.param_groups[0]["lr"] == 1e-4
        assert any(not torch.equal(before[name], value) for name, value in policy.state_dict().items())
        assert all(map(torch.equal, policy.actor_parameters(), last.policy.actor_parameters()))


def test_failed_demonstrations_are_not_shown_for_tasks_without_a_success():
    """Task 0 has a success of the policy, task 1 only demonstrations, of which one failed."""
    shown = demonstrations()
    failed = replace(shown, actions=shown.actions + 9.0, success=torch.zeros(2, dtype=torch.int8))
    policy, other, _ = make()
    both = Episodes.join([shown, failed])
    learner = SelfImitation(policy, other.config, both, Reach(2), torch.Generator().manual_seed(0))
    learner.replay.add_episodes(shown.part(0, 1))
    learner._sort()
    assert {task: len(rows) for task, rows in learner.demonstration_rows.items()} == {0: 5, 1: 5}
    assert float(torch.cat([learner._batch()["actions"] for _ in range(10)]).max()) < 1.0
