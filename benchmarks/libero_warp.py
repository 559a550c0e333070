"""LIBERO on mujoco_warp against MuJoCo: `python benchmarks/libero_warp.py [--episodes 30] [--output FILE]`.

The scripted expert, with noise on its actions, succeeds in `--episodes` episodes of each task in MuJoCo. Their actions
are replayed from the same starts in mujoco_warp, and again in MuJoCo with actions perturbed by 1e-6, as a lower bound,
because contact amplifies differences. Prints the success rates of replays, with 95% Wilson intervals, and the error
after one control step from every tenth of MuJoCo's states with the object in the gripper.

`--speed [WORLDS ...] [--device cuda]` measures control steps per second instead, of environments with 256 to 8192
worlds of the first of `--tasks`: with state observations, and with two cameras of 128x128 pixels once a chunk of 8.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import numpy as np  # noqa: E402
import torch  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from embodied.evaluation.evaluation import wilson  # noqa: E402
from embodied.runtime.progress import Progress  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from sims.libero.assets import Assets, find_assets  # noqa: E402
from sims.libero.environment import LiberoEnvironment  # noqa: E402
from sims.libero.expert.expert import Expert, Phase  # noqa: E402
from sims.libero.physics.backend import LiberoSim  # noqa: E402
from sims.libero.physics.simulation import Simulation  # noqa: E402
from sims.libero.physics.warp_simulation import WarpSimulation  # noqa: E402
from sims.libero.scene.placement import Placement  # noqa: E402
from sims.libero.scene.scene import Scene, build_scene  # noqa: E402
from sims.libero.suite import WARM_UP, Task, load_tasks, step_limit_of  # noqa: E402

NOISE, EVERY = 0.1, 10
"""Standard deviation of the expert's noise, and control steps between states from which the error is measured."""
WORLDS = (256, 512, 1024, 2048, 4096, 8192)
EXECUTED, CHUNKS, STARTS = 8, 5, 64
"""Speed measurement: control steps of a chunk, timed chunks, and number of different starts of the worlds."""


def begin(scene: Scene, simulation: Simulation | WarpSimulation, starts: NDArray[np.int64]) -> None:
    """Set the simulations to the numbered wide starts and warm up."""
    placement = Placement(scene, "wide", "eval")
    for i, start in enumerate(starts.tolist()):
        simulation.write(i, **placement(start)._asdict())
    ids = np.arange(len(starts))
    simulation.step(ids, np.broadcast_to(WARM_UP, (len(starts), *WARM_UP.shape)), stop_on_success=False)


def record(scene: Scene, starts: NDArray[np.int64], limit: int) -> tuple[NDArray, NDArray, list[dict[str, NDArray]]]:
    """Actions [n, T, 7], success [n], and states with a grasped object, with the action and qpos after it."""
    count, ids = len(starts), np.arange(len(starts))
    simulation = Simulation([scene] * count, sleep=False)
    begin(scene, simulation, starts)
    expert = Expert(simulation, noise=NOISE, seed=0)
    expert.reset()
    actions, running, success = np.zeros((count, limit, 7)), np.ones(count, dtype=bool), np.zeros(count, dtype=bool)
    grasp_states: list[dict[str, NDArray]] = []
    for t in range(limit):
        active = ids[running]
        if not len(active):
            break
        actions[active, t] = expert.act(active)
        states = _states(simulation)
        success[active] = simulation.step(active, actions[active, t : t + 1])[1]
        if t % EVERY == 0:
            grasped = active[np.isin(expert.phase[active], (Phase.CLOSE, Phase.CARRY))]
            qpos = simulation.qpos(ids)
            grasp_states += [
                {name: values[i] for name, values in states.items()} | {"action": actions[i, t], "next": qpos[i]}
                for i in grasped
            ]
        running &= ~success
    return actions[:, : t + 1], success, grasp_states


def _states(simulation: Simulation) -> dict[str, NDArray]:
    fields = ("qpos", "qvel", "qacc_warmstart")
    state = {name: np.stack([getattr(data, name) for data in simulation.data]) for name in fields}
    return state | {name: simulation.memory[name].copy() for name in ("goal_orientation", "posture", "gripper")}


def replay(
    scene: Scene, simulation: Simulation | WarpSimulation, starts: NDArray[np.int64], actions: NDArray
) -> NDArray:
    """Replay the recorded `actions` [n, T, 7]; returns success [n]."""
    begin(scene, simulation, starts)
    return simulation.step(np.arange(len(starts)), actions)[1]


def step_errors(scene: Scene, held: list[dict[str, NDArray]], device: str | None = None) -> NDArray:
    """Largest error of qpos (m, rad) after one control step on `device` from each of the `held` states."""
    warp = WarpSimulation([scene] * len(held), device=device)
    state = {name.removeprefix("0."): values for name, values in warp.state_dict().items()}
    state |= {name: np.stack([each[name] for each in held]) for name in state if name in held[0]}
    state["fresh"] = np.zeros(len(held))
    warp.load_state_dict({f"0.{name}": values for name, values in state.items()})
    ids = np.arange(len(held))
    warp.step(ids, np.stack([each["action"] for each in held])[:, None], stop_on_success=False)
    return np.abs(warp.qpos(ids) - np.stack([each["next"] for each in held])).max(1)


def rate(name: str, success: NDArray) -> dict:
    """Success rate of the replays `name`, with its interval."""
    low, high = wilson(int(success.sum()), len(success))
    return {f"{name}_success": float(success.mean()), f"{name}_low": low, f"{name}_high": high}


def speed(
    task: Task,
    assets: Assets,
    worlds: int,
    device: str,
    image_size: int | None,
    executed: int = EXECUTED,
    timed: int = CHUNKS,
) -> float:
    """Control steps per second of `worlds` environments that execute small motions, observations included.

    The measurement covers `timed` chunks of `executed` control steps.
    """
    env = LiberoEnvironment(
        [task],
        worlds,
        horizon=executed,
        executed=executed,
        assets=assets,
        image_size=image_size,
        sim=LiberoSim.mjwarp,
        device=device,
    )
    generator = torch.Generator().manual_seed(0)
    chunks = 0.3 * torch.randn(timed + 1, worlds, executed, 7, generator=generator).to(device)
    env.reset(starts=torch.arange(worlds) % STARTS)
    env.step(chunks[0]).observation["joint_position"].sum().item()  # compiles kernels and captures the graph
    start_s = time.perf_counter()
    for chunk in chunks[1:]:
        transition = env.step(chunk)
    transition.observation["joint_position"].sum().item()  # waits for the device
    seconds = time.perf_counter() - start_s
    env.close()
    return worlds * executed * timed / seconds


def speeds(task: Task, assets: Assets, sizes: list[int], device: str) -> dict:
    """Control steps per second by number of worlds."""
    rows = []
    for worlds in sizes:
        state, pictures = (speed(task, assets, worlds, device, size) for size in (None, 128))
        rows.append({"worlds": worlds, "state": state, "two_cameras_128": pictures})
        print(f"{worlds} worlds: {state:.0f} control steps/s, {pictures:.0f} with two cameras", flush=True)
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    return {
        "task": task.name,
        "assets": assets.kind,
        "device": name,
        "control_steps_per_s": rows,
        "git_commit": git_commit(),
        "versions": versions(),
    }


def summary(assets: str, rows: list[dict], replays: dict[str, list[NDArray]], errors: list[NDArray]) -> dict:
    """Summary of the measurements over the tasks of `rows`."""
    total = np.concatenate(errors)
    return {
        "assets": assets,
        "git_commit": git_commit(),
        "versions": versions(),
        "tasks": rows,
        "episodes": sum(row["episodes"] for row in rows),
        **{key: value for name, each in replays.items() for key, value in rate(name, np.concatenate(each)).items()},
        "step_error_grasped": {str(q): float(np.quantile(total, q)) for q in (0.5, 0.9, 0.99, 1.0)},
    }


def write(output: Path, result: dict) -> None:
    """Write `result` as JSON."""
    with complete_or_absent(output) as path:
        path.write_text(dumps_rows(result))


def main() -> None:
    """Measure and print; write JSON with `--output`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=30, help="per task")
    parser.add_argument("--suite", default="libero_object")
    parser.add_argument("--tasks", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--assets", help="LIBERO's own objects; found as in training, else stand-ins")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--speed", type=int, nargs="*", metavar="WORLDS", help="measure speed, not accuracy")
    parser.add_argument("--device", default="cuda", help="of --speed")
    options = parser.parse_args()
    if options.speed is not None:
        task, sizes = load_tasks(options.suite, options.tasks[:1])[0], options.speed or list(WORLDS)
        result = speeds(task, find_assets(options.assets), sizes, options.device)
        if options.output:
            write(options.output, result)
        return
    assets, rng = find_assets(options.assets), np.random.default_rng(0)
    rows, replays, errors = [], {"mujoco": [], "mjwarp": []}, []
    with Progress("tasks", len(options.tasks), "task") as bar:
        for task in load_tasks(options.suite, options.tasks):
            scene, starts = build_scene(task, assets), np.arange(options.episodes)
            actions, success, grasp_states = record(scene, starts, step_limit_of([task]))
            starts, actions = starts[success], actions[success]
            disturbed = actions + 1e-6 * rng.standard_normal(actions.shape) * (np.arange(7) < 6)
            floor = replay(scene, Simulation([scene] * len(starts), sleep=False), starts, disturbed)
            replayed = replay(scene, WarpSimulation([scene] * len(starts)), starts, actions)
            errors.append(step_errors(scene, grasp_states))
            replays["mujoco"].append(floor)
            replays["mjwarp"].append(replayed)
            rows.append(
                {
                    "task": task.name,
                    "episodes": len(starts),
                    "mujoco": float(floor.mean()),
                    "mjwarp": float(replayed.mean()),
                    "states": len(grasp_states),
                    "median": float(np.median(errors[-1])),
                    "p99": float(np.quantile(errors[-1], 0.99)),
                }
            )
            print(
                f"{task.name}: mujoco {floor.mean():.3f}, mjwarp {replayed.mean():.3f} of {len(starts)} replays",
                flush=True,
            )
            result = summary(assets.kind, rows, replays, errors)
            if options.output:  # after every task, so that an interrupted run keeps its results
                write(options.output, result)
            bar.update(1)
    print(json.dumps({key: value for key, value in result.items() if key not in ("tasks", "versions")}, indent=2))


if __name__ == "__main__":
    main()
