"""Random faults against the nodes of every row of the robots' registry: no message outside limits or modes.

    .venv-ros/bin/python benchmarks/safety_faults_rows.py --sequences 10000

The real safety_node with the row's codecs runs in one process and in simulated time (`row_network`), between a policy
and a robot that are classes (`row_robots`; PX4 is the tests' state machine of its commander). A sequence is one row
with random limits for `PERIODS` control periods, in which faults of `FAULTS` occur one after the other and together.
`row_checker` raises `ViolationError`, which ends a sequence. Prints and writes JSON: sequences, seed, violations with
their seeds, number of injections of each fault, and actions of the robots of each row. Fails if there is a violation.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from dataclasses import replace
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs from a clone that is not installed

from benchmarks.row_checker import RowChecker, StoppedByCommands, StoppedByItself
from benchmarks.row_known import Known
from benchmarks.row_network import TROUBLES, Hosted, Network, hosted
from benchmarks.row_robots import Px4, Robot
from benchmarks.safety_checker import ViolationError
from benchmarks.safety_faults import element_limits
from embodied.contract import Contract
from embodied.runtime.progress import Progress
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import dumps_rows
from embodied.saving.versions import git_commit
from real_robot.ros2 import ros_robot, topics
from real_robot.ros2.nodes import safety
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.robots.tables import ACTION, Table
from real_robot.safety.limits import Kind, Limits
from tests.real_robot.ros2.in_process import heartbeat, interfaces
from tests.real_robot.ros2.robots.test_tables import ROWS

PERIODS = 100
CALM_PERIODS = 90
"""Initial periods without faults, in which a robot that is requested to follow begins to follow."""
FLOWN_S = 0.02
FAULTS = (
    *TROUBLES,
    "mode change",
    "take-over",
    "clock jump",
    "clock stands still",
    "safety_node killed",
    "safety_node paused",
    "policy killed",
    "policy paused",
    "partner restarted",
    "emergency stop",
    "wrong reading",
    "late policy",
    "partner silent",
    "other publisher",
)
OTHER = "/", "other"
"""Namespace and name of another node that publishes on the robot's commands."""
DOWN_S = 1.0
"""Shortest time for which a killed process is down, and a partner silent."""


def rows() -> list[tuple[str, Contract, dict[str, Any]]]:
    """The registry's rows with the tests' options; quadrotors at 50 Hz, so that a sequence has more events."""
    tables = []
    for name, contract, options in ROWS:
        if name.startswith("px4"):
            contract, options = replace(contract, control_dt_s=FLOWN_S), dict(options) | {"rate_hz": 1.0 / FLOWN_S}
        tables.append((name, contract, options))
    return tables


def random_limits(rng: np.random.Generator, table: Table) -> Limits:
    """Draw limits of the elements that a row commands, and times."""
    commands = {}
    rests = table.at_rest or ()
    for name, rest in zip(table.contract.action.names, rests, strict=False):
        key = "end_effector_position" if table.name == "cartesian" else "joint_position"
        spec = table.contract.observation.get(key)
        measured = f"{key}.{name}" if spec is not None and name in spec.names else ""
        kind = Kind.POSITION if math.isnan(rest) else Kind.VELOCITY
        if name != "gripper":
            commands[name] = replace(element_limits(rng, kind, measured), scale=1.0, measured=measured)
    dt_s = table.control_dt_s
    times = [float(rng.uniform(3.0, 10.0)) * dt_s for _ in range(2)]
    return Limits(
        commands,
        observation_timeout_s=times[0],
        command_timeout_s=times[1],
        clock_error_s=2.5 * dt_s,
        following_s=20.0 * dt_s,
        recovery_s=8.0 * dt_s,
    )


OFTEN = 4
"""Relative frequency of silent drivers, because few rows have a driver that reports its mode."""


class Policy:
    """Messages of a policy_node: heartbeats, and a command per period."""

    def __init__(self, graph: Network, table: Table, topic: str) -> None:
        self.graph, self.table, self.topic = graph, table, topic
        self.alive, self.paused = True, False
        spec = table.contract.action
        self.low, self.high = np.array(spec.low), np.array(spec.high)
        self.target = graph.rng.random(len(self.low))
        self._last: Any = None  # command

    @property
    def runs(self) -> bool:
        """Whether the policy's process runs."""
        return self.alive and not self.paused

    def step(self) -> None:
        """Simulate one period."""
        graph, rng = self.graph, self.graph.rng
        if not self.runs:
            return
        graph.signs[self.topic] = graph.now_s
        graph.send("policy/heartbeat", heartbeat(graph.ros_s))
        if rng.random() < 0.1:
            self.target = rng.random(len(self.low)) * rng.choice([0.2, 1.0, 1.5])
        noisy = self.target + 0.02 * rng.normal(size=len(self.low))
        action = self.low + noisy * (self.high - self.low)
        self._last = self.table.command.codec.encode({ACTION: action}, interfaces, graph.ros_s)
        graph.send(self.topic, self._last)

    def repeat(self) -> None:
        """Send the last command again, as if it had been delayed."""
        if self.runs and self._last is not None:
            self.graph.send(self.topic, self._last)


class Sequence:
    """One row, its faults and its checker."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.row, contract, options = rows()[seed % len(ROWS)]
        self.table = table = robot_table(self.row, contract, options)
        self.limits = limits = random_limits(rng, table)
        self.graph = Network(rng, bool(rng.random() < 0.3), table.control_dt_s)
        self.settings = safety.SafetySettings(
            "",
            self.row,
            options,
            heartbeat_timeout_s=float(rng.uniform(0.15, 0.5)),
            liveliness_s=float(rng.uniform(0.1, 0.5)),
            relocates=False,
        )
        safety.read_contract = lambda path: contract  # files are read elsewhere
        safety.read_limits = lambda path: limits
        reader = Known(self.graph, table, limits, self.settings)
        kind = StoppedByItself if table.at_rest is None else StoppedByCommands
        self.checker: RowChecker = kind(reader, table.command.name)
        self.graph.sent, self.graph.settled = self.checker.send, self.checker.settle
        self.graph.read = lambda topic, message, name: reader.read(topic, message) if name == "safety_node" else None
        robot_class = Px4 if self.row.startswith("px4") else Robot
        self.robot = robot_class(self.graph, table, limits)
        self.policy = Policy(self.graph, table, reader.command)
        self._start_safety()
        without = {
            "clock stands still": not self.graph.simulated,
            "partner silent": not (table.modes or table.status),
            "wrong reading": not self.robot.measures,
        }
        self.possible = [fault for fault in FAULTS if not without.get(fault)]
        self.possible += ["partner silent"] * OFTEN * bool(table.modes)
        self.faults: dict[str, int] = {}  # fault -> number of remaining periods
        self.suspended_s = 0.0
        self.injected = Counter[str]()

    def run(self) -> None:
        """Run the sequence.

        Raises:
            ViolationError: for a message that may never be published.
        """
        dt_s = self.table.control_dt_s
        calm = CALM_PERIODS if self.table.status else 0
        for period in range(calm + PERIODS):
            if period >= calm:
                self._begin_faults()
            self.robot.step(dt_s)
            self.graph.tick(0.5 * dt_s)
            self.policy.step()
            self.graph.tick(0.5 * dt_s)
            self._operate()
            for fault in [fault for fault, left in self.faults.items() if left <= 1]:
                self._end(fault)
                del self.faults[fault]
            self.faults = {fault: left - 1 for fault, left in self.faults.items()}

    def _start_safety(self) -> None:
        self.checker.begin()
        self.safety = hosted(safety.SafetyNode, self.graph)
        self.safety.start(self.settings)
        if self.table.status:
            self.graph.call("safety_node/reset")

    def _operate(self) -> None:
        """Let an operator reset a stop, now and then."""
        if self.rng.random() < 0.1 and self.safety.runs and "emergency stop" not in self.faults:
            lost = isinstance(self.checker, StoppedByItself) and self.checker.lost
            if lost or self.checker.state in ("stopped", "holding"):
                self.checker.stopped = False
                self.checker.known.reset()
                if isinstance(self.checker, StoppedByItself):
                    self.checker.reset()
                self.graph.call("safety_node/reset")
                if self.rng.random() < 0.5:
                    self.policy.repeat()
                if self.rng.random() < 0.5 and "wrong reading" in self.possible:
                    self._inject("wrong reading")

    def _begin_faults(self) -> None:
        if self.rng.random() < 0.08:
            self._inject(str(self.rng.choice(self.possible)))

    def _inject(self, fault: str) -> None:
        if fault in self.faults:
            return
        if any(fault.split()[0] == other.split()[0] for other in self.faults if "node" in fault or "policy" in fault):
            return
        periods = int(self.rng.integers(1, 20))
        if fault.endswith(("killed", "restarted", "silent")):
            periods = round(DOWN_S / self.table.control_dt_s) + periods
        self.faults[fault] = periods
        self.injected[fault] += 1
        self._begin(fault, periods)

    def _begin(self, fault: str, periods: int) -> None:
        graph = self.graph
        if fault in TROUBLES:
            topics = [self.policy.topic, "policy/heartbeat", *(topic.name for topic in self.table.states)]
            topics += [mode.name for mode in self.table.modes] + ([self.table.status.name] if self.table.status else [])
            graph.troubled[str(self.rng.choice(topics))] = fault
        elif fault == "mode change":
            self.robot.change_mode(back=False)
        elif fault == "take-over":
            self.robot.take_over(back=False)
        elif fault == "clock jump":
            self._jump()
        elif fault == "clock stands still":
            graph.frozen_s = graph.ros_s if graph.simulated else None
        elif fault == "partner restarted":
            self.robot.restart(periods * self.table.control_dt_s)
        elif fault == "wrong reading":
            self.robot.misread()
        elif fault == "late policy":
            graph.troubled |= dict.fromkeys((self.policy.topic, "policy/heartbeat"), "very late")
        elif fault == "partner silent":
            self.robot.silent = True
        elif fault == "other publisher":
            graph.publishers.setdefault(self.table.command.name, set()).add(OTHER)
        elif fault == "emergency stop":
            if self.safety.runs:
                self.checker.stopped = True
                graph.call("safety_node/emergency_stop")
        else:
            process = self._process(fault)
            if fault.endswith("killed"):
                process.kill() if isinstance(process, Hosted) else setattr(process, "alive", False)
            else:
                process.paused, self.suspended_s = True, graph.ros_s

    def _end(self, fault: str) -> None:
        graph = self.graph
        if fault in TROUBLES:
            graph.troubled = {topic: trouble for topic, trouble in graph.troubled.items() if trouble != fault}
        elif fault == "mode change":
            self.robot.change_mode(back=True)
        elif fault == "take-over":
            self.robot.take_over(back=True)
        elif fault == "wrong reading":
            self.robot.wrong = None
        elif fault == "late policy":
            graph.troubled = {topic: trouble for topic, trouble in graph.troubled.items() if trouble != "very late"}
        elif fault == "partner silent":
            self.robot.silent = False
        elif fault == "other publisher":
            graph.publishers[self.table.command.name].discard(OTHER)
        elif fault == "clock stands still" and graph.frozen_s is not None:
            graph.jumped_s, graph.frozen_s = graph.frozen_s - graph.now_s, None
        elif fault == "safety_node killed":
            self._start_safety()
        elif fault == "policy killed":
            self.policy = Policy(graph, self.table, self.policy.topic)
        elif fault.endswith("paused"):
            process = self._process(fault)
            if fault.startswith("safety_node"):
                self._tell_jump(graph.ros_s - self.suspended_s)  # effect of a suspension on a process
                self.checker.known.resumed_s = graph.now_s
            process.resume() if isinstance(process, Hosted) else setattr(process, "paused", False)

    def _process(self, fault: str) -> Any:  # noqa: ANN401 - a node or the policy
        return self.safety if fault.startswith("safety_node") else self.policy

    def _jump(self) -> None:
        change_s = float(self.rng.choice([-1.0, 1.0]) * self.rng.exponential(2.0))
        self.graph.jumped_s += change_s
        if self.graph.frozen_s is None and self.safety.runs:
            self._tell_jump(change_s)

    def _tell_jump(self, change_s: float) -> None:
        """Notify nodes of a simulator's clock that has jumped back, as ROS does."""
        if change_s < 0.0 and self.graph.simulated:
            for forget in self.safety.on_jump:
                forget(-change_s)
            self.checker.known.jump_back(-change_s)


def run_one(number: int) -> tuple[str, Counter[str], Counter[str]]:
    """Run one sequence; returns its row, and counts of injections and actions.

    Raises:
        ViolationError: with the seed of the sequence.
    """
    ros_robot.types = topics.types = interfaces  # warnings about packages that are not installed
    sequence = Sequence(number)
    try:
        sequence.run()
    except ViolationError as error:
        raise ViolationError(f"sequence {number}, {sequence.row}, {sequence.graph.now_s:.3f} s: {error}") from error
    return sequence.row, sequence.injected, sequence.checker.count


def _tried(number: int) -> tuple[str, Counter[str], Counter[str]] | str:
    """Return the result of a sequence, or its violation."""
    try:
        return run_one(number)
    except ViolationError as error:
        return str(error)


def run(sequences: int, seed: int, processes: int = 1) -> dict[str, object]:
    """Run sequences with the seeds from `seed` on; returns the violations, and counts of actions by row."""
    count, injected, done = Counter[str](), Counter[str](), dict[str, Counter[str]]()
    violations: list[str] = []
    with Progress("faults", sequences, "sequence") as bar, Pool(processes) as pool:
        for result in pool.imap(_tried, range(seed, seed + sequences), chunksize=18):
            bar.update()
            if isinstance(result, str):
                violations.append(result)
                continue
            row, faults, actions = result
            count[row] += 1
            injected.update(faults)
            done.setdefault(row, Counter()).update(actions)
    return {
        "git_commit": git_commit(),
        "sequences": sequences,
        "first_seed": seed,
        "violations": violations,
        "injected": {fault: injected[fault] for fault in FAULTS},
        "rows": {row: {"sequences": count[row], **dict(sorted(done[row].items()))} for row in done},
    }


def main() -> None:
    """Run the sequences, print the results, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/safety_faults_rows.json"))
    arguments = parser.parse_args()
    results = run(arguments.sequences, arguments.seed, arguments.processes)
    print(json.dumps(results, indent=2))
    with complete_or_absent(arguments.json) as temporary:
        temporary.write_text(dumps_rows(results))
    sys.exit(1 if results["violations"] else 0)


if __name__ == "__main__":
    main()
