"""SAC and RLPD: targets and losses by hand, learning in chunks, resuming, demonstrations."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from embodied.algorithms.off_policy.sac import SAC, RLPDConfig, SACConfig
from embodied.data.episodes import FAILED, SUCCEEDED, Episodes
from embodied.errors import DivergedError, UserError
from embodied.networks.value_head import CriticHead
from embodied.rollout.rollout import Collector
from policies.flow import FlowConfig
from policies.squashed import SquashedConfig, SquashedPolicy
from tests.embodied.reach import Reach


def make(
    seed: int = 0, config: SACConfig | None = None, demonstrations: Episodes | None = None, **settings
) -> tuple[SquashedPolicy, SAC, Collector]:
    torch.manual_seed(seed)
    env = Reach(32)
    policy = SquashedConfig(hidden=[32]).build(env.contract)
    policy.fit(env.reset(starts=torch.arange(32)), torch.zeros(1, 1))
    generator = torch.Generator().manual_seed(seed)
    small = {"hidden": [64, 64], "warmup": 200, "discount": 0.9, "minibatch": 64, "updates": 0.1} | settings
    learner = replace(config or SACConfig(), **small).build(policy, demonstrations, env, generator)
    return policy, learner, Collector(env, policy, generator)


def episodes(reward: float = 1.0) -> Episodes:
    """Two successful episodes of four steps from +-0.9 m, with an observation before every step."""
    parts = []
    for sign in (1.0, -1.0):
        position = sign * torch.tensor([0.9, 0.65, 0.4, 0.15])
        observation = TensorDict({"position": position.unsqueeze(1), "task": torch.zeros(4, 1)}, [4])
        rewards = torch.tensor([0.0, 0.0, 0.0, reward])
        parts.append(Episodes.of(observation, torch.full((4, 1), -0.25 * sign), reward=rewards))
    return Episodes.join(parts)


@pytest.mark.parametrize("entropy_in_target", [True, False])
def test_targets_by_hand(entropy_in_target: bool) -> None:
    policy, learner, collector = make(entropy_in_target=entropy_in_target, initial_temperature=0.3)
    for parameter in learner.q.targets.parameters():
        parameter.data += torch.randn_like(parameter)  # the trained networks have moved on
    learner.replay.add(collector.collect(6))
    batch = learner._batch()
    state = learner.generator.get_state()
    following = batch["next_observation"]
    mean, log_std = policy._gaussian(following)
    std = log_std.exp()
    base = Independent(Normal(mean, std), 2)
    squashed = TransformedDistribution(base, [TanhTransform(cache_size=1)])
    draws = torch.Generator()
    draws.set_state(state)
    actions = torch.tanh(mean + std * torch.randn(mean.shape, generator=draws))
    log_prob = squashed.log_prob(actions)
    values = learner.q.targets.values(torch.cat((policy.features(following), actions.flatten(1)), -1)).min(0).values
    soft = values - 0.3 * log_prob if entropy_in_target else values
    assert (batch["carry"] == 0).any()
    assert (batch["carry"] > 0).any()
    torch.testing.assert_close(
        learner._target(batch), (batch["reward"] + batch["carry"] * soft).detach(), rtol=1e-4, atol=1e-4
    )


def test_entropy_moves_the_atoms_of_distributions() -> None:
    _, learner, _ = make(head=CriticHead.C51, bins=3, value_low=-1.0, value_high=1.0)
    batch = TensorDict({"reward": torch.tensor([0.25]), "carry": torch.tensor([0.5])}, [1])
    batch["next_observation"] = Reach(1).reset()
    learner.q.targets.lowest = lambda *_: torch.tensor([[0.5, 0.0, 0.5]]).log()
    target = learner.q.target(batch, torch.zeros(1, 2, 1), learner.generator, torch.tensor([0.2]))
    # -1 -> 0.25 + 0.5 (-1 + 0.2) = -0.15, 1 -> 0.25 + 0.5 (1 + 0.2) = 0.85
    expected = torch.tensor([[[0.5 * 0.15, 0.5 * 0.85 + 0.5 * 0.15, 0.5 * 0.85]]])
    torch.testing.assert_close(target, expected)


@pytest.mark.parametrize("actor_mean", [True, False])
def test_losses_of_actor_and_temperature_by_hand(actor_mean: bool) -> None:
    policy, learner, collector = make(actor_mean=actor_mean, initial_temperature=0.3, target_std=0.2)
    observation = collector.collect(1).last_observation
    state = learner.generator.get_state()
    actions, log_prob = learner._sample(observation)
    assert torch.equal(actions * 0.25, policy.sample(observation, torch.randn(32, 2, 1, generator=_at(state)))[0])
    values = learner.q.values(observation, actions)
    best = values.mean(0) if actor_mean else values.min(0).values
    expected = (0.3 * log_prob - best).mean()
    gradient = torch.autograd.grad(expected, learner.actor_parameters)
    learner.generator.set_state(state)
    learner.actor_optimiser.step = lambda: None  # leaves the gradients
    assert learner._update_actor(observation)["policy_loss"] == pytest.approx(float(expected.detach()))
    for parameter, own in zip(learner.actor_parameters, gradient, strict=True):
        torch.testing.assert_close(parameter.grad, own)
    assert all(parameter.grad is None for parameter in learner.q.critics.parameters())
    # two executed actions of one element: H0 = 2 log(0.2 sqrt(2 pi e))
    wished = 2 * math.log(0.2 * math.sqrt(2 * math.pi * math.e))
    assert float(learner.log_temperature.grad) == pytest.approx(float(-log_prob.detach().mean()) - wished, rel=1e-5)


def _at(state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def test_the_log_probability_is_finite_where_tanh_is_saturated() -> None:
    policy, _, collector = make()
    observation = collector.collect(1).last_observation
    raw = torch.full((32, 2, 1), 30.0)
    log_prob = policy.evaluate(observation, TensorDict({"raw": raw}, [32])).log_prob
    mean, log_std = policy._gaussian(observation)
    # log(1 - tanh^2 u) = log 4 - 2 u where exp(-2 u) vanishes
    expected = (Normal(mean, log_std.exp()).log_prob(raw) - (math.log(4.0) - 60.0)).sum((1, 2))
    torch.testing.assert_close(log_prob.squeeze(1), expected)


def test_steps_follow_the_number_of_decisions() -> None:
    _, learner, collector = make(updates=0.04, policy_delay=2)
    assert learner.update(collector.collect(1), 0.0) == {}  # warm-up
    learner.config = replace(learner.config, warmup=0)
    steps = []
    for _ in range(4):
        learner.update(collector.collect(1), 0.0)
        steps.append(learner.gradient_steps)
    assert steps == [1, 2, 4, 5]  # int(0.04 * 32 n) - int(0.04 * 32)
    assert float(learner.actor_optimiser.state[learner.actor_parameters[0]]["step"]) == 2


@pytest.mark.parametrize("rate", [None, 0.05])
@pytest.mark.parametrize(("progress", "share"), [(0.0, 1.0), (0.5, 0.6)])
def test_learning_rates_decay_and_the_temperature_may_have_its_own(
    rate: float | None, progress: float, share: float
) -> None:
    settings = {"warmup": 0, "initial_temperature": 0.3, "temperature_learning_rate": rate, "final_lr_share": 0.2}
    _, learner, collector = make(updates=0.04, value_learning_rate=1e-3, **settings)
    weights = learner.actor_parameters, list(learner.q.critics.parameters())
    before = [[each.detach().clone() for each in part] for part in weights]
    learner.update(collector.collect(1), progress)
    # the first step of Adam is as large as its rate
    moved = abs(float(learner.log_temperature.detach()) - math.log(0.3))
    assert moved == pytest.approx(share * (rate or 3e-4), rel=1e-3)
    for old, new, largest in zip(before, weights, (3e-4, 1e-3), strict=True):
        steps = [float((a.detach() - b.detach()).abs().max()) for a, b in zip(old, new, strict=True)]
        assert max(steps) == pytest.approx(share * largest, rel=1e-3)


def test_actor_waits_for_its_critics() -> None:
    _, learner, collector = make(updates=0.04, warmup=0, critic_warmup=3)
    before = [each.clone() for each in learner.actor_parameters]
    actor_steps = []
    for _ in range(4):
        learner.update(collector.collect(1), 0.0)
        state = learner.actor_optimiser.state.get(learner.actor_parameters[0], {"step": 0})
        actor_steps.append(int(state["step"]))
        unchanged = all(torch.equal(old, new) for old, new in zip(before, learner.actor_parameters, strict=True))
        assert unchanged == (learner.gradient_steps <= 3)
    assert actor_steps == [0, 0, 0, 2]  # after 1, 2, 3 and 5 steps of the critics


def test_learns_to_reach_from_sparse_reward() -> None:
    _, learner, collector = make(learning_rate=3e-3, value_learning_rate=3e-3, averaging=0.02, initial_temperature=0.05)
    rates = []
    for _ in range(20):
        rollout = collector.collect(8)
        rates.append(float(rollout.success.sum() / rollout.done.sum()))
        metrics = learner.update(rollout, 0.0)
    assert sum(rates[:3]) / 3 < 0.7
    assert sum(rates[-5:]) / 5 > 0.9
    assert 0.0 < metrics["temperature"] < 0.05  # where it began


def test_resumed_updates_equal_uninterrupted_ones() -> None:
    rlpd = RLPDConfig(policy_delay=2, ensemble=3, temperature_learning_rate=0.01)
    policy, learner, collector = make(0, rlpd, episodes())
    for _ in range(4):
        learner.update(collector.collect(8), 0.0)
    rollout = collector.collect(8)
    other_policy, other, _ = make(1, rlpd, episodes())
    other_policy.load_state_dict(policy.state_dict())
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert learner.update(rollout, 0.0) == other.update(rollout, 0.0)
    for a, b in zip(policy.parameters(), other_policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_half_of_a_batch_is_demonstrated() -> None:
    _, learner, collector = make(0, RLPDConfig(), episodes(reward=5.0))
    learner.replay.add(collector.collect(6))
    batch = learner._batch()
    assert len(batch) == 64
    demonstrated = batch["observation", "position"].squeeze(1)[32:].abs()
    rewards = batch["reward"][32:]
    # chunks of two actions from every observation: the last ones earn 5, discounted by one action from 0.4 m
    for position, reward in ((0.9, 0.0), (0.65, 0.0), (0.4, 4.5), (0.15, 5.0)):
        chosen = (demonstrated - position).abs() < 1e-6
        assert chosen.any()
        torch.testing.assert_close(rewards[chosen], torch.full((int(chosen.sum()),), reward))
    assert batch["reward"][:32].max() <= 1.0


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
        make(0, RLPDConfig(), demonstrations)
    make(0, RLPDConfig(), demonstrations, demonstration_share=0.0)  # the advice


def test_actors_loss_with_imitation_by_hand() -> None:
    settings = {"bc_coefficient": 3.0, "initial_temperature": 0.3}
    policy, learner, collector = make(0, RLPDConfig(), episodes(), **settings)
    learner.replay.add(collector.collect(6))
    observation = learner._batch()["observation"]
    state = learner.generator.get_state()
    log_prob = learner._sample(observation)[1]
    learner.generator.set_state(state)
    values = learner.q.values(observation, learner._sample(observation)[0]).mean(0).detach()
    # chunks from the four places of each demonstration, in half ranges; the last one ends after one action
    rows = learner.replay.draw_imitable(64, learner.generator, learner.replay.interventions)
    demonstrated = learner.replay.chunks(rows, 2)
    positions = demonstrated["observation", "position"].abs()
    assert {round(float(each), 2) for each in positions} == {0.9, 0.65, 0.4, 0.15}
    imitation = policy.loss(demonstrated["observation"], demonstrated["actions"], demonstrated["valid"]).detach()
    learner.generator.set_state(state)
    metrics = learner._update_actor(observation)
    torch.testing.assert_close(metrics["bc_loss"], imitation)
    expected = (0.3 * log_prob - values).mean() + 3.0 * values.abs().mean() * imitation
    torch.testing.assert_close(metrics["policy_loss"], expected.detach())


def test_the_actor_does_not_imitate_failed_demonstrations_from_which_critics_learn() -> None:
    mixed = replace(episodes(), success=torch.tensor([SUCCEEDED, FAILED], dtype=torch.int8))
    _, learner, _ = make(0, RLPDConfig(), mixed, bc_coefficient=1.0)
    rows = learner.replay.draw_imitable(64, learner.generator, learner.replay.interventions)
    assert (learner.replay.chunks(rows, 2)["observation", "position"] > 0.0).all()  # those of the first episode
    failures = mixed.part(1, 2)
    with pytest.raises(UserError, match="all 1 episodes of the demonstrations failed; imitation needs others"):
        make(0, RLPDConfig(), failures, bc_coefficient=1.0)
    _, learner, _ = make(0, RLPDConfig(), failures)
    assert len(learner.replay.demonstrations) == 4
    assert learner._imitation() is None


def test_imitation_keeps_the_actor_at_the_demonstrated_actions() -> None:
    slow = replace(episodes(), actions=0.4 * episodes().actions)  # faster ones earn more
    errors = {}
    for coefficient in (0.0, 1000.0):
        settings = {"learning_rate": 3e-3, "bc_coefficient": coefficient, "initial_temperature": 1e-4}
        policy, learner, collector = make(0, RLPDConfig(), slow, updates=0.5, policy_delay=1, **settings)
        for _ in range(2):
            learner.update(collector.collect(8), 0.0)
        chunks = slow.chunks(torch.arange(8), 2)
        errors[coefficient] = float(policy.loss(chunks["observation"], chunks["actions"], chunks["valid"]).detach())
    assert errors[1000.0] < 0.01 < errors[0.0]


def test_imitation_needs_demonstrations_and_the_whole_policy() -> None:
    with pytest.raises(UserError, match=r"demonstration_share=0\.5"):
        SACConfig(bc_coefficient=1.0)
    policy, learner, _ = make(0, RLPDConfig(), episodes())
    config = replace(learner.config, bc_coefficient=1.0)
    with pytest.raises(UserError, match="use 0"):
        SAC(policy, config, torch.Generator(), episodes(), copy.deepcopy(policy))


@pytest.mark.parametrize("kind", [CriticHead.HL_GAUSS, CriticHead.C51])
def test_categorical_critics_learn_and_report_targets_out_of_their_range(kind: CriticHead) -> None:
    head = {"head": kind, "value_low": 0.0, "value_high": 0.6}
    _, learner, collector = make(**head, initial_temperature=0.01)
    first, *_, last = [learner.update(collector.collect(8), 0.0) for _ in range(4)]
    assert last["value_loss"] < first["value_loss"]
    assert 0.0 < last["clamped_targets"] < 1.0  # the reward of a success is 1


def test_a_policy_without_such_samples_is_refused() -> None:
    env = Reach(2)
    policy = FlowConfig(width=8, hidden=8, turn_rad=0.0).build(env.contract)
    with pytest.raises(UserError, match="policy=squashed"):
        SACConfig().build(policy, None, env, torch.Generator())


def test_no_weight_changes_by_a_reward_that_is_not_finite() -> None:
    policy, learner, collector = make()
    rollout = collector.collect(16)
    rollout.reward[:] = torch.nan
    before = copy.deepcopy(policy.state_dict())
    with pytest.raises(DivergedError, match="value loss became nan"):
        learner.update(rollout, 0.0)
    assert all(torch.equal(before[name], part) for name, part in policy.state_dict().items())
