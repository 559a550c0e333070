"""Options that may change when a run is resumed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from embodied.errors import UserError

FREE = {
    "video",
    "wandb",
    "device",
    "threads",
    "checkpoint_every",
    "evaluation_envs",
    "resume",
    "output",
    "eval_only",
    "evaluate_every_steps",
    "storage",
    "viewer",
    "viewer_port",
    "task.python",
    "task.timeout_s",
    "policy.compile",
    "policy.gradient_checkpointing",
    "device_gb",
    "robot.device",
    "robot.event",
    "robot.prefix",
    "robot.listen",
}
"""Options that may change when a run is resumed: results depend on them by rounding at most."""
LOCATED = ("task.mdp", "task.id")
"""Options that may name a user's file, which may move: only the last part of the path has to stay."""
MOVABLE = ("placement",)
"""Groups that do not affect a run's results: a resumed run may have another placement, if requested."""


def check_continues(before: Mapping[str, Any], now: Mapping[str, Any], free: Collection[str]) -> None:
    """Check that the record `now` of `compose` continues the run of the record `before`.

    Raises:
        UserError: if options differ that are not `free`; `env_steps` may grow.
    """
    changed = _differences(before.get("values", {}), now.get("values", {}))
    refused = [
        f"{name}={old}, got {new}"
        for name, (old, new) in changed.items()
        if name not in free
        and name.partition(".")[0] not in MOVABLE
        and not (name == "env_steps" and new > old)
        and not (name in LOCATED and Path(old).name == Path(new).name)
    ]
    if refused:
        raise UserError(
            f"the saved run has {', '.join(refused)}; only env_steps may grow when a run is continued: "
            "start a new run for that"
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Values of options in both, by dotted name, if they differ."""
    differing: dict[str, tuple[Any, Any]] = {}
    for key in sorted(before.keys() & now.keys()):
        name = f"{prefix}{key}"
        pair = (before[key], now[key])
        if isinstance(pair[0], Mapping) and isinstance(pair[1], Mapping):
            differing |= _differences(*pair, f"{name}.")
        elif pair[0] != pair[1]:
            differing[name] = pair
    return differing
