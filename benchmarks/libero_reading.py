"""Does a LIBERO policy read? `python benchmarks/libero_reading.py RUN [--starts 50] [--all-objects] [--output FILE]`.

Each task runs with its own instruction, and with paraphrases held out by sentence and by words. Then its scene is
combined with the instruction of each other task of the run whose objects are in the scene; with --all-objects, with one
of every other object there. A policy that reads moves the named object; one that has memorised the scene moves the
object of the scene's own task. Starts are the run's held-out ones in all rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.command_line.config import compose  # noqa: E402
from embodied.evaluation.evaluation import evaluate, wilson  # noqa: E402
from embodied.policy import Policy  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.saving import checkpoint  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from embodied.training.compute import prepare  # noqa: E402
from sims.libero.assets import find_assets  # noqa: E402
from sims.libero.counterfactual import with_other_objects  # noqa: E402
from sims.libero.environment import LiberoEnvironment  # noqa: E402
from sims.libero.suite import Task, load_tasks, step_limit_of  # noqa: E402
from sims.libero.task import LiberoTask  # noqa: E402
from train import GROUPS, TrainConfig  # noqa: E402

WORDINGS = {
    "name": "own instruction",
    "held_out": "paraphrases held out by sentence",
    "held_out_words": "paraphrases held out by words",
}
MOVED = {"named": "the object named", "usual": "the one usually asked for there"}


def questions(tasks: list[Task]) -> Iterator[tuple[Task, Task]]:
    """Pairs of a scene's task and another task whose instruction is possible in that scene."""
    for scene_task in tasks:
        for instruction_task in tasks:
            named = set(instruction_task.problem.objects).intersection(instruction_task.problem.obj_of_interest)
            if instruction_task is not scene_task and named <= set(scene_task.problem.objects):
                yield scene_task, instruction_task


def environment(
    scene: Task, instruction: Task, goal: Task, wording: str, task: LiberoTask, starts: int
) -> LiberoEnvironment:
    """Held-out starts in the scene of one task with the instruction of another, and the goal of a third."""
    problem = replace(scene.problem, goal=goal.problem.goal, obj_of_interest=goal.problem.obj_of_interest)
    return LiberoEnvironment(
        [replace(scene, language=instruction.language, problem=problem)],
        starts,
        distribution=task.starts,
        split="eval",
        wording=wording,
        horizon=task.horizon,
        executed=task.executed,
        step_limit=task.step_limit or step_limit_of([scene]),
        assets=find_assets(task.assets),
        joints=task.joints,
        image_size=task.image_size if task.images else None,
        images=tuple(task.images),
    )


def measure(tasks: list[Task], policy: Policy, task: LiberoTask, starts: int, *, all_objects: bool) -> list[dict]:
    """Rows of successes among `starts` episodes: of the named object, and of the one usually asked for in the scene."""

    def successes(scene: Task, instruction: Task, goal: Task, wording: str = "name") -> int:
        env = environment(scene, instruction, goal, wording, task, starts)
        count = int(evaluate(env, policy, starts_per_task=starts, progress=instruction.language).success.sum())
        env.close()
        return count

    rows: list[dict] = []
    for each in tasks:
        for wording in WORDINGS:
            named = successes(each, each, each, wording)
            row = {"scene": each.name, "instruction": each.language, "wording": wording, "own": True}
            rows.append(row | {"episodes": starts, "named": named, "usual": named})
    every = ((each, other) for each in tasks for other in with_other_objects(each))
    for scene, instruction in every if all_objects else questions(tasks):
        row = {
            "scene": scene.name,
            "instruction": instruction.language,
            "wording": "name",
            "own": False,
            "episodes": starts,
        }
        named, usual = (successes(scene, instruction, goal) for goal in (instruction, scene))
        rows.append(row | {"named": named, "usual": usual})
    return rows


def report(rows: list[dict]) -> str:
    """Table of all rows, and of their sums by kind."""
    cells = [[row["scene"], row["instruction"], row["wording"], *(_rate([row], key) for key in MOVED)] for row in rows]
    sums = {label: [row for row in rows if row["own"] and row["wording"] == name] for name, label in WORDINGS.items()}
    sums["another object of the scene"] = [row for row in rows if not row["own"]]
    totals = [[label, *(_rate(each, key) for key in MOVED)] for label, each in sums.items() if each]
    heads = list(MOVED.values())
    return f"{table(['scene', 'instruction', 'wording', *heads], cells)}\n\n{table(['all scenes', *heads], totals)}"


def main() -> None:
    """Evaluate every pair of scene and instruction, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run of train.py, or one of its checkpoints")
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--all-objects", action="store_true")
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
    rows = measure(tasks, policy, task, options.starts, all_objects=options.all_objects)
    print(report(rows))
    if options.output:
        words = getattr(trained.policy, "words", None)
        record = {
            "commit": git_commit(),
            "versions": versions(),
            "starts": task.starts,
            "words": words and words.value,
        }
        with complete_or_absent(options.output) as temporary:
            temporary.write_text(dumps_rows(record | {"rows": rows}))


def _rate(rows: list[dict], key: str) -> str:
    successes, episodes = (sum(row[each] for row in rows) for each in (key, "episodes"))
    low, high = wilson(successes, episodes)
    return f"{successes} of {episodes} [{low:.1%}, {high:.1%}]"


if __name__ == "__main__":
    main()
