"""Random faults against `Safety`: commands and robots stay within limits, stops within their distance, then silence.

    python benchmarks/safety_faults.py --sequences 10000

A sequence is one robot with random limits (1 to 3 elements of any kinds, some bounded on one side) for `PERIODS`
control periods, in which faults of `FAULTS` occur one after the other and together. Half of the robots execute commands
at once; the others lag by up to 0.3 s, as a delay or as a lag of first order, and positions sag. A checker that uses
only commands, measurements and the robot, and is independent of `Safety`, raises `ViolationError`, which ends a
sequence. After a false measurement of a position to which somebody could have moved the robot since the last
measurement, the true position is unknowable: such sequences are counted (`deceived`), and from then on only their
commands are checked. Prints and writes JSON: sequences, seed, violations with their seeds, number of injections of each
fault, actions of the robots, the largest departure from the walls, and for each fault the consequences in the second
after it: commands, motion and the state at its end. Fails if there is a violation.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs from a clone that is not installed

from benchmarks.safety_checker import Checker, ViolationError
from embodied.contract import Contract, TensorSpec
from embodied.runtime.progress import Progress
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import dumps_rows
from embodied.saving.versions import git_commit
from real_robot.robots.robot import Array, Reading
from real_robot.safety.inputs import Command
from real_robot.safety.limits import ElementLimits, Kind, Limits
from real_robot.safety.safety import Safety, State, Verdict

PERIODS = 240
FAULTS = (
    "late measurement",
    "lost measurement",
    "NaN measured",
    "reordered measurement",
    "late command",
    "lost command",
    "NaN commanded",
    "wrong shape",
    "reordered command",
    "clock ahead",
    "clock behind",
    "clock jumps on",
    "clock jumps back",
    "paused program",
    "hung policy",
    "blocked robot",
    "take-over",
    "emergency stop",
    "zeros measured",
    "-pi measured",
    "offset measured",
)
WRONG = ("zeros measured", "-pi measured", "offset measured")
"""Faults of false measurements, once or for some time."""
LONG = ("blocked robot", "take-over", "paused program", "offset measured", "zeros measured")
"""Faults that may last longer than others."""
LAG_S = 0.3
AFTER_S = 1.0
"""Time for which the consequences of a fault are recorded."""
FIRST_ORDER = 9.0
"""Time constants of a lag of first order after which it counts as over: a ten-thousandth remains."""
MOVES_ALONE = 0.5
"""Share of its largest velocity with which somebody else moves a robot."""


class World:
    """A robot of random kinds and limits, in simulated time: it follows commands unless blocked or taken over.

    It may follow late: by `late` periods, or with a lag of first order that is over after the same time. Measured
    positions of POSITION elements sag by `sag`.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.dt_s = float(rng.choice([0.005, 0.01, 0.02, 0.05]))
        size = int(rng.integers(1, 4))
        names = tuple("abc"[:size])
        self.kinds = [Kind(kind) for kind in rng.choice([kind.value for kind in Kind], size)]
        positions = TensorSpec((size,), unit="m", names=names)
        self.elements = [
            element_limits(rng, kind, f"position.{name}") for kind, name in zip(self.kinds, names, strict=True)
        ]
        self.high = np.array([_bound(rng, given, self.dt_s) for given in self.elements])
        self.low = np.array([-bound if rng.random() < 0.7 else -0.0 for bound in self.high])  # some forward only
        positions_are = [kind is Kind.POSITION for kind in self.kinds]
        self.low[positions_are] = -self.high[positions_are]
        action = TensorSpec((size,), unit="m", names=names, low=tuple(self.low), high=tuple(self.high))
        self.contract = Contract({"position": positions}, action, self.dt_s)
        self.at_rest = tuple(math.nan if kind is Kind.POSITION else 0.0 for kind in self.kinds)
        # time for which the robot's driver continues a velocity, if not for ever
        self.stops_after_s = float(rng.uniform(0.2, 0.6)) if rng.random() < 0.5 else None
        lags = rng.random() < 0.5
        self.late = int(rng.uniform(0.0, LAG_S) / self.dt_s) if lags else 0
        self.first_order = bool(rng.random() < 0.5)
        self.pending: deque[Array] = deque(maxlen=self.late + 1)
        self.rate = np.zeros(size)  # motion per period, of first order
        self.limits = Limits(
            dict(zip(names, self.elements, strict=True)),
            observation_timeout_s=6.5 * self.dt_s,
            command_timeout_s=6.5 * self.dt_s,
            clock_error_s=2.5 * self.dt_s,
            following_s=20.0 * self.dt_s,
            recovery_s=8.0 * self.dt_s,
            lag_s=self.late * self.dt_s,
        )
        self.following = np.array([0.03 if given.following is None else given.following for given in self.elements])
        positions = np.array(positions_are) & np.array([bool(given.measured) for given in self.elements])
        self.sag = np.where(positions & lags, rng.uniform(-0.6, 0.6, size) * self.following, 0.0)
        self.position = np.array([rng.uniform(max(given.low, -1.0), min(given.high, 1.0)) for given in self.elements])
        self.commanded = np.where(np.isnan(self.at_rest), self.position, 0.0)
        self.pending.append(self.commanded)
        self.written: Array | None = None
        self.periods, self.since, self.offset_s = 0, 0, 1000.0
        self.blocked = self.taken = False

    def clock(self) -> float:
        """The robot's and the program's time, which may jump."""
        return self.offset_s + self.periods * self.dt_s

    def steady(self) -> float:
        """Time that does not jump."""
        return self.periods * self.dt_s

    def read(self) -> Reading:
        """The current measurement."""
        return Reading({"position": self.position + self.sag}, self.clock(), self.periods)

    def write(self, action: Array) -> None:
        """Store a command."""
        self.written, self.commanded, self.since = action, self.physical(action), 0

    def hold(self) -> None:
        """No-op: the robot has no behaviour of its own."""

    def close(self) -> None:
        """No-op."""

    def physical(self, action: Array) -> Array:
        """Positions, and motion per period, of an action."""
        scales = [e.scale * (self.dt_s if e.kind is Kind.VELOCITY else 1.0) for e in self.elements]
        return action * np.array(scales)

    def step(self) -> None:
        """Simulate one period."""
        self.periods += 1
        self.since += 1
        driven = self._driven()
        self.pending.append(driven)
        if self.taken:
            speeds = [min(e.velocity, 1.0) for e in self.elements]
            self.position = self.position + MOVES_ALONE * self.dt_s * np.array(speeds)
        elif not self.blocked:
            self._follow(self.pending[0])

    def _driven(self) -> Array:
        """Positions, and motion per period, that the driver commands to the motors."""
        values = self.commanded.copy()
        for index, kind in enumerate(self.kinds):
            stopped = self.stops_after_s is not None and self.since * self.dt_s > self.stops_after_s + 1e-9
            if (kind is Kind.DELTA and self.since > 1) or (kind is Kind.VELOCITY and stopped):
                values[index] = 0.0
        return values

    def _follow(self, late: Array) -> None:
        share = 1.0 - math.exp(-FIRST_ORDER / self.late) if self.late and self.first_order else 1.0
        commanded = self.pending[-1] if self.first_order else late
        for index, kind in enumerate(self.kinds):
            if kind is Kind.POSITION:
                # a robot that was blocked catches up as fast as it can
                fastest = self.elements[index].velocity * self.dt_s + self.following[index]
                self.position[index] += min(max(share * (commanded[index] - self.position[index]), -fastest), fastest)
            else:
                self.rate[index] += share * (commanded[index] - self.rate[index])
                self.position[index] += self.rate[index]


def element_limits(rng: np.random.Generator, kind: Kind, measured: str) -> ElementLimits:
    """Random limits of an element whose position is observed as `measured`."""
    velocity = math.exp(rng.uniform(math.log(0.05), math.log(5.0)))
    acceleration = velocity * math.exp(rng.uniform(0.0, 4.0)) if rng.random() < 0.8 else math.inf
    jerk = acceleration * math.exp(rng.uniform(1.0, 5.0)) if rng.random() < 0.7 else math.inf
    low = -math.exp(rng.uniform(-3.0, 1.0)) if rng.random() < 0.8 else -math.inf
    high = math.exp(rng.uniform(-3.0, 1.0)) if rng.random() < 0.8 else math.inf
    position = kind is Kind.POSITION
    if position and rng.random() < 0.2:
        measured = ""  # a steering angle
    following = math.exp(rng.uniform(-4.0, -1.0)) if position and measured and rng.random() < 0.5 else None
    scale = float(rng.choice([1.0, 0.05, 3.0]))
    if not position and (not measured or rng.random() < 0.3):
        low, high = -math.inf, math.inf
    return ElementLimits(
        kind, scale, low, high, velocity, acceleration, jerk, measured, 0.0 if low < 0.0 < high else low, following
    )


def _bound(rng: np.random.Generator, given: ElementLimits, dt_s: float) -> float:
    """Bound in the contract, in its own unit: less or more than the limits."""
    if given.kind is Kind.POSITION:
        return 9.0 / min(given.scale, 1.0)
    unit = given.scale / dt_s if given.kind is Kind.DELTA else given.scale
    return given.velocity / unit * math.exp(rng.uniform(-0.5, 1.0))


class Aftermath:
    """Behaviour of a robot in the second after the beginning of a fault."""

    def __init__(self, fault: str, world: World) -> None:
        self.fault, self.left = fault, round(AFTER_S / world.dt_s)
        self.start = world.position.copy()
        self.commands, self.moved, self.state = 0, 0.0, ""

    def follow(self, sequence: Sequence) -> None:
        """Record one period."""
        if self.left <= 0:
            return
        world = sequence.world
        self.left -= 1
        self.commands += world.written is not None
        if not (world.taken or world.blocked):
            self.moved = max(self.moved, float(np.abs(world.position - self.start).max()))
        self.state = sequence.safety.state.value


class Sequence:
    """One robot, its faults and its checker."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.world = World(self.rng)
        self.safety = Safety(self.world, self.world.limits, self.world.clock, self.world.steady)
        self.checker = Checker(self.world)
        self.faults: dict[str, int] = {}  # fault -> number of remaining periods
        self.readings: deque[Reading] = deque(maxlen=20)
        self.target = self.rng.normal(size=len(self.world.kinds))
        self.injected = Counter[str]()
        self.offset = float(self.rng.choice([-1.0, 1.0]) * self.rng.uniform(0.3, 2.0))
        self.aftermath: list[Aftermath] = []

    def run(self) -> None:
        """Run the sequence.

        Raises:
            ViolationError: for a violation of a property that safety guarantees.
        """
        for _ in range(PERIODS):
            self.world.step()
            self.checker.walls("paused program" in self.faults)
            self._begin_faults()
            self.readings.append(self.world.read())
            self._period()
            for each in self.aftermath:
                each.follow(self)
            self.faults = {fault: remaining - 1 for fault, remaining in self.faults.items() if remaining > 1}
            self.world.blocked, self.world.taken = "blocked robot" in self.faults, "take-over" in self.faults

    def _begin_faults(self) -> None:
        if self.rng.random() > 0.06:
            return
        fault = str(self.rng.choice(FAULTS))
        self.faults[fault] = int(self.rng.integers(1, 40 if fault in LONG else 12))
        self.injected[fault] += 1
        self.aftermath.append(Aftermath(fault, self.world))
        if fault.startswith("clock jumps"):
            self.world.offset_s += float(self.rng.exponential(2.0)) * (1.0 if fault.endswith("on") else -1.0)
        if fault == "emergency stop":
            self.world.written = None
            self.safety.trip("button")
            self.checker.check(Verdict(self.safety.state, self.world.written, ""), None)

    def _period(self) -> None:
        world = self.world
        world.written = None
        if "paused program" in self.faults:
            return
        if self.safety.state is State.STOPPED and self.rng.random() < 0.05:
            self.safety.reset()
            self.checker.reset(self.safety.state)
        if "hung policy" in self.faults:
            self.safety.watch()
            self.checker.check(Verdict(self.safety.state, world.written, ""), None)
            return
        command, reading = self._command(), self._reading()
        verdict = self.safety.command(command, reading)
        if verdict.action is not world.written:
            raise ViolationError(f"the verdict says {verdict.action}, the robot got {world.written}")
        self.checker.check(verdict, reading, command)

    def _command(self) -> Command | None:
        rng, world = self.rng, self.world
        if "lost command" in self.faults:
            return None
        if rng.random() < 0.1:
            self.target = rng.normal(size=len(world.kinds)) * rng.choice([0.1, 1.0, 1e3])
        largest = np.where(np.isnan(world.at_rest), 1.0, world.high)
        action = (self.target + 0.02 * rng.normal(size=len(largest))) * largest
        if "NaN commanded" in self.faults:
            action[-1] = rng.choice([math.nan, math.inf])
        if "wrong shape" in self.faults:
            action = np.append(action, 0.0)
        late = 8 if "late command" in self.faults else 3 if "reordered command" in self.faults else 0
        return Command(action, world.clock() - late * world.dt_s)

    def _reading(self) -> Reading | None:
        faults, newest = self.faults, self.readings[-1]
        late = int(self.rng.integers(1, 7)) if "late measurement" in faults else 0
        late = int(self.rng.integers(0, 4)) if "reordered measurement" in faults else late
        if "lost measurement" in faults:
            late = min(len(self.readings), 12) - faults["lost measurement"]
        reading = self.readings[max(len(self.readings) - 1 - max(late, 0), 0)]
        wrong = next((fault for fault in WRONG if fault in faults), "")
        self.checker.lied = wrong
        if wrong:
            lies = {"zeros measured": 0.0, "-pi measured": -math.pi, "offset measured": self.offset}
            positions = newest.observation["position"] * (wrong == "offset measured") + lies[wrong]
            reading = replace(newest, observation={"position": positions})
        if "NaN measured" in faults:
            reading = replace(newest, observation={"position": newest.observation["position"] * math.nan})
        skew_s = 4.0 * self.world.dt_s * (("clock ahead" in faults) - ("clock behind" in faults))
        return replace(reading, stamp_s=reading.stamp_s + skew_s) if skew_s else reading


def run(sequences: int, seed: int) -> dict[str, object]:
    """Run sequences with the seeds from `seed` on; returns the violations, and counts of injections and actions."""
    injected, actions = Counter[str](), Counter[str]()
    aftermaths: dict[str, list[Aftermath]] = {fault: [] for fault in FAULTS}
    departure, deceived = 0.0, 0
    violations: list[str] = []
    with Progress("faults", sequences, "sequence") as bar:
        for number in range(seed, seed + sequences):
            sequence = Sequence(number)
            try:
                sequence.run()
            except ViolationError as error:
                violations.append(f"sequence {number}, period {sequence.world.periods}: {error}")
            injected.update(sequence.injected)
            actions.update(sequence.checker.count)
            departure = max(departure, sequence.checker.departure)
            deceived += sequence.checker.deceived
            for each in sequence.aftermath:
                aftermaths[each.fault].append(each)
            bar.update()
    return {
        "git_commit": git_commit(),
        "sequences": sequences,
        "first_seed": seed,
        "periods": sequences * PERIODS,
        "violations": violations,
        "deceived": deceived,
        "largest_departure_from_walls": departure,
        "injected": {fault: injected[fault] for fault in FAULTS},
        "done": dict(sorted(actions.items())),
        "second_after": {name: second(each) for name, each in aftermaths.items()},
    }


def second(aftermath: list[Aftermath]) -> dict[str, object]:
    """Means and extremes over the seconds after one kind of fault."""
    if not aftermath:
        return {}
    states = Counter(each.state for each in aftermath)
    return {
        "faults": len(aftermath),
        "commands": float(np.mean([each.commands for each in aftermath])),
        "median_motion": float(np.median([each.moved for each in aftermath])),
        "largest_motion": max(each.moved for each in aftermath),
        "states_at_its_end": {name: count / len(aftermath) for name, count in sorted(states.items())},
    }


def main() -> None:
    """Run the sequences, print the results, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/safety_faults.json"))
    arguments = parser.parse_args()
    results = run(arguments.sequences, arguments.seed)
    print(json.dumps(results, indent=2))
    with complete_or_absent(arguments.json) as temporary:
        temporary.write_text(dumps_rows(results))
    sys.exit(1 if results["violations"] else 0)


if __name__ == "__main__":
    main()
