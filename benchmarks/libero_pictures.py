"""CPU time of LIBERO's camera pictures by the rasteriser and by the ray tracer: `python benchmarks/libero_pictures.py`.

One thread draws states of the official starts with both back ends in turn, from each camera; the least CPU time of
`--runs` counts, as other work on the machine only adds to it. Then chunks of four random actions are run as
`task=libero_pictures` collects them, without a policy: control steps per CPU-second without pictures and with those of
both cameras.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.libero_throughput import machine  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from sims.libero.assets import find_assets  # noqa: E402
from sims.libero.environment import LiberoEnvironment  # noqa: E402
from sims.libero.physics.simulation import Simulation  # noqa: E402
from sims.libero.rendering import cameras  # noqa: E402
from sims.libero.rendering.cameras import AGENT_VIEW, WRIST, Backend, Cameras  # noqa: E402
from sims.libero.scene.scene import build_scene  # noqa: E402
from sims.libero.suite import Task, initial_states, load_tasks  # noqa: E402

BACKENDS: tuple[Backend, ...] = ("raster", "rays")
STATES, SIZES = 8, (64, 128)
ENVS, CHUNK, CHUNKS = 30, 4, 4


def least(what: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Smallest CPU seconds of each function; they are called alternately."""
    best = dict.fromkeys(what, float("inf"))
    for _ in range(runs + 1):
        for name, call in what.items():
            start = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - start)
    return best


def pictures(task: Task, runs: int) -> list[dict]:
    """CPU milliseconds of a picture, and the share of equal pixels."""
    scene, rows = build_scene(task, find_assets()), []
    simulation = Simulation([scene] * STATES)
    for i, state in enumerate(initial_states(task)[:STATES]):
        simulation.write(i, state[1 : 1 + scene.model.nq], state[1 + scene.model.nq :])
    for size in SIZES:
        for camera in (AGENT_VIEW, WRIST):
            views = {name: Cameras(simulation, (camera,), size, size, backend=name) for name in BACKENDS}
            rasterised, traced = (view.render().astype(int) for view in views.values())
            seconds = least({name: view.render for name, view in views.items()}, runs)
            row = {"task": f"{task.suite}:{task.index}", "camera": camera, "size": size}
            row |= {f"{name}_ms": round(1e3 * seconds[name] / STATES, 3) for name in BACKENDS}
            row["ratio"] = round(seconds["rays"] / seconds["raster"], 1)
            row["within_4"] = round(float((np.abs(rasterised - traced).max(-1) <= 4).mean()), 5)
            rows.append(row)
            sys.stdout.write(json.dumps(row) + "\n")
    simulation.close()
    return rows


def collecting(backend: Backend | None, size: int) -> Callable[[], None]:
    """Function that runs some chunks of small random motions in all environments, with pictures by `backend`."""
    if backend is not None:
        cameras.choose_backend = lambda film=False: backend
    env = LiberoEnvironment(
        load_tasks("libero_object", [0, 1, 2]), ENVS, executed=CHUNK, threads=1, image_size=size if backend else None
    )
    env.reset()
    actions = torch.from_numpy(np.random.default_rng(0).uniform(-0.3, 0.3, (ENVS, CHUNK, 7)))

    def run() -> None:
        for _ in range(CHUNKS):
            env.step(actions.float())

    return run


def collection(runs: int, size: int) -> dict[str, float]:
    """Control steps per CPU-second."""
    kinds: dict[str, Backend | None] = {"no pictures": None, "raster": "raster", "rays": "rays"}
    seconds = least({name: collecting(backend, size) for name, backend in kinds.items()}, runs)
    return {name: round(ENVS * CHUNK * CHUNKS / each) for name, each in seconds.items()}


def main() -> None:
    """Measure all rows, print them and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["libero_object:0"], metavar="SUITE:INDEX")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "libero_pictures.json")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one thread
    about = {"git_commit": git_commit(), "versions": versions(), "machine": machine() | {"load": os.getloadavg()[0]}}
    about |= {"threads": 1, "official_assets": find_assets().root is not None}
    tasks = [load_tasks(name.split(":")[0], [int(name.split(":")[1])])[0] for name in options.tasks]
    rows = [row for task in tasks for row in pictures(task, options.runs)]
    steps = collection(options.runs, SIZES[0])
    sys.stdout.write(json.dumps(steps) + "\n")
    about["load_after"] = os.getloadavg()[0]
    with complete_or_absent(options.output) as temporary:
        temporary.write_text(dumps_rows(about | {"pictures": rows, "control_steps_per_cpu_s": steps}))


if __name__ == "__main__":
    main()
