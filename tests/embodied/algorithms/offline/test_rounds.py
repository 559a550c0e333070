"""Off-policy evaluation and rounds that it gates: targets by hand, worse and better policies, resumption, refusals."""

import copy
from dataclasses import dataclass, field, replace

import pytest
import torch

from embodied.algorithms.critics import CriticConfig
from embodied.algorithms.imitation.one_step import OfflineOneStepConfig
from embodied.algorithms.imitation.sft import SFT, SFTConfig, with_drawn_weights
from embodied.algorithms.offline.dynamics import DynamicsConfig
from embodied.algorithms.offline.iql import IQLConfig
from embodied.algorithms.offline.off_policy_evaluation import (
    Estimate,
    Estimator,
    FittedQ,
    ModelRollouts,
    OffPolicyEvaluationConfig,
    initial_rows,
    with_own_critic,
    with_weights,
)
from embodied.algorithms.offline.rebrac import ReBRAC, ReBRACConfig
from embodied.algorithms.offline.rounds import Rounds, RoundsConfig
from embodied.algorithms.parts import only_listed_optimisers
from embodied.contract import TensorSpec
from embodied.data.episodes import UNKNOWN, Episodes
from embodied.data.recording import record_episodes
from embodied.data.round_results import collected_total
from embodied.data.transitions import Transitions
from embodied.errors import UserError
from embodied.policy import Steering, TrainablePolicy
from embodied.run_options import ExperimentConfig
from policies.flow import FlowConfig
from policies.mlp import MLPConfig
from policies.recurrent import RecurrentConfig
from tests.embodied.algorithms.off_policy.test_steering import steered
from tests.embodied.algorithms.offline.test_offline import NEAR, make, success
from tests.embodied.reach import Reach
from tests.embodied.recorded_reach import recorded
from tests.embodied.saving.test_tree import same

EVALUATION = OffPolicyEvaluationConfig(
    hidden=[32, 32], steps=150, batch=64, learning_rate=3e-3, discount=0.9, averaging=0.05, model_steps=150, horizon=4
)
DYNAMICS = DynamicsConfig(models=3, elites=2, hidden=[32, 32])


class Misled(ReBRAC):
    """ReBRAC of negative rewards: it learns to move away from the goal."""

    def fit(self, episodes, steps, world=None):
        if self.transitions is None:
            episodes = replace(episodes, reward=-episodes.reward)
            super().fit(episodes, 0)
        return super().fit(self.transitions.episodes, steps)


@dataclass
class LearnerConfig(ReBRACConfig):
    """A learner that improves the policy, or a `misled` one."""

    misled: bool = field(default=False)

    def build(self, policy, generator):
        return (Misled if self.misled else ReBRAC)(policy, self, generator)


def trained(seed: int = 0) -> TrainablePolicy:
    """A policy that comes to a part of the goals."""
    policy, learner = make(SFTConfig(steps=100, batch=64), seed=seed)
    learner.fit(recorded(), 100)
    return policy


def rounds(policy: TrainablePolicy, gate: Estimator, collect=None, *, is_present=True, misled=False, **options):
    config = RoundsConfig(gate=gate, evaluation=EVALUATION, dynamics=DYNAMICS, **options)
    learning = LearnerConfig(**NEAR, misled=misled)
    learning.steps = 150
    generator = torch.Generator().manual_seed(0)
    return Rounds(policy, config, learning, generator, collect, is_present=is_present)


def test_targets_and_estimate_of_fitted_q_evaluation_by_hand() -> None:
    policy = trained()
    transitions = Transitions(recorded(), 2, 0.9)
    fitted = FittedQ(policy, transitions, EVALUATION, torch.Generator().manual_seed(0))
    for parameter in fitted.q.targets.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    rows = torch.arange(64)
    batch = transitions.take(rows, 2)
    following = policy.act(batch["next_observation"], deterministic=True).actions / 0.25
    inputs = torch.cat((policy.features(batch["next_observation"]), following.flatten(1)), -1)
    expected = batch["reward"] + batch["carry"] * fitted.q.targets.values(inputs).mean(0)
    torch.testing.assert_close(fitted._target(batch, rows), expected)
    begins = initial_rows(recorded())
    assert recorded().first[begins].tolist() == [0, *recorded().ends[:-1].tolist()]
    initial = transitions.take(begins, 1)["observation"]
    inputs = torch.cat(
        (policy.features(initial), policy.act(initial, deterministic=True).actions.flatten(1) / 0.25), -1
    )
    values = fitted.q.critics.values(inputs).mean(0) * transitions.scale
    torch.testing.assert_close(fitted.estimate().values, values.detach())
    low, high = Estimate(torch.arange(100.0)).interval(torch.Generator().manual_seed(0))
    assert low == pytest.approx(49.5 - 1.96 * 2.887, abs=0.7)  # deviation of the mean of 100 numbers 0 .. 99
    assert high == pytest.approx(49.5 + 1.96 * 2.887, abs=0.7)


def test_policies_are_evaluated_without_a_copy_of_their_actors() -> None:
    env = Reach(2)
    policy = FlowConfig(width=8, hidden=16, turn_rad=0.0).build(env.contract)
    policy.fit(env.reset(), torch.rand(8, 1))
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    critic = with_own_critic(policy)
    assert all(ours is its for ours, its in zip(policy.actor_parameters(), critic.actor_parameters(), strict=True))
    own = {id(each) for each in policy.critic_parameters()}
    assert own
    assert not own & {id(each) for each in critic.critic_parameters()}
    weights = {name: value + 1.0 if value.is_floating_point() else value for name, value in before.items()}
    other = with_weights(policy, weights)
    assert all(value.data_ptr() == weights[name].data_ptr() for name, value in other.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


def test_an_evaluated_policy_acts_in_minibatches(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, transitions = trained(), Transitions(recorded(), 2, 0.9)
    act, sizes = policy.act, []
    monkeypatch.setattr(policy, "act", lambda each, **options: sizes.append(len(each)) or act(each, **options))
    fitted = FittedQ(policy, transitions, EVALUATION, torch.Generator().manual_seed(0))
    assert max(sizes) == 64
    assert len(fitted.actions) == len(transitions.episodes)


def test_a_rollout_in_the_model_weighs_values_by_what_goes_on_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = trained()
    transitions = Transitions(recorded(), 2, 0.9)
    config = replace(EVALUATION, horizon=2)
    model = ModelRollouts(policy, transitions, config, DYNAMICS, torch.Generator().manual_seed(0))
    start = transitions.take(initial_rows(recorded()), 1)["observation"]
    moved = start.clone().update({"position": start["position"] * 0.5})
    share = torch.linspace(0.0, 1.0, len(start))
    monkeypatch.setattr(model.dynamics, "step", lambda observation, actions, generator: (moved, None, share))
    first, second = (
        model.critics.q.values(each, policy.act(each, deterministic=True).actions / 0.25).mean(0).detach()
        for each in (start, moved)
    )
    expected = (first + (1.0 - share) * second) / (2.0 - share) * transitions.scale
    torch.testing.assert_close(model.estimate(policy).values, expected)


@pytest.mark.parametrize("gate", [Estimator.FQE, Estimator.AM_Q])
def test_a_better_policy_replaces_the_present_one_and_a_worse_one_does_not(gate: Estimator) -> None:
    policy = trained()
    before = success(policy)
    better = rounds(policy, gate)
    with only_listed_optimisers(better):
        better.fit(recorded(), 150)
    assert better.results[0]["accepted"]
    assert better.results[0]["estimate"] > 1.05 * better.results[0]["present"]
    assert success(policy) > max(0.9, before)
    weights = copy.deepcopy(dict(policy.state_dict()))
    worse = rounds(policy, gate, misled=True)
    worse.fit(recorded(), 149)
    assert success(policy) < 0.3
    worse.fit(recorded(), 1)
    assert not worse.results[0]["accepted"]
    assert worse.results[0]["sentence"].startswith("Offline round 1 on 60 episodes: refused")
    assert same(dict(policy.state_dict()), weights)


@pytest.mark.parametrize(("estimate", "accepted"), [(-9.8, False), (-9.4, True)])
def test_the_margin_also_asks_for_more_where_values_are_negative(
    monkeypatch: pytest.MonkeyPatch, estimate: float, accepted: bool
) -> None:
    learning = IQLConfig(steps=1, batch=16, critics=CriticConfig(hidden=[8]))
    config = RoundsConfig(gate=Estimator.FQE, margin=0.05)
    learner = Rounds(steered(Steering.NONE), config, learning, torch.Generator(), None, is_present=True)
    estimates = [Estimate(torch.full((3,), each)) for each in (-10.0, estimate)]
    monkeypatch.setattr(learner.evaluation, "estimates", lambda *_: estimates)
    learner.fit(recorded(), 1)
    assert learner.results[0]["accepted"] is accepted  # above -10 + 0.05 * 10


def test_the_present_policy_acts_as_before_the_learner_was_built() -> None:
    policy = steered(Steering.ONE_STEP)
    config = RoundsConfig(gate=Estimator.FQE, evaluation=replace(EVALUATION, steps=1))
    learner = Rounds(policy, config, OfflineOneStepConfig(steps=1), torch.Generator(), None, is_present=True)
    assert policy.steers
    assert not learner.present["steers"]


def test_after_a_refusal_critics_keep_the_features_that_they_read() -> None:
    policy = steered(Steering.NONE)
    actor, critic = ([each.clone() for each in part()] for part in (policy.actor_parameters, policy.critic_parameters))
    config = RoundsConfig(gate=Estimator.FQE, margin=1e9, evaluation=replace(EVALUATION, steps=1))
    learning = IQLConfig(steps=1, batch=16, critics=CriticConfig(hidden=[8]))
    learner = Rounds(policy, config, learning, torch.Generator(), None, is_present=True)
    learner.fit(recorded(), 1)
    assert not learner.results[0]["accepted"]
    assert all(map(torch.equal, actor, policy.actor_parameters()))
    assert not all(map(torch.equal, critic, learner.values()["features"]))


@pytest.mark.parametrize("imitate_anew", [False, True])
def test_resumed_rounds_equal_uninterrupted_ones_across_a_collection(imitate_anew: bool) -> None:
    def made(seed: int) -> Rounds:
        policy = trained(seed)
        env = Reach(4)
        config = replace(EVALUATION, steps=3)
        options = {"count": 2, "collected": 2, "imitate_anew": imitate_anew}
        built = rounds(
            policy,
            Estimator.FQE,
            lambda number: record_episodes(env, policy, torch.Generator().manual_seed(number), number),
            **options,
        )
        built.learning.steps = 3
        built.imitation_config = SFTConfig(steps=4, batch=64)
        built.evaluation.config = config
        return built

    learner, other = made(0), made(1)
    learner.fit(recorded(), 2)
    other.fit(recorded(), 1)
    total = 2 * 3 + 4 * imitate_anew
    for steps, count in ((0, 2), (3, 5), (total - 6, total - 1)):
        learner.fit(recorded(), steps)
        assert learner.gradient_steps == count
        assert (learner.imitation is not None) == (imitate_anew and count == 5)
        other.policy.load_state_dict(copy.deepcopy(learner.policy.state_dict()))
        other.load_state_dict(copy.deepcopy(learner.state_dict()))
        assert same(other.state_dict(), learner.state_dict())
        assert other.gradient_steps == count
        if count < total - 1:  # a resumed round takes the same steps
            torch.manual_seed(0)
            expected = copy.deepcopy(learner)
            assert other.fit(recorded(), 1) == expected.fit(recorded(), 1)
    assert learner.fit(recorded(), 1) == other.fit(recorded(), 1)
    assert learner.gradient_steps == other.gradient_steps == total
    assert learner.config.steps(3, 4) == total
    assert [each["episodes"] for each in learner.results] == [60, 68]
    steps = learner.collected.steps
    assert [each.get("collected") for each in learner.results] == [None, {"episodes": 8, "env_steps": steps}]
    assert collected_total(learner.results, "env_steps") == steps > 8
    assert learner.results == other.results
    assert same(dict(other.policy.state_dict()), dict(learner.policy.state_dict()))


def test_a_round_begins_with_imitation_by_new_weights_of_all_episodes() -> None:
    policy, env, numbers = trained(), Reach(4), []

    def collect(number: int) -> Episodes:
        numbers.append(number)
        return record_episodes(env, policy, torch.Generator().manual_seed(number), number)

    learner = rounds(
        policy,
        Estimator.NONE,
        collect,
        count=3,
        collected=2,
        imitate_anew=True,
    )
    learner.imitation_config = SFTConfig(steps=20, batch=64)
    learner.learning.steps = 2
    learner.fit(recorded(), 2)
    generator = torch.Generator()
    generator.set_state(learner.generator.get_state())
    learner.fit(recorded(), 1)
    expected = SFT(with_drawn_weights(policy, generator), learner.imitation_config, generator)
    expected.fit(learner._all(recorded()), 20)
    assert not all(map(torch.equal, policy.actor_parameters(), expected.averaged))
    learner.fit(recorded(), 19)
    assert all(map(torch.equal, policy.actor_parameters(), expected.averaged))
    assert learner.learner.gradient_steps == 0
    learner.fit(recorded(), 2 + 20 + 2)
    assert learner.gradient_steps == learner.config.steps(2, 20) == 3 * 2 + 2 * 20
    assert numbers == [0, 1, 2, 3]  # each collection begins with further initial states
    assert [each["episodes"] for each in learner.results] == [60, 68, 76]
    assert [each["collected"]["episodes"] for each in learner.results[1:]] == [8, 8]  # of each round


def test_recorded_episodes_are_those_of_the_environment() -> None:
    policy = MLPConfig(hidden=[8]).build(Reach(1).contract)
    policy.fit(*recorded().by_weight())
    episodes = record_episodes(Reach(4), policy, torch.Generator().manual_seed(0), number=3)
    assert len(episodes.ends) == 4
    begins = episodes.observation["position"][initial_rows(episodes), 0]
    assert begins.tolist() == pytest.approx([0.6, 0.6, -0.65, -0.65])  # starts 6, 6, 7, 7 of tasks 0, 1, 0, 1
    for end, begin, final, succeeded in zip(
        episodes.ends, begins, episodes.final_observation["position"], episodes.success, strict=True
    ):
        start = 0 if end == episodes.ends[0] else int(episodes.ends[episodes.ends < end][-1])
        assert float(begin + episodes.actions[start:end].sum()) == pytest.approx(float(final), abs=1e-6)
        assert bool(succeeded) == (abs(float(final)) < 0.1) == bool(episodes.reward[start:end].sum() == 1.0)


class WithoutSuccess(Reach):
    """Reach that does not define success."""

    def step(self, actions):
        return replace(super().step(actions), has_success=False)


def test_the_outcome_of_recorded_episodes_is_unknown_where_success_is_not_defined() -> None:
    policy = MLPConfig(hidden=[8]).build(Reach(1).contract)
    policy.fit(*recorded().by_weight())
    episodes = record_episodes(WithoutSuccess(4), policy, torch.Generator().manual_seed(0))
    assert episodes.success.tolist() == [UNKNOWN] * 4  # failures would not be imitated


def test_what_rounds_cannot_do_is_refused_in_one_line() -> None:
    policy = trained()
    with pytest.raises(UserError, match=r"use rounds\.count=2 or more, or collected=0"):
        RoundsConfig(gate=Estimator.AM_Q, collected=1)
    with pytest.raises(UserError, match=r"use rounds\.count=2 or more, or imitate_anew=false"):
        RoundsConfig(imitate_anew=True)
    anew = ExperimentConfig(stages=["offline"], rounds=RoundsConfig(count=2, imitate_anew=True), sft=SFTConfig(steps=0))
    with pytest.raises(UserError, match=r"imitate_anew takes sft\.steps gradient steps, which are 0"):
        anew.check_learners(None, ReBRACConfig())
    gated = RoundsConfig(count=2, gate=Estimator.AM_Q, collected=1)
    with pytest.raises(UserError, match=r"no simulator .*; use rounds\.collected=0"):
        gated.check(policy, 1, has_simulator=False)
    with pytest.raises(UserError, match=r"one process; use rounds\.count=1 rounds\.gate=none"):
        gated.check(policy, 2, has_simulator=True)
    contract = Reach(1).contract
    with pytest.raises(UserError, match=r"a memory yet; use rounds\.count=1 rounds\.gate=none"):
        gated.check(RecurrentConfig(hidden=[8]).build(contract), 1, has_simulator=True)
    policy.contract = replace(contract, observation=contract.observation | {"rows": TensorSpec((-1, 2))})
    with pytest.raises(UserError, match=r"use rounds\.gate=fqe: .* observations of fixed size, not rows"):
        gated.check(policy, 1, has_simulator=True)
    policy.contract = contract
    RoundsConfig().check(policy, 2, has_simulator=False)
    unknown = replace(recorded(), reward=torch.full_like(recorded().reward, torch.nan))
    gated = Rounds(
        policy,
        RoundsConfig(gate=Estimator.FQE),
        SFTConfig(steps=1, batch=8),
        torch.Generator(),
        None,
        is_present=True,
    )
    with pytest.raises(UserError, match=r"rewards are unknown .*rounds\.gate=none"):
        gated.fit(unknown, 1)
    with pytest.raises(UserError, match=r"at least 2 episodes; record more, or use gate=none"):
        gated.fit(recorded(1), 1)
    with pytest.raises(UserError, match=r"single episode has no interval"):
        Estimate(torch.ones(1)).interval(torch.Generator())
    weighted = replace(recorded(), weights=torch.ones(1))
    with pytest.raises(UserError, match=r"no weight among weighted data sets; use rounds\.collected=0"):
        rounds(policy, Estimator.NONE, count=2, collected=1).fit(weighted, 1)  # before the first round
