"""Selection of those tasks of LIBERO-plus whose scenes, models and instructions are available."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from embodied.errors import UserError
from sims.libero.catalogue import CATEGORIES
from sims.libero.language import INSTRUCTION_BYTES
from sims.libero.scene.arena import WORKSPACES
from sims.libero.suite import Task

NOWHERE = "for which there are no stand-ins"


def lacking(task: Task) -> str:
    """Why a task of LIBERO-plus cannot run: what it needs that no package has, or its long words; "" if it can."""
    problem = task.problem
    if problem.name not in WORKSPACES:
        base = next((name for name in WORKSPACES if problem.name.startswith(name)), "")
        return f"needs the scene {problem.name.removeprefix(f'{base}_')}, {NOWHERE}"
    workspace = WORKSPACES[problem.name].category
    if unknown := {*problem.objects.values(), *problem.fixtures.values()} - CATEGORIES - {workspace}:
        return f"needs models of {', '.join(sorted(unknown))}, {NOWHERE}"
    size = len(task.language.encode())
    return f"has an instruction of {size} bytes, where {INSTRUCTION_BYTES} fit" if size > INSTRUCTION_BYTES else ""


def available(tasks: Sequence[Task], *, named: bool) -> list[Task]:
    """The tasks among `tasks`, of one suite, that can run.

    Raises:
        UserError: if none can, or one that is `named` by the user cannot.
    """
    missing = {task.name: reason for task in tasks if (reason := lacking(task))}
    if missing and (named or len(missing) == len(tasks)):
        name, reason = next(iter(missing.items()))
        message = f"{tasks[0].suite}: {len(missing)} of {len(tasks)} tasks cannot run here, such as {name}"
        raise UserError(f"{message}, which {reason}; leave them out")
    return [task for task in tasks if task.name not in missing]


def left_out(tasks: Sequence[Task]) -> dict[str, int]:
    """Number of `tasks` that cannot run, by category of the perturbation."""
    return dict(Counter(task.perturbation.category for task in tasks if task.perturbation and lacking(task)))
