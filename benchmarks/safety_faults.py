"""Random faults against `Safety`: no command outside any limit, every stop within its distance, silence afterwards.

    python benchmarks/safety_faults.py --sequences 10000

A sequence is one robot with random limits (1 to 3 elements of any kinds, some bounded on one side) for `PERIODS`
control periods, in which faults of `FAULTS` come one after the other and together. A checker that knows commands and
measurements alone, and nothing of `Safety`, raises `ViolationError` with the seed. Prints and writes JSON: sequences,
seed, how often each fault was injected, and what the robots did.
"""

import argparse
import json
import math
import sys
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs from a clone that is not installed

from embodied.contract import Contract, TensorSpec
from real_robot.robots.robot import Array, Reading
from real_robot.safety.inputs import Command
from real_robot.safety.limits import ElementLimits, Kind, Limits
from real_robot.safety.safety import Safety, State, Verdict

PERIODS = 240
FAULTS = (
    "late measurement", "lost measurement", "NaN measured", "reordered measurement", "late command", "lost command",
    "NaN commanded", "wrong shape", "reordered command", "clock ahead", "clock behind", "clock jumps on",
    "clock jumps back", "paused program", "hung policy", "blocked robot", "take-over", "emergency stop",
)  # fmt: skip
DRIVER_TIMEOUT_S = 0.5
"""Without commands for so long, the robot's own controller ends a velocity."""
MOVES_ALONE = 0.5
"""Share of its fastest velocity with which a robot is moved by somebody else."""


class ViolationError(AssertionError):
    """What `Safety` may never do."""


class World:
    """A robot of random kinds and limits, in a time of its own: it follows commands unless blocked or taken over."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.dt_s = float(rng.choice([0.005, 0.01, 0.02, 0.05]))
        size = int(rng.integers(1, 4))
        names = tuple("abc"[:size])
        self.kinds = [Kind(kind) for kind in rng.choice([kind.value for kind in Kind], size)]
        positions = TensorSpec((size,), unit="m", names=names)
        self.elements = [_element(rng, kind, f"position.{name}") for kind, name in zip(self.kinds, names, strict=True)]
        self.high = np.array([_bound(rng, given, self.dt_s) for given in self.elements])
        self.low = np.array([-bound if rng.random() < 0.7 else -0.0 for bound in self.high])  # some forward only
        positions_are = [kind is Kind.POSITION for kind in self.kinds]
        self.low[positions_are] = -self.high[positions_are]
        action = TensorSpec((size,), unit="m", names=names, low=tuple(self.low), high=tuple(self.high))
        self.contract = Contract({"position": positions}, action, self.dt_s)
        self.at_rest = tuple(math.nan if kind is Kind.POSITION else 0.0 for kind in self.kinds)
        self.limits = Limits(
            dict(zip(names, self.elements, strict=True)), observation_timeout_s=6.5 * self.dt_s,
            command_timeout_s=6.5 * self.dt_s, clock_error_s=2.5 * self.dt_s, following_s=20.0 * self.dt_s,
            recovery_s=8.0 * self.dt_s,
        )  # fmt: skip
        self.position = np.array([rng.uniform(max(given.low, -1.0), min(given.high, 1.0)) for given in self.elements])
        self.commanded = np.where(np.isnan(self.at_rest), self.position, 0.0)
        self.written: Array | None = None
        self.periods, self.since, self.offset_s = 0, 0, 1000.0
        self.blocked = self.taken = False

    def clock(self) -> float:
        """The robot's and the program's time, which may jump."""
        return self.offset_s + self.periods * self.dt_s

    def read(self) -> Reading:
        """The measurement of now."""
        return Reading({"position": self.position.copy()}, self.clock(), self.periods)

    def write(self, action: Array) -> None:
        """Take a command."""
        self.written, self.commanded, self.since = action, self.physical(action), 0

    def hold(self) -> None:
        """Nothing of its own."""

    def close(self) -> None:
        """Nothing."""

    def physical(self, action: Array) -> Array:
        """Positions, and motion per period, of an action."""
        scales = [e.scale * (self.dt_s if e.kind is Kind.VELOCITY else 1.0) for e in self.elements]
        return action * np.array(scales)

    def step(self) -> None:
        """One period passes."""
        self.periods += 1
        self.since += 1
        if self.taken:
            speeds = [min(e.velocity, 1.0) for e in self.elements]
            self.position = self.position + MOVES_ALONE * self.dt_s * np.array(speeds)
        elif not self.blocked:
            for index, kind in enumerate(self.kinds):
                self.position[index] = self._moved(index, kind)

    def _moved(self, index: int, kind: Kind) -> float:
        position, commanded = self.position[index], self.commanded[index]
        if kind is Kind.POSITION:
            return commanded
        longest = 1 if kind is Kind.DELTA else DRIVER_TIMEOUT_S / self.dt_s
        return position + commanded * (self.since <= longest)


def _element(rng: np.random.Generator, kind: Kind, measured: str) -> ElementLimits:
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
    if not position and rng.random() < 0.3:
        low, high = -math.inf, math.inf
    return ElementLimits(
        kind, scale, low, high, velocity, acceleration, jerk, measured, 0.0 if low < 0.0 < high else low, following
    )


def _bound(rng: np.random.Generator, given: ElementLimits, dt_s: float) -> float:
    """What the contract allows at most, in its own unit: less or more than the limits."""
    if given.kind is Kind.POSITION:
        return 9.0 / min(given.scale, 1.0)
    unit = given.scale / dt_s if given.kind is Kind.DELTA else given.scale
    return given.velocity / unit * math.exp(rng.uniform(-0.5, 1.0))


class Track:
    """One element as its commands show it: p, w, b in periods, from rest to rest."""

    def __init__(self, given: ElementLimits, dt_s: float, start: float, command: tuple[float, float]) -> None:
        self.given, self.position = given, given.kind is Kind.POSITION
        self.fastest = given.velocity * dt_s
        span = min(2.0 * self.fastest, math.inf)
        self.most_b = min(given.acceleration * dt_s**2, span)
        self.most_c = min(given.jerk * dt_s**3, 2.0 * self.most_b)
        self.low, self.high = (given.low, given.high) if self.position else command
        self.p, self.w, self.b = start, 0.0, 0.0
        self.past = deque([start])

    @property
    def still(self) -> bool:
        """Whether it may begin a new motion."""
        small = 2e-3 * min(self.most_b, self.most_c)
        return abs(self.w) <= small and abs(self.b) <= small

    def rest(self, position: float) -> None:
        """Begin at rest."""
        self.p, self.w, self.b = position, 0.0, 0.0
        self.past.clear()
        self.past.append(position)

    def take(self, value: float, kept: int) -> str:
        """Follow a command; returns which limit it is outside of."""
        w = value - self.p if self.position else value
        b = w - self.w
        c = b - self.b
        rounding = 1e-12 * max(1.0, abs(value))
        broken = "range" if not self.low - rounding <= value <= self.high + rounding else ""
        over = (
            ("velocity", w, self.fastest, 1), ("acceleration", b, self.most_b, 2), ("jerk", c, self.most_c, 4)
        )  # fmt: skip
        broken = broken or next(
            (f"{name} of {size:.6g}, limit {most:.6g}" for name, size, most, times in over
             if abs(size) > most * (1 + 1e-9) + times * rounding), "",
        )  # fmt: skip
        self.p, self.w, self.b = (value if self.position else self.p + w), w, b
        self.past.append(self.p)
        while len(self.past) > kept:
            self.past.popleft()
        return broken

    def stop(self) -> tuple[float, float]:
        """Distance and periods that the fastest stop needs at most, counted in whole periods."""
        ramp = math.ceil(abs(self.b) / self.most_c)
        peak = abs(self.w) + 0.5 * abs(self.b) * (ramp + 1)  # first the acceleration has to cease
        braking = peak / self.most_b + self.most_b / self.most_c
        return peak * (ramp + 0.5 * braking + 3.0), ramp + 2.0 * braking + 6.0


class Checker:
    """Follows what reaches the robot."""

    def __init__(self, world: World) -> None:
        self.world, self.limits = world, world.limits
        edges = zip(world.physical(world.low), world.physical(world.high), strict=True)
        self.tracks = [
            Track(given, world.dt_s, start if given.measured else given.rest, edge)
            for given, start, edge in zip(world.elements, world.position, edges, strict=True)
        ]
        self.state, self.count = State.READY, Counter[str]()
        self.good, self.held = 10**9, 0  # periods
        self.silent = False
        self.now_s = self.written_s = -math.inf
        self.bounds: list[tuple[float, float, float]] = []  # of p, or of w summed up; periods
        self.sums = [0.0] * len(self.tracks)

    def check(self, verdict: Verdict, reading: Reading | None, command: Command | None = None) -> None:
        """One call has ended."""
        now_s = self.world.clock()
        self.written_s += min(now_s - self.now_s, 0.0)  # the clock may have gone back
        self.now_s, before, self.state = now_s, self.state, verdict.state
        if command is not None and before is not State.READY:
            self.good = 0 if self._bad(command, reading) else self.good + 1
        if verdict.state is State.ACTIVE:
            if before is not State.ACTIVE:
                self.count["begun"] += 1
            self._active(verdict, reading, before)
        else:
            self._hold(verdict, reading, before)
        if verdict.action is not None:
            self.written_s = self.now_s

    def _active(self, verdict: Verdict, reading: Reading | None, before: State) -> None:
        if before is State.STOPPED:
            raise ViolationError("an emergency stop was left without a reset")
        needed = round(self.limits.recovery_s / self.world.dt_s)
        if before is State.HOLDING and self.good < needed:
            raise ViolationError(f"active after {self.good} good periods, expected {needed}")
        if verdict.action is None:
            return
        assert reading is not None
        measured = reading.observation["position"]
        values = self.world.physical(verdict.action)
        gap = self.now_s - self.written_s > self.limits.command_timeout_s
        begins = before is not State.ACTIVE and all(track.still for track in self.tracks)
        for track, at in zip(self.tracks, measured, strict=True):
            if begins or gap:
                track.rest(min(max(at, track.low), track.high) if track.position and track.given.measured else track.p)
            elif (away := self._away(track, at)) > 0.0:
                raise ViolationError(f"commanded on, {away:.4g} from where the robot is")
        self._take(values)

    def _hold(self, verdict: Verdict, reading: Reading | None, before: State) -> None:
        if before is State.ACTIVE or (before is State.HOLDING and verdict.state is State.STOPPED):
            self._begin_stop(reading, "commanded to" in verdict.reason)
        if self.now_s - self.written_s > 2.0 * self.limits.command_timeout_s:
            self.held, self.silent = (
                0,
                False,
            )  # it stands still by its own time-out, and may get one command that says so
            for track in self.tracks:
                track.rest(track.p)
        self.held += 1
        if verdict.action is None:
            self.silent = self.silent or self.now_s - self.written_s > 0.999 * self.world.dt_s
            return
        if self.silent:
            raise ViolationError("commanded after the stop")
        values = self.world.physical(verdict.action)
        self.count["stop commands"] += 1
        self._take(values)
        for index, (track, (low, high, periods)) in enumerate(zip(self.tracks, self.bounds, strict=True)):
            self.sums[index] = track.p if track.position else self.sums[index] + track.w
            rounding = 1e-9 + 1e-9 * abs(self.sums[index])
            if not low - rounding <= self.sums[index] <= high + rounding:
                raise ViolationError(f"stopped at {self.sums[index]:.6g}, certified {low:.6g} to {high:.6g}")
            if self.held > periods:
                raise ViolationError(f"not silent {self.held} periods after the last command, {periods:.0f} allowed")

    def _begin_stop(self, reading: Reading | None, returns: bool) -> None:
        """`returns`: elements that did not follow are brought back to where the robot is."""
        self.count["stops"] += 1
        self.held, self.silent, self.bounds = 0, False, []
        self.sums = [track.p if track.position else 0.0 for track in self.tracks]
        longest = 0.0
        for index, track in enumerate(self.tracks):
            distance, periods = track.stop()
            low, high = self.sums[index] - distance, self.sums[index] + distance
            if returns and reading is not None and track.position and track.given.measured:
                back = min(max(reading.observation["position"][index], track.low), track.high)
                low, high = min(low, back), max(high, back)
                periods += 3.0 * (periods + abs(track.p - back) / track.fastest)
            self.bounds.append((low, high, 0.0))
            longest = max(longest, periods)
        # commands that come too soon are not written, a paused program writes nothing: half of the periods may be such
        self.bounds = [(low, high, 2.0 * longest + 30.0) for low, high, _ in self.bounds]

    def _away(self, track: Track, measured: float) -> float:
        """How far a measured position is outside of what was commanded lately, and may not be."""
        if not (track.position and track.given.measured) or not track.past:
            return 0.0
        allowed = 0.03 if track.given.following is None else track.given.following
        away = max(min(track.past) - measured, measured - max(track.past))
        return away if away > allowed + 1e-9 else 0.0

    def _bad(self, command: Command, reading: Reading | None) -> bool:
        """Whether an input is bad in a way that does not depend on the ones before."""
        now_s, limits = self.world.clock(), self.limits
        if reading is None or command.stamp_s is None or len(command.action) != len(self.tracks):
            return True
        ages = now_s - reading.stamp_s, now_s - command.stamp_s
        late = ages[0] > limits.observation_timeout_s + 1e-9 or ages[1] > limits.command_timeout_s + 1e-9
        values = np.concatenate((command.action, reading.observation["position"]))
        return late or min(ages) < -limits.clock_error_s - 1e-9 or not np.isfinite(values).all()

    def _take(self, values: Array) -> None:
        kept = round(self.limits.following_s / self.world.dt_s) + 2
        for name, track, value in zip("abc", self.tracks, values, strict=False):
            if broken := track.take(float(value), kept):
                raise ViolationError(f"{name}: {broken}")
        self.count["commands"] += 1


class Sequence:
    """One robot, its faults and its checker."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.world = World(self.rng)
        self.safety = Safety(self.world, self.world.limits, self.world.clock)
        self.checker = Checker(self.world)
        self.faults: dict[str, int] = {}  # and for how many more periods
        self.readings: deque[Reading] = deque(maxlen=20)
        self.target = self.rng.normal(size=len(self.world.kinds))
        self.injected = Counter[str]()

    def run(self) -> None:
        """Run it.

        Raises:
            ViolationError: for anything that safety may never do.
        """
        for _ in range(PERIODS):
            self.world.step()
            self._begin_faults()
            self.readings.append(self.world.read())
            self._period()
            self.faults = {fault: left - 1 for fault, left in self.faults.items() if left > 1}
            self.world.blocked, self.world.taken = "blocked robot" in self.faults, "take-over" in self.faults

    def _begin_faults(self) -> None:
        if self.rng.random() > 0.06:
            return
        fault = str(self.rng.choice(FAULTS))
        self.faults[fault] = int(self.rng.integers(1, 40 if fault in ("blocked robot", "take-over") else 12))
        self.injected[fault] += 1
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
            self.checker.state = self.safety.state
            self.checker.good = 10**9
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
        most = np.where(np.isnan(world.at_rest), 1.0, world.high)
        action = (self.target + 0.02 * rng.normal(size=len(most))) * most
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
        if "NaN measured" in faults:
            reading = replace(newest, observation={"position": newest.observation["position"] * math.nan})
        skew_s = 4.0 * self.world.dt_s * (("clock ahead" in faults) - ("clock behind" in faults))
        return replace(reading, stamp_s=reading.stamp_s + skew_s) if skew_s else reading


def run(sequences: int, seed: int) -> dict[str, object]:
    """Run sequences with the seeds from `seed` on; returns how often what was injected and done.

    Raises:
        ViolationError: with the seed of the sequence.
    """
    injected, done = Counter[str](), Counter[str]()
    for number in range(seed, seed + sequences):
        sequence = Sequence(number)
        try:
            sequence.run()
        except ViolationError as error:
            raise ViolationError(f"sequence {number}, period {sequence.world.periods}: {error}") from error
        injected.update(sequence.injected)
        done.update(sequence.checker.count)
    return {
        "sequences": sequences, "first_seed": seed, "periods": sequences * PERIODS,
        "injected": {fault: injected[fault] for fault in FAULTS}, "done": dict(sorted(done.items())), "violations": 0,
    }  # fmt: skip


def main() -> None:
    """Run, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/safety_faults.json"))
    arguments = parser.parse_args()
    found = run(arguments.sequences, arguments.seed)
    print(json.dumps(found, indent=2))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
