"""Cost and gain of child processes: seconds of a chunk in child processes and in this one, in the same run.

    python benchmarks/remote_speed.py [--runs 9] [--seconds 0.5] [--output FILE]

The worst case is a simulator that takes next to nothing (64 quadrotors, in compiled C); the realistic one has physics
(LIBERO pick on stand-in objects, K = 4). All kinds alternate in every run, of which the fastest chunk is taken; the
median of the runs counts. A chunk is all of `env.step` with random actions; episodes that end are begun again, which is
not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.environment import Environment  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit  # noqa: E402
from sims.libero.task import LiberoTask  # noqa: E402
from sims.quadrotor.task import HoverTask  # noqa: E402
from sims.registry import in_processes  # noqa: E402
from sims.remote.environment import RemoteEnvironment  # noqa: E402

PROCESSES = (0, 1, 2)


@dataclass
class Kind:
    """One measured case: `count` environments of a task in `processes` child processes (0: in this one)."""

    name: str
    processes: int
    env: Environment
    chunk_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def main() -> None:
    """Measure all cases, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "remote_speed.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [made(name, processes) for name in COUNTS for processes in PROCESSES]
    for _ in range(options.runs):
        for each in kinds:
            chunk_s, cpu_s = measure(each.env, options.seconds)
            each.chunk_s.append(chunk_s)
            each.cpu_s.append(cpu_s)
    rows = [row(each, kinds) for each in kinds]
    sys.stdout.write(table(list(rows[0]), [[str(value) for value in each.values()] for each in rows]) + "\n")
    report = {
        "git_commit": git_commit(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "runs": options.runs,
        "rows": rows,
    }
    options.output.write_text(dumps_rows(report))
    for each in kinds:
        each.env.close()


COUNTS = {"quadrotor_hover": 64, "libero_pick": 8}


def made(name: str, processes: int) -> Kind:
    """Make the environments of a case, before their first reset."""
    kind = LiberoTask(assets="stand-in", tasks=["0"]) if name == "libero_pick" else HoverTask()
    kind.processes = processes
    task = in_processes(kind)
    return Kind(name, processes, task.environment(COUNTS[name], task.distributions[0], "train"))


def cpu_s(env: Environment) -> float:
    """CPU time of this process and of the processes of `env`."""
    children = [child.process.pid for child in env._children] if isinstance(env, RemoteEnvironment) else []
    stats = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split() for child in children]
    return time.process_time() + sum(int(each[11]) + int(each[12]) for each in stats) / os.sysconf("SC_CLK_TCK")


def measure(env: Environment, seconds: float) -> tuple[float, float]:
    """Seconds of the fastest chunk within `seconds`, and CPU seconds of a chunk including its surroundings.

    Slower chunks wait for a core of a busy machine.
    """
    env.reset()
    cpu_before = cpu_s(env)
    spec, took, generator = env.contract.action, [], torch.Generator().manual_seed(0)
    low, high = torch.tensor(spec.low), torch.tensor(spec.high)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(took) < 3:
        shape = (env.num_envs, env.contract.executed, *spec.shape)
        chunk = low + (high - low) * torch.rand(shape, generator=generator)
        start_s = time.perf_counter()
        transition = env.step(chunk)
        took.append(time.perf_counter() - start_s)
        if bool(transition.done.any()):
            env.reset(transition.done)
    return min(took), (cpu_s(env) - cpu_before) / len(took)


def row(kind: Kind, kinds: list[Kind]) -> dict[str, object]:
    """Row of a case, with ratios to the same case in this process."""
    reference = next(each for each in kinds if (each.name, each.processes) == (kind.name, 0))
    mine, reference_s = statistics.median(kind.chunk_s), statistics.median(reference.chunk_s)
    ratios = sorted(
        chunk_s / reference_chunk_s for chunk_s, reference_chunk_s in zip(kind.chunk_s, reference.chunk_s, strict=True)
    )
    return {
        "task": kind.name,
        "environments": kind.env.num_envs,
        "processes": kind.processes,
        "ms a chunk": round(1e3 * mine, 3),
        "more, ms": round(1e3 * (mine - reference_s), 3),
        "CPU ms a chunk": round(1e3 * statistics.median(kind.cpu_s), 3),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
    }


if __name__ == "__main__":
    main()
