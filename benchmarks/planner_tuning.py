"""Tune a planner of vehicles or racing quadrotors on training worlds: planner_tuning.py PLANNER [--settings 16].

A random search with a fixed seed: PLANNER's current settings and random ones from RANGES drive some training worlds,
then the KEPT best of them drive others (`--worlds 32 64`: as many in each round). The cost is the mean time of an
episode (race: of a lap); failures count as FAILED_S, or as COLLIDED_S after a collision. Prints every setting and
writes nothing: copy the best one into the planner's defaults by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from embodied.evaluation.evaluation import EvaluationResult, evaluate
from embodied.navigation.dynamic_window import DynamicWindow, Weights
from embodied.policy import Policy
from embodied.task import Task
from sims.quadrotor.physics.airframes import RACER_5_INCH
from sims.quadrotor.planners import raceline as quadrotor
from sims.quadrotor.task import RaceTask as QuadrotorRaceTask
from sims.vehicle.mapping import drive_of
from sims.vehicle.planners.gap import FollowTheGap, GapNumbers
from sims.vehicle.planners.pursuit import Numbers, PurePursuit
from sims.vehicle.planners.raceline import Raceline, RacelineNumbers
from sims.vehicle.task import NavigateTask, RaceTask, VehicleTask

RACE = QuadrotorRaceTask(airframe="racer_5_inch", step_limit=2000)
KEPT = 4
"""Number of settings in the second round, besides the current one."""
FAILED_S = 60.0
"""Cost of a failure, s: a percentage point of success equals half a second, and laps take ten seconds."""
COLLIDED_S = {"time_s": 180.0, "lap_time_s": 60.0}
"""Cost of a collision by timed metric, s: more than a late arrival; in a race the same, over three laps."""
RANGES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "DWA": {
        "horizon_s": (0.8, 3.0),
        "clearance_m": (0.2, 0.6),
        "free_m": (0.4, 2.0),
        "goal": (0.3, 2.0),
        "heading": (0.03, 1.0),
        "clearance": (0.2, 2.0),
        "speed": (0.1, 2.0),
        "margin_m": (0.02, 0.12),
        "turn_m": (0.01, 0.1),
        "window_s": (0.15, 0.6),
    },
    "pure pursuit": {
        "ahead_m": (0.4, 1.5),
        "ahead_s": (0.02, 0.3),
        "lateral_m_s2": (2.5, 7.0),
        "braking_m_s2": (1.5, 7.0),
    },
    "follow the gap": {
        "margin_m": (0.03, 0.25),
        "share": (0.2, 0.8),
        "aim_m": (0.4, 2.0),
        "lateral_m_s2": (2.5, 7.0),
        "braking_m_s2": (2.0, 7.0),
        "stop_m": (0.3, 1.5),
    },
    "raceline": {
        "margin_m": (0.22, 0.36),
        "lateral_m_s2": (5.2, 7.0),
        "driving_m_s2": (3.5, 6.5),
        "braking_m_s2": (4.5, 8.0),
        "join": (1.0, 4.0),
        "early_s": (0.05, 0.2),
        "pursuit.ahead_m": (0.25, 0.8),
        "pursuit.ahead_s": (0.1, 0.25),
    },
    "quadrotor raceline": {
        "limits.highest": (0.8, 0.95),
        "limits.opening": (0.25, 0.65),
        "place_1_s2": (15.0, 90.0),
        "speed_1_s": (4.0, 16.0),
        "along_1_s": (3.0, 12.0),
        "tilt_1_s2": (200.0, 900.0),
        "rate_1_s": (20.0, 70.0),
        "yaw_1_s": (2.0, 15.0),
        "lead_s": (0.008, 0.03),
        "late_s": (0.001, 0.01),
    },
}
"""Ranges for random settings, uniform in the logarithm."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Search for settings and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("planner", choices=RANGES)
    parser.add_argument("--settings", type=int, default=16)
    parser.add_argument("--worlds", nargs=2, type=int, default=(32, 64), help="worlds in each of the two rounds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tasks = {"DWA": NavigateTask(guard=False), "quadrotor raceline": RACE}
    task = tasks.get(args.planner, RaceTask())
    default, build = planner(args.planner, task)
    rng = np.random.default_rng(args.seed)
    drawn_ones = [drawn(RANGES[args.planner], rng) for _ in range(args.settings)]
    first = 0
    for worlds in args.worlds:
        costs = [drive(task, build(changed(default, each)), each, first, worlds) for each in [{}, *drawn_ones]][1:]
        drawn_ones = [drawn_ones[index] for index in np.argsort(costs)[:KEPT]]
        first += worlds


def planner(name: str, task: Task) -> tuple[Any, Callable[[Any], Policy]]:
    """Current settings of the planner `name`, and a function that builds it from other settings."""
    contract = task.contract(task.distributions[0])
    if name == "quadrotor raceline":
        return quadrotor.Numbers(), partial(quadrotor.Raceline, contract, RACER_5_INCH)
    vehicle, lidar, mdp = cast(VehicleTask, task).driven
    kinds: dict[str, tuple[Any, Callable[[Any], Policy]]] = {
        "DWA": (Weights(), lambda numbers: DynamicWindow(contract, drive_of(vehicle, lidar), numbers)),
        "pure pursuit": (Numbers(), lambda numbers: PurePursuit(contract, vehicle, numbers)),
        "follow the gap": (GapNumbers(), lambda numbers: FollowTheGap(contract, vehicle, lidar, numbers)),
        "raceline": (RacelineNumbers(), lambda numbers: Raceline(contract, vehicle, mdp, numbers)),
    }
    return kinds[name]


def drawn(ranges: Mapping[str, tuple[float, float]], rng: np.random.Generator) -> dict[str, float]:
    """Draw a random setting, rounded to three digits."""
    return {name: float(f"{np.exp(rng.uniform(*np.log(pair))):.3g}") for name, pair in ranges.items()}


def changed(numbers: Any, setting: Mapping[str, float]) -> Any:  # noqa: ANN401 - any planner's dataclass
    """Copy of `numbers` with the values of `setting`; "a.b" is the field b of its dataclass a."""
    for name, value in setting.items():
        inner, _, last = name.rpartition(".")
        change = replace(getattr(numbers, inner), **{last: value}) if inner else value
        numbers = replace(numbers, **{inner or last: change})
    return numbers


def drive(task: Task, policy: Policy, setting: Mapping[str, float], first: int, worlds: int) -> float:
    """Cost of the setting in `worlds` training worlds from `first` on, s; also printed."""
    env = task.environment(min(worlds, 100), task.distributions[0], "train")
    result = evaluate(env, policy, starts_per_task=worlds, first_start=first)
    spent, row = cost(result), result.summary()
    time = "time_s" if "time_s" in row else "lap_time_s"
    line = f"{spent:6.2f}  {row['success']:.1%} {row.get('collision', 0.0):.1%} {row[time] or 0.0:6.2f} s  {worlds}"
    sys.stdout.write(f"{line}  {dict(setting)}\n")
    sys.stdout.flush()
    return spent


def cost(found: EvaluationResult) -> float:
    """Mean time of an episode or a lap, with failures counted as FAILED_S or COLLIDED_S."""
    timed = "time_s" if "time_s" in found.metrics else "lap_time_s"
    collided = found.metrics.get("collision", torch.zeros(()))  # quadrotors fail alike
    failed = torch.where(collided > 0.0, COLLIDED_S[timed], FAILED_S)
    return float(torch.where(found.success, found.metrics[timed], failed).mean())


if __name__ == "__main__":
    main()
