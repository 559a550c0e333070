"""Control period of a robot while a policy learns: `python benchmarks/control_period.py [--seconds 60]`.

    [--rows "NAME;NAME"] [--output FILE] [--options algorithm.updates=1 ...] [--show]

LIBERO's simulator plays the robot (task 0 of `libero_pick`, from state, stand-in assets), in real time at 20 Hz, behind
the interface of a robot, with nobody beside it; RLPD learns by a gradient step for four decisions, which two cores can
follow (its settings for robots have sixteen times as many: `--options algorithm.updates=4`). Measured is the time
between two commands of an episode, as they are sent through the safety layer, over `--seconds` after learning has
begun. A miss is later than 1.5 periods. `late_s` is by how much periods were too long, in all: the time in which the
robot stood. `gradient_steps_per_s` shows what was learned meanwhile.

alone: nothing is learned. one process: the robot stands during each update. overlap: the default of robots that move,
which act while they learn. actor.py: the robot's program beside the learner's, with a thread each. The simulator takes
CPU time in the robot's program, which a real robot's driver does not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from benchmarks.libero_throughput import machine  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402

PERIOD_S = 0.05
LATE = 1.5
"""Periods after which a command is a miss."""
RUN = (
    *("task=libero_pick", "task.tasks=[0]", "task.assets=stand-in", "task.horizon=1", "task.executed=1"),
    *("task.episodes=3", "policy=squashed", "algorithm=rlpd", "algorithm.updates=0.25", "stages=[rl]"),
    "env_steps=1000000",
    *("evaluate_every_steps=null", "checkpoint_every=1000000", "robot=simulation"),
)
ROBOT = ("robot.person=operator", "robot.waits=false")
"""Options of a robot in real time, of which nobody helps."""
ROWS: dict[str, tuple[str, ...]] = {
    "alone": (*ROBOT, "overlap=false", "algorithm.warmup=1000000"),
    "one process": (*ROBOT, "overlap=false"),
    "overlap": (*ROBOT, "overlap=true"),
    "actor.py": ("robot.listen=127.0.0.1:0", "threads=1"),
}
RESULT = ROOT / "benchmarks" / "results" / "control_period.json"
PATIENCE_S = 600.0

Command = tuple[int, float]
"""Number of the episode, and time by the monotonic clock, s."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the rows, print the table, and write the JSON; or run a program of a row."""
    args = _parse(arguments)
    if args.program:
        return timed_program(args.program, args.times, args.options)
    if args.show:
        report = json.loads(args.output.read_text())
    else:
        about: dict[str, Any] = {"git_commit": git_commit(), "versions": versions()}
        about["machine"] = machine() | {"load": os.getloadavg()[0]}
        rows = [measured(name, args.seconds, args.options) for name in args.rows]
        report = about | {"load_after": os.getloadavg()[0], "period_s": PERIOD_S, "options": args.options, "rows": rows}
        with complete_or_absent(args.output) as temporary:
            temporary.write_text(dumps_rows(report))
    sys.stdout.write(shown(report["rows"]) + "\n")
    return 0


def measured(name: str, seconds: float, options: Sequence[str]) -> dict[str, Any]:
    """Run the programs of row `name` with the learner's further `options`, and measure their commands."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        start = partial(_start, stack, folder)
        run = folder / "run"
        programs = [start("train", *RUN, *ROWS[name], *options, f"output={run}")]
        if name == "actor.py":
            log = _log(folder, "train")
            server = _wait(lambda: re.search(r"at 127\.0\.0\.1:(\d+)", log.read_text()), programs, folder)
            address = f"learner=127.0.0.1:{server[1]}", f"token_file={run / 'actor_token'}"
            programs.append(start("actor", *address, "robot=simulation", *ROBOT, "threads=1"))
        learning = name != "alone"
        _wait(lambda: rows_of(run, learning), programs, folder)
        begin_s, begin = time.monotonic(), time.time()
        time.sleep(seconds)
        end_s, end = time.monotonic(), time.time()
        for program in reversed(programs):
            program.send_signal(signal.SIGINT)
            program.wait(PATIENCE_S)
        taken = [each["step"] for each in rows_of(run, learning) if begin <= each["time"] <= end]
        updates = re.search(r"^ +updates: ([\d.]+)$", (run / "config.yaml").read_text(), re.MULTILINE)
        assert updates
        learned = (max(taken) - min(taken)) * float(updates[1]) / seconds if learning and taken else 0.0
        commands = json.loads((folder / f"{'actor' if len(programs) > 1 else 'train'}.json").read_text())
    return {"name": name, **statistics(commands, begin_s, end_s), "gradient_steps_per_s": round(learned, 1)}


def statistics(commands: Sequence[Command], begin_s: float, end_s: float) -> dict[str, float]:
    """Number of periods from `begin_s` to `end_s`, their quantiles in ms, and how many were late, by how much in all.

    A period is the time between two `commands` of an episode.
    """
    periods = np.array(
        [
            later - earlier
            for (episode, earlier), (following, later) in pairwise(commands)
            if episode == following and begin_s <= earlier and later <= end_s
        ]
    )
    p50, p99 = np.quantile(periods, (0.5, 0.99))
    late = periods[periods > LATE * PERIOD_S]
    in_ms = {"p50_ms": p50, "p99_ms": p99, "max_ms": periods.max()}
    return {
        "periods": len(periods),
        **{each: round(1e3 * float(value), 2) for each, value in in_ms.items()},
        "misses": len(late),
        "late_s": round(float((late - PERIOD_S).sum()), 3),
    }


def rows_of(run: Path, learning: bool) -> list[dict[str, float]]:
    """Rows of the metrics of `run`, those of updates if it is `learning`."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if not learning or any("loss" in each for each in row)]


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a table."""
    columns = [each for each in rows[0] if each != "name"]
    return table(["", *columns], [[row["name"], *(str(row[each]) for each in columns)] for row in rows])


def timed_program(name: str, times: Path, options: list[str]) -> int:
    """Run train.py or actor.py with a robot whose commands are timed; writes them to `times`."""
    import actor
    import train
    from embodied.command_line import program, train_options

    train_options.RobotTask = timed_task(times)
    module = {"train": train, "actor": actor}[name]
    return program.main(module.run, module.describe, options)


def timed_task(times: Path) -> type[Any]:
    """Class of a robot's task in real time, with nobody beside it, which writes its commands to `times` at the end."""
    from real_robot.learning.task import RobotTask
    from real_robot.robots.teleoperation import Station

    class TimedTask(RobotTask):
        """Task whose robot notes when it is commanded."""

        def _simulated(self, distribution: str, split: str, seed: int, stack: ExitStack) -> tuple[Station, Any]:
            station, env = super()._simulated(distribution, split, seed, stack)
            robot = TimedRobot(station.robot)

            def begin() -> None:
                station.begin()
                robot.episode += 1

            stack.callback(lambda: times.write_text(json.dumps(robot.commands)))
            return replace(station, robot=robot, begin=begin), env

        def _person(self, *_: object) -> None:
            """Nobody."""

    return TimedTask


class TimedRobot:
    """The `robot`, whose commands are noted."""

    def __init__(self, robot: Any) -> None:  # noqa: ANN401 - a Robot
        self.robot = robot
        self.contract = robot.contract
        self.at_rest = robot.at_rest
        self.stops_after_s = robot.stops_after_s
        self.episode = 0
        self.commands: list[Command] = []

    def read(self) -> Any:  # noqa: ANN401 - a Reading
        """See `Robot.read`."""
        return self.robot.read()

    def write(self, action: Any) -> None:  # noqa: ANN401 - an action
        """See `Robot.write`."""
        self.commands.append((self.episode, time.monotonic()))
        self.robot.write(action)

    def hold(self) -> None:
        """See `Robot.hold`."""
        self.robot.hold()

    def close(self) -> None:
        """See `Robot.close`."""
        self.robot.close()


def _start(stack: ExitStack, folder: Path, name: str, *options: str) -> subprocess.Popen[bytes]:
    """Start a timed program, which is ended with `stack`."""
    log = stack.enter_context(_log(folder, name).open("wb"))
    command = [sys.executable, __file__, "--program", name, "--times", str(folder / f"{name}.json"), "--options"]
    process = subprocess.Popen([*command, *options], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _log(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def _wait(result: Callable[[], Any], programs: Sequence[subprocess.Popen[bytes]], folder: Path) -> Any:  # noqa: ANN401
    """Wait until `result` is true while all programs run, whose logs are in `folder`; returns it."""
    end = time.monotonic() + PATIENCE_S
    while not (value := result()):
        if time.monotonic() > end or any(each.poll() is not None for each in programs):
            raise SystemExit("\n".join(path.read_text() for path in folder.glob("*.log")))
        time.sleep(0.2)
    return value


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=lambda names: names.split(";"), default=list(ROWS))
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--show", action="store_true", help="print the table of what is measured")
    parser.add_argument("--program", choices=["train", "actor"], help=argparse.SUPPRESS)
    parser.add_argument("--times", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of the learner, at the end")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.rows if name not in ROWS]:
        parser.error(f"unknown rows {unknown}; expected some of {'; '.join(ROWS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
