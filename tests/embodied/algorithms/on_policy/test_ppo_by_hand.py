"""PPO's numbers and gradients on one minibatch, each computed by hand."""

import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.minibatches import Minibatches
from embodied.algorithms.on_policy.ppo import PPO, PPOConfig
from embodied.errors import UserError
from embodied.networks.value_head import CriticHead, ValueHead
from embodied.rollout.rollout import Collector, Rollout
from embodied.world import ALONE
from policies.mlp import MLPConfig, MLPPolicy
from tests.embodied.reach import Reach

ROWS = 6


def make(envs: int = ROWS, head: ValueHead | None = None, **settings: float) -> tuple[MLPPolicy, PPO, Collector]:
    torch.manual_seed(0)
    env = Reach(envs)
    policy = MLPConfig(hidden=[8], values=head or ValueHead()).build(env.contract)
    policy.fit(Reach(32).reset(starts=torch.arange(32)), torch.zeros(1, 1))
    values = {"minibatch": 10**6, "epochs": 1, "critic_warmup": 0, "max_gradient_norm": math.inf} | settings
    learner = PPOConfig(**values).build(policy, None, env, torch.Generator().manual_seed(0))
    return policy, learner, Collector(env, policy, torch.Generator().manual_seed(0))


def minibatch(policy: MLPPolicy, ratio: float, advantage: float) -> TensorDict:
    """Decisions whose old probability is that of `policy` divided by `ratio`; returns are 2."""
    observation = Reach(ROWS).reset(starts=torch.arange(ROWS))
    decision = policy.act(observation, generator=torch.Generator().manual_seed(1))
    return TensorDict(
        {
            "observation": observation,
            "sample": decision.sample,
            "log_prob": decision.log_prob - math.log(ratio),
            "advantage": torch.full((ROWS,), advantage),
            "return": torch.full((ROWS,), 2.0),
            "own": torch.ones(ROWS, dtype=torch.bool),
        },
        [ROWS],
    )


def gradients(parameters: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in parameters])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [  # -min(r A, clip(r) A) with a clip of 0.2, and its slope along r
        (1.5, 1.0, -1.2, 0.0),
        (1.5, -1.0, 1.5, 1.0),
        (0.5, 1.0, -0.5, -1.0),
        (0.5, -1.0, 0.8, 0.0),
        (1.1, 2.0, -2.2, -2.0),
    ],
)
def test_ratios_are_clipped_where_they_went_too_far_already(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    policy, learner, _ = make(clip=0.2)
    batch = minibatch(policy, ratio, advantage)
    log_prob = policy.evaluate(batch["observation"], batch["sample"]).log_prob.mean()
    expected = torch.autograd.grad(slope * ratio * log_prob, policy.actor_parameters())  # dr = r d log p
    metrics = learner._step(batch)
    assert metrics["policy_loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["kl"] == pytest.approx(ratio - 1.0 - math.log(ratio), rel=1e-3)
    assert metrics["clip_fraction"] == float(abs(ratio - 1.0) > 0.2)
    expected = torch.cat([each.flatten() for each in expected])
    torch.testing.assert_close(gradients(policy.actor_parameters()), expected, rtol=1e-4, atol=1e-6)


def test_categorical_values_learn_the_distribution_of_returns_by_cross_entropy() -> None:
    head = ValueHead(CriticHead.HL_GAUSS, bins=21, value_low=-1.0, value_high=4.0)
    policy, learner, _ = make(head=head, value_learning_rate=0.03)
    batch = minibatch(policy, 1.0, 0.0)
    logits = policy.critic(policy.features(batch["observation"]))
    expected = torch.nn.functional.cross_entropy(logits, head.histogram(torch.tensor(2.0)).expand(ROWS, -1))
    slope = torch.autograd.grad(expected, policy.critic_parameters())
    assert learner._step(batch)["value_loss"] == pytest.approx(expected.item(), rel=1e-5)
    slope = torch.cat([each.flatten() for each in slope])
    torch.testing.assert_close(gradients(policy.critic_parameters()), slope, rtol=1e-4, atol=1e-6)
    for _ in range(100):
        learner._step(batch)
    torch.testing.assert_close(policy.value(batch["observation"]), torch.full((ROWS,), 2.0), atol=0.05, rtol=0.0)
    rollout = Collector(Reach(ROWS), policy, torch.Generator()).collect(20)
    rollout.reward[:, 0] = 20.0
    metrics = learner.update(rollout, 0.0)
    assert 0.0 < metrics["clamped_targets"] < 1.0


def test_entropy_is_worth_something() -> None:
    policy, learner, _ = make(entropy_weight=0.1)
    metrics = learner._step(minibatch(policy, 1.0, 0.0))
    deviation = math.log(0.5) + 0.5 + 0.5 * math.log(2 * math.pi)  # of one action; a chunk has two
    assert metrics["entropy"] == pytest.approx(2 * deviation, rel=1e-5)
    torch.testing.assert_close(policy.log_std.grad, torch.full((2,), -0.1))
    assert (policy.log_std > math.log(0.5)).all()


def test_the_critic_comes_closer_to_the_returns() -> None:
    policy, learner, _ = make()
    batch = minibatch(policy, 1.5, 1.0)
    value = policy.value(batch["observation"])
    expected = torch.autograd.grad((value - 2.0).square().sum() / ROWS, policy.critic_parameters())
    metrics = learner._step(batch)
    assert metrics["value_loss"] == pytest.approx(float((value.detach() - 2.0).square().mean()), rel=1e-5)
    torch.testing.assert_close(
        gradients(policy.critic_parameters()), torch.cat([each.flatten() for each in expected]), rtol=1e-4, atol=1e-6
    )
    assert (policy.value(batch["observation"]) > value).all()


def test_actor_and_critic_are_clipped_apart() -> None:
    policy, learner, _ = make(max_gradient_norm=0.01)
    batch = minibatch(policy, 1.5, -1.0)
    learner._step(batch.set("return", torch.full((ROWS,), 1e6)))
    for parameters in (policy.actor_parameters(), policy.critic_parameters()):
        assert float(gradients(parameters).norm()) == pytest.approx(0.01, rel=1e-3)


def test_the_critic_is_trained_alone_at_first() -> None:
    policy, learner, collector = make(critic_warmup=2)
    moved = []
    for _ in range(3):
        before = [parameter.clone() for parameter in (policy.actor[0].weight, policy.critic[0].weight)]
        learner.update(collector.collect(4), 0.0)
        after = (policy.actor[0].weight, policy.critic[0].weight)
        moved.append([not torch.equal(*pair) for pair in zip(before, after, strict=True)])
    assert moved == [[False, True], [False, True], [True, True]]


@pytest.mark.parametrize(("warmup", "warnings"), [(3, 1), (2, 0)])
def test_a_run_that_warms_up_to_its_end_says_so_once(
    warmup: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    _, learner, collector = make(critic_warmup=warmup)
    for iteration in range(3):
        learner.update(collector.collect(4), (iteration + 1) / 3)
    messages = [record.message for record in caplog.records if "algorithm.critic_warmup=" in record.message]
    assert len(messages) == warnings
    assert all(message.startswith("about 3 iterations") for message in messages)


@pytest.mark.parametrize(("target_kl", "taken"), [(1e-6, 2), (1e6, 6)])
def test_an_update_ends_once_the_policy_has_moved_far(target_kl: float, taken: int) -> None:
    """Three minibatches, two epochs; the KL divergence is measured before each step, zero at the first."""
    _, learner, collector = make(minibatch=8, epochs=2, target_kl=target_kl, learning_rate=0.05)
    assert learner.update(collector.collect(4), 0.0)["minibatches"] == taken == learner.gradient_steps


def constant(policy: MLPPolicy, value: float) -> None:
    """Set its critic to `value` everywhere."""
    torch.nn.init.zeros_(policy.critic[-1].weight)
    torch.nn.init.constant_(policy.critic[-1].bias, value)


def shaped(rollout: Rollout, reward: list[float], **fields: list[bool]) -> Rollout:
    """`rollout` of one decision of N environments with a reward for its first action, all actions executed."""
    first = torch.tensor(reward).view(1, -1, 1)
    changes = {name: torch.tensor(values).unsqueeze(0) for name, values in fields.items()}
    both = torch.cat((first, torch.zeros_like(first)), -1)
    return replace(rollout, reward=both, executed=torch.ones_like(rollout.executed), **changes)


def test_a_time_limit_is_bootstrapped_and_a_termination_is_not() -> None:
    policy, learner, collector = make(envs=3, discount=0.5, gae_lambda=0.9)
    constant(policy, 4.0)
    rollout = shaped(
        collector.collect(1), [1.0, 1.0, 0.0], terminated=[True, False, False], truncated=[False, True, False]
    )
    batch, *_ = learner._prepare(replace(rollout, value=torch.full_like(rollout.value, 4.0)), ALONE)
    # the reward alone; the reward and 4 after two steps; that without the reward
    assert batch["return"].flatten().tolist() == [1.0, 1.0 + 0.25 * 4.0, 0.25 * 4.0]
    advantage = torch.tensor([1.0 - 4.0, 2.0 - 4.0, 1.0 - 4.0])
    torch.testing.assert_close(batch["advantage"].flatten(), (advantage - advantage.mean()) / advantage.std())


def test_the_critic_may_look_further_ahead_than_advantages() -> None:
    policy, learner, collector = make(envs=1, discount=0.5, gae_lambda=0.0, value_gae_lambda=1.0)
    constant(policy, 4.0)
    rollout = collector.collect(3)
    going = torch.zeros_like(rollout.done)
    reward = torch.tensor([0.0, 1.0, 5.0]).view(3, 1, 1) * torch.tensor([1.0, 0.0]).expand(3, 1, 2)
    rollout = replace(
        rollout, reward=reward, executed=torch.ones_like(rollout.executed), terminated=going, truncated=going
    )
    batch, *_ = learner._prepare(replace(rollout, value=torch.full_like(rollout.value, 4.0)), ALONE)
    # two actions a decision: each decision is worth a quarter of what follows, at the end of 4
    assert batch["return"].flatten().tolist() == [0.25 * (1.0 + 0.25 * 6.0), 1.0 + 0.25 * 6.0, 6.0]
    one_step = torch.tensor([1.0, 2.0, 6.0]) - 4.0  # the reward and a quarter of the next value
    torch.testing.assert_close(batch["advantage"].flatten(), (one_step - one_step.mean()) / one_step.std())


def taken_over(envs: int = 1) -> tuple[MLPPolicy, PPO, Rollout]:
    """Four decisions with the rewards 0, 1, 5, 0; a person makes the third one of environment 0."""
    policy, learner, collector = make(envs=envs, discount=0.5, gae_lambda=1.0)
    rollout = collector.collect(4)
    none = torch.zeros_like(rollout.done)
    human = torch.zeros_like(rollout.executed)
    human[2, 0, 1] = True  # in the middle of a chunk
    reward = torch.tensor([0.0, 1.0, 5.0, 0.0]).view(4, 1, 1) * torch.tensor([1.0, 0.0]).expand(4, envs, 2)
    running = replace(rollout, reward=reward, executed=torch.ones_like(human), terminated=none, truncated=none)
    return policy, learner, replace(running, signals={"human": human})


def test_what_a_person_did_is_no_merit_of_the_policy() -> None:
    policy, learner, rollout = taken_over()
    constant(policy, 4.0)
    own = torch.tensor([True, True, False, True]).view(4, 1)
    batch, *_ = learner._prepare(replace(rollout, value=torch.full_like(rollout.value, 4.0)), ALONE)
    assert torch.equal(batch["own"], own)
    # the second decision is bootstrapped from the third one's value, the last one from the following value
    assert batch["return"][own].tolist() == [0.25 * (1.0 + 1.0), 1.0 + 0.25 * 4.0, 0.25 * 4.0]
    advantage = torch.tensor([0.5, 2.0, 1.0]) - 4.0
    torch.testing.assert_close(batch["advantage"][own], (advantage - advantage.mean()) / advantage.std())


def test_what_a_person_did_is_not_learned_from() -> None:
    policy, learner, rollout = taken_over(envs=2)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    learner.update(rollout, 0.0)
    after = {name: value.clone() for name, value in policy.state_dict().items()}
    strange = rollout.sample.clone()
    strange["raw"][2, 0] += 3.0  # the policy's action in place of the person's
    other, again, _ = make(envs=2, discount=0.5, gae_lambda=1.0)
    other.load_state_dict(before)
    again.update(replace(rollout, sample=strange), 0.0)
    assert all(torch.equal(value, after[name]) for name, value in other.state_dict().items())
    assert not torch.equal(after["actor.0.weight"], before["actor.0.weight"])


def test_a_rollout_of_a_person_alone_changes_nothing() -> None:
    policy, learner, rollout = taken_over()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    assert learner.update(replace(rollout, signals={"human": torch.ones_like(rollout.executed)}), 0.0) == {}
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


@pytest.mark.parametrize("piece", [1, 4, 7])
def test_a_minibatch_in_pieces_has_the_gradients_of_the_whole(piece: int) -> None:
    found = []
    for rows in (None, piece):
        policy, learner, rollout = taken_over(envs=5)  # decisions that count beside those that don't
        learner.piece, learner.config.entropy_weight = rows or 10**6, 0.1
        batch, *_ = learner._prepare(rollout, ALONE)
        batch["log_prob"] = batch["log_prob"] + 0.3 * torch.randn(4, 5, 1, generator=torch.Generator().manual_seed(0))
        metrics = learner._step(batch.flatten(0, 1))
        found.append((gradients([*policy.actor_parameters(), *policy.critic_parameters()]), metrics))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-5, abs=1e-6)
    assert found[0][0].abs().max() > 1e-2


def test_pieces_keep_no_more_than_the_budget_allows() -> None:
    seen: list[int] = []

    def update(memory_gb: float | None) -> dict[str, float]:
        _, learner, collector = make(envs=32, minibatch=128, memory_gb=memory_gb)
        original = learner._losses

        def losses(batch: TensorDict, count: int) -> tuple:
            seen.append(len(batch))
            return original(batch, count)

        learner._losses = losses
        return learner.update(collector.collect(8), 0.0)

    whole = update(None)
    assert set(seen) == {128}
    seen.clear()
    assert update(2e-6) == pytest.approx(whole, rel=1e-4, abs=1e-6)
    assert 1 < max(seen) < 32
    with pytest.raises(UserError, match="memory_gb=0: expected a number above 0"):
        PPOConfig(memory_gb=0.0)


def test_minibatches_are_taken_from_where_the_rollout_lies_one_after_the_other() -> None:
    """Rollouts on disk may exceed memory, rollouts in memory may exceed the policy's device."""
    _, learner, collector = make(minibatch=8)
    batch, *_ = learner._prepare(collector.collect(4), ALONE)
    parts = list(learner._minibatches(batch, Minibatches(batch["own"])))
    assert [len(part) for part in parts] == [8, 8, 8]
    for part in parts:
        for leaf in part.values(include_nested=True, leaves_only=True):
            assert leaf.untyped_storage().nbytes() == leaf.nbytes
    seen = torch.cat([part["sample", "raw"] for part in parts])[:, 0]
    assert torch.equal(seen.sort().values, batch["sample", "raw"].flatten(0, 1)[:, 0].sort().values)
