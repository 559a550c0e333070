"""Concatenation of rollouts: of several collectors, as if one had stepped all of their environments, or in time.

Letters: T decisions, N environments, E episode ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.rollout.rollout import Rollout

DECISIONS = (
    "observation",
    "actions",
    "sample",
    "log_prob",
    "reward",
    "executed",
    "terminated",
    "truncated",
    "success",
    "start",
    "value",
    "episode_return",
    "episode_steps",
)
"""Names of fields [T, N]."""
ENVIRONMENTS = ("last_observation", "task_index")
"""Names of fields [N]."""
NAMED = ("signals", "events", "episode_totals")
"""Names of fields that are dictionaries of tensors [T, N]."""
Part = TypeVar("Part", Tensor, TensorDict)


def joined(rollouts: Sequence[Rollout]) -> Rollout:
    """Concatenate the environments of all `rollouts`, which have T decisions each, in their order; a copy.

    The result has the oldest policy version and the longest of the simultaneous simulation times.

    Raises:
        ValueError: for no rollouts, for different numbers of decisions, and where only some have an optional field.
    """
    if len({len(each.done) for each in rollouts}) != 1:
        raise ValueError(f"expected rollouts of one length, got {[len(each.done) for each in rollouts]} decisions")
    fields: dict[str, Any] = {name: _side_by_side(rollouts, name, 1) for name in DECISIONS}
    fields |= {name: _side_by_side(rollouts, name, 0) for name in ENVIRONMENTS}
    fields |= {name: _named(rollouts, name) for name in NAMED}
    fields |= {name: max(getattr(each, name) for each in rollouts) for name in ("simulation_s", "policy_s")}
    metrics = {name: sum(each.placement_metrics[name] for each in rollouts) for name in rollouts[0].placement_metrics}
    starts = [each.starts for each in rollouts if each.starts]
    fields["starts"] = {name: sum(each[name] for each in starts) / len(starts) for name in (starts or [{}])[0]}
    final_rows, final_observation = _ends(rollouts)
    return replace(
        rollouts[0],
        **fields,
        final_rows=final_rows,
        final_observation=final_observation,
        vanished=sum(each.vanished for each in rollouts),
        policy_version=min(each.policy_version for each in rollouts),
        has_success=all(each.has_success for each in rollouts),
        placement_metrics=metrics,
    )


def consecutive(first: Rollout, second: Rollout) -> Rollout:
    """Concatenate two rollouts of one collector in time, `second` directly after `first`; a copy on its device.

    Metrics and policy version are those of `second`.
    """
    device = second.done.device
    fields: dict[str, Any] = {}
    for name in DECISIONS:
        earlier, later = getattr(first, name), getattr(second, name)
        fields[name] = None if later is None else _cat([earlier.to(device), later], 0)
    for name in NAMED:
        earlier, later = getattr(first, name), getattr(second, name)
        fields[name] = {key: torch.cat((earlier[key].to(device), later[key])) for key in later if key in earlier}
    decisions, envs = first.done.shape
    # the observations after episodes that ended with the last decision of `first` are in its last observation
    seam = first.done[-1].to(device).nonzero().squeeze(1)
    after = first.last_observation.to(device)
    rows, observations = [(decisions - 1) * envs + seam], [after[seam]]
    if first.final_rows is not None and first.final_observation is not None:
        rows.insert(0, first.final_rows.to(device))
        observations.insert(0, first.final_observation.to(device))
    if second.final_rows is not None and second.final_observation is not None:
        rows.append(decisions * envs + second.final_rows)
        observations.append(second.final_observation)
    return replace(
        second, **fields, final_rows=torch.cat(rows), final_observation=cast(TensorDict, TensorDict.cat(observations))
    )


def since(rollout: Rollout, t: int) -> Rollout:
    """Copy of `rollout` without its first `t` decisions."""
    fields: dict[str, Any] = {
        name: None if getattr(rollout, name) is None else getattr(rollout, name)[t:].clone() for name in DECISIONS
    }
    fields |= {name: {key: each[t:].clone() for key, each in getattr(rollout, name).items()} for name in NAMED}
    final_rows, final_observation = rollout.final_rows, rollout.final_observation
    if final_rows is not None and final_observation is not None:
        rows = final_rows - t * rollout.done.shape[1]
        final_rows, final_observation = rows[rows >= 0], cast(TensorDict, final_observation[rows >= 0])
    return replace(rollout, **fields, final_rows=final_rows, final_observation=final_observation)


def _side_by_side(rollouts: Sequence[Rollout], name: str, dim: int) -> Tensor | TensorDict | None:
    parts = [getattr(each, name) for each in rollouts]
    missing = [part is None for part in parts]
    if any(missing):
        if not all(missing):
            raise ValueError(f"expected all rollouts with {name}, or none")
        return None
    return _cat(parts, dim)


def _named(rollouts: Sequence[Rollout], name: str) -> dict[str, Tensor]:
    """Tensors that all `rollouts` have, concatenated; others are dropped, because some environments lack them."""
    parts: list[dict[str, Tensor]] = [getattr(each, name) for each in rollouts]
    shared = [key for key in parts[0] if all(key in part for part in parts)]
    return {key: torch.cat([part[key] for part in parts], 1) for key in shared}


def _cat(parts: list[Part], dim: int) -> Part:
    cat = TensorDict.cat if isinstance(parts[0], TensorDict) else torch.cat
    return cast(Any, cat)(parts, dim)


def _ends(rollouts: Sequence[Rollout]) -> tuple[Tensor | None, TensorDict | None]:
    """Indices of decisions before episode ends, and the observations after them.

    The indices are t * N + n [E], ascending over all environments; the observations are [E].
    """
    total = sum(each.done.shape[1] for each in rollouts)
    first = 0
    rows: list[Tensor] = []
    observations: list[TensorDict] = []
    for each in rollouts:
        count = each.done.shape[1]
        if each.final_rows is not None and each.final_observation is not None:
            t = each.final_rows // count
            n = each.final_rows % count
            # renumber from t * count + n to t * total + (first + n)
            rows.append(t * total + first + n)
            observations.append(each.final_observation)
        first += count
    if not rows:
        return None, None
    order = torch.cat(rows).argsort()
    return torch.cat(rows)[order], TensorDict.cat(observations)[order]
