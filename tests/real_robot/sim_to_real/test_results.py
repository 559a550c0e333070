"""Gaps between back ends are paired and correct for any order of episodes."""

import json

import pytest
import torch

from embodied.contract import TensorSpec
from embodied.evaluation.evaluation import EvaluationResult, evaluate
from real_robot.sim_to_real.report import write
from real_robot.sim_to_real.results import ActionLog, BackEndRun, compare, discrepancy
from tests.embodied.evaluation.test_evaluation import ChaoticEnvironment, NetworkPolicy

SPEC = TensorSpec((2,), low=(-1.0, 0.0), high=(1.0, 1.0))


def result(success: list[bool], error: list[float]) -> EvaluationResult:
    outcome, steps = torch.tensor([success]), torch.full((1, len(success)), 7)
    return EvaluationResult(("task",), outcome, steps, 10, {"error_m": torch.tensor([error], dtype=torch.float64)})


def test_actions_are_logged_by_episode_whatever_runs_beside_it():
    logs = []
    for num_envs in (3, 19):
        log = ActionLog()
        outcome = evaluate(ChaoticEnvironment(num_envs), NetworkPolicy(), starts_per_task=9, watch=log)
        logs.append(log.episodes())
    assert set(logs[0]) == {(task, start) for task in range(3) for start in range(9)}
    for (task, start), actions in logs[0].items():
        assert actions.shape == (int(outcome.steps[task, start]), 1)
        assert torch.equal(actions, logs[1][task, start])


def test_environments_without_an_episode_log_nothing():
    log = ActionLog()
    outcome = evaluate(ChaoticEnvironment(19), NetworkPolicy(), starts_per_task=2, watch=log)
    lengths = {episode: len(actions) for episode, actions in log.episodes().items()}
    assert lengths == {(task, start): int(outcome.steps[task, start]) for task in range(3) for start in range(2)}


def test_a_back_end_may_lack_metrics():
    simulator = BackEndRun("simulator", result([True, True], [0.1, 0.2]), {})
    outcome = EvaluationResult(("task",), torch.tensor([[True, False]]), torch.full((1, 2), 7), 10)
    gap = compare([simulator, BackEndRun("robot", outcome, {})], SPEC)[1]["gap"]
    assert gap["success"]["difference"] == -0.5
    assert gap["metrics"] == {}


def test_discrepancy_is_in_half_ranges_over_the_steps_that_both_ran():
    ours = {(0, 0): torch.tensor([[0.5, 0.5], [0.0, 0.0], [9.0, 9.0]]), (0, 1): torch.zeros(1, 2)}
    theirs = {(0, 0): torch.tensor([[0.0, 0.25], [0.0, 0.0]]), (0, 2): torch.zeros(1, 2)}
    # Differences 0.5 of a half range 1 and 0.25 of 0.5 are 0.5 and 0.5; two steps of two elements.
    assert discrepancy(ours, theirs, SPEC).tolist() == pytest.approx([(2 * 0.25 / 4) ** 0.5])


def test_unlimited_actions_have_no_discrepancy():
    with pytest.raises(ValueError, match="expected action limits"):
        discrepancy({}, {}, TensorSpec((2,)))


def test_gaps_are_paired_on_the_episodes_that_both_ran():
    simulator = BackEndRun("simulator", result([True, True, False, True], [0.1, 0.2, 0.3, 0.4]), {})
    robot = BackEndRun("robot", result([True, False], [0.2, 0.4]), {}, latency_s=torch.tensor([0.001, 0.003]))
    row = compare([simulator, robot], SPEC)[1]
    assert row["gap"]["success"]["difference"] == -0.5
    assert row["gap"]["episodes"] == 2
    assert row["gap"]["metrics"]["error_m"] == pytest.approx(0.15)
    assert row["latency_s"]["max"] == pytest.approx(0.003)


def test_a_recording_is_compared_with_what_it_recorded(tmp_path, caplog):
    actions = {(0, 0): torch.tensor([[0.5, 0.5]])}
    simulator = BackEndRun("simulator", result([True], [0.1]), actions)
    bag = BackEndRun("bag", None, {(0, 0): torch.tensor([[0.5, 0.75]])}, expected=actions)
    with caplog.at_level("INFO", "embodied"):
        write(tmp_path, [simulator, bag], SPEC, {"task": "reach"})
    rows = json.loads((tmp_path / "sim_to_real.json").read_text())["back_ends"]
    assert rows[0]["action_discrepancy"] is None
    assert rows[1]["summary"] is None
    assert rows[1]["action_discrepancy"]["mean"] == pytest.approx((0.25 / 2) ** 0.5)
    assert "| bag |" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sim_to_real.json", "sim_to_real.md", "sim_to_real.png"]
