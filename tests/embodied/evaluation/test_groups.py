"""Tasks in groups: the same episodes as all at once, and rates by kind."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from embodied.environment import Environment
from embodied.evaluation.evaluation import EvaluationResult, compare, evaluate, wilson
from embodied.evaluation.groups import Kinds, compare_in_groups, groups, joined, summary
from embodied.report.report import POLICY, evaluation_table, write_evaluation
from embodied.task import Task
from tests.embodied.evaluation.test_evaluation import ChaoticEnvironment, NetworkPolicy

KINDS = {"odd": ["task 1", "task 3"], "even": ["task 0", "task 2", "task 4"]}


class Suite(Task):
    """A suite with these kinds of tasks, three of which are left out."""

    left_out: ClassVar[dict[str, int]] = {"light": 3}

    def __init__(self, kinds: Kinds) -> None:
        self.of = kinds

    @property
    def kinds(self) -> Kinds:
        return self.of


class Part(ChaoticEnvironment):
    """Environment of those tasks that an option of train.py names, or of all five."""

    closed = 0

    def __init__(self, changes: Sequence[str]) -> None:
        names = changes[0].removeprefix("task.tasks=[").removesuffix("]").split(",") if changes else None
        super().__init__(6, tasks=5)
        numbers = [int(name.removeprefix("task ")) for name in names] if names else list(range(5))
        self.task_names = self.instructions = tuple(f"task {number}" for number in numbers)
        self.task_index = torch.arange(6) % len(numbers)
        self.numbers = torch.tensor(numbers)

    def reset(self, mask=None, starts=None):
        own, self.task_index = self.task_index, self.numbers[self.task_index]
        try:
            return super().reset(mask, starts)
        finally:
            self.task_index = own

    def close(self) -> None:
        Part.closed += 1


def test_groups_are_of_about_one_size_and_name_every_task_once() -> None:
    assert groups(KINDS, 5) == groups({}, 1) == [[]]
    assert groups(KINDS, 4) == [["task.tasks=[task 1,task 3,task 0]"], ["task.tasks=[task 2,task 4]"]]
    assert [len(options[0].split(",")) for options in groups({"a": [str(i) for i in range(101)]}, 50)] == [34, 34, 33]


def test_episodes_are_those_of_all_tasks_at_once() -> None:
    def environment(distribution: str, num_envs: int, changes: Sequence[str]) -> Environment:
        assert distribution == "official"
        assert num_envs in (2, 5)
        return Part(changes)

    policy = NetworkPolicy()
    expected = evaluate(Part([]), policy, starts_per_task=4)
    Part.closed = 0
    parts = compare_in_groups(Suite(KINDS), environment, 2, ["official"], {"policy": policy}, starts_per_task=4)
    result = parts["policy", "official"]
    assert Part.closed == 3
    assert result.tasks == ("task 1", "task 3", "task 0", "task 2", "task 4")
    order = [expected.tasks.index(name) for name in result.tasks]
    assert torch.equal(result.success, expected.success[order])
    assert torch.equal(result.steps, expected.steps[order])
    assert result.step_limit == expected.step_limit
    one = compare_in_groups(Suite({}), environment, 5, ["official"], {"policy": policy}, starts_per_task=4)
    same = compare(lambda name: Part([]), ["official"], {"policy": policy}, starts_per_task=4)
    assert torch.equal(one["policy", "official"].success, same["policy", "official"].success)


def result(names: Sequence[str], successes: int, **columns: dict[str, torch.Tensor]) -> EvaluationResult:
    success = torch.arange(len(names) * 2).view(-1, 2) < successes
    return EvaluationResult(tuple(names), success, torch.full_like(success, 9, dtype=torch.int64), 20, **columns)


def test_what_one_group_does_not_measure_is_unknown() -> None:
    length = {"length": torch.tensor([[1.0, 3.0]], dtype=torch.float64)}
    lost = {"lost": torch.tensor([[True, False]])}
    both = joined([result(["a"], 1, metrics=length, events=lost, failures=lost), result(["b"], 2)])
    assert both.success.tolist() == [[True, False], [True, True]]
    assert both.metrics["length"][0].tolist() == [1.0, 3.0]
    assert all(math.isnan(value) for value in both.metrics["length"][1].tolist())
    assert both.events["lost"].tolist() == both.failures["lost"].tolist() == [[True, False], [False, False]]
    assert both.returns is None
    assert both.summary()["length"] == 2.0


def test_rates_by_kind(tmp_path: Path) -> None:
    whole = result(["task 0", "task 1", "task 2", "task 3", "task 4"], 5)  # of tasks 0, 1 and half of 2
    odd, even = summary(whole, KINDS)["kinds"]
    assert (odd["kind"], odd["tasks"], odd["episodes"], odd["success"]) == ("odd", 2, 4, 0.5)
    assert (even["kind"], even["tasks"], even["episodes"], even["success"]) == ("even", 3, 6, 0.5)
    assert (odd["low"], odd["high"]) == pytest.approx(wilson(2, 4))
    assert "kinds" not in summary(whole, {})
    table = evaluation_table({"official": whole}, KINDS)
    assert [name for name in ("odd", "even", "all (10 episodes)", "task 0") if name in table] == [
        *("odd", "even", "all (10 episodes)")
    ]
    path = tmp_path / "evaluation.json"
    write_evaluation(path, {}, {(POLICY, "official"): whole}, Suite(KINDS))
    record = json.loads(path.read_text())
    assert record["left_out"] == {"light": 3}
    (written,) = record["evaluations"]
    assert [each["kind"] for each in written["kinds"]] == ["odd", "even"]
    assert len(written["per_task"]) == 5
