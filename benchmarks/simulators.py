"""Overhead of this library on other simulators: control steps per CPU-second and memory of our loop and theirs.

    python benchmarks/simulators.py [gym_pusher_16 robosuite ...] [--runs 5] [--seconds 1.0] [--output FILE]

Both loops step the same number of worlds of the same kind with the same random actions, and restart ended episodes: the
library's loop is its own vector environment, or a loop over its worlds if it has none; ours also computes observations,
rewards and terminations in tensors, and resumes bit for bit. Our own simulators have no other loop.

The two take turns of about 50 ms, until each has had `seconds` of CPU time in one thread; that is one run. A run's
overhead is the additional CPU time of our control step as a share of the library's; the median of the runs, the lowest
and the highest are reported. Resets count. MB are the growth of a separate process that loads the simulator, makes the
worlds and steps each of them a few times. All rows take about six CPU-minutes. Isaac Lab's rows are run by its own
interpreter, .venv-isaac/bin/python, the others by .venv/bin/python. EnvPool's rows need `pip install envpool`, and are
measured only if they are named.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from benchmarks.simulator_rows import ROWS, Loop, Row  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402

TURN_S = 0.05


def apart(function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 - the function's
    """Call `function` in a process of its own, which leaves no state behind; returns its result."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(function(*arguments)))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError as error:
        raise SystemExit(f"{function.__name__} failed in its process, see above") from error
    finally:
        child.join()


def grown_mb(make: Callable[[], Loop]) -> float:
    """Growth of this process in MB by a loop that has made three steps."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    bytes_before = resident()
    make()(3)
    return round((resident() - bytes_before) / 1e6, 1)


def timed(row: Row, runs: int, seconds: float) -> list[dict[str, float]]:
    """CPU microseconds of a control step in each run, "ours" and "theirs", measured alternately."""
    makers = {"ours": row.ours, "theirs": row.theirs}
    loops = {owner: make() for owner, make in makers.items() if make is not None}
    lengths = {owner: _length(loop) for owner, loop in loops.items()}
    runs_us = []
    for _ in range(runs):
        cpu_s, step_counts = dict.fromkeys(loops, 0.0), dict.fromkeys(loops, 0)
        while min(cpu_s.values()) < seconds:
            for owner, loop in loops.items():
                start_s = time.process_time()
                step_counts[owner] += loop(lengths[owner])
                cpu_s[owner] += time.process_time() - start_s
        runs_us.append({owner: 1e6 * cpu_s[owner] / step_counts[owner] for owner in loops})
    return runs_us


def _length(loop: Loop) -> int:
    """Number of steps of a turn; warms up the loop."""
    loop(2)
    start_s, steps = time.process_time(), 0
    while time.process_time() - start_s < 2 * TURN_S:
        loop(1)
        steps += 1
    return max(1, steps // 2)


def measure(row: Row, runs: int, seconds: float) -> dict[str, Any]:
    """Measure one row of the table."""
    makers = {"ours": row.ours, "theirs": row.theirs}
    memory = {owner: apart(grown_mb, make) for owner, make in makers.items() if make is not None}
    runs_us = apart(timed, row, runs, seconds)
    step_us = {owner: round(statistics.median(run[owner] for run in runs_us), 2) for owner in runs_us[0]}
    result: dict[str, Any] = {
        "name": row.name,
        "worlds": row.worlds,
        "step_us": step_us,
        "steps_per_cpu_s": {owner: round(1e6 / each) for owner, each in step_us.items()},
        "MB": memory,
    }
    if row.theirs is not None:
        # (ours - theirs) / theirs per run
        overheads = sorted(run["ours"] / run["theirs"] - 1.0 for run in runs_us)
        difference_us = statistics.median(run["ours"] - run["theirs"] for run in runs_us)
        result["overhead"] = {
            "median": round(statistics.median(overheads), 4),
            "low": round(overheads[0], 4),
            "high": round(overheads[-1], 4),
            "us_per_step_of_all": round(difference_us * row.worlds, 1),
        }
    return result


def line(row: dict[str, Any]) -> str:
    """Format one row of the table as Markdown."""
    rates, memory, overhead = row["steps_per_cpu_s"], row["MB"], row.get("overhead")
    overhead_text = (
        "" if overhead is None else f"{overhead['median']:+.1%} ({overhead['low']:+.1%} to {overhead['high']:+.1%})"
    )
    cells = (
        row["name"],
        row["worlds"],
        f"{rates['ours']:,}",
        f"{rates['theirs']:,}" if overhead else "",
        overhead_text,
        f"{memory['ours']:.0f}",
        f"{memory['theirs']:.0f}" if overhead else "",
    )
    return "| " + " | ".join(map(str, cells)) + " |\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    available = [name for name in ROWS if name.startswith("isaac_lab") == (find_spec("isaaclab") is not None)]
    available = [name for name in available if not name.startswith("envpool")]
    parser.add_argument("rows", nargs="*", default=available, help=", ".join(ROWS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU time of each in a run")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"unknown rows {', '.join(sorted(unknown))}; expected some of {', '.join(ROWS)}")
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    sys.stdout.write("| simulator | worlds | ours, steps per CPU-s | the library's own | overhead | MB | its MB |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    rows = {}
    for name in options.rows:
        rows[name] = measure(ROWS[name], options.runs, options.seconds)
        sys.stdout.write(line(rows[name]))
        sys.stdout.flush()
    if options.output:
        report = {
            "git_commit": git_commit(),
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": 1,
            "runs": options.runs,
            "seconds": options.seconds,
            "load": [round(each, 1) for each in (load_before, os.getloadavg()[0])],
            "versions": versions() | ({"envpool": version("envpool")} if "envpool" in " ".join(rows) else {}),
            "rows": rows,
        }
        with complete_or_absent(options.output) as temporary:
            temporary.write_text(dumps_rows(report))


if __name__ == "__main__":
    main()
