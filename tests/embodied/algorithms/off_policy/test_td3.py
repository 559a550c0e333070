"""TD3: targets by hand, learning in chunks, resuming."""

import copy
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.off_policy.td3 import TD3, TD3Config
from embodied.data.store import EpisodeStore
from embodied.errors import DivergedError, UserError
from embodied.networks.value_head import CriticHead
from embodied.rollout.rollout import Collector, Rollout
from policies.flow import FlowConfig
from policies.mlp import MLPConfig, MLPPolicy
from tests.embodied.reach import Reach


def make(seed: int = 0, **settings) -> tuple[MLPPolicy, TD3, Collector]:
    torch.manual_seed(seed)
    env = Reach(32)
    policy = MLPConfig(hidden=[32], initial_std=0.4).build(env.contract)
    policy.fit(env.reset(starts=torch.arange(32)), torch.zeros(1, 1))
    generator = torch.Generator().manual_seed(seed)
    learner = TD3Config(warmup=500, discount=0.9, minibatch=64, **settings).build(policy, None, env, generator)
    return policy, learner, Collector(Reach(32), policy, generator)


def transitions(learner: TD3, rollout: Rollout) -> TensorDict:
    """Transitions of all decisions of one rollout that the simulation survived."""
    store = EpisodeStore(learner.config.capacity)
    store.add(rollout)
    rows = rollout.simulated.flatten().nonzero().squeeze(1)
    return store.transitions(rows, learner.config.lookahead, learner.config.discount)


def test_targets_by_hand() -> None:
    policy, learner, collector = make(target_noise=0.5, noise_clip=0.3, lookahead=1)
    for parameter in (*learner.target_policy.parameters(), *learner.q.targets.parameters()):
        parameter.data += torch.randn_like(parameter)  # the trained networks have moved on
    rows = transitions(learner, collector.collect(6))
    ended = rows["carry"] == 0
    assert ended.any()
    assert not ended.all()
    seen = rows["next_observation"]
    actions = learner.target_policy.actions(seen)[:, :2] / 0.25
    draws = torch.Generator()
    draws.set_state(learner.generator.get_state())
    noise = (0.5 * torch.randn(actions.shape, generator=draws)).clamp(-0.3, 0.3)
    assert ((actions + noise).abs() > 1.0).any()
    inputs = torch.cat((policy.features(seen), (actions + noise).clamp(-1.0, 1.0).flatten(1)), -1)
    both = learner.q.targets.values(inputs)
    expected = torch.where(ended, rows["reward"], rows["reward"] + 0.9**2 * both.min(0).values)
    limit = (rows["carry"] - 0.9).abs() < 1e-6  # a chunk of which the time limit left one action
    torch.testing.assert_close(learner._target(rows)[~limit], expected.detach()[~limit])


def test_distributions_of_targets_by_hand() -> None:
    head = {"head": CriticHead.C51, "bins": 7, "value_low": -1.0, "value_high": 2.0}
    policy, learner, collector = make(target_noise=0.0, lookahead=1, **head)
    for parameter in learner.q.targets.parameters():
        parameter.data += torch.randn_like(parameter)
    rows = transitions(learner, collector.collect(4))
    assert (rows["carry"] == 0).any()
    following = rows["next_observation"]
    actions = (learner.target_policy.actions(following)[:, :2] / 0.25).clamp(-1.0, 1.0)
    probabilities = (
        learner.q.targets(torch.cat((policy.features(following), actions.flatten(1)), -1)).softmax(-1).detach()
    )
    atoms = [-1.0 + 0.5 * number for number in range(7)]
    expected = torch.zeros(len(rows), 7)
    for row in range(len(rows)):
        network = min((0, 1), key=lambda each: float(probabilities[each, row] @ torch.tensor(atoms)))
        for atom, mass in zip(atoms, probabilities[network, row].tolist(), strict=True):
            value = min(max(float(rows["reward"][row] + rows["carry"][row] * atom), -1.0), 2.0)
            for number, other in enumerate(atoms):
                expected[row, number] += mass * max(0.0, 1.0 - abs(value - other) / 0.5)
    target = learner._target(rows)
    torch.testing.assert_close(target, expected.unsqueeze(0), atol=1e-5, rtol=1e-4)
    outputs = learner.q.critics(learner.q.inputs(rows["observation"], learner.q.scaled(rows["actions"])))
    loss = sum(torch.nn.functional.cross_entropy(each, expected) for each in outputs)
    metrics = learner.q.step(rows, target, 1)
    assert metrics["value_loss"].item() == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["clamped_targets"].item() == pytest.approx(expected[:, [0, 6]].sum(1).mean().item(), rel=1e-4)


def test_further_targets_are_asked_for_where_they_end() -> None:
    _, learner, collector = make(lookahead=3)
    rollout = collector.collect(6)
    rows = transitions(learner, rollout).view(6, 32)
    going = ~rollout.done[:3].any(0)
    assert going.any()
    torch.testing.assert_close(
        rows["next_observation", "position"][0, going], rollout.next_observation()["position"][2, going]
    )
    torch.testing.assert_close(rows["carry"][0, going], torch.full((int(going.sum()),), 0.9**6))
    assert (rows["carry"][rollout.terminated] == 0).all()


def test_targets_reach_no_further_than_where_a_person_takes_over() -> None:
    _, learner, collector = make(lookahead=3)
    rollout = collector.collect(6)
    human = torch.zeros_like(rollout.executed)
    human[1, :, 0] = True
    rows = transitions(learner, replace(rollout, signals={"human": human})).view(6, 32)
    alone = transitions(learner, rollout).view(6, 32)
    going = ~rollout.done[:3].any(0)
    following = rollout.next_observation()["position"][:, going]
    torch.testing.assert_close(rows["next_observation", "position"][:2, going], following[[0, 3]])
    torch.testing.assert_close(rows["carry"][0, going], torch.full((int(going.sum()),), 0.9**2))
    assert (rows[1:] == alone[1:]).all()  # a person's actions are stored like others


def test_the_loss_of_the_critics_by_hand() -> None:
    _, learner, collector = make(gradient_steps=1)
    learner.replay.add(collector.collect(20))
    state = learner.generator.get_state()
    rows = learner.replay.draw(64, learner.generator)
    batch = learner.replay.transitions(rows, learner.config.lookahead, 0.9)
    target = learner._target(batch)
    values = learner.q.critics.values(learner.q.inputs(batch["observation"], batch["actions"] / 0.25))
    assert values.shape == (2, 64)
    expected = (values - target).square().mean(1).sum()
    learner.generator.set_state(state)
    assert torch.equal(learner._step()["value_loss"], expected.detach())


def test_other_critics_learn_and_report_targets_out_of_their_range() -> None:
    head = {"head": CriticHead.HL_GAUSS, "value_low": 0.0, "value_high": 0.6}
    _, learner, collector = make(ensemble=5, subset=2, layer_norm=True, **head)
    first, *_, last = [learner.update(collector.collect(20), 0.0) for _ in range(4)]
    assert last["value_loss"] < first["value_loss"]
    assert 0.0 < last["clamped_targets"] < 1.0  # the reward of a success is 1
    inputs = learner.q.inputs(collector.observation, torch.zeros(32, 2, 1))
    assert learner.q.critics.values(inputs).shape == (5, 32)


def test_noise_is_spread_over_the_environments() -> None:
    policy, learner, _ = make(exploration_low=0.0, exploration_high=0.6)
    collector = learner.collector(Reach(4), policy, torch.Generator().manual_seed(0))
    rollout = collector.collect(400)
    mean = policy.actions(rollout.observation.flatten(0, 1)).view(rollout.actions.shape)
    assert torch.equal(rollout.actions[:, 0], mean[:, 0])
    assert rollout.actions.abs().max() == 0.25
    for env, deviation in enumerate((0.0, 0.2, 0.4)):
        noise = (rollout.actions - mean)[:, env] / 0.25
        assert noise.std().item() == pytest.approx(deviation, rel=0.15)
    alone = learner.collector(Reach(1), policy, torch.Generator())
    assert alone.deviations.item() == pytest.approx(0.6)
    for low, high in ((None, 0.1), (0.1, None), (0.2, 0.1)):
        with pytest.raises(UserError, match="exploration_low <= exploration_high"):
            TD3Config(exploration_low=low, exploration_high=high)


def test_rates_fall_to_their_final_share() -> None:
    _, learner, collector = make(gradient_steps=1)
    learner.update(collector.collect(20), 1.0)
    assert learner.gradient_steps == 1
    rates = [each.param_groups[0]["lr"] for each in (learner.actor_optimiser, learner.q.optimiser)]
    assert rates == pytest.approx([3e-5, 1e-4])


def test_the_policy_moves_once_in_so_many_steps_and_its_targets_with_it() -> None:
    policy, learner, collector = make(gradient_steps=1, policy_delay=3, averaging=0.25)
    moved = []
    for _ in range(4):
        actor, target = policy.actor[0].weight.clone(), learner.target_policy.actor[0].weight.clone()
        learner.update(collector.collect(8), 0.0)
        moved.append(not torch.equal(policy.actor[0].weight, actor))
        expected = target.lerp(policy.actor[0].weight, 0.25) if moved[-1] else target
        torch.testing.assert_close(learner.target_policy.actor[0].weight, expected)
    assert moved == [False, False, False, True]  # the first rows are warm-up


def test_the_target_policy_reads_observations_by_the_statistics_of_the_policy() -> None:
    env = Reach(32)
    policy = MLPConfig(hidden=[8], running_statistics=True).build(env.contract)
    policy.fit(env.reset(starts=torch.arange(32)), torch.zeros(1, 1))
    config = TD3Config(warmup=1, minibatch=8, gradient_steps=1, policy_delay=2, target_noise=0.0, lookahead=1)
    learner = config.build(policy, None, env, torch.Generator().manual_seed(0))
    rollout = Collector(env, policy, torch.Generator().manual_seed(0)).collect(4)
    policy.renormalise(rollout.observation.apply(lambda each: each + 3.0))  # as the loop does after each update
    observation = rollout.observation[0]
    learner.update(rollout, 0.0)  # of the critics alone: the weights of both policies are still the same
    torch.testing.assert_close(learner.target_policy.actions(observation), policy.actions(observation))


def test_learns_to_reach_from_sparse_reward() -> None:
    _, learner, collector = make(learning_rate=3e-3, value_learning_rate=3e-3, lookahead=1, gradient_steps=64)
    rates = []
    for _ in range(25):
        rollout = collector.collect(8)
        rates.append(float(rollout.success.sum() / rollout.done.sum()))
        learner.update(rollout, 0.0)
    assert sum(rates[:3]) / 3 < 0.7
    assert sum(rates[-5:]) / 5 > 0.9


def test_resumed_updates_equal_uninterrupted_ones() -> None:
    policy, learner, collector = make()
    for _ in range(4):
        learner.update(collector.collect(8), 0.0)
    rollout = collector.collect(8)
    other_policy, other, _ = make(seed=1)
    other_policy.load_state_dict(policy.state_dict())
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert learner.update(rollout, 0.0) == other.update(rollout, 0.0)
    for a, b in zip(policy.parameters(), other_policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_policy_that_only_samples_is_refused() -> None:
    env = Reach(2)
    with pytest.raises(ValueError, match="deterministic actions"):
        TD3Config().build(
            FlowConfig(width=8, hidden=8, turn_rad=0.0).build(env.contract), TensorDict(), env, torch.Generator()
        )


@pytest.mark.parametrize("fault", ["reward", "actor"])
def test_no_weight_changes_by_what_is_not_finite(fault: str) -> None:
    policy, learner, collector = make(gradient_steps=4, policy_delay=1)
    rollout = collector.collect(16)
    if fault == "reward":
        rollout.reward[:] = torch.nan
    else:
        learner.q.inputs = lambda observation, actions, **_: torch.cat(
            (policy.features(observation), (actions + (0.0 * actions.square()).sqrt()).flatten(1)), -1
        )
    before = [part.clone() for part in policy.mean_parameters()]
    with pytest.raises(DivergedError, match="value loss became nan" if fault == "reward" else "the actor became nan"):
        learner.update(rollout, 0.0)
    for old, new in zip(before, policy.mean_parameters(), strict=True):
        assert torch.equal(old, new)


def test_decisions_that_the_simulation_did_not_survive_are_not_stored() -> None:
    _, learner, collector = make(lookahead=3)
    rollout = collector.collect(6)
    broken = torch.zeros_like(rollout.done)
    env = int((~rollout.done[:3].any(0)).nonzero()[0])
    broken[2, env] = True
    rows = transitions(learner, replace(rollout, events={"diverged": broken}, terminated=rollout.terminated | broken))
    assert len(rows) == 6 * 32 - 1
    assert (rows["carry"][[env, 32 + env]] > 0).all()  # of the observation before it
