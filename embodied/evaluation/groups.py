"""Evaluation of more tasks than one environment runs at once, in groups, and rates by kind of task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from embodied.environment import Environment
from embodied.evaluation.evaluation import EvaluationResult, evaluate
from embodied.policy import Policy
from embodied.task import Task

Kinds = Mapping[str, Sequence[str]]
"""Names of tasks by kind, see `Task.kinds`."""
NO_KINDS: Kinds = MappingProxyType({})
Results = Mapping[tuple[str, str], EvaluationResult]
"""Results by the name of the policy and of the distribution."""


class MakeEnvironment(Protocol):
    """Function that makes an environment of a distribution, with further options of train.py."""

    def __call__(self, distribution: str, num_envs: int, changes: Sequence[str]) -> Environment:
        """Make the environment."""
        ...


def groups(kinds: Kinds, num_envs: int) -> list[list[str]]:
    """Options of train.py for each group of at most `num_envs` tasks; a single group needs none."""
    names = [name for tasks in kinds.values() for name in tasks]
    if len(names) <= num_envs:
        return [[]]
    count = math.ceil(len(names) / num_envs)
    size = math.ceil(len(names) / count)
    return [[f"task.tasks=[{','.join(names[first : first + size])}]"] for first in range(0, len(names), size)]


def compare_in_groups(
    task: Task,
    environment: MakeEnvironment,
    num_envs: int,
    distributions: Sequence[str],
    policies: Mapping[str, Policy],
    **settings: Any,  # noqa: ANN401 - those of `evaluate`
) -> dict[tuple[str, str], EvaluationResult]:
    """Run `evaluate` like `compare`, for each of the `groups` of a suite's tasks in an environment of its own."""
    options = groups(task.kinds, num_envs)
    results: dict[tuple[str, str], list[EvaluationResult]] = {}
    for name in distributions:
        for label, policy in policies.items():
            for number, changes in enumerate(options):
                progress = f"{label}, {name}" + (f", {number + 1} of {len(options)}" if len(options) > 1 else "")
                env = environment(name, num_envs, changes)
                result = evaluate(env, policy, progress=progress, **settings)
                results.setdefault((label, name), []).append(result)
                if len(options) > 1:
                    env.close()
    return {key: joined(parts) for key, parts in results.items()}


def joined(results: Sequence[EvaluationResult]) -> EvaluationResult:
    """Result of the tasks of all `results`, which have the same starts; what one does not measure is unknown there."""
    if len(results) == 1:
        return results[0]
    returns = [result.returns for result in results if result.returns is not None]
    return replace(
        results[0],
        tasks=tuple(task for result in results for task in result.tasks),
        success=torch.cat([result.success for result in results]),
        steps=torch.cat([result.steps for result in results]),
        metrics=_joined([result.metrics for result in results], results, math.nan),
        events=_joined([result.events for result in results], results, False),
        failures=_joined([result.failures for result in results], results, False),
        repeatable=all(result.repeatable for result in results),
        returns=torch.cat(returns) if len(returns) == len(results) else None,
    )


def _joined(
    columns: Sequence[Mapping[str, Tensor]], results: Sequence[EvaluationResult], absent: float
) -> dict[str, Tensor]:
    names = dict.fromkeys(name for each in columns for name in each)
    kind = torch.float64 if math.isnan(absent) else torch.bool
    return {
        name: torch.cat(
            [
                each.get(name, torch.full(result.success.shape, absent, dtype=kind))
                for each, result in zip(columns, results, strict=True)
            ]
        )
        for name in names
    }


def summary(result: EvaluationResult, kinds: Kinds) -> dict[str, Any]:
    """Summary of `result`, with success or return and metrics of each of the `kinds` if there are any."""
    rows = {kind: [result.tasks.index(name) for name in names] for kind, names in kinds.items()}
    by_kind = [
        {"kind": kind, "tasks": len(indices), **result.measured(indices), **result.means(indices)}
        for kind, indices in rows.items()
    ]
    return result.summary() | ({"kinds": by_kind} if by_kind else {})
