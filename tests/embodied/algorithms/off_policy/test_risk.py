"""Risk critics: targets by hand, what counts as a failure, and training that resumes bit for bit."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from embodied.algorithms.off_policy import risk
from embodied.algorithms.off_policy.risk import RecordedFailures, RiskConfig, RiskLearner, failures
from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from embodied.execution.reflex import Reflex

CONTRACT = Contract(
    {
        "distance": TensorSpec((1,), unit="m"),
        "truth": TensorSpec((2,), privileged=True),
        "camera": TensorSpec((4, 4, 3), dtype="uint8"),
    },
    TensorSpec((1,), unit="m/s", names=("speed",), low=(0.0,), high=(2.0,)),
    0.1,
)
SMALL = RiskConfig(hidden=[8], batch=16, learning_rate=1e-2)


def episode(length: int = 3, success: bool | None = False, terminated: bool = True, **signals: list[float]) -> Episodes:
    """A drive at 1 m/s from `length` tenths of a metre before a wall."""
    distance = torch.arange(length, 0, -1).float().unsqueeze(1) / 10
    one = Episodes.of(
        TensorDict({"distance": distance}, [length]), torch.ones(length, 1), success=success, terminated=terminated
    )
    parts = {name: torch.tensor(values) for name, values in signals.items()}
    return replace(one, signals=TensorDict(parts, [length])) if parts else one


def test_failures_are_terminations_without_success_and_unknown_is_not_zero():
    cases = {(False, True): 1.0, (True, True): 0.0, (None, True): math.nan, (False, False): 0.0, (None, False): 0.0}
    for (success, terminated), last in cases.items():
        expected = torch.tensor([0.0, 0.0, last])
        torch.testing.assert_close(
            failures(episode(success=success, terminated=terminated), []), expected, equal_nan=True
        )


def test_a_signal_above_zero_is_a_failure_and_one_that_is_unknown_is_not_none():
    one = episode(4, True, hold=[0.0, 1.0, math.nan, 0.0], force=[0.0, math.nan, math.nan, 2.0])
    expected = torch.tensor([0.0, 1.0, math.nan, 1.0])
    torch.testing.assert_close(failures(one, ["hold", "force"]), expected, equal_nan=True)
    with pytest.raises(UserError, match=r"'holds'.*hold"):
        failures(one, ["holds"])


def test_rows_are_those_whose_target_is_known():
    episodes = Episodes.join([episode(), episode(success=True), episode(terminated=False), episode(success=None)])
    recorded = RecordedFailures(episodes, CONTRACT, SMALL)
    # the last step of a truncated episode has no known successor, that of an unknown outcome no known failure
    assert recorded.rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]
    assert recorded.ends.nonzero().squeeze(1).tolist() == [2, 5]
    assert recorded.near.tolist() == [0, 1, 2]
    two = RecordedFailures(episodes, CONTRACT, replace(SMALL, near=2))
    assert two.near.tolist() == [1, 2]


def test_steps_with_a_measurement_or_action_that_is_not_finite_are_left_out():
    lying = Episodes.join([episode(), episode()])
    lying.observation["distance"][1] = math.nan
    lying.actions[5] = math.inf
    # step 0 needs the measurement after it, step 4 the action after it
    assert RecordedFailures(lying, CONTRACT, SMALL).rows.tolist() == [2, 3]


def test_there_is_nothing_to_learn_without_a_failure_or_a_measurement():
    with pytest.raises(UserError, match="no failure"):
        RecordedFailures(episode(success=True), CONTRACT, SMALL)
    with pytest.raises(UserError, match="'distance'"):
        RecordedFailures(replace(episode(), observation=TensorDict({}, [3])), CONTRACT, SMALL)
    sparse = replace(episode(4), observation=episode(2).observation, first=torch.tensor([0, 2]))
    with pytest.raises(UserError, match="every control step"):
        RecordedFailures(sparse, CONTRACT, SMALL)
    with pytest.raises(UserError, match="numbers"):
        RiskLearner(replace(CONTRACT, observation={"camera": CONTRACT.observation["camera"]}), SMALL, torch.Generator())
    with pytest.raises(UserError, match="limits"):
        RiskLearner(replace(CONTRACT, action=TensorSpec((1,))), SMALL, torch.Generator())


def test_targets_by_hand():
    learner = RiskLearner(CONTRACT, replace(SMALL, discount=0.5), torch.Generator())
    logits = torch.tensor([[0.0, 2.0, 1.0], [math.log(3.0), -2.0, 5.0]])
    learner.target.logits = lambda observation, actions: logits
    recorded = RecordedFailures(episode(), CONTRACT, SMALL)
    batch = recorded.take(torch.tensor([0, 1, 2]))
    assert batch["next_observation", "distance"].flatten().tolist() == pytest.approx([0.2, 0.1, 0.1])
    # gamma (1/2 + 3/4) / 2; gamma (s(2) + s(-2)) / 2 = gamma / 2; c
    assert learner.targets(batch).tolist() == pytest.approx([0.3125, 0.25, 1.0])


def test_draws_before_failures_are_weighted_so_that_the_mean_stays():
    episodes = Episodes.join([episode(10), *(episode(10, True) for _ in range(9))])
    recorded = RecordedFailures(episodes, CONTRACT, replace(SMALL, near=5))
    steps, weight = recorded.draw(100_000, 0.5, torch.Generator().manual_seed(0))
    is_near = torch.isin(steps, recorded.near)
    assert float(is_near.float().mean()) == pytest.approx(0.5 + 0.5 * 0.05, abs=0.01)
    assert float(weight.mean()) == pytest.approx(1.0, abs=0.01)
    assert float((weight * is_near).mean()) == pytest.approx(0.05, abs=0.002)


def test_risk_grows_towards_the_wall_and_reads_neither_pictures_nor_the_truth():
    learner = RiskLearner(CONTRACT, replace(SMALL, batch=64, discount=0.7), torch.Generator().manual_seed(0))
    recorded = RecordedFailures(Episodes.join([episode(20), episode(20, True)]), CONTRACT, SMALL)
    metrics = learner.fit(recorded, 400)
    assert metrics.keys() == {"risk_loss", "risk"}
    distance = torch.tensor([[1.5], [0.3], [0.1]])
    risks = learner.critic(TensorDict({"distance": distance}, [3]), torch.ones(3, 1))
    # one of two such drives ends in a failure
    assert risks.tolist() == pytest.approx([0.0, 0.5 * 0.7**2, 0.5], abs=0.15)
    assert risks.tolist() == sorted(risks.tolist())
    unknown = learner.critic(TensorDict({"distance": torch.tensor([[math.nan]])}, [1]), torch.ones(1, 1))
    assert unknown.isnan().all()


def test_a_resumed_learner_takes_the_same_steps():
    recorded = RecordedFailures(Episodes.join([episode(10), episode(10, True)]), CONTRACT, SMALL)
    whole = RiskLearner(CONTRACT, SMALL, torch.Generator().manual_seed(3))
    whole.fit(recorded, 5)
    resumed = RiskLearner(CONTRACT, SMALL, torch.Generator().manual_seed(4))
    resumed.load_state_dict(torch.utils._pytree.tree_map(_copied, whole.state_dict()))
    assert whole.fit(recorded, 5) == resumed.fit(recorded, 5)
    for own, other in zip(whole.critic.state_dict().values(), resumed.critic.state_dict().values(), strict=True):
        assert torch.equal(own, other)


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


def test_a_saved_reflex_is_read_as_it_was(tmp_path: Path):
    learner = RiskLearner(CONTRACT, SMALL, torch.Generator().manual_seed(0))
    learner.fit(RecordedFailures(episode(10), CONTRACT, SMALL), 3)
    reflex = Reflex(learner.critic, CONTRACT, 0.3, (None,))
    risk.save(tmp_path / "reflex", learner.critic, SMALL, reflex, [])
    read = risk.load(tmp_path / "reflex")
    assert (read.contract, read.threshold, read.brake) == (CONTRACT, 0.3, (None,))
    observation = TensorDict({"distance": torch.rand(5, 1)}, [5])
    actions = torch.rand(5, 1)
    assert torch.equal(read.risk(observation, actions), learner.critic(observation, actions))
    with pytest.raises(UserError, match="exists"):
        risk.save(tmp_path / "reflex", learner.critic, SMALL, reflex, [])


@pytest.mark.parametrize("name", ["risk.safetensors", "reflex.json"])
def test_a_damaged_or_missing_file_is_refused_on_one_line(tmp_path: Path, name: str):
    learner = RiskLearner(CONTRACT, SMALL, torch.Generator().manual_seed(0))
    risk.save(tmp_path / "reflex", learner.critic, SMALL, Reflex(learner.critic, CONTRACT, 0.3, (0.0,)), [])
    path = tmp_path / "reflex" / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match="cannot read a reflex") as error:
        risk.load(tmp_path / "reflex")
    assert "\n" not in str(error.value)
    path.unlink()
    with pytest.raises(UserError, match="cannot read a reflex"):
        risk.load(tmp_path / "reflex")
