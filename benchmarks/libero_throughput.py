"""Control steps per second, ours beside stock LIBERO's in the same run: `python benchmarks/libero_throughput.py`.

Two workloads, the same actions in both from the official initial states: `motion` are random small motions above the
objects, `pick` is what our scripted expert does, most of it with an object between the fingers. Each without cameras
and with two 128x128 cameras; ours draw once per chunk of 10 control steps, stock's after every one, as it ships.
Per CPU-second counts the time of all threads; per wall-second uses all cores: threads in ours, processes of stock.

Stock needs LIBERO's official assets (LIBERO_ASSETS or --assets) and, for cameras, OpenGL. Its virtual environment is
made with pip in build/stock_libero on the first run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from sims.libero.assets import HOW_TO_GET, Assets, find_assets  # noqa: E402
from sims.libero.cameras import Cameras  # noqa: E402
from sims.libero.expert import Expert  # noqa: E402
from sims.libero.scene import Scene, build_scene  # noqa: E402
from sims.libero.simulation import Simulation  # noqa: E402
from sims.libero.suite import Task, initial_states, load_tasks  # noqa: E402

STOCK_VENV = ROOT / "build" / "stock_libero"
STOCK_PACKAGES = ("robosuite==1.4.0", "hf-libero==0.1.4", "bddl==1.0.1")  # without dependencies: they pin old ones
STOCK_DEPENDENCIES = (
    *("numpy<2", "scipy", "numba", "opencv-python-headless", "pillow", "termcolor", "pyyaml", "easydict"),
    *("cloudpickle", "gym", "gymnasium", "future", "matplotlib", "h5py", "jupytext", "networkx", "pytest"),
)
CHUNK = 10  # control steps
EPISODES = 8  # initial states, repeated over SIMULATIONS
SIMULATIONS = 32
MOTION_STEPS = 100
PICK_LIMIT = 150
STILL = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]
CORES = len(os.sched_getaffinity(0))


@dataclass
class Episode:
    """An official initial state [1+nq+nv] and the actions [T, 7] after the five warm-up steps."""

    state: NDArray[np.float64]
    actions: NDArray[np.float64]


@dataclass
class Rate:
    """What was stepped, and how long it took."""

    steps: int = 0
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
    """Measure, print the table, write the JSON."""
    options = _options(arguments)
    assets = find_assets(options.assets)
    if assets.root is None:
        sys.exit(f"stock LIBERO needs its official assets; {HOW_TO_GET}")
    python = stock_python(assets)
    rows = []
    for name in options.tasks:
        suite, index = name.split(":")
        (task,) = load_tasks(suite, [int(index)])
        scene = build_scene(task, assets)
        for workload, episodes in (("motion", motion(task)), ("pick", pick(scene))):
            for cameras in (False, True):
                ours = measure_ours(scene, episodes, cameras, options.seconds)
                stock = measure_stock(python, scene, episodes, cameras, options.seconds)
                rows.append(_row(f"{suite} {index}", workload, cameras, ours, stock))
                sys.stdout.write(_line(rows[-1]) if len(rows) > 1 else _head() + _line(rows[-1]))
                sys.stdout.flush()
    report = {"machine": machine(), "chunk": CHUNK, "simulations": SIMULATIONS, "rows": rows}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")


def motion(task: Task) -> list[Episode]:
    """Random small motions."""
    rng = np.random.default_rng(0)
    return [Episode(s, rng.uniform(-0.3, 0.3, (MOTION_STEPS, 7))) for s in initial_states(task)[:EPISODES]]


def pick(scene: Scene) -> list[Episode]:
    """What the scripted expert does from each initial state, to the end of its task, and a chunk of rest."""
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
    rest = [STILL] * CHUNK  # stock may let go a moment later
    return [Episode(e.state, np.array(a + rest)) for e, a in zip(episodes, actions, strict=True)]


def measure_ours(scene: Scene, episodes: list[Episode], cameras: bool, seconds: float) -> Rate:
    """Replay the episodes in SIMULATIONS simulations, chunk by chunk, again and again for `seconds`."""
    simulation = Simulation([scene] * SIMULATIONS)
    rows = [episodes[i % len(episodes)] for i in range(SIMULATIONS)]
    eyes = Cameras(simulation, width=128, height=128) if cameras else None
    total = Rate()
    while total.wall_s < seconds:
        _start(simulation, rows)
        cpu, wall = time.process_time(), time.perf_counter()
        reached = np.zeros(SIMULATIONS, dtype=bool)
        for ids, chunk in _chunks(rows):
            executed, success, _ = simulation.step(ids, chunk, stop_on_success=False)
            total.steps, reached[ids] = total.steps + int(executed.sum()), reached[ids] | success
            if eyes is not None:
                eyes.render(ids)
        total.cpu_s, total.wall_s = total.cpu_s + time.process_time() - cpu, total.wall_s + time.perf_counter() - wall
        total.episodes, total.successes = total.episodes + SIMULATIONS, total.successes + int(reached.sum())
    return total


def measure_stock(python: Path, scene: Scene, episodes: list[Episode], cameras: bool, seconds: float) -> Rate | None:
    """The same in one stock process per core; None where stock can't draw here (no OpenGL)."""
    bodies = [scene.model.body(fixture.body) for fixture in scene.fixtures]
    request = {
        "bddl": str(scene.task.bddl),
        "fixtures": {body.name: [body.pos.tolist(), body.quat.tolist()] for body in bodies},
        "cameras": cameras,
        "seconds": seconds,
        "episodes": [{"state": e.state.tolist(), "actions": e.actions.tolist()} for e in episodes],
    }
    backends = ("egl", "osmesa") if cameras else ("egl",)
    for backend in backends:
        with ThreadPoolExecutor(CORES) as pool:
            answers = list(pool.map(_ask, [python] * CORES, [request] * CORES, [backend] * CORES))
        if all(isinstance(answer, dict) for answer in answers):
            sums = {key: sum(answer[key] for answer in answers) for key in ("steps", "cpu_s", "episodes", "successes")}
            return Rate(wall_s=max(answer["wall_s"] for answer in answers), **sums)
    if cameras:
        sys.stderr.write(f"stock LIBERO can't draw here:\n{answers[0]}\n")
        return None
    sys.exit(f"stock LIBERO failed:\n{answers[0]}")


def stock_python(assets: Assets) -> Path:
    """The interpreter of stock's virtual environment, made on the first call, with LIBERO told where its files are."""
    python = STOCK_VENV / "bin" / "python"
    if not (STOCK_VENV / "ready").exists():
        sys.stderr.write(f"installing stock LIBERO into {STOCK_VENV.relative_to(ROOT)}\n")
        venv.create(STOCK_VENV, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"mujoco=={version('mujoco')}", *STOCK_DEPENDENCIES], check=True)
        subprocess.run([*pip, "--no-deps", *STOCK_PACKAGES], check=True)
        (STOCK_VENV / "ready").touch()
    find = "import importlib.util as u; print(list(u.find_spec('libero').submodule_search_locations)[0])"
    package = subprocess.run([str(python), "-c", find], check=True, capture_output=True, text=True).stdout.strip()
    root = Path(package) / "libero"
    link = root / "assets"
    link.unlink(missing_ok=True)
    link.symlink_to(assets.root)
    # Stock asks with input() for this file where it is missing.
    folders = {"benchmark_root": root, "bddl_files": root / "bddl_files", "init_states": root / "init_files"}
    folders |= {"datasets": root / "datasets", "assets": link}
    (STOCK_VENV / "config.yaml").write_text("".join(f"{key}: {path}\n" for key, path in folders.items()))
    return python


def machine() -> dict[str, str | int]:
    """What the figures depend on."""
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
    """Initial states, then LIBERO's five no-op steps."""
    nq = simulation.scenes[0].model.nq
    for i, episode in enumerate(episodes):
        simulation.write(i, episode.state[1 : 1 + nq], episode.state[1 + nq :])
    still = np.tile(STILL, (simulation.num, 5, 1))
    simulation.step(np.arange(simulation.num), still, stop_on_success=False)


def _chunks(rows: Sequence[Episode]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Chunks of CHUNK steps (fewer at an episode's end) for simulations that have that many left."""
    for first in range(0, max(len(row.actions) for row in rows), CHUNK):
        parts = [row.actions[first : first + CHUNK] for row in rows]
        for length in sorted({len(part) for part in parts} - {0}):
            ids = np.array([i for i, part in enumerate(parts) if len(part) == length], dtype=np.int64)
            yield ids, np.stack([parts[i] for i in ids])


def _ask(python: Path, request: dict, backend: str) -> dict | str:
    """Stock's answer, or what it printed when it failed. One thread each: BLAS gains nothing on 7x7 matrices."""
    single = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")}
    environment = os.environ | single | {"MUJOCO_GL": backend, "LIBERO_CONFIG_PATH": str(STOCK_VENV)}
    command = [str(python), str(Path(__file__).with_name("stock_libero.py"))]
    result = subprocess.run(
        command, input=json.dumps(request), env=environment, capture_output=True, text=True, check=False
    )
    return json.loads(result.stdout) if result.returncode == 0 else result.stderr[-2000:]


def _row(task: str, workload: str, cameras: bool, ours: Rate, stock: Rate | None) -> dict:
    row = {"task": task, "workload": workload, "cameras": cameras, "ours": _figures(ours), "stock": None}
    if stock is not None:
        row["stock"] = _figures(stock)
        row["ratio_cpu"], row["ratio_wall"] = ours.per_cpu_s / stock.per_cpu_s, ours.per_wall_s / stock.per_wall_s
    return row


def _figures(rate: Rate) -> dict:
    return asdict(rate) | {"per_cpu_s": rate.per_cpu_s, "per_wall_s": rate.per_wall_s}


def _head() -> str:
    columns = ("workload", "cameras", "ours/CPU-s", "stock/CPU-s", "ratio", "ours/s", "stock/s", "ratio")
    return f"{'task':18}" + "".join(f"{name:>12}" for name in columns) + "\n"


def _line(row: dict) -> str:
    ours, stock = row["ours"], row["stock"]
    cells = [row["workload"], "2" if row["cameras"] else "none"]
    for key, ratio in (("per_cpu_s", "ratio_cpu"), ("per_wall_s", "ratio_wall")):
        cells += [f"{ours[key]:.0f}", "-" if stock is None else f"{stock[key]:.1f}"]
        cells += ["-" if stock is None else f"{row[ratio]:.1f}x"]
    return f"{row['task']:18}" + "".join(f"{cell:>12}" for cell in cells) + "\n"


if __name__ == "__main__":
    main()
