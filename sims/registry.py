"""Tasks by the name that `task=` builds on."""

from sims.libero.task import LiberoTask

TASKS: dict[str, type] = {"libero": LiberoTask}
