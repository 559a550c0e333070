"""Chunked implicit Q-learning: its transitions and losses by hand, resumption, and that it learns a small task."""

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from embodied.algorithms.chunked_iql import (
    ChunkedIQL,
    ChunkedIQLConfig,
    demonstration_transitions,
    rollout_transitions,
)
from embodied.algorithms.sft import SFTConfig, cut_chunks
from embodied.evaluation import evaluate
from embodied.policy import Decision
from embodied.rollout import Collector, Rollout
from policies.mlp import MLPConfig, MLPPolicy
from tests.embodied.reach import Reach


class RankingMLP(MLPPolicy):
    """An MLPPolicy with two critics of chunks, acting by the best of eight once `ranked`."""

    def __init__(self, contract) -> None:
        super().__init__(contract, MLPConfig(hidden=[32], initial_std=0.4))
        size = 2 + contract.horizon
        self.action_critics = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
            for _ in range(2)
        )
        self.register_buffer("ranked", torch.zeros((), dtype=torch.bool))

    def critic_parameters(self):
        return [*super().critic_parameters(), *self.action_critics.parameters()]

    def action_values(self, observation, actions):
        inputs = torch.cat((self._inputs(observation), (actions / 0.25).flatten(1)), -1)
        return torch.stack([critic(inputs).squeeze(-1) for critic in self.action_critics])

    @torch.no_grad()
    def act(self, observation, *, deterministic=False, generator=None):
        if not self.ranked:
            return super().act(observation, deterministic=deterministic, generator=generator)
        generator = torch.Generator().manual_seed(0) if deterministic else generator
        many = observation.repeat_interleave(8, 0)
        actions = super().act(many, generator=generator).actions
        best = self.action_values(many, actions).amin(0).view(-1, 8).argmax(1)
        actions = actions.view(-1, 8, *actions.shape[1:])[torch.arange(len(best)), best]
        return Decision(actions, TensorDict({"raw": actions.flatten(1)}, [len(best)]), torch.zeros(len(best), 1))


def episode(length: int, first: float = 0.0, horizon: int = 3) -> TensorDict:
    """An episode whose observations count on from `first`."""
    position = first + torch.arange(float(length)).unsqueeze(1)
    return cut_chunks(TensorDict({"position": position}, [length]), position + 0.5, horizon)


def rows(*episodes: TensorDict) -> TensorDict:
    return demonstration_transitions(torch.cat(episodes), 0.5)


def test_windows_of_a_demonstration_by_hand():
    got = rows(episode(5))
    assert got["observation", "position"].flatten().tolist() == [0, 1, 2, 3, 4]
    # windows of 3: the first two go on at their fourth observation, the third ends with the episode
    assert got["next_observation", "position"].flatten()[:2].tolist() == [3, 4]
    assert got["decay"].tolist() == [0.125, 0.125, 0, 0, 0]
    assert got["reward"].tolist() == [0, 0, 0.25, 0.5, 1.0]  # 1 at the last step, discounted to the window's first
    assert got["valid"].tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_no_window_runs_into_the_next_episode(order):
    lengths = (3, 2, 4, 1)  # as long as a window, shorter, longer, and one step
    episodes = [episode(lengths[index], 100.0 * index) for index in order]
    got = rows(*episodes)
    rewards = {3: [0.25, 0.5, 1.0], 2: [0.5, 1.0], 4: [0.0, 0.25, 0.5, 1.0], 1: [1.0]}
    assert got["reward"].tolist() == [reward for index in order for reward in rewards[lengths[index]]]
    assert got["decay"].tolist() == [0.125 if reward == 0 else 0.0 for reward in got["reward"].tolist()]
    going = got["decay"] > 0
    moved = got["next_observation", "position"] - got["observation", "position"]
    assert moved[going].flatten().tolist() == [3.0]


def test_windows_of_one_action_are_refused():
    # all of them are whole, so that nothing shows where an episode ends
    with pytest.raises(ValueError, match="horizon"):
        rows(episode(4, horizon=1))


def rollout() -> Rollout:
    """Two decisions of two environments, H=3, K=2: one succeeds in the middle of a chunk, one runs out of time."""
    seen = torch.arange(4.0).view(2, 2, 1)
    flags = {name: torch.zeros(2, 2, dtype=torch.bool) for name in ("terminated", "truncated", "success")}
    flags["terminated"][1, 0] = flags["success"][1, 0] = flags["truncated"][1, 1] = True
    executed = torch.ones(2, 2, 2, dtype=torch.bool)
    executed[1, :, 1] = False
    reward = torch.zeros(2, 2, 2)
    reward[1, 0, 0] = 1.0
    return Rollout(
        observation=TensorDict({"position": seen}, [2, 2]),
        next_observation=TensorDict({"position": seen + 10}, [2, 2]),
        actions=torch.arange(12.0).view(2, 2, 3, 1), sample=TensorDict({}, [2, 2]), log_prob=torch.zeros(2, 2, 1),
        reward=reward, executed=executed, **flags, task_index=torch.zeros(2, 2), start=torch.zeros(2, 2),
        simulation_s=0.0, policy_s=0.0,
    )  # fmt: skip


def test_chunks_of_a_rollout_by_hand():
    got = rollout_transitions(rollout(), 0.5)
    assert got["observation", "position"].flatten().tolist() == [0, 1, 2, 3]
    assert got["next_observation", "position"].flatten().tolist() == [10, 11, 12, 13]
    assert got["actions"].flatten(1).tolist() == torch.arange(12.0).view(4, 3).tolist()
    assert got["valid"].tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert got["reward"].tolist() == [0, 0, 1, 0]
    # discount per executed step; the success has no future, the time limit has
    assert got["decay"].tolist() == [0.25, 0.25, 0, 0.5]


def test_a_late_reward_in_a_chunk_is_discounted():
    late = rollout()
    late.reward[0, 1] = torch.tensor([0.0, 1.0])
    assert rollout_transitions(late, 0.5)["reward"].tolist() == [0, 0.5, 1, 0]


def demonstrations() -> TensorDict:
    """One start of each side, pushed slowly."""
    episodes = []
    for task in range(2):
        position = (1.0 - 2.0 * task) * torch.linspace(0.4, 0.05, 6)
        seen = TensorDict({"position": position[:5, None], "task": torch.full((5, 1), float(task))}, [5])
        episodes.append(cut_chunks(seen, position.diff()[:, None], 2))
    return torch.cat(episodes)


def make(seed: int = 0, **settings) -> tuple[RankingMLP, ChunkedIQL, Collector]:
    torch.manual_seed(seed)
    policy = RankingMLP(Reach(1).contract)
    policy.fit(Reach(32).reset(starts=torch.arange(32)), torch.zeros(1, 1))
    sft = SFTConfig(steps=400, batch=64, learning_rate=5e-3, final_learning_rate=5e-3, average=0.9)
    defaults = {"critic_steps": 40, "actor_steps": 30, "batch": 64, "capacity": 5000, "learning_rate": 3e-3, "sft": sft}
    config = ChunkedIQLConfig(**(defaults | {"target_rate": 0.05, "discount": 0.9} | settings))
    learner = config.build(policy, demonstrations(), Reach(32), torch.Generator().manual_seed(seed))
    return policy, learner, Collector(Reach(32), policy, torch.Generator().manual_seed(seed), learner.starts)


def test_the_expectile_weighs_what_is_better_than_expected_more():
    # With one state, values of chunks 0 and 1 equally often and nothing to follow, V goes to the expectile of {0, 1}:
    # expectile * (1 - v) = (1 - expectile) * v, so v = expectile.
    policy, learner, _ = make(expectile=0.8, learning_rate=1e-2)
    batch = demonstration_transitions(demonstrations(), 0.9)[torch.zeros(64, dtype=torch.long)]
    batch["decay"] = torch.zeros(64)
    batch["actions"] = batch["actions"].clone()
    batch["actions"][:, :, 0] = torch.where(torch.arange(64) < 32, 0.25, -0.25).unsqueeze(1)
    batch["reward"] = torch.where(torch.arange(64) < 32, 1.0, 0.0)
    for _ in range(600):
        learner._critic_step(batch)
    q = policy.action_values(batch["observation"], batch["actions"])
    torch.testing.assert_close(q, batch["reward"].expand(2, -1), atol=0.05, rtol=0)
    torch.testing.assert_close(policy.value(batch["observation"]), torch.full((64,), 0.8), atol=0.05, rtol=0)


def test_the_target_follows_slowly():
    policy, learner, collector = make(target_rate=0.25)
    learner.replay.add(rollout_transitions(collector.collect(2), 0.9))
    before = [parameter.clone() for parameter in learner.target.critic_parameters()]
    learner._critic_step(learner._batch())
    for old, target, now in zip(before, learner.target.critic_parameters(), policy.critic_parameters(), strict=True):
        torch.testing.assert_close(target, 0.75 * old + 0.25 * now)


def test_chunks_that_are_better_than_expected_are_imitated_more():
    policy, learner, collector = make(temperature=0.5, largest_weight=2.0)
    learner.replay.add(rollout_transitions(collector.collect(2), 0.9))
    batch = learner._batch()
    q, value = torch.linspace(-1, 1, 64), torch.zeros(64)
    learner.target.action_values = lambda observation, actions: torch.stack((q, q + 1.0))  # the lower one counts
    policy.value = lambda observation: value
    valid = batch["valid"].clone()
    learner._actor_step(batch, 0.0)
    weight = (q / 0.5).exp().clamp_max(2.0)
    torch.testing.assert_close(batch["valid"], valid * weight.unsqueeze(-1))


def test_minibatches_hold_their_share_of_demonstrations():
    _, learner, collector = make(demonstration_share=0.25)
    learner.replay.add(rollout_transitions(collector.collect(4), 0.9))
    shown = {tuple(row) for row in learner.demonstrations["actions"].flatten(1).tolist()}
    assert sum(tuple(row) in shown for row in learner._batch()["actions"].flatten(1).tolist()) == 16


def test_a_policy_without_action_values_is_refused():
    env = Reach(2)
    with pytest.raises(ValueError, match=r"policy=flow; got MLPPolicy"):
        ChunkedIQLConfig().build(MLPConfig().build(env.contract), demonstrations(), env, torch.Generator())


def success_rate(policy: RankingMLP) -> float:
    return evaluate(Reach(16), policy, starts_per_task=22).summary()["success"]


def test_learns_to_reach_where_demonstrations_alone_do_not():
    policy, learner, collector = make()
    learner.actor.fit(demonstrations(), 100)
    for _ in range(8):
        learner.update(collector.collect(12), 0.0)
    control, supervised, _ = make()
    supervised.actor.fit(demonstrations(), learner.gradient_steps)
    assert policy.ranked
    assert success_rate(control) < 0.7
    assert success_rate(policy) > 0.95


def test_a_resumed_learner_takes_the_same_steps():
    policy, learner, collector = make()
    for _ in range(2):
        learner.update(collector.collect(5), 0.0)
    state = copy.deepcopy({"learner": learner.state_dict(), "collector": collector.state_dict()})
    weights = copy.deepcopy(policy.state_dict())
    first = [learner.update(collector.collect(5), 0.0) for _ in range(2)]
    other_policy, other, other_collector = make(seed=3)
    other_policy.load_state_dict(weights)
    other.load_state_dict(state["learner"])
    other_collector.load_state_dict(state["collector"])
    assert [other.update(other_collector.collect(5), 0.0) for _ in range(2)] == first
    assert all(torch.equal(value, other_policy.state_dict()[name]) for name, value in policy.state_dict().items())
