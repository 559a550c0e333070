"""Time of `Safety.command` for an arm, a quadrotor and a vehicle, with and without active limits.

    python benchmarks/safety_speed.py

Prints a table and writes JSON: microseconds of this thread's processor time. The same commands run several times, and
the smallest time of each counts, to exclude other programs' effects on the caches.
"""

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs from a clone that is not installed

from embodied.contract import Contract, TensorSpec
from embodied.saving.json_text import dumps_rows
from embodied.saving.versions import git_commit
from real_robot.robots.robot import Array, Reading
from real_robot.safety.barrier import Distance, Motion
from real_robot.safety.limits import ElementLimits, Kind, Limits, ObservedRange
from real_robot.safety.safety import Safety

JOINTS = tuple(f"joint{number}" for number in range(1, 8))
DT_S = 0.001


class Still:
    """A robot with constant measurements, except of the key `follows`, which equals the last command."""

    def __init__(self, contract: Contract, observation: dict[str, Array], follows: str = "") -> None:
        self.contract, self._observation, self._follows, self.periods = contract, observation, follows, 0
        self.at_rest = None

    def clock(self) -> float:
        """Time in s."""
        return self.periods * self.contract.control_dt_s

    def read(self) -> Reading:
        """The same measurement with a new stamp."""
        return Reading(self._observation, self.clock(), self.periods)

    def write(self, action: Array) -> None:
        """Measure `action` from now on."""
        if self._follows:
            self._observation = self._observation | {self._follows: action}

    def hold(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def arm() -> tuple[Still, Limits]:
    """Joint positions at 1 kHz, with a Franka's orders of magnitude."""
    spec = TensorSpec((7,), unit="rad", names=JOINTS)
    contract = Contract(
        {"joint_position": spec, "joint_torque": TensorSpec((7,), unit="N m", names=JOINTS)}, spec, DT_S
    )
    each = {
        name: ElementLimits(
            low=-2.8, high=2.8, velocity=2.0, acceleration=10.0, jerk=500.0, measured=f"joint_position.{name}"
        )
        for name in JOINTS
    }
    torque = {f"joint_torque.{name}": ObservedRange(-80.0, 80.0) for name in JOINTS}
    still = {"joint_position": np.zeros(7), "joint_torque": np.zeros(7)}
    return Still(contract, still, follows="joint_position"), Limits(each, torque)


def quadrotor() -> tuple[Still, Limits]:
    """Body rates and thrust at 500 Hz within a geofence and a tilt."""
    names = ("rate_x", "rate_y", "rate_z", "thrust")
    action = TensorSpec((4,), names=names, low=(-6.0, -6.0, -3.0, 0.0), high=(6.0, 6.0, 3.0, 20.0))
    axes = ("x", "y", "z")
    observation = {
        "position": TensorSpec((3,), unit="m", names=axes),
        "velocity": TensorSpec((3,), unit="m/s", names=axes),
        "attitude": TensorSpec((4,), names=("x", "y", "z", "w")),
    }
    fence = {f"position.{axis}": ObservedRange(-5.0, 5.0, f"velocity.{axis}", 10.0, 4.0) for axis in axes}
    commands = {name: ElementLimits(velocity=100.0, rest=9.8 if name == "thrust" else 0.0) for name in names}
    still = {"position": np.zeros(3), "velocity": np.zeros(3), "attitude": np.array([0.0, 0.0, 0.0, 1.0])}
    limits = Limits(commands, fence, attitude="attitude", tilt_rad=1.0)
    return Still(Contract(observation, action, 0.002), still), limits


def vehicle() -> tuple[Still, Limits]:
    """Speed and turn rate at 50 Hz, distance from 360 ranges, some of which are close."""
    action = TensorSpec((2,), names=("speed", "turn_rate"), low=(-0.5, -1.0), high=(1.0, 1.0))
    ranges = TensorSpec((360,), unit="m")
    commands = {
        "speed": ElementLimits(Kind.VELOCITY, acceleration=2.0, jerk=20.0),
        "turn_rate": ElementLimits(Kind.VELOCITY, acceleration=5.0),
    }
    distance = Distance(
        ["speed", "turn_rate"],
        Motion.TURNING,
        ranges="ranges",
        angle_step_rad=math.tau / 360,
        ahead_m=0.2,
        margin_m=0.3,
        acceleration=2.0,
    )
    seen = 0.6 + np.abs(np.sin(np.linspace(0, 9, 360)))
    return Still(Contract({"ranges": ranges}, action, 0.02), {"ranges": seen}), Limits(commands, distance=distance)


def measure(make: Callable[[], tuple[Still, Limits]], wanted: list[Array], runs: int) -> tuple[Array, float]:
    """Microseconds of each command, the minimum over all runs, and the share of changed commands."""
    times, limited = np.full((runs, len(wanted)), np.inf), 0
    gc.disable()
    for run in range(runs):
        robot, limits = make()
        safety = Safety(robot, limits, robot.clock)
        for index, action in enumerate(wanted):
            robot.periods += 1
            reading = robot.read()
            start_ns = time.thread_time_ns()
            verdict = safety.command(action, reading)
            times[run, index] = (time.thread_time_ns() - start_ns) / 1000
            assert verdict.action is not None, verdict.reason
            limited += verdict.limited
    gc.enable()
    return times.min(0), limited / times.size


def main() -> None:
    """Measure three robots with three kinds of commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commands", type=int, default=5_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/safety_speed.json"))
    arguments = parser.parse_args()
    rng, rows = np.random.default_rng(0), []
    for name, make in {"arm, 7 joints": arm, "quadrotor": quadrotor, "vehicle, 360 ranges": vehicle}.items():
        robot, limits = make()
        size = robot.contract.action.shape[-1]
        rest = np.array([limits.commands[element].rest for element in robot.contract.action.names])
        cases = {
            "smooth": lambda index, rest=rest: rest + 0.2 * math.sin(0.002 * index) ** 3,
            "random": lambda index, rest=rest, size=size: rest + rng.uniform(-3, 3, size),
            "steps": lambda index, rest=rest: rest + (2.0 if index // 300 % 2 else -2.0),
        }
        for case, commands in cases.items():
            times, limited = measure(make, [commands(index) for index in range(arguments.commands)], arguments.runs)
            p50, p99, p999 = np.quantile(times, [0.5, 0.99, 0.999])
            rows.append(
                {
                    "robot": name,
                    "commands": case,
                    "limited": limited,
                    "p50_us": p50,
                    "p99_us": p99,
                    "p99.9_us": p999,
                }
            )
            print(f"{name:20} {case:8} limited {limited:4.0%}  p50 {p50:6.1f}  p99 {p99:6.1f}  p99.9 {p999:6.1f} us")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(dumps_rows({"git_commit": git_commit(), "commands": arguments.commands, "rows": rows}))


if __name__ == "__main__":
    main()
