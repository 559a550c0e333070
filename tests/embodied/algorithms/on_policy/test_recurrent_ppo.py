"""PPO trains a policy with memory through time: scores of sequences, and a task that needs memory."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.on_policy.ppo import PPO, PPOConfig
from embodied.contract import TensorSpec
from embodied.environment import Transition
from embodied.rollout.rollout import Collector
from policies.recurrent import RecurrentConfig, RecurrentPolicy
from tests.embodied.reach import Reach


class Recall(Reach):
    """The first observation of an episode shows a sign, which the third and last action must have."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, executed=1, horizon=1, step_limit=3, tasks=1)
        self.contract = replace(self.contract, observation={"cue": TensorSpec((1,))})

    @property
    def sign(self) -> torch.Tensor:
        return 1.0 - 2.0 * (self.start % 2)

    def step(self, actions: torch.Tensor) -> Transition:
        running = ~self.frozen
        self.steps += running
        self.frozen = self.frozen | (self.steps >= self.step_limit)
        right = running & self.frozen & (actions[:, 0, 0] * self.sign > 0.0)
        never = torch.zeros_like(right)
        reward = right.float().unsqueeze(1)
        return Transition(self._observation(), reward, running.unsqueeze(1), self.frozen.clone(), never, right)

    def _observation(self) -> TensorDict:
        cue = torch.where(self.steps == 0, self.sign, 0.0)
        return TensorDict({"cue": cue.unsqueeze(1)}, [self.num_envs])


def make(seed: int = 0, envs: int = 64, **settings: float) -> tuple[RecurrentPolicy, PPO, Collector]:
    torch.manual_seed(seed)
    env = Recall(envs)
    policy = RecurrentConfig(hidden=[16], encoder=8, memory=8).build(env.contract)
    policy.fit(Recall(8).reset(starts=torch.arange(8)), torch.zeros(1, 1))
    values = {"minibatch": 256, "learning_rate": 1e-2, "target_kl": 1.0, "critic_warmup": 0, "discount": 0.9} | settings
    learner = PPOConfig(**values).build(policy, None, env, torch.Generator().manual_seed(seed))
    return policy, learner, Collector(env, policy, torch.Generator().manual_seed(seed))


def test_sequences_are_scored_as_they_were_sampled() -> None:
    policy, learner, collector = make(envs=6, minibatch=15, learning_rate=0.0)
    for parameter in policy.actor_parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    collector.collect(2)
    rollout = collector.collect(5)  # begins within episodes, and others begin in it
    assert rollout.observation["started"].any()
    assert not rollout.observation["started"][0].any()
    found = policy.evaluate(rollout.observation, rollout.sample)
    torch.testing.assert_close(found.log_prob, rollout.log_prob)
    assert found.entropy.shape == found.log_prob.shape == (5, 6, 1)
    metrics = learner.update(rollout, 0.0)
    assert metrics["minibatches"] == learner.config.epochs * 2  # of three whole environments
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)


def test_what_was_seen_is_remembered_when_it_pays() -> None:
    _, learner, collector = make()
    rates = []
    for _ in range(16):
        rollout = collector.collect(12)
        rates.append(rollout.ended()["success"])
        learner.update(rollout, 0.0)
    assert rates[0] < 0.6
    assert sum(rates[-3:]) / 3 > 0.9


def test_a_memory_limit_cuts_minibatches_between_environments_and_never_in_time() -> None:
    learned = []
    for memory_gb in (None, 1e-9):  # whole, and environment by environment
        policy, learner, collector = make(envs=4, minibatch=24, epochs=1, memory_gb=memory_gb)
        metrics = learner.update(collector.collect(6), 0.0)
        learned.append((metrics, dict(policy.named_parameters())))
        assert learner.piece == (4 if memory_gb is None else 1)
    (whole, expected), (cut, found) = learned
    assert cut == pytest.approx(whole, abs=1e-5)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, atol=1e-5, rtol=1e-4)
