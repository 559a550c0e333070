"""Speed of vehicles and their lidar: control steps and scans per CPU-second of one thread, next to NumPy and torch.

    python benchmarks/vehicle_speed.py [--seconds 0.5] [--runs 5] [--output FILE]

All kinds are measured in one call, alternating in every run. Scans are noisy. In NumPy and torch (float32, batched over
environments) a scan tests every beam against every shape, like a ray caster without culling; a test checks that the
compiled one finds the same ranges. Maps are updated, planned on every fifth time, and read, as in training; torch is
what robots run. A step is all of `env.step`: dynamics in substeps with a contact test each, scan,
observation, reward, and worlds of new episodes; decisions do not count.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.navigation.local_map import LocalMap  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit  # noqa: E402
from sims.vehicle.environment import VehicleEnvironment  # noqa: E402
from sims.vehicle.geometry import Lidar  # noqa: E402
from sims.vehicle.navigate import Navigate  # noqa: E402
from sims.vehicle.planners.pursuit import PurePursuit  # noqa: E402
from sims.vehicle.race import Race  # noqa: E402
from sims.vehicle.simulator import Simulator  # noqa: E402
from sims.vehicle.vehicles import F1TENTH, JACKAL  # noqa: E402

COUNT = 256
DENSE = Lidar(beams=1080, field_rad=math.radians(270.0), range_m=10.0, noise_m=0.02)
"""Lidar of F1TENTH cars."""
TASKS = {"navigate": (Navigate(), JACKAL), "race": (Race(), F1TENTH)}


@dataclass
class Kind:
    """One measured case: `call` makes `steps` steps or scans; `against` is the baseline of the ratio."""

    name: str
    steps: int
    call: Callable[[], object]
    against: str | None = None
    rates: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all kinds, print the table, and write the JSON."""
    options = _options(arguments)
    torch.set_num_threads(1)
    kinds = [*scans("navigate", None), *maps(), *steps("navigate", mapped=True), *scans("race", None), *steps("race")]
    kinds += scans("race", DENSE)
    for _ in range(options.runs):
        for kind in kinds:
            kind.rates.append(rate(kind, options.seconds))
    median = {kind.name: statistics.median(kind.rates) for kind in kinds}
    rows = [
        {"kind": kind.name, "per_core": median[kind.name], "runs": kind.rates}
        | ({"times": median[kind.name] / median[kind.against], "against": kind.against} if kind.against else {})
        for kind in kinds
    ]
    report = {"git_commit": git_commit(), "machine": machine(), "environments": COUNT, "rows": rows}
    sys.stdout.write(table(rows))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(dumps_rows(report))


def driven(name: str, lidar: Lidar | None, mapped: bool = False) -> VehicleEnvironment:
    """Make environments and drive them randomly for some steps."""
    mdp, vehicle = TASKS[name]
    env = VehicleEnvironment(COUNT, mdp=mdp, vehicle=vehicle, lidar=lidar, mapped=mapped)
    env.reset()
    for seed in range(5):
        env.step(commands(env, seed))
    return env


def commands(env: VehicleEnvironment, seed: int) -> torch.Tensor:
    """Random actions [N, 1, 2]."""
    low, high = torch.tensor(env.contract.action.low), torch.tensor(env.contract.action.high)
    return low + (high - low) * torch.rand(COUNT, 1, 2, generator=torch.Generator().manual_seed(seed))


def scans(name: str, lidar: Lidar | None) -> list[Kind]:
    """Kinds of the same scan in C, torch and NumPy."""
    env = driven(name, lidar)
    mdp, lidar, now = env.mdp, env.simulator.lidar, env.now
    arguments = now.state, env.parameters, now.world["circles"], now.world["segments"], env._key, now.steps
    plain = Simulator(mdp.MODEL, lidar, dt_s=mdp.DT_S, substeps=mdp.SUBSTEPS, backend="torch")
    arrays = [part.numpy() for part in (now.state, now.world["circles"], now.world["segments"])]
    angles = lidar.angles().numpy().astype(np.float32)
    title = f"{name}, scan of {lidar.beams} beams, {now.world['segments'].shape[1]} segments"
    small = [part[:32] for part in arguments]  # more pairs do not fit into the cache
    return [
        Kind(f"{title}: C", COUNT, lambda: env.simulator.scan(*arguments), f"{title}: NumPy"),
        Kind(f"{title}: torch", 32, lambda: plain.scan(*small)),
        Kind(f"{title}: NumPy", 32, lambda: numpy_scan(*(part[:32] for part in arrays), angles, lidar)),
    ]


def numpy_scan(
    state: np.ndarray, circles: np.ndarray, segments: np.ndarray, angles: np.ndarray, lidar: Lidar
) -> np.ndarray:
    """Ranges [N, B], testing every beam against every shape."""
    heading = state[:, 2:3] + angles
    dx, dy = np.cos(heading)[..., None], np.sin(heading)[..., None]
    range_limit = np.float32(lidar.range_m)
    cx, cy = (circles[:, None, :, axis] - state[:, None, axis, None] for axis in (0, 1))
    room = circles[:, None, :, 2] ** 2 - (dx * cy - dy * cx) ** 2
    near = dx * cx + dy * cy - np.sqrt(np.maximum(room, 0.0))
    ranges = np.where((room >= 0.0) & (near > 0.0), near, range_limit).min(-1)
    ax, ay = (segments[:, None, :, axis] - state[:, None, axis, None] for axis in (0, 1))
    ex, ey = (segments[:, None, :, 2 + axis] - segments[:, None, :, axis] for axis in (0, 1))
    crossing = dx * ey - dy * ex
    crossing = np.where(np.abs(crossing) < 1e-12, np.float32(1e-12), crossing)
    distance, share = (ax * ey - ay * ex) / crossing, (ax * dy - ay * dx) / crossing
    walls = np.where((distance > 0.0) & (share >= 0.0) & (share <= 1.0), distance, range_limit).min(-1)
    ranges = np.minimum(np.minimum(ranges, walls), range_limit)
    # beams without a hit have no noise
    noise = np.random.default_rng(0).standard_normal(ranges.shape, dtype=np.float32)
    return np.where(ranges < range_limit, ranges + np.float32(lidar.noise_m) * noise, ranges)


def maps() -> list[Kind]:
    """Kinds of a control step of the map that vehicles build from their lidar."""
    env = driven("navigate", None, mapped=True)
    measurement, compiled = env._measured(), env.map
    plain = LocalMap(compiled.angles, compiled.range_m, compiled.dt_s, compiled.lidar_x_m)

    def step(made: LocalMap, memory: torch.Tensor, count: int) -> None:
        for _ in range(compiled.every):  # one of which plans
            made.update(memory, *(part[:count] for part in measurement))
            made.observe(memory)

    title, memory = "navigate, maps and waypoints", env.now.map
    few = memory[:32].clone()
    return [
        Kind(f"{title}: C", COUNT * compiled.every, lambda: step(compiled, memory, COUNT), f"{title}: torch"),
        Kind(f"{title}: torch", 32 * compiled.every, lambda: step(plain, few, 32)),
    ]


def steps(name: str, mapped: bool = False) -> list[Kind]:
    """Kinds of the dynamics with contact only, and of full steps of the task with restarts."""
    env = driven(name, None, mapped)
    now, command = env.now, commands(env, 9)[:, 0]
    arguments = now.state, command, env.parameters, now.world["circles"], now.world["segments"]
    frozen = torch.zeros(COUNT, dtype=torch.bool)
    observation = env.reset()

    def step() -> float:
        nonlocal observation
        start_s = time.process_time()
        actions = pursue(env, observation)
        deciding = time.process_time() - start_s
        transition = env.step(actions)
        observation = env.reset(mask=transition.done) if transition.done.any() else transition.observation
        return deciding

    return [
        Kind(f"{name}, dynamics and contact: C", COUNT, lambda: env.simulator.advance(*arguments, frozen)),
        Kind(f"{name}, env.step() with restarts", COUNT, step),
    ]


def pursue(env: VehicleEnvironment, observation: TensorDict) -> torch.Tensor:
    """Actions [N, 1, 2] that prolong episodes: towards the goal, or along the track."""
    if isinstance(env.mdp, Race):
        return PurePursuit(env.contract, env.vehicle).act(observation).actions
    turn = 1.5 * observation["goal_direction"][:, 1]
    return torch.stack((torch.full_like(turn, 0.6), turn), 1).unsqueeze(1)


def rate(kind: Kind, seconds: float) -> float:
    """Steps per CPU-second, without the excluded time that a call returns."""
    kind.call()
    cpu_s, calls = 0.0, 0
    while cpu_s < seconds:
        start_s = time.process_time()
        excluded_s = kind.call()
        cpu_s += time.process_time() - start_s - (excluded_s if isinstance(excluded_s, float) else 0.0)
        calls += 1
    return kind.steps * calls / cpu_s


def machine() -> dict[str, str | int | float]:
    """Properties of the machine that the figures depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": model,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "load": round(os.getloadavg()[0], 1),
    }


def table(rows: list[dict]) -> str:
    """Thousands of steps per second, and the ratio to NumPy's, or of maps to torch's."""
    text = f"{'thousands per CPU-second':52}{'':>10}{'ratio':>10}\n"
    for row in rows:
        text += f"{row['kind']:52}{row['per_core'] / 1e3:10.1f}{row.get('times', math.nan):10.1f}\n".replace(
            "nan", "  -"
        )
    return text


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="of CPU time per kind and run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "vehicle_speed.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
