"""Does a LIBERO policy read? `python benchmarks/libero_reading.py RUN [--starts 50] [--output FILE]`.

Every task's scene is combined with the instruction of each other task of the run whose objects are in the scene. A
policy that reads moves the named object; one that has memorised the scene moves the object of the scene's own task.
Starts are the run's held-out ones, also for the comparison with the scene's own instruction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.command_line.config import compose  # noqa: E402
from embodied.evaluation.evaluation import evaluate, wilson  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.saving import checkpoint  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from embodied.training.compute import prepare  # noqa: E402
from sims.libero.assets import find_assets  # noqa: E402
from sims.libero.environment import LiberoEnvironment  # noqa: E402
from sims.libero.suite import Task, load_tasks, step_limit_of  # noqa: E402
from sims.libero.task import LiberoTask  # noqa: E402
from train import GROUPS, TrainConfig  # noqa: E402


def questions(tasks: list[Task]) -> Iterator[tuple[Task, Task]]:
    """Pairs of a scene's task and another task whose instruction is possible in that scene."""
    for scene_task in tasks:
        for instruction_task in tasks:
            if set(instruction_task.problem.objects).intersection(instruction_task.problem.obj_of_interest) <= set(
                scene_task.problem.objects
            ):
                yield scene_task, instruction_task


def successes(shown: Task, asked: Task, aim: Task, policy: Any, task: LiberoTask, starts: int) -> int:  # noqa: ANN401
    """Number of `starts` episodes in the scene of `shown`, with the instruction of `asked`, that reach `aim`'s goal."""
    problem = replace(shown.problem, goal=aim.problem.goal, obj_of_interest=aim.problem.obj_of_interest)
    env = LiberoEnvironment(
        [replace(shown, language=asked.language, problem=problem)],
        starts,
        distribution=task.starts,
        split="eval",
        horizon=task.horizon,
        executed=task.executed,
        step_limit=step_limit_of([shown]),
        assets=find_assets(task.assets),
        joints=task.joints,
        image_size=task.image_size if task.images else None,
        images=tuple(task.images),
    )
    label = f"{asked.index} asked for in the scene of {shown.index}"
    count = int(evaluate(env, policy, starts_per_task=starts, progress=label).success.sum())
    env.close()
    return count


def main() -> None:
    """Evaluate every pair of scene and instruction, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run of train.py, or one of its checkpoints")
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    saved = checkpoint.load(options.run)
    trained, _ = compose(TrainConfig, "train", [], GROUPS, saved.config)
    task = trained.task
    assert isinstance(task, LiberoTask), "only LIBERO tasks have scenes that they share"
    prepare("cpu", trained.threads)
    policy = trained.policy.build(saved.contract)
    saved.restore(policy)
    tasks = load_tasks(task.suite, [int(key) if key.isdigit() else key for key in task.tasks] or None)
    rows = []
    for scene_task, instruction_task in questions(tasks):
        row: dict[str, Any] = {
            "scene": scene_task.name,
            "instruction": instruction_task.language,
            "episodes": options.starts,
        }
        row["named"] = successes(scene_task, instruction_task, instruction_task, policy, task, options.starts)
        row["usual"] = (
            row["named"]
            if instruction_task is scene_task
            else successes(scene_task, instruction_task, scene_task, policy, task, options.starts)
        )
        rows.append(row | {"own": instruction_task is scene_task})
    cells = [
        [row["scene"], row["instruction"], *(_rate(row[each], row["episodes"]) for each in ("named", "usual"))]
        for row in rows
    ]
    print(table(["scene", "instruction", "the object named", "the one usually asked for there"], cells))
    swapped = [row for row in rows if not row["own"]]
    total = sum(row["episodes"] for row in swapped)
    if swapped:
        parts = (_rate(sum(row[each] for row in swapped), total) for each in ("named", "usual"))
        print("All instructions of other tasks: named {}, usual {}".format(*parts))
    if options.output:
        record = {"commit": git_commit(), "versions": versions(), "starts": task.starts, "rows": rows}
        with complete_or_absent(options.output) as temporary:
            temporary.write_text(dumps_rows(record))


def _rate(successes: int, episodes: int) -> str:
    low, high = wilson(successes, episodes)
    return f"{successes} of {episodes} [{low:.1%}, {high:.1%}]"


if __name__ == "__main__":
    main()
