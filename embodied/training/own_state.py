"""State that each process of a run has for itself: its running episodes, its initial states and its random numbers.

Decisions that wait in a learner for an update belong to it, too. Weights, optimisers and counters are the same in all
processes, and are saved once. On another number of processes the episodes begin again, and the records of initial
states and decisions that wait are dropped.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from embodied import seeding
from embodied.rollout.ahead import CollectorAhead
from embodied.rollout.rollout import Collector
from embodied.saving.checkpoint import Checkpoint
from embodied.world import World


@runtime_checkable
class Waits(Protocol):
    """Learner in which decisions of its process wait for an update."""

    def own_state_dict(self) -> dict[str, Any]:
        """The waiting decisions, which `state_dict` contains, too."""
        ...

    def load_own_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from `own_state_dict`; None: without waiting decisions."""
        ...


def own_state(parts: dict[str, Any]) -> dict[str, Any]:
    """State of this process in a stage with these `parts`, as a tree."""
    state: dict[str, Any] = {"rng": seeding.rng_state()}
    if "collector" in parts:
        state["collector"] = parts["collector"].state_dict()
    for part in parts.values():
        if isinstance(part, Waits):
            state["waiting"] = part.own_state_dict()
    return state


def load(part: Any, state: dict[str, Any], own: dict[str, Any] | None) -> None:  # noqa: ANN401 - has a state
    """Restore `part` from the first process's `state`; what is another process's from its `own` state."""
    collects = isinstance(part, Collector | CollectorAhead)
    part.load_state_dict(own["collector"] if own is not None and collects else state)
    if own is not None and isinstance(part, Waits):
        part.load_own_state_dict(own.get("waiting"))  # none in states of earlier releases


def load_moved(part: Any, state: dict[str, Any]) -> None:  # noqa: ANN401 - has a state
    """Restore `part` from the first process's `state` on another number of processes."""
    if isinstance(part, Collector | CollectorAhead):
        part.version = state["version"]
    else:
        part.load_state_dict(state)
        if isinstance(part, Waits):
            part.load_own_state_dict(None)


def own_seed(seed: int, world: World, saved: Checkpoint | None) -> int:
    """Seed of this process's environments and noise; a new one on another number of processes than in `saved`."""
    moved = saved is not None and saved.counters.get("processes", 1) != world.size
    progress = [saved.counters["env_steps"]] if saved and moved else []
    if not world.rank and not progress:
        return seed
    return seeding.derive(seed, "process", world.rank, *progress) % (1 << 31)


def moved_note(env_steps: int, before: int, now: int) -> str:
    """Note of the report on a run that was resumed on another number of processes."""
    change = f"{now} process{'es' * (now > 1)} after {before}"
    return (
        f"After {env_steps:,} environment steps the run went on in {change}: running episodes began again, with other"
        " initial states and noise, and what was known of initial states was forgotten."
    )
