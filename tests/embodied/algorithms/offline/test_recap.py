"""RECAP and policies that are conditioned on advantages: labels, guidance and losses by hand."""

from dataclasses import replace

import pytest
import torch

from embodied.algorithms.offline.recap import RECAP, RECAPConfig
from embodied.errors import UserError
from embodied.policy import CONDITION, Condition
from policies.diffusion import DiffusionConfig
from policies.flow import FlowConfig
from policies.generation.base import CONDITION_SCALE, GenerativePolicy
from policies.mlp import MLPConfig
from tests.embodied.algorithms.offline.test_offline import success
from tests.embodied.reach import Reach
from tests.embodied.recorded_reach import recorded

SMALL = {"steps": 800, "batch": 64, "discount": 0.9, "hidden": [32, 32], "lookahead": 2, "learning_rate": 3e-3}


def make(guidance: float | None = 2.5, *, diffusion: bool = False, **options) -> tuple[GenerativePolicy, RECAP]:
    torch.manual_seed(0)
    sizes = {"width": 16, "hidden": 32, "turn_rad": 0.0, "denoising_steps": 2, "advantage_guidance": guidance}
    config = DiffusionConfig(tuned_steps=1, **sizes) if diffusion else FlowConfig(**sizes)
    policy = config.build(Reach(1).contract)
    policy.fit(*recorded().by_weight())
    return policy, RECAPConfig(**SMALL | options).build(policy, torch.Generator().manual_seed(0))


def test_learns_under_the_condition_of_large_advantages() -> None:
    policy, learner = make(1.5)
    metrics = learner.fit(recorded(), 800)
    assert learner.gradient_steps == 800
    assert metrics["positive_share"] == pytest.approx(0.3, abs=0.02)
    assert success(policy) > 0.9
    policy.config = replace(policy.config, advantage_guidance=0.0)
    assert success(policy) < 0.5  # the average of all episodes


def test_the_learning_rate_rises_in_the_first_steps_of_imitation() -> None:
    _, learner = make(steps=40, warmup=4)
    learner.fit(recorded(), learner.value_steps + 1)
    assert learner.optimiser.param_groups[0]["lr"] == pytest.approx(3e-3 / 5)


def test_conditions_by_hand() -> None:
    policy, learner = make(lookahead=3, folds=2)
    episodes = recorded()
    human = torch.zeros(episodes.steps, dtype=torch.bool)
    human[:7] = True  # the first episode
    episodes = replace(episodes, human=human)
    learner.fit(episodes, learner.value_steps)
    assert learner.conditions is None
    learner.fit(episodes, 1)
    with torch.no_grad():
        values = learner.v.values(policy.features(episodes.observation))
    begin, advantages = 0, []
    for number, end in enumerate(episodes.ends.tolist()):
        rows = torch.arange(begin, end)
        fold = int(learner.fold[begin])
        assert (learner.fold[rows] == fold).all()
        task = episodes.task_index == episodes.task_index[number]
        assert task.all()
        # G_t = gamma^(T - 1 - t) if the episode succeeded; the largest return is 1 and the smallest 0
        reached = float(episodes.success[number])
        y = reached * 0.9 ** (len(rows) - 1 - torch.arange(len(rows)).float()) - 1.0
        for t in range(len(rows)):
            # A_t = R_{t:t+3} + 0.9^3 V_{t+3} - V_t in units of V + 1, the return
            v = values[fold, rows] + 1.0
            gains = [0.9**i * float(episodes.reward[begin + t + i]) for i in range(3) if t + i < len(rows)]
            later = 0.9**3 * float(v[t + 3]) if t + 3 < len(rows) else 0.0
            advantages.append(sum(gains) + later - float(v[t]))
        torch.testing.assert_close(learner.target[rows], y)
        begin = end
    advantage = torch.tensor(advantages)
    torch.testing.assert_close(learner._advantages(learner.transitions), advantage, atol=1e-5, rtol=1e-4)
    threshold = advantage.sort().values[int(0.7 * len(advantage))]
    expected = torch.where(advantage >= threshold, Condition.POSITIVE, Condition.NEGATIVE)
    assert (expected[:7] == Condition.NEGATIVE).any()
    expected[:7] = Condition.POSITIVE
    assert torch.equal(learner.conditions, expected)


def test_the_last_advantages_of_a_long_data_set_are_known() -> None:
    """1 / discount to the power of all control steps before is infinite: 2^376 here, 1.01^8900 by default."""
    _, learner = make(discount=0.5, lookahead=3)
    learner.fit(recorded(), 0)
    assert recorded().steps > 128
    advantage = learner._advantages(learner.transitions)
    # nothing follows the last decision: A = y - V
    expected = learner.target[-1] - learner._values(learner.transitions.episodes)[-1]
    assert advantage[-1] == expected
    assert advantage.isfinite().all()


def test_values_are_computed_in_pieces_of_a_process_s_share(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, learner = make()
    learner.fit(recorded(), 0)
    features, sizes = policy.features, []
    monkeypatch.setattr(policy, "features", lambda each: sizes.append(len(each)) or features(each))
    alone = learner._labels(learner.transitions)
    assert max(sizes) == 64
    sizes.clear()
    two = learner._labels(learner.transitions, type("Two", (), {"size": 2, "rank": 0})())
    assert max(sizes) == 32
    assert torch.equal(alone, two)


def test_values_learn_without_their_fold() -> None:
    _, learner = make(folds=2)
    learner.fit(recorded(), 0)
    rows = (learner.fold == 0).nonzero().squeeze(1)
    observation = learner.transitions.episodes.chunks(rows, 1)["observation"]
    zero, one = learner.v.config.errors(learner.v(learner.policy.features(observation)), learner.target[rows]).mean(1)
    passes = []
    learner.v.register_forward_hook(lambda *_: passes.append(1))
    learner._learn_values(rows)
    assert len(passes) == 1  # for what is learned and what is held out
    assert learner.held_out_value_loss == pytest.approx(float(zero.detach()))
    assert learner.value_loss == pytest.approx(float(one.detach()))
    gradients = [weight.grad for weight in learner.v.weights]
    assert all((each[0] == 0.0).all() and (each[1] != 0.0).any() for each in gradients if each is not None)


@pytest.mark.parametrize("diffusion", [False, True])
def test_a_conditioned_policy_acts_exports_and_loads_weights_without_a_condition(diffusion: bool) -> None:
    policy, _ = make(2.5, diffusion=diffusion)
    alone, _ = make(1.0, diffusion=diffusion)
    observation = Reach(8).reset(starts=torch.arange(8))
    state = {name: weight for name, weight in alone.state_dict().items() if not name.startswith("condition")}
    policy.load_state_dict(state)
    before = policy.act(observation, deterministic=True).actions
    torch.testing.assert_close(before, alone.act(observation, deterministic=True).actions)
    policy.condition.weight.data[1:].normal_()
    shift = CONDITION_SCALE * policy.condition.weight
    x = torch.randn(8, 2, 1)
    features = policy.encoder(observation)
    torch.testing.assert_close(policy.actor_features(observation), features + shift[2])
    predict = (
        (lambda each: policy.network(x, torch.zeros(8), each))
        if diffusion
        else (lambda each: policy.velocity(x, torch.ones(8), each))
    )
    expected = predict(features) + 2.5 * (predict(features + shift[2]) - predict(features))
    torch.testing.assert_close(policy.guided(predict, policy.actor_features(observation)), expected)
    if not diffusion:
        velocity, _ = policy._field(policy.actor_features(observation))(x, torch.zeros(8, dtype=torch.long))
        torch.testing.assert_close(velocity, expected)
    decision = policy.act(observation, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(policy.evaluate(observation, decision.sample).log_prob, decision.log_prob)
    after = policy.act(observation, deterministic=True).actions
    assert ((after - before).abs() > 1e-3).any()
    network = policy.deployable()
    torch.testing.assert_close(network(*network.inputs.of(observation).values()), after)


def test_the_supervised_loss_reads_the_condition() -> None:
    policy, _ = make()
    policy.condition.weight.data[1:].normal_()
    batch = recorded().chunks(torch.arange(8), 2)
    condition = torch.arange(8) % 3
    read = []
    policy._error = lambda target, features: read.append(features) or target.square().mean(-1)
    policy.loss(batch["observation"], batch["actions"], batch["valid"])
    policy.loss(batch["observation"].copy().update({CONDITION: condition}), batch["actions"], batch["valid"])
    shift = CONDITION_SCALE * policy.condition.weight[condition]
    assert (shift[0] == 0.0).all()
    torch.testing.assert_close(read[1], read[0] + shift)


def test_labels_are_dropped_for_a_share_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    _, learner = make(dropout=0.25, batch=2000)
    batches = []
    monkeypatch.setattr(learner, "step", lambda batch, *_: batches.append(batch) or 0.0)
    learner.gradient_steps = learner.value_steps
    learner.fit(recorded(), 1)
    condition = batches[0]["observation", CONDITION]
    assert float((condition == Condition.NONE).float().mean()) == pytest.approx(0.25, abs=0.03)


def test_what_recap_cannot_learn_is_refused() -> None:
    contract = Reach(1).contract
    for policy in (MLPConfig(hidden=[8]), FlowConfig(width=8, hidden=8, turn_rad=0.0)):
        with pytest.raises(UserError, match="use policy=flow, diffusion, pi0, pi05, smolvla or groot with policy"):
            RECAPConfig().build(policy.build(contract), torch.Generator())
    _, learner = make()
    few = recorded(4)
    with pytest.raises(UserError, match=r"at least offline\.folds=5 episodes, got 4"):
        learner.fit(few, 1)
    with pytest.raises(UserError, match="rewards are unknown"):
        learner.fit(replace(recorded(), reward=torch.full_like(recorded().reward, torch.nan)), 1)
