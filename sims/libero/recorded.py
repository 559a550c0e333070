"""LIBERO's own demonstrations: HDF5 files of one task each, whose recorded states are replayed in our scenes.

A file has `data/demo_N/states` [T, 1+nq+nv] (time, qpos, qvel before each action) and `actions` [T, 7]. Its `obs` are
not read: they are from after the action of their row. Our observations and pictures are computed from the states. An
episode ends as in our environments, with the action that reaches the goal; an episode that never does is left out.
"""

from __future__ import annotations

import json
import logging
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from embodied.data import hdf5
from embodied.data.episodes import Episodes, EpisodeWriter
from embodied.errors import UserError
from embodied.runtime.progress import Progress
from sims.libero.assets import Assets
from sims.libero.expert.demonstrations import worded
from sims.libero.language import Wordings
from sims.libero.observation import Observer
from sims.libero.physics import controller
from sims.libero.physics.simulation import Simulation
from sims.libero.published import Published
from sims.libero.scene.geometry import Array
from sims.libero.scene.scene import Scene, build_scene
from sims.libero.suite import WARM_UP, Task

log = logging.getLogger(__name__)
SUFFIX = ".hdf5"
DATA = "data"
DEMO = f"{DATA}/demo_"
"""Group of a file, and the begin of the names of its episodes, which numbers follow."""
CONTROLLER = {"type": "OSC_POSE", "output_max": [0.05, 0.05, 0.05, 0.5, 0.5, 0.5]}
"""Meaning of LIBERO's actions, as given in its files: see `observation.action_spec`."""


@dataclass(frozen=True)
class Demonstration:
    """One recorded episode: `states` [T, 1+nq+nv], `actions` [T, 7], fixtures [nbody, 3] m and [nbody, 4]."""

    states: Array
    actions: Array
    body_pos: Array
    body_quat: Array


def files(source: Path) -> list[Path]:
    """HDF5 files in the folder `source`, or the file `source` itself; empty if there are none."""
    if source.is_dir():
        return sorted(source.rglob(f"*{SUFFIX}"))
    return [source] if source.suffix == SUFFIX else []


def collect(
    writer: EpisodeWriter,
    paths: Sequence[Path],
    tasks: Sequence[Task],
    assets: Assets,
    image_size: int | None = None,
    images: Sequence[str] = (),
    convention: Published | None = None,
) -> None:
    """Write every successful episode of `tasks` in the files `paths`; instructions vary over the training wordings.

    Files of other tasks are skipped. The writer's origin names the tasks and counts the episodes that were left out of
    each.

    Raises:
        UserError: for a file that is damaged or does not fit, or a task without a successful episode.
    """
    task_files = _by_task(paths, tasks)
    replay = Replay([build_scene(task, assets) for task in tasks], image_size, images, convention)
    instruction = 0
    omitted = []
    with Progress("demonstrations", len(tasks), "task") as bar:
        for index, task in enumerate(tasks):
            count = 0
            written = 0
            for demonstration in (each for path in task_files[index] for each in read_file(path, replay.scenes[index])):
                count += 1
                if (episode := replay(index, demonstration)) is not None:
                    writer.add(worded(episode, Wordings(task, "training"), instruction))
                    instruction = instruction + episode.steps
                    written = written + 1
            if not written:
                raise UserError(
                    f"none of {count} recorded episodes of {task.name} reaches its goal; choose other files"
                )
            omitted.append(count - written)
            bar.update(1)
    if any(omitted):
        log.warning(f"{sum(omitted)} recorded episodes do not reach their goal here and are left out")
    writer.origin |= {"tasks": [task.name for task in tasks], "left_out": omitted}


class Replay:
    """Computes our observations from recorded states; `scenes` are the scenes of a run's tasks, in order."""

    def __init__(
        self,
        scenes: Sequence[Scene],
        image_size: int | None = None,
        images: Sequence[str] = (),
        convention: Published | None = None,
    ) -> None:
        self.scenes = list(scenes)
        self._simulation = Simulation(self.scenes, threads=1, sleep=False)
        self._observer = Observer(self._simulation, image_size, images, convention)

    def __call__(self, index: int, recorded: Demonstration) -> Episodes | None:
        """Episode of task `index` up to its goal; None if it does not reach the goal."""
        simulation = self._simulation
        scene = self.scenes[index]
        memory = simulation.memory[index]
        observations = []
        replayed = torch.arange(len(self.scenes)) == index
        commands = np.zeros(2)
        for action in [recorded.actions[0]] * len(WARM_UP):  # the first actions of an episode are not in the files
            commands = _gripped(simulation, index, commands, action[6])
        for step, state in enumerate(recorded.states):
            qpos, qvel = np.split(state[1:], [scene.model.nq])
            simulation.write(index, qpos, qvel, body_pos=recorded.body_pos, body_quat=recorded.body_quat)
            hand = simulation.data[index].site_xmat[scene.grip_site].reshape(3, 3)
            memory["goal_orientation"] = hand
            memory["gripper"] = commands
            memory["fresh"] = 0.0
            observations.append(self._observer.observe(replayed)[index])
            if step and simulation.satisfied(index):
                break
            commands = _gripped(simulation, index, commands, recorded.actions[step, 6])
        else:
            if not simulation.step([index], recorded.actions[None, -1:])[1][0]:
                return None
            observations.append(self._observer.observe(replayed)[index])
        length = len(observations) - 1
        reward = torch.zeros(length)
        reward[-1] = 1.0
        return Episodes.of(
            torch.stack(observations[:-1]),
            torch.from_numpy(recorded.actions[:length]).float().clamp(-1.0, 1.0),
            reward=reward,
            task_index=index,
            final_observation=observations[-1],
        )


def read_file(path: Path, scene: Scene) -> Iterator[Demonstration]:
    """Every episode of a file, in the order of their numbers.

    Raises:
        UserError: for a damaged or unsuitable episode; the message names file, episode and problem.
    """
    attributes = hdf5.contents(path).attributes
    _check_controller(path, _attribute(path, attributes, "env_args"))
    groups = [name for name in attributes if name.startswith(DEMO) and name.removeprefix(DEMO).isdecimal()]
    groups.sort(key=lambda name: int(name.removeprefix(DEMO)))
    arrays = hdf5.arrays(path, [(f"{group}/{name}", None, None) for group in groups for name in ("states", "actions")])
    for group in groups:
        states, actions = (np.asarray(next(arrays), np.float64) for _ in range(2))
        place = f"{path}, {group.removeprefix(DATA)[1:]}"
        yield _demonstration(place, states, actions, attributes[group].get("model_file", ""), scene)


def _demonstration(place: str, states: Array, actions: Array, model_file: str, scene: Scene) -> Demonstration:
    width = 1 + scene.model.nq + scene.model.nv
    if states.ndim != 2 or states.shape[1] != width or actions.shape != (len(states), 7) or not len(states):
        expected = f"states [T, {width}] and actions [T, 7] of {scene.task.name}"
        raise UserError(f"{place}: expected {expected}, got {list(states.shape)} and {list(actions.shape)}")
    if not (np.isfinite(states).all() and np.isfinite(actions).all()):
        raise UserError(f"{place}: expected finite states and actions, got nan or infinity")
    return Demonstration(states, actions, *_fixtures(place, model_file, scene))


def _fixtures(place: str, model: str, scene: Scene) -> tuple[Array, Array]:
    """Positions [nbody, 3] m and quaternions [nbody, 4] of our bodies, with the fixtures as in the MJCF `model`."""
    position = scene.model.body_pos.copy()
    quaternion = scene.model.body_quat.copy()
    if not scene.fixtures:
        return position, quaternion
    try:
        bodies = {body.get("name"): body for body in ET.fromstring(model).iter("body")}
        for fixture in scene.fixtures:
            body = bodies[f"{fixture.name}_main"]
            position[fixture.body] = np.array(body.get("pos", "0 0 0").split(), float)
            quaternion[fixture.body] = np.array(body.get("quat", "1 0 0 0").split(), float)
        if not (np.isfinite(position).all() and np.isfinite(quaternion).all()):
            raise ValueError("a place that is not finite")
    except (ET.ParseError, KeyError, ValueError) as error:
        names = ", ".join(fixture.name for fixture in scene.fixtures)
        raise UserError(f"{place}: expected the attribute model_file, MJCF that places {names}: {error}") from error
    return position, quaternion


def _gripped(simulation: Simulation, index: int, commands: Array, action: float) -> Array:
    """Commands [2] of the fingers after one more control step towards closed (`action` > 0) or open."""
    memory = simulation.memory[index]
    memory["gripper"] = commands
    for _ in range(controller.SUBSTEPS):
        controller.grip(simulation.models[index], simulation.scenes[index], memory, action)
    return memory["gripper"].copy()


def _by_task(paths: Sequence[Path], tasks: Sequence[Task]) -> list[list[Path]]:
    """The files of each task.

    Raises:
        UserError: for a file that names no task, or a task without files.
    """
    indices = {(task.suite, task.name): index for index, task in enumerate(tasks)}
    task_files: list[list[Path]] = [[] for _ in tasks]
    keys = [(path, _task_of(path)) for path in paths]
    for path, key in keys:
        if key in indices:
            task_files[indices[key]].append(path)
    if missing := [task.name for index, task in enumerate(tasks) if not task_files[index]]:
        has = ", ".join(sorted({f"{suite}/{name}" for _, (suite, name) in keys}))
        raise UserError(f"no demonstrations of {', '.join(missing)}; the files are of {has}: choose task.tasks=[...]")
    return task_files


def _task_of(path: Path) -> tuple[str, str]:
    """Suite and name of the task of a file, from the name of its BDDL file."""
    bddl = Path(_attribute(path, hdf5.contents(path).attributes, "bddl_file_name"))
    return bddl.parent.name, bddl.stem


def _attribute(path: Path, attributes: Mapping[str, Mapping[str, str]], name: str) -> str:
    """Attribute `name` of the group that has the episodes of the file at `path`."""
    try:
        return attributes[DATA][name]
    except KeyError as error:
        raise UserError(f"{path} is no file of LIBERO: it has no group {DATA} with the attribute {name}") from error


def _check_controller(path: Path, env_args: str) -> None:
    """Raise UserError unless actions have our meaning and rate."""
    try:
        options = json.loads(env_args).get("env_kwargs", {})
        got = {name: options.get("controller_configs", {}).get(name) for name in CONTROLLER}
        rate = options.get("control_freq")
    except (ValueError, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"cannot read LIBERO demonstrations from {path}: env_args is damaged: {reason}") from error
    if got != CONTROLLER or rate != 20:
        raise UserError(f"{path}: expected actions of {CONTROLLER} at 20 Hz in env_args, got {got} at {rate} Hz")
