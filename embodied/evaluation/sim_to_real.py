"""One policy on several back ends, from its simulator to a robot: what each gives, and the gap between them.

Episodes are paired: a numbered initial state of a task is the same situation on every back end. Letters: T control
steps of an episode, A action dimension, M decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from embodied.contract import TensorSpec
from embodied.environment import NumberedStarts, Transition
from embodied.errors import UserError
from embodied.evaluation.evaluation import EvaluationResult

Episode = tuple[int, int]
"""Number of the task, number of the initial state."""


@dataclass(frozen=True, eq=False)
class BackEndRun:
    """What the policy did on one back end.

    `result` holds the episodes' outcomes, None where nothing could succeed (a recording that is replayed). `actions`
    are the commands given in each episode, [T, A]; `expected` those it was recorded with, where it was. `latency_s`
    [M] is the time from a measurement to the command made of it, None where no time passes.
    """

    name: str
    result: EvaluationResult | None
    actions: Mapping[Episode, Tensor]
    expected: Mapping[Episode, Tensor] = field(default_factory=dict)
    latency_s: Tensor | None = None


class ActionLog:
    """Remembers which actions were executed in which episode: `watch` of `evaluation.evaluate`."""

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, env: NumberedStarts, actions: Tensor, transition: Transition) -> None:
        """Take up the chunks `actions` [N, K, A], of which `transition` came."""
        executed = transition.executed.cpu()
        rows = executed.nonzero()[:, 0]
        self._rows.append((env.task_index.cpu()[rows], env.start.cpu()[rows], actions.cpu()[executed]))

    def episodes(self) -> dict[Episode, Tensor]:
        """Actions [T, A] in robot units by episode; an initial state is expected to have run once."""
        task, start, actions = (torch.cat(parts) for parts in zip(*self._rows, strict=True))
        keys = torch.stack((task, start), 1)
        found, place = keys.unique(dim=0, return_inverse=True)
        order = place.argsort(stable=True)  # within an episode, as they were executed
        groups = actions[order].split(place.bincount().tolist())
        return {(int(key[0]), int(key[1])): group for key, group in zip(found, groups, strict=True)}


def discrepancy(actions: Mapping[Episode, Tensor], others: Mapping[Episode, Tensor], spec: TensorSpec) -> Tensor:
    """Root mean square difference of two runs' commands in each episode that both have, in half ranges of `spec`.

    Compared step by step while both run, [episodes]; empty where they have none in common.

    Raises:
        UserError: where actions have no limits, so that nothing says what is large.
    """
    if not spec.low:
        raise UserError("expected action limits in the contract; differences are told in half ranges of them")
    half_range = (torch.tensor(spec.high) - torch.tensor(spec.low)) / 2
    return torch.tensor([float(each.square().mean().sqrt()) for each in _differences(actions, others, half_range)])


def _differences(
    actions: Mapping[Episode, Tensor], others: Mapping[Episode, Tensor], half_range: Tensor
) -> Iterator[Tensor]:
    for episode in sorted(actions.keys() & others.keys()):
        if steps := min(len(actions[episode]), len(others[episode])):
            yield (actions[episode][:steps] - others[episode][:steps]) / half_range


def compare(runs: Sequence[BackEndRun], spec: TensorSpec) -> list[dict[str, Any]]:
    """JSON-ready rows, one for each of `runs`, the first of which is what the others are compared with.

    Each holds its summary (None where nothing could succeed), the paired gap to the first in success on the episodes
    that both ran, the same for every metric that both have, the discrepancy of actions (of a recording: from the
    recorded ones) and quantiles of the latency.
    """
    reference = runs[0]
    rows = []
    for run in runs:
        others = run.expected or reference.actions
        found = discrepancy(run.actions, others, spec)
        rows.append(
            {
                "back_end": run.name,
                "summary": None if run.result is None else run.result.summary(),
                "gap": None if run is reference else _gap(run.result, reference.result),
                "action_discrepancy": _spread(found) if len(found) and others is not run.actions else None,
                "latency_s": _spread(run.latency_s) if run.latency_s is not None and len(run.latency_s) else None,
            }
        )
    return rows


def _gap(result: EvaluationResult | None, reference: EvaluationResult | None) -> dict[str, Any] | None:
    if result is None or reference is None:
        return None
    common = min(result.success.shape[1], reference.success.shape[1])
    ours, theirs = first_starts(result, common), first_starts(reference, common)
    both = [name for name in theirs.metrics if name in ours.metrics]  # trials on a robot have none
    metrics = {name: float((ours.metrics[name] - theirs.metrics[name]).nanmean()) for name in both}
    means = {name: None if math.isnan(mean) else mean for name, mean in metrics.items()}
    return {"success": vars(ours.gain_over(theirs)), "metrics": means, "episodes": ours.success.numel()}


def first_starts(result: EvaluationResult, count: int) -> EvaluationResult:
    """The part of `result` that is about the first `count` initial states of each task."""
    metrics = {name: values[:, :count] for name, values in result.metrics.items()}
    return EvaluationResult(
        result.tasks, result.success[:, :count], result.steps[:, :count], result.step_limit, metrics
    )


def _spread(values: Tensor) -> dict[str, float]:
    quantiles = values.double().quantile(torch.tensor([0.5, 0.99], dtype=torch.float64))
    return {
        "mean": float(values.double().mean()), "p50": float(quantiles[0]), "p99": float(quantiles[1]),
        "max": float(values.max()), "count": len(values),
    }  # fmt: skip
