"""Settings of tasks for their policies and algorithms, and of placements for large policies, from configs/settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from embodied.commands import CONFIGS

PUBLISHED = "published"
"""Owner of the settings for published weights."""
ALL_TASKS = "all_tasks"
"""Owner of the settings of policies and algorithms for any task."""
ROBOTS = "robots"
"""Owner of the settings of algorithms on any robot."""


def settings(choices: Mapping[str, str], *, published: bool) -> Any:  # noqa: ANN401 - OmegaConf's
    """Settings of a run with these `choices` of a name for each group, and with `published` weights or new ones."""
    sections = (table().get(owner, {}).get(name, {}) for owner, name in places(choices, published=published))
    return OmegaConf.merge(*sections)


def places(choices: Mapping[str, str], *, published: bool) -> Iterator[tuple[str, str]]:
    """Owner and name of each section that `settings` looks up; where two set an option, the later one wins."""
    task = choices["task"]
    policy = choices["policy"]
    algorithm = choices["algorithm"]
    yield ALL_TASKS, policy
    yield ALL_TASKS, algorithm
    yield ALL_TASKS, f"{policy}_{choices.get('offline')}"
    yield task, policy
    yield task, algorithm
    yield task, f"{policy}_{algorithm}"
    yield task, f"offline_{choices.get('offline')}"
    if "robot" in choices:
        yield ROBOTS, algorithm
    yield choices["placement"], policy
    if published:
        yield PUBLISHED, policy


@cache
def table() -> dict[str, Any]:
    """Sections of all files by owner (a task, a placement, `ALL_TASKS`, `ROBOTS` or `PUBLISHED`) and by name."""
    files: list[Any] = [OmegaConf.load(path) for path in sorted((CONFIGS / "settings").glob("*.yaml"))]
    return {owner: sections for file in files for owner, sections in file.items()}
