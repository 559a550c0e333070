"""ARSQ: targets and losses by hand, an optimum that no dimension shows alone, demonstrations, resuming."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.imitation.sft import SFTConfig
from embodied.algorithms.off_policy.arsq import ARSQ, ARSQConfig
from embodied.data.episodes import Episodes
from embodied.errors import DivergedError, UserError
from embodied.networks.value_head import CriticHead, ValueHead
from embodied.rollout.rollout import Collector
from embodied.training.loop import build
from embodied.world import World
from policies.coarse_to_fine import CoarseToFineConfig, CoarseToFinePolicy
from policies.squashed import SquashedConfig
from tests.embodied.reach import Reach
from tests.embodied.xor_bandit import MIDDLE, XorBandit, rewards


def make(
    seed: int = 0, demonstrations: Episodes | None = None, **settings
) -> tuple[CoarseToFinePolicy, ARSQ, Collector]:
    torch.manual_seed(seed)
    env = Reach(32)
    policy = CoarseToFineConfig(hidden=[64, 64]).build(env.contract)
    policy.fit(env.reset(starts=torch.arange(32)), torch.zeros(1, 1))
    generator = torch.Generator().manual_seed(seed)
    small = {"warmup": 200, "discount": 0.9, "minibatch": 64, "gradient_steps": 25}
    small |= {"learning_rate": 3e-3, "value_learning_rate": 3e-3}
    small |= {"demonstration_share": 0.5 if demonstrations is not None else 0.0}
    learner = ARSQConfig(**small | settings).build(policy, demonstrations, env, generator)
    return policy, learner, Collector(env, policy, generator)


def episodes(reward: float = 1.0, *, second_succeeds: bool = True) -> Episodes:
    """Two episodes of four steps towards the origin, from +0.9 m and from -0.9 m, which may fail."""
    parts = []
    for sign, success in ((1.0, True), (-1.0, second_succeeds)):
        position = sign * torch.tensor([0.9, 0.65, 0.4, 0.15])
        observation = TensorDict({"position": position.unsqueeze(1), "task": torch.zeros(4, 1)}, [4])
        earned = torch.tensor([0.0, 0.0, 0.0, reward])
        parts.append(Episodes.of(observation, torch.full((4, 1), -0.25 * sign), reward=earned, success=success))
    return Episodes.join(parts)


@pytest.mark.parametrize("entropy_in_target", [True, False])
def test_targets_by_hand(entropy_in_target: bool) -> None:
    policy, learner, collector = make(entropy_in_target=entropy_in_target, temperature=0.3)
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # the trained networks have moved on
    learner.replay.add(collector.collect(6))
    batch = learner._batch()
    following = batch["next_observation"]
    draws = torch.Generator().set_state(learner.generator.get_state())
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 62, (), generator=draws)))
    code = policy.act(following, generator=generator).sample["code"].long()
    log_prob = policy.log_probs(following, code).gather(-1, code.unsqueeze(-1)).flatten(1).sum(1)
    value = learner.target_policy.value(following)
    assert not torch.allclose(value, policy.value(following))
    expected = batch["reward"] + batch["carry"] * (value if entropy_in_target else value + 0.3 * log_prob)
    assert (batch["carry"] == 0).any()
    assert (batch["carry"] > 0).any()
    torch.testing.assert_close(learner._target(batch), expected.detach())


def test_losses_by_hand() -> None:
    policy, learner, _ = make(temperature=0.1, margin=0.15)
    # every choice has the probabilities p, and V(s) = 0.4
    p = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1])
    policy.actor.layers[-1].bias.data = p.log()
    for parameter in (policy.critic[-1].weight, policy.critic[-1].bias):
        parameter.data.zero_()
    policy.critic[-1].bias.data += 0.4
    # points of the grid of 125: 31 = 1 1 1 in base 5, 93 = 3 3 3, 62 = 2 2 2
    actions = 0.25 * (2.0 * torch.tensor([[31.0, 93.0], [31.0, 62.0], [93.0, 93.0]]) / 124.0 - 1.0)
    batch = TensorDict(
        {
            "observation": Reach(3).reset(),
            "actions": actions.unsqueeze(-1),
            "executed": torch.tensor([[True, True], [True, False], [True, True]]),
            "imitated": torch.tensor([True, True, False]),
        },
        [3],
    )
    losses = {
        name: float(loss.detach()) for name, loss in learner._losses(batch, torch.tensor([0.1, -0.2, 0.0])).items()
    }
    likely, unlikely = 0.1 * 3 * math.log(0.4), 0.1 * 3 * math.log(0.2)
    errors = [0.4 + likely + unlikely - 0.1, 0.4 + likely + 0.2, 0.4 + 2 * unlikely]
    assert losses["value_loss"] == pytest.approx(sum(error**2 for error in errors) / 3, rel=1e-5)

    def hinge(own: int) -> float:
        gaps = [0.1 * math.log(p[own] / p[other]) for other in range(5) if other != own]
        return 3 * sum(max(0.0, 0.15 - gap) for gap in gaps) / 4

    # three imitated actions: both of the first row, the executed one of the second
    expected = (hinge(1) + hinge(3) + hinge(1)) / 3
    assert losses["imitation_loss"] == pytest.approx(expected, rel=1e-5)


def bandit(
    seed: int, levels: int, *, autoregressive: bool = True
) -> tuple[CoarseToFinePolicy, ARSQ, Collector, XorBandit]:
    torch.manual_seed(seed)
    env = XorBandit(32)
    config = CoarseToFineConfig(hidden=[32, 32], levels=levels, bins=3, autoregressive=autoregressive)
    policy = config.build(env.contract)
    policy.fit(env.reset(), torch.zeros(1, 2))
    generator = torch.Generator().manual_seed(seed)
    small = {"warmup": 0, "minibatch": 128, "gradient_steps": 20, "demonstration_share": 0.0, "temperature": 0.05}
    small |= {"learning_rate": 3e-3, "value_learning_rate": 3e-3}
    learner = ARSQConfig(**small).build(policy, None, env, generator)
    return policy, learner, Collector(env, policy, generator), env


@pytest.mark.parametrize("autoregressive", [True, False])
def test_an_optimum_that_no_dimension_shows_alone(autoregressive: bool) -> None:
    policy, learner, collector, env = bandit(0, 1, autoregressive=autoregressive)
    uniform = collector.collect(64)  # a policy that has learned nothing plays all actions alike
    assert float(uniform.reward.mean()) == pytest.approx((1 + 1 + 5 * MIDDLE) / 9, abs=0.03)
    for _ in range(12):
        metrics = learner.update(uniform, 0.0)
    best = policy.act(env.reset(), deterministic=True).actions[:, 0]
    if autoregressive:
        assert float(rewards(best).mean()) == 1.0
        assert metrics["value_loss"] < 0.01
    else:
        # sums of a value for each element leave a mean squared error of 0.113 in the nine rewards, see XorBandit
        assert best.abs().max() == 0.0
        assert metrics["value_loss"] > 0.1


def test_it_finds_that_optimum_by_its_own_play() -> None:
    policy, learner, collector, env = bandit(1, 2)
    for _ in range(12):
        learner.update(collector.collect(8), 0.0)
    assert float(rewards(policy.act(env.reset(), deterministic=True).actions[:, 0]).mean()) == 1.0
    assert float(collector.collect(8).reward.mean()) > 0.97


@pytest.mark.parametrize("autoregressive", [True, False])
def test_imitation_of_two_ways_mixes_them_only_if_dimensions_are_independent(autoregressive: bool) -> None:
    policy, learner, _, env = bandit(0, 2, autoregressive=autoregressive)
    corners = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(8, 1)
    recorded = Episodes.of(TensorDict({"constant": torch.ones(16, 1)}, [16]), corners)
    SFTConfig(batch=32, learning_rate=1e-2).build(policy, learner.generator).fit(recorded, 150)
    many = env.reset().expand(32).contiguous()
    draws = torch.cat([policy.act(many, generator=learner.generator).actions[:, 0] for _ in range(20)])
    earned = float(rewards(draws).mean())
    assert earned > 0.97 if autoregressive else 0.4 < earned < 0.6
    assert 0.3 < float((draws[:, 0] > 0).float().mean()) < 0.7  # both ways


def test_choices_wait_for_the_critic() -> None:
    policy, learner, collector = make(warmup=0, gradient_steps=2, critic_warmup=3)
    for steps in (2, 4):
        before = copy.deepcopy(policy)
        learner.update(collector.collect(2), 0.0)
        assert learner.gradient_steps == steps
        changes = zip(policy.actor_parameters(), before.actor_parameters(), strict=True)
        assert any(not torch.equal(new, old) for new, old in changes) == (steps > 3)
        changes = zip(policy.critic_parameters(), before.critic_parameters(), strict=True)
        assert all(not torch.equal(new, old) for new, old in changes)


def test_learns_to_reach_from_sparse_reward() -> None:
    _, learner, collector = make()
    rates = []
    for _ in range(20):
        rollout = collector.collect(8)
        rates.append(float(rollout.success.sum() / rollout.done.sum()))
        learner.update(rollout, 0.0)
    assert sum(rates[:3]) / 3 < 0.7
    assert sum(rates[-5:]) / 5 > 0.9


def test_resumed_updates_equal_uninterrupted_ones() -> None:
    policy, learner, collector = make(0, episodes())
    for _ in range(2):
        learner.update(collector.collect(8), 0.0)
    rollout = collector.collect(8)
    other_policy, other, _ = make(1, episodes())
    other_policy.load_state_dict(policy.state_dict())
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert learner.update(rollout, 0.0) == other.update(rollout, 0.0)
    for mine, theirs in ((policy, other_policy), (learner.target_policy, other.target_policy)):
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)


def test_half_of_a_batch_is_demonstrated_and_successes_alone_are_imitated() -> None:
    _, learner, collector = make(0, episodes(second_succeeds=False))
    learner.replay.add(collector.collect(6))
    batch = learner._batch()
    position = batch["observation", "position"].squeeze(1)[32:]
    assert not batch["imitated"][:32].any()
    assert torch.equal(batch["imitated"][32:], position > 0.0)
    # from the last observation one action of two is left
    is_last = (position.abs() - 0.15).abs() < 1e-6
    assert is_last.any()
    assert torch.equal(batch["executed"][32:], torch.stack((torch.ones(32) > 0, ~is_last), 1))


def test_demonstrations_that_succeed_are_imitated() -> None:
    policy, learner, collector = make(0, episodes(), imitation=10.0)
    for _ in range(3):
        metrics = learner.update(collector.collect(8), 0.0)
    assert metrics["imitation_loss"] < 0.01
    observation = episodes().observation
    actions = policy.act(observation, deterministic=True).actions[:, 0, 0]
    assert torch.equal(actions, -0.25 * observation["position"].squeeze(1).sign())


@pytest.mark.parametrize(
    ("demonstrations", "message"),
    [
        (None, "none; .* or use algorithm.demonstration_share=0"),
        (episodes(math.nan), "are unknown"),
        (replace(episodes(), observation=episodes().observation.exclude("task")), "critics read task"),
    ],
)
def test_demonstrations_that_cannot_be_learned_from_are_refused(demonstrations, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(0, demonstrations, demonstration_share=0.5)
    make(0, demonstrations, demonstration_share=0.0)  # the advice


def test_no_weight_changes_by_a_reward_that_is_not_finite() -> None:
    policy, learner, collector = make()
    rollout = collector.collect(16)
    rollout.reward[:] = torch.nan
    before = copy.deepcopy(policy.state_dict())
    with pytest.raises(DivergedError, match="value loss became nan"):
        learner.update(rollout, 0.0)
    assert all(torch.equal(before[name], part) for name, part in policy.state_dict().items())


def test_other_policies_are_refused() -> None:
    env = Reach(2)
    config = ARSQConfig(demonstration_share=0.0)
    with pytest.raises(UserError, match="use policy=coarse_to_fine"):
        config.build(SquashedConfig(hidden=[8]).build(env.contract), None, env, torch.Generator())
    values = ValueHead(head=CriticHead.HL_GAUSS, value_low=0.0, value_high=1.0)
    with pytest.raises(UserError, match=r"use policy\.values\.head=scalar"):
        config.build(CoarseToFineConfig(values=values).build(env.contract), None, env, torch.Generator())


def test_several_processes_are_refused() -> None:
    class TwoProcesses(World):
        size = 2

    env = Reach(2)
    policy = CoarseToFineConfig(hidden=[8]).build(env.contract)
    with pytest.raises(UserError, match="learns from a replay"):
        build(env, policy, ARSQConfig(demonstration_share=0.0), None, 0, TwoProcesses())
