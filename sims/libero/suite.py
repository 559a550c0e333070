"""LIBERO's five suites, 130 tasks, and their official initial states, read from the hf-libero package's data.

Also those suites of LIBERO-PRO (arXiv 2510.03827) that have LIBERO's own objects, read from what `make assets` fetches,
and LIBERO-plus (`plus.py`).
"""

import ast
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from embodied.errors import UserError
from sims.libero.assets import COMMAND, package_folder
from sims.libero.perturbed import plus
from sims.libero.scene.bddl import Problem, parse

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_90", "libero_10")
STEP_LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_90": 400, "libero_10": 520}
"""Suite -> control steps of an episode. They are OpenVLA's (arXiv 2406.09246, run_libero_eval.py), which later work
also uses: slightly more than the longest human demonstration of each suite. LIBERO's own evaluation allows 600
everywhere (eval.max_steps of its configuration)."""
PERTURBED = {
    f"libero_{suite}_{kind}": f"libero_{suite}"
    for suite in ("spatial", "object", "goal", "10")
    for kind in ("lan", "swap", "task")
} | {
    f"libero_object_temp_{axis}0.{tenths}": "libero_object"
    for axis, most in (("x", 5), ("y", 4))  # a task of temp_y0.5 has no initial states
    for tenths in range(1, most + 1)
}
"""Suite of LIBERO-PRO -> the suite whose ten tasks it changes: `lan` words the instructions otherwise, `swap` exchanges
the positions of objects, `task` asks for another goal in the same scene, `temp_x0.1` moves the object by 0.07 m along x
(`temp_y0.4`: 0.28 m along y), and what lay there out of the way."""
BASES = PERTURBED | plus.SUITES
"""Suite of LIBERO-PRO or LIBERO-plus -> the suite that it perturbs."""
WARM_UP = np.tile([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0], (5, 1))
"""Actions before every episode that let objects settle; not counted by the step limit.

LIBERO's own evaluation runs five zero actions, which leave the fingers half open; OpenVLA's runs ten of these, which
open them as at the beginning of every demonstration. Here: LIBERO's number of OpenVLA's actions.
"""
OFFICIAL_STARTS = 50
"""Number of official initial states of a task, except of LIBERO-plus's other layouts, which have one."""
INSTALL = "pip install --no-deps hf-libero==0.1.4 robosuite==1.5.2"


@dataclass(frozen=True)
class Task:
    """One task of a suite; `language` is the benchmark's instruction, `index` its position in stock's order.

    `perturbation` is that of a task of LIBERO-plus.
    """

    suite: str
    index: int
    name: str
    language: str
    bddl: Path
    problem: Problem
    perturbation: plus.Perturbation | None = None

    @property
    def official_starts(self) -> int:
        """Number of official initial states."""
        return 1 if self.perturbation and self.perturbation.category == "layout" else OFFICIAL_STARTS


def load_tasks(suite: str, names_or_indices: Sequence[str | int] | None = None) -> list[Task]:
    """Tasks of `suite` in stock benchmark order, or those selected; raises UserError for an unknown one."""
    if suite not in SUITES and suite not in BASES:
        expected = ", ".join([*SUITES, *BASES])
        raise UserError(f"unknown LIBERO suite {suite!r}; expected one of {expected}")
    names = _names(suite)
    if names_or_indices is None:
        return [_load(suite, index) for index in range(len(names))]
    return [_load(suite, _index(suite, names, key)) for key in names_or_indices]


def step_limit_of(tasks: Sequence[Task]) -> int:
    """Step limit of evaluations of `tasks`: the largest of their suites."""
    return max(STEP_LIMITS[BASES.get(task.suite, task.suite)] for task in tasks)


def initial_states(task: Task) -> np.ndarray:
    """Official initial states of `task`, [`task.official_starts`, 1+nq+nv] float64: time, qpos, qvel."""
    path, states = _plus_states(task) if task.perturbation else _own_states(task)
    count = task.official_starts
    if states.ndim != 2 or len(states) != count or states.dtype != np.float64:
        raise UserError(f"{path}: expected float64 states [{count}, 1+nq+nv], got {states.dtype} {states.shape}")
    return states


def _own_states(task: Task) -> tuple[Path, np.ndarray]:
    path = _data_folder(task.suite) / "init_files" / task.suite / f"{task.name}.pruned_init"
    if task.suite not in PERTURBED:
        return path, _unpickled_states(path)
    path = path.with_name(f"{path.name}.npz")
    with np.load(path, allow_pickle=False) as file:
        return path, file["states"]


def _plus_states(task: Task) -> tuple[Path, np.ndarray]:
    assert task.perturbation
    path = plus.states_file(task.suite, task.perturbation)
    return path, np.atleast_2d(_unpickled_states(path))  # a single state is stored without a row


def _unpickled_states(path: Path) -> np.ndarray:
    import torch  # only here, so that reading tasks needs no torch

    # The files are pickles: only numpy's array constructors may run while they load.
    reconstruct = np.zeros(1).__reduce__()[0]
    legacy_reconstruct = (reconstruct, "numpy.core.multiarray._reconstruct")
    allowed = [reconstruct, legacy_reconstruct, np.ndarray, np.dtype, type(np.dtype(np.float64))]
    with torch.serialization.safe_globals(allowed):
        return np.asarray(torch.load(path, weights_only=True))


def _data_folder(suite: str) -> Path:
    """Folder of the task descriptions and initial states of `suite`; raises UserError if it is missing."""
    if suite not in PERTURBED:
        return installed_folder("libero") / "libero"
    folder = package_folder().parents[1] / "libero" / "libero"
    if not folder.is_dir():
        raise UserError(f"{suite} needs LIBERO-PRO's tasks in {folder}; run `{COMMAND}`")
    return folder


@cache
def installed_folder(package: str) -> Path:
    """Folder of an installed package, for its data files, without importing it. UserError if missing."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"LIBERO needs the data of the package {package}; install it with `{INSTALL}`")
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def _task_map() -> dict[str, list[str]]:
    """Task names by suite, in benchmark order: the literal assigned in hf-libero's task map."""
    path = installed_folder("libero") / "libero" / "benchmark" / "libero_suite_task_map.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            return ast.literal_eval(node.value)
    raise UserError(f"{path}: no task map found; reinstall with `{INSTALL}`")


@cache
def _names(suite: str) -> list[str]:
    """Names of the tasks of `suite`, in its order."""
    return plus.task_names(suite) if suite in plus.SUITES else _task_map()[PERTURBED.get(suite, suite)]


def _index(suite: str, names: list[str], key: str | int) -> int:
    if isinstance(key, str) and key in names:
        return names.index(key)
    if isinstance(key, int) and 0 <= key < len(names):
        return key
    raise UserError(f"unknown task {key!r} of {suite}; expected 0..{len(names) - 1} or one of: {', '.join(names)}")


_parse = cache(parse)
"""Descriptions by path: many tasks of LIBERO-plus have the same one."""


def _load_plus(suite: str, index: int) -> Task:
    name = _names(suite)[index]
    perturbation = plus.Perturbation.parse(name)
    path = plus.description(suite, perturbation)
    problem = _parse(path)
    # the unperturbed task's words: LIBERO-plus's own code appends the perturbation's numbers in a task's name to them
    language = problem.language if perturbation.category == "language" else _language(perturbation.base)
    return Task(suite, index, name, language, path, problem, perturbation)


@cache
def _load(suite: str, index: int) -> Task:
    if suite in plus.SUITES:
        return _load_plus(suite, index)
    name = _names(suite)[index]
    path = _data_folder(suite) / "bddl_files" / suite / f"{name}.bddl"
    problem = parse(path)
    if suite in PERTURBED and problem.language != _load(PERTURBED[suite], index).problem.language:
        return Task(suite, index, name, problem.language, path, problem)  # another wording, or another goal
    return Task(suite, index, name, _language(name), path, problem)


def _language(name: str) -> str:
    """The instruction in a task's name: libero_90 and libero_10 put the scene in capitals before it."""
    words = name.split("_")
    return " ".join(word for i, word in enumerate(words) if not (i < 3 and word.isupper()))
