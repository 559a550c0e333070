"""Memories are kept during episodes, reset with them, and independent of other environments."""

import pytest
import torch
from tensordict import TensorDict

from embodied.evaluation.evaluation import act, evaluate
from embodied.evaluation.video import film
from embodied.policy import Decision
from embodied.rollout.memory import Memory
from embodied.rollout.rollout import Collector
from policies.mlp import MLPConfig
from policies.recurrent import RecurrentConfig, RecurrentPolicy
from tests.embodied.reach import FixedStarts, Reach


class Patient:
    """Waits for `patience` decisions of an episode, then moves to the left; counts them only in its memory."""

    def __init__(self, env: Reach, patience: int) -> None:
        self.contract, self.patience = env.contract, patience

    def initial_memory(self, count: int) -> torch.Tensor:
        return torch.full((count, 1), float(self.patience))

    def act(self, observation, *, deterministic=False, generator=None):
        left = observation["memory"]
        actions = torch.where(left > 0, 0.0, -0.1).unsqueeze(1).expand(-1, self.contract.horizon, 1)
        return Decision(actions, TensorDict({"memory": left - 1}, batch_size=[len(left)]), torch.zeros(len(left), 2, 1))


def recurrent(env: Reach) -> RecurrentPolicy:
    torch.manual_seed(0)
    policy = RecurrentConfig(encoder=4, memory=4, initial_std=0.3).build(env.contract)
    for parameter in policy.actor_parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    policy.fit(TensorDict({"position": torch.randn(64, 1), "task": torch.rand(64, 1)}, [64]), torch.zeros(1, 1))
    return policy


def test_a_rollout_holds_what_was_remembered_and_where_episodes_begin():
    env = Reach(2, tasks=1)
    rollout = Collector(env, Patient(env, 1), torch.Generator(), FixedStarts([0, 1])).collect(6)
    # start 0: x = 0.3, waits one decision, then .2 .1, and 0 in the next; start 1: x = -0.35 runs away, 7 steps
    assert rollout.observation["memory"][:, 0, 0].tolist() == [1, 0, -1, 1, 0, -1]
    assert rollout.observation["memory"][:, 1, 0].tolist() == [1, 0, -1, -2, 1, 0]
    assert rollout.observation["started"][:, 0].tolist() == [True, False, False, True, False, False]
    assert torch.equal(rollout.observation["started"][1:], rollout.done[:-1])
    assert "memory" not in rollout.next_observation().keys()  # noqa: SIM118 - a TensorDict iterates over its batch


def test_unrolling_a_rollout_gives_the_actions_that_were_taken():
    env = Reach(5, executed=1, horizon=1)
    policy = recurrent(env)
    policy.log_std.data.fill_(-20.0)  # no noise
    collector = Collector(env, policy, torch.Generator())
    collector.collect(5)
    rollout = collector.collect(12)
    assert rollout.observation["started"].any()
    actions, _ = policy.unroll(rollout.observation, rollout.observation["memory"][0])
    torch.testing.assert_close(actions, rollout.actions, atol=1e-6, rtol=1e-5)


def test_a_continued_collection_is_the_one_that_was_not_stopped():
    def make() -> Collector:
        env = Reach(3)
        return Collector(env, recurrent(env), torch.Generator().manual_seed(1))

    whole, stopped, continued = make(), make(), make()
    whole.collect(5)
    stopped.collect(5)
    continued.load_state_dict(stopped.state_dict())
    first, second = whole.collect(6), continued.collect(6)
    assert (first.observation == second.observation).all()
    assert torch.equal(first.actions, second.actions)
    assert not torch.equal(first.observation["memory"][0], make().memory.values)


def test_an_evaluated_policy_begins_every_episode_with_its_initial_memory():
    """From 0.3 + 0.05 s it arrives after the same number of steps in whichever environment and round it runs."""
    results = [evaluate(Reach(n, tasks=1, step_limit=20), Patient(Reach(1), 2), starts_per_task=11) for n in (1, 3, 16)]
    steps = torch.tensor([[4 + -(-(0.2 + 0.05 * s) // 0.1) if s % 2 == 0 else 20 for s in range(11)]])
    for result in results:
        assert result.success.tolist() == [[s % 2 == 0 for s in range(11)]]
        assert (result.steps - steps).abs().max() <= 1  # 0.1 is not a float
        assert torch.equal(result.steps, results[0].steps)


def test_a_filmed_policy_remembers():
    env = Reach(2, tasks=1, step_limit=20)
    flown = film(env, Patient(env, 2), torch.tensor([0, 2]), lambda ids: torch.zeros(len(ids), 2, 2, 3).numpy())
    assert flown.success[-1].all()
    measured = evaluate(Reach(2, tasks=1, step_limit=20), Patient(env, 2), starts_per_task=3)
    assert len(flown.frames) - 1 == -(-int(measured.steps[0, [0, 2]].max()) // 2)


def test_only_who_has_acted_goes_on():
    env = Reach(3, tasks=1)
    policy = Patient(env, 2)
    memory = Memory(policy, 3)
    seen = memory.with_observation(env.reset(starts=torch.zeros(3)))
    memory.keep([policy.act(seen[torch.tensor([0, 2])])], torch.tensor([0, 2]))
    assert memory.values.flatten().tolist() == [1, 2, 1]
    assert memory.started.tolist() == [False, True, False]


def test_a_policy_with_a_memory_does_not_act_without_it():
    env = Reach(2)
    with pytest.raises(ValueError, match="reads its memory as observation"):
        act(recurrent(env), env.reset(starts=torch.zeros(2)), torch.ones(2, dtype=torch.bool), "cpu")


def test_for_a_policy_without_memory_there_is_nothing():
    env = Reach(3)
    policy = MLPConfig(hidden=[4]).build(env.contract)
    memory, observation = Memory(policy, 3), env.reset(starts=torch.zeros(3))
    memory.restart(None)
    assert memory.with_observation(observation) is observation
    assert memory.state_dict() == {}
    memory.load_state_dict({})
