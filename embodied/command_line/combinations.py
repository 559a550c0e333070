"""Valid combinations of task, policy and algorithm, from configs/combinations.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from omegaconf import OmegaConf

from embodied.commands import CONFIGS, command
from embodied.errors import UserError


def completed(overrides: Sequence[str]) -> list[str]:
    """Copy of `overrides` ("key=value") with the policy or algorithm that they leave open, if it is not the default.

    Raises:
        UserError: if task, policy and algorithm are not a valid combination.
    """
    task, policy, algorithm = chosen(overrides)
    if (policy, algorithm) not in valid_pairs(task):
        raise UserError(
            f"policy={policy} algorithm={algorithm} do not go with task={task}, which takes {described(task)}"
        )
    default_policy, default_algorithm = valid_pairs(task)[0]
    named = {override.partition("=")[0] for override in overrides}
    added = []
    if "policy" not in named and policy != default_policy:
        added.append(f"policy={policy}")
    if "algorithm" not in named and algorithm != default_algorithm:
        added.append(f"algorithm={algorithm}")
    return [*overrides, *added]


def check_named(overrides: Sequence[str], program: str) -> None:
    """Check that `overrides` name a task for `program`, and the options without which it is incomplete.

    Raises:
        UserError: with the command to type.
    """
    named = dict(each.split("=", 1) for each in overrides if "=" in each)
    if "task" not in named:
        list_command = f"{command('train')} list=tasks"
        raise UserError(f"expected {command(program)} task=NAME [key=value ...]; {list_command} lists the tasks")
    path = CONFIGS / "task" / f"{named['task']}.yaml"
    file: Any = OmegaConf.load(path) if path.is_file() else {}
    options = file.get("task", {})
    for option in options:
        if OmegaConf.is_missing(options, option) and f"task.{option}" not in named:
            raise UserError(
                f"expected task.{option}=..., as task={named['task']} is for any of them; "
                f"{command(program)} --help task={named['task']} describes it"
            )


def task_options(overrides: Sequence[str], program: str) -> list[str]:
    """Select the task and its options from the `overrides` of a `program` that has further ones.

    Raises:
        UserError: see `check_named`.
    """
    check_named(overrides, program)
    return [each for each in overrides if each.startswith(("task=", "task."))]


def chosen(overrides: Sequence[str]) -> tuple[str, str, str]:
    """Task, policy and algorithm of `overrides`; the task's defaults for those not named.

    Where the default policy does not go with the named algorithm, or the other way round, the first one that does.

    Raises:
        UserError: for a task that is not listed.
    """
    by_key = dict(override.split("=", 1) for override in overrides)
    task = by_key.get("task", next(iter(_table())))
    if task not in _table():
        raise UserError(f"configs/combinations.yaml does not list task={task}; add it there")
    pairs = valid_pairs(task)
    policy, algorithm = by_key.get("policy", pairs[0][0]), by_key.get("algorithm", pairs[0][1])
    if (policy, algorithm) not in pairs:
        fitting = [pair for pair in pairs if by_key.get("policy", pair[0]) == pair[0]]
        fitting = [pair for pair in fitting if by_key.get("algorithm", pair[1]) == pair[1]]
        policy, algorithm = next(iter(fitting), (policy, algorithm))
    return task, policy, algorithm


def valid_pairs(task: str) -> list[tuple[str, str]]:
    """All valid (policy, algorithm) of `task`; its default first."""
    return [(policy, algorithm) for policy, algorithms in _table()[task].items() for algorithm in algorithms]


def described(task: str) -> str:
    """Valid combinations of `task` as text.

    For example "policy=mlp with algorithm=bptt|ppo; policy=recurrent with algorithm=ppo".
    """
    return "; ".join(
        f"policy={policy} with algorithm={'|'.join(algorithms)}" for policy, algorithms in _table()[task].items()
    )


@cache
def _table() -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(CONFIGS / "combinations.yaml")))
