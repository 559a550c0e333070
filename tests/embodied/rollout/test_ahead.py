"""Collection beside the update: whose rollouts these are, that both run at once, and what faults and stops leave."""

from __future__ import annotations

import threading

import pytest
import torch

from embodied.algorithms.advantage import values
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.errors import UserError
from embodied.rollout.ahead import CollectorAhead
from embodied.rollout.rollout import Cancelled, Collector
from embodied.training.loop import iterations
from policies.mlp import MLPConfig, MLPPolicy
from policies.recurrent import RecurrentConfig
from tests.embodied.reach import Reach
from tests.embodied.training.test_experiment import POLICY, SCRATCH, Experiment, ExperimentConfig, ScratchTask

PPO = PPOConfig(rollout_length=4, minibatch=32, learning_rate=1e-2, critic_warmup=0)


def ready(env: Reach, config=None) -> MLPPolicy:
    torch.manual_seed(0)
    policy = (config or MLPConfig(hidden=[8])).build(env.contract)
    policy.fit(env.reset(), torch.zeros(1, 1))
    return policy


def ahead(env: Reach, policy: MLPPolicy) -> CollectorAhead:
    return CollectorAhead(Collector(env, policy, torch.Generator().manual_seed(0)), policy)


def test_a_rollout_that_was_begun_is_by_the_policy_from_before_the_update() -> None:
    policy = ready(Reach(8))
    learner = PPO.build(policy, None, Reach(8), torch.Generator())
    with ahead(Reach(8), policy) as collector:
        first = collector.collect(4)
        old = {name: value.clone() for name, value in policy.state_dict().items()}
        collector.begin(4)
        learner.update(first, 0.0)
        collector.version += 1
        second = collector.collect(4)
        assert (first.policy_version, second.policy_version, collector.version) == (0, 0, 1)
        log_prob = policy.evaluate(second.observation.flatten(), second.sample.flatten()).log_prob
        assert not torch.allclose(log_prob, second.log_prob.flatten(0, 1), atol=1e-4)
        policy.load_state_dict(old)
        log_prob = policy.evaluate(second.observation.flatten(), second.sample.flatten()).log_prob
        torch.testing.assert_close(log_prob, second.log_prob.flatten(0, 1))
        third = collector.collect(4)  # was not begun: by the policy as it is
        assert third.policy_version == 1


def test_episodes_go_on_as_in_one_thread() -> None:
    policy = ready(Reach(8))
    alone = Collector(Reach(8), policy, torch.Generator().manual_seed(0))
    expected = [alone.collect(3) for _ in range(4)]
    with ahead(Reach(8), policy) as collector:
        for rollout in expected:
            found = collector.collect(3)
            collector.begin(3)
            assert torch.equal(found.actions, rollout.actions)
            assert torch.equal(found.episode_return, rollout.episode_return)


class Meets(Reach):
    """Its steps wait for the update, after the first rollout."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.stepped, self.updated, self.free = threading.Event(), threading.Event(), 4

    def step(self, actions):
        if self.free:
            self.free -= 1
        else:
            self.stepped.set()
            assert self.updated.wait(60.0)
        return super().step(actions)


def test_the_simulator_steps_while_the_policy_is_updated() -> None:
    env = Meets(8)
    policy = ready(env)
    learner = PPO.build(policy, None, env, torch.Generator())
    update = learner.update

    def meeting(*arguments):
        if learner.gradient_steps == 0:
            assert env.stepped.wait(60.0)
            env.updated.set()
        return update(*arguments)

    learner.update = meeting
    with ahead(env, policy) as collector:
        steps = list(iterations(learner, collector, 4, 200))
    assert len(steps) >= 3
    assert all(step.simulation_s >= 0.0 for step in steps)
    assert torch.get_num_threads() == collector.threads


def test_no_rollout_is_begun_that_nobody_will_learn_from() -> None:
    env = Reach(8)
    policy = ready(env)
    learner = PPO.build(policy, None, env, torch.Generator())
    with ahead(env, policy) as collector:
        list(iterations(learner, collector, 4, 100))
        assert collector.running is None


def test_values_are_of_the_critic_as_it_is_when_a_rollout_is_learned_from() -> None:
    env = Reach(8)
    policy = ready(env)
    learner = PPO.build(policy, None, env, torch.Generator())
    update, off = learner.update, []

    def told(rollout, *arguments):
        value = values(policy, rollout.observation)
        off.append(float((rollout.value - value).abs().max()))
        return update(rollout, *arguments)

    learner.update = told
    with ahead(env, policy) as collector:
        list(iterations(learner, collector, 4, 200))
    assert len(off) >= 3
    assert max(off) < 1e-5


class Broken(Reach):
    def step(self, actions):
        raise RuntimeError("the simulator is broken")


def test_a_fault_of_the_simulator_is_raised_where_its_rollout_is_asked_for() -> None:
    env = Broken(8)
    policy = ready(env)
    with ahead(env, policy) as collector, pytest.raises(RuntimeError, match="the simulator is broken"):
        collector.collect(4)


def test_leaving_ends_a_long_rollout_at_its_next_decision() -> None:
    env = Meets(2)
    env.free = 0
    policy = ready(env)
    collector = ahead(env, policy)
    with collector:
        collector.begin(1000)
        assert env.stepped.wait(60.0)
        running = collector.running
        threading.Timer(0.1, env.updated.set).start()
    assert isinstance(running.exception(), Cancelled)


def test_a_policy_with_memory_remembers_by_its_own_copy() -> None:
    env = Reach(8)
    policy = ready(env, RecurrentConfig(hidden=[8], encoder=4, memory=4))
    alone = Collector(Reach(8), policy, torch.Generator().manual_seed(0))
    expected = [alone.collect(3) for _ in range(3)]
    with ahead(Reach(8), policy) as collector:
        assert collector.collector.memory.policy is collector.acting
        for rollout in expected:
            assert torch.equal(collector.collect(3).observation["memory"], rollout.observation["memory"])


@pytest.mark.parametrize("algorithm", ["bptt", "distillation"])
def test_what_learns_from_its_present_policy_alone_is_refused(tmp_path, algorithm: str) -> None:
    config = ExperimentConfig(num_envs=8, env_steps=100, evaluation_envs=4, overlap=True)
    with pytest.raises(UserError, match="use overlap=false"):
        Experiment(config, ScratchTask(), POLICY, SCRATCH[algorithm], tmp_path, record={})
