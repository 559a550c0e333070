"""Actions that an episode's end left unexecuted are not trained: not by the success, nor by the entropy."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.on_policy.clipped import Clipped, ClippedConfig
from embodied.algorithms.on_policy.grpo import GRPOConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.policy import EXECUTED
from embodied.rollout.rollout import Collector, Rollout
from embodied.rollout.storage import Storage
from policies.mlp import MLPConfig, MLPPolicy
from policies.recurrent import RecurrentConfig
from tests.embodied.reach import Reach

K = 4


def collected(config: MLPConfig, storage: Storage = Storage.DEVICE) -> tuple[MLPPolicy, Rollout]:
    torch.manual_seed(0)
    env = Reach(32, executed=K, horizon=K + 1, step_limit=30)
    policy = config.build(env.contract)
    policy.fit(env.reset(torch.ones(32, dtype=torch.bool), starts=torch.arange(32)), torch.zeros(1, 1))
    collector = Collector(env, policy, torch.Generator().manual_seed(0), storage=storage)
    return policy, collector.collect(12)


@pytest.mark.parametrize("config", [MLPConfig(hidden=[16]), RecurrentConfig(hidden=[16])])
@pytest.mark.parametrize("storage", [Storage.DEVICE, Storage.DISK])
def test_a_rollout_scores_what_was_executed(config: MLPConfig, storage: Storage) -> None:
    policy, rollout = collected(config, storage)
    cut = ~rollout.executed.all(-1)
    assert cut.any()  # episodes that ended within a chunk
    assert rollout.done[cut].all()
    executed = policy.evaluate(rollout.observation, rollout.sample).log_prob  # for the recurrent one through time
    torch.testing.assert_close(executed, rollout.log_prob, rtol=1e-4, atol=1e-4)
    chunk = policy.evaluate(rollout.observation, rollout.sample.exclude(EXECUTED)).log_prob
    difference = (chunk - rollout.log_prob).abs().squeeze(-1)
    assert float((difference[cut] > 1e-3).float().mean()) > 0.9
    assert float(difference[~cut].detach().max()) < 1e-3


@pytest.mark.parametrize("algorithm", [PPOConfig(critic_warmup=0, entropy_weight=0.1), GRPOConfig(entropy_weight=0.1)])
def test_an_unexecuted_action_has_no_gradient(algorithm: ClippedConfig) -> None:
    policy, rollout = collected(MLPConfig(hidden=[16]))
    learner = Clipped(policy, algorithm, torch.Generator().manual_seed(0), 1e-3)
    once = (rollout.executed.sum(-1) == 1).flatten()  # success by the first action of the chunk
    assert int(once.sum()) >= 2
    batch = TensorDict(
        {
            "observation": rollout.observation.flatten(),
            "sample": rollout.sample.flatten(),
            "log_prob": rollout.log_prob.flatten(0, 1),
            "advantage": torch.ones(len(once)),
            "own": torch.ones(len(once), dtype=torch.bool),
        },
        [len(once)],
    )[once]
    loss, metrics = learner._policy_loss(batch, policy.evaluate(batch["observation"], batch["sample"]))
    loss.backward()
    assert float(metrics["clip_fraction"]) == 0.0
    for gradient in (policy.actor[-2].bias.grad, policy.log_std.grad):  # [H * A], A = 1
        assert gradient is not None
        assert float(gradient[0].abs()) > 1e-4
        assert float(gradient[1:].abs().max()) == 0.0
