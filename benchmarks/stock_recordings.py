"""Record episodes in stock LIBERO to compare with ours: `python benchmarks/stock_recordings.py SUITE:INDEX ...`.

Writes one file per task for `python -m sims.libero.parity`. The actions are those of our scripted expert with noise,
planned in our simulator from the same initial states and fixtures, or random if the task has no expert. Uses the
virtual environment of `evaluate.py sim=stock`, and needs LIBERO's official assets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # also runs from a clone that is not installed

from libero_throughput import ask_stock  # noqa: E402

from embodied.saving.files import complete_or_absent  # noqa: E402
from sims.libero.assets import HOW_TO_GET, find_assets  # noqa: E402
from sims.libero.expert.expert import PLACES, Expert  # noqa: E402
from sims.libero.physics.simulation import Simulation  # noqa: E402
from sims.libero.scene.scene import Scene, build_scene  # noqa: E402
from sims.libero.stock.interpreter import stock_python  # noqa: E402
from sims.libero.suite import STEP_LIMITS, WARM_UP, initial_states, load_tasks  # noqa: E402

RANDOM_STEPS = 100
NOISE = 0.15
REST = 10  # control steps after the last success

Array = NDArray[np.float64]


def main(arguments: Sequence[str] | None = None) -> None:
    """Record every task and print its success count."""
    options = _options(arguments)
    assets = find_assets(options.assets)
    if assets.root is None:
        sys.exit(f"stock LIBERO needs its official assets; {HOW_TO_GET}")
    python = stock_python()
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.tasks:
        suite, index = name.split(":")
        (task,) = load_tasks(suite, [int(index)])
        scene = build_scene(task, assets)
        states = initial_states(task)[options.first : options.first + options.episodes]
        request = {"bddl": str(task.bddl), "assets": str(assets.root), "seed": options.seed}
        fixed = record(python, request, states, np.empty((len(states), 0, 7)))
        actions = planned(scene, states, fixed, options.seed)
        recorded = record(python, request, states, actions)
        assert np.array_equal(recorded["body_pos"], fixed["body_pos"]), "the same seed put fixtures elsewhere"
        with complete_or_absent(options.output / f"{suite}_{index}.npz") as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, init_state=states, actions=actions, bddl=np.array(task.bddl.name), **recorded)
        succeeded = int(recorded["success"].any(axis=1).sum())
        sys.stdout.write(f"{suite} {index}: {succeeded} of {len(states)} succeed, {actions.shape[1]} control steps\n")
        sys.stdout.flush()


def record(python: Path, request: dict[str, Any], states: Array, actions: Array) -> dict[str, NDArray]:
    """Record `actions` [E, T, 7] from `states` [E, 1+nq+nv] in stock; returns arrays [E, ...]."""
    episodes = [{"state": s.tolist(), "actions": a.tolist()} for s, a in zip(states, actions, strict=True)]
    answer = ask_stock(python, {**request, "episodes": episodes}, "egl")
    if isinstance(answer, str):
        sys.exit(f"stock LIBERO failed:\n{answer}")
    runs = answer["episodes"]
    moments = {name: np.array([[each[name] for each in run["moments"]] for run in runs]) for name in MOMENT}
    after_warm_up = {f"{name}_after_warmup": moments[name][:, 0] for name in ("qpos", "qvel")}
    for name in ("qpos", "qvel"):
        moments[name] = moments[name][:, 1:]
    once = {name: np.array(answer[name]) for name in ("body_names", "initial_joint")}
    return {**moments, **after_warm_up, **once, **{name: np.array([run[name] for run in runs]) for name in EPISODE}}


MOMENT = ("qpos", "qvel", "gripper_action", "goal_orientation")
EPISODE = ("success", "body_pos", "body_quat")


def planned(scene: Scene, states: Array, fixed: dict[str, NDArray], seed: int) -> Array:
    """Plan actions [E, T, 7] of our expert with fixtures `fixed`, up to the last success or the suite's step limit."""
    count, rng = len(states), np.random.default_rng(seed)
    if any(goal.kind not in PLACES for goal in scene.goal):
        return rng.uniform(-0.5, 0.5, (count, RANDOM_STEPS, 7))
    simulation, ids = Simulation([scene] * count), np.arange(count)
    for i, state in enumerate(states):
        qpos, qvel = np.split(state[1:], [scene.model.nq])
        simulation.write(i, qpos, qvel, body_pos=fixed["body_pos"][i], body_quat=fixed["body_quat"][i])
    simulation.step(ids, np.broadcast_to(WARM_UP, (count, *WARM_UP.shape)), stop_on_success=False)
    expert, actions, won = Expert(simulation, noise=NOISE, seed=seed), [], np.zeros(count, dtype=bool)
    while len(actions) < STEP_LIMITS[scene.task.suite] and not won.all():
        actions.append(np.where(won[:, None], WARM_UP[0], expert.act()))
        won |= simulation.step(ids, actions[-1][:, None], stop_on_success=False)[1]
    return np.stack([*actions, *[np.tile(WARM_UP[0], (count, 1))] * REST], axis=1)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+", metavar="SUITE:INDEX")
    parser.add_argument("--episodes", type=int, default=6, help="of each task")
    parser.add_argument("--first", type=int, default=20, help="the first initial state")
    parser.add_argument("--seed", type=int, default=0, help="seed of the fixtures and of the expert's noise")
    parser.add_argument("--assets", type=Path, help="folder of LIBERO's official assets")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "stock_recordings")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
