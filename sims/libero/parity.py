"""Agreement with stock LIBERO on recorded episodes: `python -m sims.libero.parity FILES.npz [--json] [--no-sleep]`.

Each file holds episodes of one task recorded in stock LIBERO (robosuite 1.4.0). Three things are measured: the error of
`qpos` (m and rad, largest entry) after the warm-up, replayed open loop from the initial state; whether the whole replay
ends like the recording; and the error of `qpos` after one control step from each recorded state, separately for states
in which nothing moves or is touched by the robot ("free") and others ("contact"). A recording lacks the constraint
solver's warm start: it is taken from our previous step.

Contact can be chaotic within one control step, especially for an object rocking between the fingers. So each step is
repeated from velocities changed by NUDGE: `step_error_contact_floor_p99` is the difference between these two runs of
ours, a lower bound for any simulator that is not bit-equal to the recording one.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied.errors import UserError
from sims.libero.assets import Assets, find_assets
from sims.libero.physics.simulation import Simulation
from sims.libero.scene.scene import Scene, build_scene
from sims.libero.suite import SUITES, WARM_UP, Task, load_tasks

Array = NDArray[np.float64]

NUDGE = 1e-12  # m/s and rad/s
ARRAYS = (
    *("init_state", "actions", "success", "qpos", "qvel", "qpos_after_warmup", "qvel_after_warmup", "gripper_action"),
    *("goal_orientation", "initial_joint", "body_pos", "body_quat", "body_names", "bddl"),
)
STILL = 1e-3  # m/s and rad/s: objects slower than this are at rest


@dataclass(frozen=True)
class Parity:
    """The result for one file; errors in m and rad, 0 without such steps."""

    file: str
    replays: int
    replays_agree: int
    warm_up_error_max: float
    step_error_free_max: float
    step_error_contact_max: float
    step_error_contact_p99: float
    step_error_contact_median: float
    step_error_contact_floor_p99: float
    steps_free: int
    steps_contact: int
    sleep: bool


class Recording:
    """One file of E recorded episodes of T control steps, and its task's scene."""

    def __init__(self, path: Path, assets: Assets) -> None:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                self.arrays = {name: arrays[name] for name in ARRAYS}
        except (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise UserError(f"{path}: expected an .npz with {', '.join(ARRAYS)}; {error}") from error
        self.scene = build_scene(_task(path, str(self.arrays["bddl"])), assets)
        self.episodes, self.steps = self.arrays["actions"].shape[:2]
        ours = [self.scene.model.body(i).name for i in range(self.scene.model.nbody)]
        if ours != self.arrays["body_names"].tolist():
            raise UserError(f"{path}: expected the bodies {ours}, got {self.arrays['body_names'].tolist()}")

    def state(self, episode: int, step: int) -> tuple[Array, Array]:
        """Recorded qpos [nq] and qvel [nv] before control step `step`."""
        if step == 0:
            return self.arrays["qpos_after_warmup"][episode], self.arrays["qvel_after_warmup"][episode]
        return self.arrays["qpos"][episode, step - 1], self.arrays["qvel"][episode, step - 1]

    def begin(self, simulation: Simulation) -> None:
        """Put simulation e into episode e's initial state, before the warm-up."""
        for e, state in enumerate(self.arrays["init_state"]):
            qpos, qvel = np.split(state[1:], [self.scene.model.nq])
            self._write(simulation, e, qpos, qvel)

    def start(self, simulation: Simulation, step: int, nudge: float = 0.0) -> None:
        """Put simulation e into episode e's recorded state before control step `step`."""
        for e in range(self.episodes):
            qpos, qvel = self.state(e, step)
            self._write(simulation, e, qpos, qvel + nudge)
        simulation.memory["goal_orientation"] = self.arrays["goal_orientation"][:, step]
        simulation.memory["gripper"] = self.arrays["gripper_action"][:, step]
        simulation.memory["fresh"] = 0.0

    def _write(self, simulation: Simulation, episode: int, qpos: Array, qvel: Array) -> None:
        arrays = self.arrays
        places = {"body_pos": arrays["body_pos"][episode], "body_quat": arrays["body_quat"][episode]}
        simulation.write(episode, qpos, qvel, initial_joint=arrays["initial_joint"], **places)


def measure(path: Path, assets: Assets, sleep: bool = True) -> Parity:
    """Compare with one file of recorded episodes; UserError if it does not fit our scene of its task."""
    recording = Recording(path, assets)
    simulation, nudged = (Simulation([recording.scene] * recording.episodes, sleep=sleep) for _ in range(2))
    warm_up_error, success = _replay(recording, simulation)
    agree = success == recording.arrays["success"].any(axis=1)
    error, floor, contact = _single_steps(recording, simulation, nudged)
    return Parity(
        file=path.name,
        replays=recording.episodes,
        replays_agree=int(agree.sum()),
        warm_up_error_max=_quantile(warm_up_error, 1.0),
        step_error_free_max=_quantile(error[~contact], 1.0),
        step_error_contact_max=_quantile(error[contact], 1.0),
        step_error_contact_p99=_quantile(error[contact], 0.99),
        step_error_contact_median=_quantile(error[contact], 0.5),
        step_error_contact_floor_p99=_quantile(floor[contact], 0.99),
        steps_free=int((~contact).sum()),
        steps_contact=int(contact.sum()),
        sleep=sleep,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m sims.libero.parity", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="recorded episodes (.npz)")
    parser.add_argument("--json", action="store_true", help="print a list of one object per file")
    parser.add_argument("--no-sleep", action="store_true", help="step objects at rest too, as stock does")
    parser.add_argument("--assets", type=Path, help="folder of LIBERO's assets (default: found as in training)")
    options = parser.parse_args(arguments)
    try:
        assets = find_assets(options.assets)
        if assets.kind != "official":
            raise UserError("parity needs LIBERO's official assets; set LIBERO_ASSETS or give --assets DIR")
        results = [measure(path, assets, sleep=not options.no_sleep) for path in options.files]
    except (OSError, UserError) as problem:
        sys.exit(f"error: {problem}")
    sys.stdout.write(json.dumps([asdict(r) for r in results], indent=2) + "\n" if options.json else _table(results))


def _task(path: Path, bddl: str) -> Task:
    for suite in SUITES:
        for task in load_tasks(suite):
            if task.bddl.name == bddl:
                return task
    raise UserError(f"{path}: unknown LIBERO task {bddl}")


def _replay(recording: Recording, simulation: Simulation) -> tuple[Array, NDArray[np.bool_]]:
    """Each episode run open loop from its initial state: error after the warm-up, and success, [E]."""
    ids = np.arange(recording.episodes)
    recording.begin(simulation)
    simulation.step(ids, np.broadcast_to(WARM_UP, (recording.episodes, *WARM_UP.shape)), stop_on_success=False)
    ours = np.stack([data.qpos for data in simulation.data])
    error = np.abs(ours - recording.arrays["qpos_after_warmup"]).max(axis=1)
    return error, simulation.step(ids, recording.arrays["actions"])[1]


def _single_steps(
    recording: Recording, simulation: Simulation, nudged: Simulation
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Error, floor and in-contact flag of one control step from each recorded state: [T, E] each."""
    shape = (recording.steps, recording.episodes)
    error = np.zeros(shape)
    floor = np.zeros(shape)
    contact = np.zeros(shape, dtype=np.bool_)
    ids = np.arange(recording.episodes)
    for step in range(recording.steps):
        warm_starts = [data.qacc_warmstart.copy() for data in simulation.data]
        for run, nudge in ((simulation, 0.0), (nudged, NUDGE)):
            recording.start(run, step, nudge)
            for data, start in zip(run.data, warm_starts, strict=True):
                data.qacc_warmstart[:] = start if step else 0.0
        contact[step] = [_busy(recording.scene, data) for data in simulation.data]
        for run in (simulation, nudged):
            run.step(ids, recording.arrays["actions"][:, step : step + 1], stop_on_success=False)
        contact[step] |= [_busy(recording.scene, data) for data in simulation.data]
        ours, repeated = (np.stack([data.qpos for data in run.data]) for run in (simulation, nudged))
        error[step] = np.abs(ours - recording.arrays["qpos"][:, step]).max(axis=1)
        floor[step] = np.abs(ours - repeated).max(axis=1)
    return error, floor, contact


def _busy(scene: Scene, data: mujoco.MjData) -> bool:
    """Whether the robot touches anything, or anything else moves."""
    model = scene.model
    robot = model.body_rootid[scene.hand_body]
    roots = model.body_rootid[model.geom_bodyid[data.contact.geom]]
    others = model.body_rootid[model.dof_bodyid] != robot
    return bool((roots == robot).any() or (np.abs(data.qvel[others]) > STILL).any())


def _quantile(values: Array, q: float) -> float:
    return float(np.quantile(values, q)) if values.size else 0.0


def _table(results: Sequence[Parity]) -> str:
    columns = ("file", "replays agree", "warm-up: max", "free: max", "contact: median", "p99", "max", "floor p99")
    rows = [
        (
            result.file,
            f"{result.replays_agree} of {result.replays}",
            *(f"{x:.1e}" for x in (result.warm_up_error_max, result.step_error_free_max)),
            *(f"{x:.1e}" for x in (result.step_error_contact_median, result.step_error_contact_p99)),
            *(f"{x:.1e}" for x in (result.step_error_contact_max, result.step_error_contact_floor_p99)),
        )
        for result in results
    ]
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in (columns, *rows))


if __name__ == "__main__":
    main()
