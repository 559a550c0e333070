"""Compares one policy on several back ends, from its simulator to a robot: results and gaps.

Episodes are paired: a numbered initial state of a task is the same on every back end. Letters: T control
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
"""Number of the task and number of the initial state."""


@dataclass(frozen=True, eq=False)
class BackEndRun:
    """Results of the policy on one back end.

    `result` has the episodes' outcomes, None for a replayed recording, which cannot succeed. `actions` are the commands
    of each episode, [T, A]; `expected` are the recorded ones, if any. `latency_s` [M] is the time from a measurement to
    the command computed from it, None in simulated time.
    """

    name: str
    result: EvaluationResult | None
    actions: Mapping[Episode, Tensor]
    expected: Mapping[Episode, Tensor] = field(default_factory=dict)
    latency_s: Tensor | None = None


class ActionLog:
    """Records the executed actions of every episode, as `watch` of `evaluation.evaluate`."""

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, env: NumberedStarts, actions: Tensor, transition: Transition) -> None:
        """Record the chunks `actions` [N, K, A] that led to `transition`."""
        executed = transition.executed.cpu()
        rows = executed.nonzero()[:, 0]
        # one row per executed action: a chunk's last actions are not executed if the episode ends
        self._rows.append((env.task_index.cpu()[rows], env.start.cpu()[rows], actions.cpu()[executed]))

    def episodes(self) -> dict[Episode, Tensor]:
        """Actions [T, A] in robot units by episode; every initial state must have run only once."""
        task, start, actions = (torch.cat(parts) for parts in zip(*self._rows, strict=True))
        keys = torch.stack((task, start), 1)
        unique_keys, episode_index = keys.unique(dim=0, return_inverse=True)
        # group by episode; the stable sort keeps the order of execution within each
        order = episode_index.argsort(stable=True)
        groups = actions[order].split(episode_index.bincount().tolist())
        return {(int(key[0]), int(key[1])): group for key, group in zip(unique_keys, groups, strict=True)}


def discrepancy(actions: Mapping[Episode, Tensor], others: Mapping[Episode, Tensor], spec: TensorSpec) -> Tensor:
    """Root mean square difference [episodes] of two runs' commands in common episodes, in half ranges of `spec`.

    Commands are compared step by step while both run; the result is empty without common episodes.

    Raises:
        UserError: if actions have no limits, which define the scale.
    """
    if not spec.low:
        raise UserError("expected action limits in the contract, the scale of action differences; set low and high")
    # sqrt(mean(((a - b) / half_range)^2)) over steps and elements, per episode
    half_range = (torch.tensor(spec.high) - torch.tensor(spec.low)) / 2
    return torch.tensor([float(each.square().mean().sqrt()) for each in _differences(actions, others, half_range)])


def _differences(
    actions: Mapping[Episode, Tensor], others: Mapping[Episode, Tensor], half_range: Tensor
) -> Iterator[Tensor]:
    """Differences [T, A] of the commands in each common episode, in half ranges."""
    for episode in sorted(actions.keys() & others.keys()):
        if steps := min(len(actions[episode]), len(others[episode])):
            yield (actions[episode][:steps] - others[episode][:steps]) / half_range


def compare(runs: Sequence[BackEndRun], spec: TensorSpec) -> list[dict[str, Any]]:
    """JSON-ready rows, one for each of `runs`; the first run is the reference for the others.

    Each row has the run's summary (None for a replayed recording), the paired gap to the first run in success and in
    every common metric on the common episodes, the discrepancy of actions (for a recording, from the recorded actions)
    and quantiles of the latency.

    Raises:
        UserError: if success is not defined.
    """
    if any(run.result is not None and run.result.returns is not None for run in runs):
        raise UserError("sim_to_real compares success rates, which this task does not define; set task.success_return")
    reference = runs[0]
    rows = []
    for run in runs:
        reference_actions = run.expected or reference.actions
        differences = discrepancy(run.actions, reference_actions, spec)
        rows.append(
            {
                "back_end": run.name,
                "summary": None if run.result is None else run.result.summary(),
                "gap": None if run is reference else _gap(run.result, reference.result),
                "action_discrepancy": _spread(differences)
                if len(differences) and reference_actions is not run.actions
                else None,
                "latency_s": _spread(run.latency_s) if run.latency_s is not None and len(run.latency_s) else None,
            }
        )
    return rows


def _gap(result: EvaluationResult | None, reference: EvaluationResult | None) -> dict[str, Any] | None:
    if result is None or reference is None:
        return None
    common = min(result.success.shape[1], reference.success.shape[1])
    result_episodes = result.first(common)
    reference_episodes = reference.first(common)
    names = [
        name for name in reference_episodes.metrics if name in result_episodes.metrics
    ]  # trials on a robot have no metrics
    metrics = {
        name: float((result_episodes.metrics[name] - reference_episodes.metrics[name]).nanmean()) for name in names
    }
    means = {name: None if math.isnan(mean) else mean for name, mean in metrics.items()}
    return {
        "success": vars(result_episodes.gain_over(reference_episodes)),
        "metrics": means,
        "episodes": result_episodes.success.numel(),
    }


def _spread(values: Tensor) -> dict[str, float]:
    """Mean, median, 99% quantile, maximum and count."""
    quantiles = values.double().quantile(torch.tensor([0.5, 0.99], dtype=torch.float64))
    return {
        "mean": float(values.double().mean()),
        "p50": float(quantiles[0]),
        "p99": float(quantiles[1]),
        "max": float(values.max()),
        "count": len(values),
    }
