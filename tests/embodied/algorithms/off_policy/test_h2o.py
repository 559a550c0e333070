"""H2O: gaps, weights and penalty by hand, a simulator that is wrong in one of two tasks, resumption, refusals."""

import copy
from dataclasses import replace

import pytest
import torch

from embodied.algorithms.off_policy.h2o import H2O, H2OConfig
from embodied.algorithms.off_policy.sac import SACConfig
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate
from embodied.rollout.rollout import Collector
from policies.flow import FlowConfig
from policies.squashed import SquashedConfig, SquashedPolicy
from tests.embodied.reach import Reach
from tests.embodied.recorded_reach import MirroredReach, recorded

FAST = {"learning_rate": 3e-3, "value_learning_rate": 3e-3, "averaging": 0.02, "initial_temperature": 0.05}
SMALL = FAST | {"hidden": [64, 64], "warmup": 200, "discount": 0.9, "minibatch": 64, "updates": 0.1}
CONFIG = H2OConfig(**SMALL, discriminator_learning_rate=3e-3)


def make(
    seed: int = 0, config: SACConfig = CONFIG, log: Episodes | None = None
) -> tuple[SquashedPolicy, H2O, Collector]:
    torch.manual_seed(seed)
    env = Reach(32)
    policy = SquashedConfig(hidden=[32]).build(env.contract)
    policy.fit(env.reset(starts=torch.arange(32)), torch.zeros(1, 1))
    generator = torch.Generator().manual_seed(seed)
    learner = config.build(policy, recorded(240, mirrored=True) if log is None else log, env, generator)
    return policy, learner, Collector(env, policy, generator)


def test_gap_weights_and_penalty_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, learner, collector = make(config=replace(CONFIG, conservatism=0.7, demonstration_share=0.25))
    learner.replay.add(collector.collect(8))
    batch = learner._batch()
    goes_on = batch["carry"] > 0
    before, after = policy.features(batch["observation"]), policy.features(batch["next_observation"])
    actions = batch["actions"].flatten(1) / 0.25
    change = (after - before) / (after - before).std(0).clamp_min(1e-6)
    inputs = torch.cat((before, actions, change), 1)
    monkeypatch.setattr(learner.dynamics, "step", lambda *_: torch.tensor(0.0))  # the discriminators of below
    real = learner.dynamics.of_transitions.values(inputs)[0].sigmoid()
    likely = learner.dynamics.of_actions.values(inputs[:, :-2])[0].sigmoid()
    ratio = (real / (1 - real)) / (likely / (1 - likely))  # p_real(s'|s, a) / p_sim(s'|s, a)
    ratio = torch.where(goes_on, ratio, 1.0)
    assert 0 < int((ratio[:48] < 1).sum()) < int(goes_on[:48].sum())
    weight = torch.cat((ratio[:48].clamp(1e-5, 1.0), torch.ones(16)))
    omega = -ratio[:48].log()
    omega = omega.clamp(1e-6, 10.0) / omega.clamp(1e-6, 10.0).sum()
    q = learner.q.values(batch["observation"], batch["actions"] / 0.25)
    penalty = ((omega * q[:, :48].exp()).sum(1).log() - q[:, 48:].mean(1)).sum()
    target = torch.linspace(-1.0, 1.0, 64)
    monkeypatch.setattr(learner, "_target", lambda _: target)
    metrics = learner._update_critics(batch)
    expected = (weight * (q - target).square()).mean(1).sum() + 0.7 * penalty
    assert float(metrics["value_loss"]) == pytest.approx(float(expected.detach()), rel=1e-4)
    assert float(metrics["simulator_weight"]) == pytest.approx(float(weight[:48].mean().detach()), rel=1e-4)


def test_discriminators_by_hand_leave_out_transitions_that_end_an_episode() -> None:
    _, learner, collector = make(config=replace(CONFIG, discriminator_noise=0.0))
    learner.replay.add(collector.collect(8))
    batch = learner._batch()
    dynamics, inputs = learner.dynamics, learner.dynamics.inputs(batch)
    goes_on, is_real = batch["carry"] > 0, torch.arange(64) >= 32
    assert 0 < int(goes_on.sum()) < 64
    loss = 0.0
    for logits in dynamics.logits(inputs):
        right = torch.where(is_real, logits, -logits).sigmoid()
        loss -= float(right[goes_on].log().sum().detach()) / 64
    assert float(dynamics.step(inputs, is_real, goes_on, learner.generator, 1)) == pytest.approx(loss, rel=1e-4)


def test_what_a_person_did_in_the_simulator_is_not_taken_for_real() -> None:
    for kept in (False, True):
        config, log = replace(CONFIG, keep_interventions=kept), recorded(2, mirrored=True)
        _, learner, collector = make(config=config, log=log)
        rollout = collector.collect(8)
        learner.replay.add(replace(rollout, signals={"human": rollout.executed}))
        state = learner.generator.get_state()
        own, logged = learner.replay.draw(64, learner.generator)
        assert (len(own) > 32) is kept  # the person's are drawn with the log, or not
        learner.generator.set_state(state)
        assert learner._batch()["is_real"].tolist() == [False] * len(own) + [True] * len(logged)
        assert learner._update_critics(learner._batch())["simulator_weight"].isfinite()


def test_learns_from_the_log_where_the_simulator_is_wrong() -> None:
    policy, learner, collector = make()
    for _ in range(25):
        metrics = learner.update(collector.collect(8), 0.0)
    reached = evaluate(MirroredReach(44), policy, starts_per_task=22).success.float().mean(1)
    assert reached[0] > 0.9
    assert reached[1] > 0.7  # SAC in the simulator: 0
    assert 0.3 < metrics["simulator_weight"] < 0.7  # about 1 in one task, 0 in the other
    learner.replay.add(collector.collect(8))
    batch = learner._batch()
    gap, is_wrong = learner.dynamics.gap(learner.dynamics.inputs(batch)), batch["observation", "task"].squeeze(1) == 1
    assert gap[:32][is_wrong[:32]].mean() > 2.0
    assert gap[:32][~is_wrong[:32]].mean().abs() < 0.5


def test_resumed_updates_equal_uninterrupted_ones() -> None:
    policy, learner, collector = make()
    for _ in range(3):
        learner.update(collector.collect(8), 0.0)
    rollout = collector.collect(8)
    other_policy, other, _ = make(1)
    other_policy.load_state_dict(policy.state_dict())
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert learner.update(rollout, 0.0) == other.update(rollout, 0.0)
    for a, b in zip(policy.parameters(), other_policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_it_cannot_learn_from_is_refused() -> None:
    log = recorded(mirrored=True)
    with pytest.raises(UserError, match=r"rewards are unknown .*; or use algorithm=sac"):
        make(log=replace(log, reward=torch.full_like(log.reward, torch.nan)))
    env = Reach(2)
    policy = SquashedConfig(hidden=[8]).build(env.contract)
    with pytest.raises(UserError, match=r"add demonstrations=DIR, or use algorithm=sac"):
        CONFIG.build(policy, None, env, torch.Generator())
    with pytest.raises(UserError, match=r"algorithm=h2o; use policy=squashed"):
        CONFIG.build(FlowConfig(width=8, hidden=8, turn_rad=0.0).build(env.contract), log, env, torch.Generator())
    for share in (0.0, 0.001, 1.0):
        with pytest.raises(UserError, match=r"learns from a log and a simulator"):
            replace(CONFIG, demonstration_share=share)
    with pytest.raises(UserError, match=r"got lookahead=3; use lookahead=1"):
        replace(CONFIG, lookahead=3)
