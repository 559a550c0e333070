"""Control steps per second of our LIBERO and of stock LIBERO in one run: `python benchmarks/libero_throughput.py`.

Two workloads, with the same actions in both simulators from the official initial states: `motion` has random small
motions above the objects, `pick` our scripted expert, mostly with an object between the fingers. Each runs without
images, with images of two 128x128 cameras after every control step, and with images after every chunk of K steps, which
is all that the policy reads; stock always draws after every step, as it ships. The cost of images alone is the extra
time of steps with images. Rates per CPU-second count the time of all threads; rates per wall-second use all cores:
threads in ours, processes in stock. Load averages are recorded before the run and before each row.

Stock needs LIBERO's official assets (LIBERO_ASSETS or --assets) and, for cameras, OpenGL. Its virtual environment is
made with pip in the user's cache on the first run, and is that of `evaluate.py sim=stock`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit  # noqa: E402
from sims.libero.assets import HOW_TO_GET, find_assets  # noqa: E402
from sims.libero.expert.expert import Expert  # noqa: E402
from sims.libero.physics.simulation import Simulation  # noqa: E402
from sims.libero.rendering.cameras import Cameras  # noqa: E402
from sims.libero.scene.scene import Scene, build_scene  # noqa: E402
from sims.libero.stock.interpreter import stock_python  # noqa: E402
from sims.libero.suite import Task, initial_states, load_tasks  # noqa: E402
from sims.libero.task import LiberoTask  # noqa: E402

K = LiberoTask().executed  # control steps of a chunk
EPISODES = 8  # initial states
SIMULATIONS = 32  # that repeat them; with images, which take most of the time, each runs once
MOTION_STEPS = 100
PICK_LIMIT = 150
STILL = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]
CORES = len(os.sched_getaffinity(0))


@dataclass
class Episode:
    """An official initial state [1+nq+nv], and the actions [T, 7] after the five warm-up steps."""

    state: NDArray[np.float64]
    actions: NDArray[np.float64]


@dataclass
class Rate:
    """Number of control steps, and their duration."""

    steps: int = 0
    pictures: int = 0  # of both cameras
    cpu_s: float = 0.0
    wall_s: float = 0.0
    episodes: int = 0
    successes: int = 0

    @property
    def per_cpu_s(self) -> float:
        """Control steps per CPU-second."""
        return self.steps / self.cpu_s

    @property
    def per_wall_s(self) -> float:
        """Control steps per second on all cores."""
        return self.steps / self.wall_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows, print the table, and write the JSON."""
    options = _options(arguments)
    assets = find_assets(options.assets)
    if assets.root is None:
        sys.exit(f"stock LIBERO needs its official assets; {HOW_TO_GET}")
    python = stock_python()
    rows, record = [], {"git_commit": git_commit(), "machine": machine() | {"load": os.getloadavg()[0]}}
    for name in options.tasks:
        suite, index = name.split(":")
        (task,) = load_tasks(suite, [int(index)])
        scene = build_scene(task, assets)
        for workload, episodes in (("motion", motion(task)), ("pick", pick(scene))):
            load, ways = os.getloadavg()[0], ((K, False), (1, True), (K, True))
            our_rates = [measure_ours(scene, episodes, *variant, options.seconds) for variant in ways]
            stock = [measure_stock(python, scene, episodes, cameras, options.seconds) for cameras in (False, True)]
            row = {"task": f"{suite} {index}", "workload": workload, "load": load}
            rows.append(row | compared(*our_rates, *stock))
            sys.stdout.write(table(rows[-1]) if len(rows) > 1 else HEAD + table(rows[-1]))
            sys.stdout.flush()
    report = record | {"executed": K, "simulations": SIMULATIONS, "rows": rows}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(dumps_rows(report))


def motion(task: Task) -> list[Episode]:
    """Episodes of small random motions."""
    rng = np.random.default_rng(0)
    return [Episode(s, rng.uniform(-0.3, 0.3, (MOTION_STEPS, 7))) for s in initial_states(task)[:EPISODES]]


def pick(scene: Scene) -> list[Episode]:
    """Episodes of the scripted expert from each initial state to the end of its task, and half a second of rest."""
    episodes = [Episode(state, np.empty((0, 7))) for state in initial_states(scene.task)[:EPISODES]]
    simulation = Simulation([scene] * EPISODES)
    _start(simulation, episodes)
    expert, running, actions = Expert(simulation), np.arange(EPISODES), [[] for _ in episodes]
    for _ in range(PICK_LIMIT):
        chunk = expert.act(running)
        success = simulation.step(running, chunk[:, None])[1]
        for i, action in zip(running, chunk, strict=True):
            actions[i].append(action)
        running = running[~success]
        if not len(running):
            break
    rest = [STILL] * 10  # stock may let go a moment later
    return [Episode(e.state, np.array(a + rest)) for e, a in zip(episodes, actions, strict=True)]


def measure_ours(scene: Scene, episodes: list[Episode], chunk: int, cameras: bool, seconds: float) -> Rate:
    """Replay the episodes in parallel for at least `seconds`, in chunks, after each of which `cameras` draw."""
    rows = episodes if cameras else [episodes[i % len(episodes)] for i in range(SIMULATIONS)]
    simulation = Simulation([scene] * len(rows))
    eyes = Cameras(simulation, width=128, height=128) if cameras else None
    total = Rate()
    while total.wall_s < seconds:
        _start(simulation, rows)
        cpu, wall = time.process_time(), time.perf_counter()
        reached = np.zeros(len(rows), dtype=bool)
        for ids, actions in _chunks(rows, chunk):
            executed, success, _ = simulation.step(ids, actions, stop_on_success=False)
            total.steps, reached[ids] = total.steps + int(executed.sum()), reached[ids] | success
            if eyes is not None:
                eyes.render(ids)
                total.pictures += len(ids)
        total.cpu_s, total.wall_s = total.cpu_s + time.process_time() - cpu, total.wall_s + time.perf_counter() - wall
        total.episodes, total.successes = total.episodes + len(rows), total.successes + int(reached.sum())
    return total


def measure_stock(python: Path, scene: Scene, episodes: list[Episode], cameras: bool, seconds: float) -> Rate | None:
    """Replay in one stock process per core; None if stock can't draw here (no OpenGL)."""
    bodies = [scene.model.body(fixture.body) for fixture in scene.fixtures]
    request = {
        "bddl": str(scene.task.bddl),
        "assets": str(scene.assets.root),
        "fixtures": {body.name: [body.pos.tolist(), body.quat.tolist()] for body in bodies},
        "cameras": cameras,
        "seconds": seconds,
        "episodes": [{"state": e.state.tolist(), "actions": e.actions.tolist()} for e in episodes],
    }
    backends = ("egl", "osmesa") if cameras else ("egl",)
    for backend in backends:
        with ThreadPoolExecutor(CORES) as pool:
            answers = list(pool.map(ask_stock, [python] * CORES, [request] * CORES, [backend] * CORES))
        if all(isinstance(answer, dict) for answer in answers):
            sums = {key: sum(answer[key] for answer in answers) for key in ("steps", "cpu_s", "episodes", "successes")}
            wall_s = max(answer["wall_s"] for answer in answers)
            return Rate(wall_s=wall_s, pictures=sums["steps"] if cameras else 0, **sums)
    if cameras:
        sys.stderr.write(f"stock LIBERO can't draw here:\n{answers[0]}\n")
        return None
    sys.exit(f"stock LIBERO failed:\n{answers[0]}")


def ask_stock(python: Path, request: dict, backend: str) -> dict | str:
    """Stock's answer, or its output after a failure; one thread each, because BLAS gains nothing on 7x7 matrices."""
    single = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")}
    environment = os.environ | single | {"MUJOCO_GL": backend}
    command = [str(python), str(Path(__file__).with_name("stock_libero.py"))]
    result = subprocess.run(
        command, input=json.dumps(request), env=environment, capture_output=True, text=True, check=False
    )
    return json.loads(result.stdout) if result.returncode == 0 else result.stderr[-2000:]


def machine() -> dict[str, str | int]:
    """Properties of the machine that the figures depend on."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in names if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": CORES, "mujoco": version("mujoco"), "python": platform.python_version()}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["libero_object:0"], metavar="SUITE:INDEX")
    parser.add_argument("--seconds", type=float, default=10.0, help="per measurement")
    parser.add_argument("--assets", type=Path, help="folder of LIBERO's official assets")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "libero_throughput.json")
    return parser.parse_args(arguments)


def _start(simulation: Simulation, episodes: Sequence[Episode]) -> None:
    """Set the initial states and run LIBERO's five no-op steps."""
    nq = simulation.scenes[0].model.nq
    for i, episode in enumerate(episodes):
        simulation.write(i, episode.state[1 : 1 + nq], episode.state[1 + nq :])
    still = np.tile(STILL, (simulation.num, 5, 1))
    simulation.step(np.arange(simulation.num), still, stop_on_success=False)


def _chunks(rows: Sequence[Episode], chunk: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Chunks of `chunk` steps (fewer at an episode's end) for the simulations with that many steps left."""
    for first in range(0, max(len(row.actions) for row in rows), chunk):
        parts = [row.actions[first : first + chunk] for row in rows]
        for length in sorted({len(part) for part in parts} - {0}):
            ids = np.array([i for i, part in enumerate(parts) if len(part) == length], dtype=np.int64)
            yield ids, np.stack([parts[i] for i in ids])


HEAD = f"{'task':18}" + "".join(
    f"{name:>14}" for name in ("workload", "pictures", "ours/CPU-s", "stock/CPU-s", "ratio")
)
HEAD += f"{'ours/s':>14}{'stock/s':>14}{'ratio':>14}\n"


def compared(plain: Rate, every_step: Rate, every_chunk: Rate, stock: Rate, stock_every_step: Rate | None) -> dict:
    """Our rates next to stock's: control steps without images, with images after every step or chunk, and images alone.

    Stock draws after every step even if ours draws after every chunk.
    """
    rows = {"none": _compared(plain, stock)}
    if stock_every_step is not None:
        rows["every step"] = _compared(every_step, stock_every_step)
        rows["every chunk"] = _compared(every_chunk, stock_every_step)
        rows["alone"] = _compared(_pictures(plain, every_chunk), _pictures(stock, stock_every_step))
    return rows


def _pictures(plain: Rate, drawn: Rate) -> Rate:
    """Rate of images alone, from the extra time of steps with images."""
    share = drawn.steps / plain.steps
    return Rate(drawn.pictures, drawn.pictures, drawn.cpu_s - share * plain.cpu_s, drawn.wall_s - share * plain.wall_s)


def _compared(ours: Rate, stock: Rate) -> dict:
    ratios = {"ratio_cpu": ours.per_cpu_s / stock.per_cpu_s, "ratio_wall": ours.per_wall_s / stock.per_wall_s}
    return {"ours": _figures(ours), "stock": _figures(stock), **ratios}


def _figures(rate: Rate) -> dict:
    return asdict(rate) | {"per_cpu_s": rate.per_cpu_s, "per_wall_s": rate.per_wall_s}


def table(row: dict) -> str:
    """Lines for the console; images alone are per second, like steps."""
    lines = []
    for pictures in ("none", "every step", "every chunk", "alone"):
        if pictures not in row:
            continue
        cells = [row["workload"], pictures]
        for key, ratio in (("per_cpu_s", "ratio_cpu"), ("per_wall_s", "ratio_wall")):
            cells += [f"{row[pictures]['ours'][key]:.0f}", f"{row[pictures]['stock'][key]:.1f}"]
            cells += [f"{row[pictures][ratio]:.1f}x"]
        lines.append(f"{row['task']:18}" + "".join(f"{cell:>14}" for cell in cells) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    main()
