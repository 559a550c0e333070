"""Time saved by `overlap=true`: `python benchmarks/overlap.py [--rows ROW,ROW] [--output FILE]`, all rows by default.

Each row is measured alternately with and without overlap, so that other work on the machine disturbs both. Seconds are
those of collection and updates alone. If a collection takes C and an update U, the ratio cannot be below `bound`,
max(C, U) / (C + U), of the CPU times of both and the sleep. The two threads need a core each: `waited_s` is the time in
which they were ready without a core, as counted by the kernel (needs Linux). `ratio_with_cores` is an estimate without
that time.

balanced: PPO on quadrotors whose simulator sleeps, like one with a device of its own, until a collection takes as long
as an update. simulation: it sleeps until a collection takes twice as long. large: like balanced, with 4096 environments
instead of 256, as is usual for such simulators; operations on fewer are so short that the threads wait for Python's
lock. libero_pick: `train.py` with its own settings, from one supervised policy, on both cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from itertools import islice
from math import nan
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.algorithms.on_policy.ppo import PPOConfig  # noqa: E402
from embodied.environment import Transition  # noqa: E402
from embodied.environments.wrapping import WrappedEnvironment  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.rollout.ahead import CollectorAhead  # noqa: E402
from embodied.rollout.random_play import first_decisions  # noqa: E402
from embodied.rollout.rollout import Rollout  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from embodied.training.loop import build, iterations  # noqa: E402
from policies.mlp import MLPConfig  # noqa: E402
from sims.quadrotor.task import HoverTask  # noqa: E402

T, ITERATIONS = 32, 12
SLEEPS = {"balanced": (1.0, 256), "simulation": (2.0, 256), "large": (1.0, 4096)}
"""Ratio of a collection's time to an update's, and the number of environments, by row."""


class Sleeping(WrappedEnvironment):
    """A simulator that takes time, but no CPU."""

    seconds = 0.0
    """Of a step."""

    def step(self, actions: torch.Tensor) -> Transition:
        """Step after a delay; see `Environment.step`."""
        time.sleep(self.seconds)
        return super().step(actions)


@dataclass(frozen=True)
class Spent:
    """Times that a thread spent in an interval, s."""

    wall: float
    cpu: float
    waited: float
    """Ready to run, but without a core."""

    @classmethod
    def by_now(cls) -> Spent:
        """Times of the calling thread since its start."""
        waited = Path("/proc/thread-self/schedstat").read_text().split()[1]
        return cls(time.perf_counter(), time.thread_time(), int(waited) / 1e9)

    def since(self, before: Spent) -> Spent:
        """Difference of two measurements."""
        return Spent(self.wall - before.wall, self.cpu - before.cpu, self.waited - before.waited)


@dataclass(frozen=True)
class Measured:
    """Mean times of an iteration: of the updating thread, of its updates, and of collections in either thread."""

    learner: Spent
    update: Spent
    collection: Spent
    overlap: bool
    both_share: float
    """Share of the time in which an update and a collection ran at once."""

    @property
    def seconds_with_cores(self) -> float:
        """Estimated time without waiting for cores, s."""
        if not self.overlap:
            return self.learner.wall - self.learner.waited
        between = self.learner.cpu - self.update.cpu  # while nothing is collected
        return max(self.learner.cpu, self.collection.wall - self.collection.waited + between)

    @property
    def waited_s(self) -> float:
        """Time in which both threads waited for cores, s."""
        return self.learner.waited + (self.collection.waited if self.overlap else 0.0)


def sleeping(
    overlap: bool,
    sleep_s: float,
    num_envs: int,
    *,
    device: str = "cpu",
    count: int = ITERATIONS,
    watch: Callable[[Rollout], None] | None = None,
    wait: bool = False,
) -> Measured:
    """Run PPO on `device` with a simulator that sleeps `sleep_s` in a step; measure `count` iterations after the first.

    `watch` is called with every rollout. With `wait` a collection ends before the update begins, so that the same
    numbers are computed without concurrency.
    """
    # without a stop by the KL divergence: all updates are of one length
    ppo = PPOConfig(
        rollout_length=T, minibatch=2 * num_envs, epochs=4, learning_rate=3e-4, critic_warmup=0, target_kl=1e9
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    env = Sleeping(HoverTask().environment(num_envs, "robust", "train", 0, device))
    policy = MLPConfig(hidden=[64, 64]).build(env.contract).to(device)
    observation, actions = first_decisions(env, torch.Generator().manual_seed(0), 256)
    policy.fit(observation.to(device), actions.to(device))
    learner, plain_collector = build(env, policy, ppo, None, 0)
    env.seconds = sleep_s
    collecting, plain_collector.collect = timed(plain_collector.collect)
    updating, learner.update = timed(learner.update)
    collector = CollectorAhead(plain_collector, policy) if overlap else plain_collector
    if watch is not None:
        collector.collect = watched(collector.collect, watch)
    if wait and isinstance(collector, CollectorAhead):
        collector.begin = waiting(collector)
    with collector if isinstance(collector, CollectorAhead) else nullcontext():
        steps = iterations(learner, collector, T, 10**9)
        next(steps)
        start = Spent.by_now()
        for _ in islice(steps, count):
            pass
        end = Spent.by_now()
    env.close()
    took = end.since(start)
    concurrent_share = at_once(updating, collecting, start.wall, end.wall) / took.wall if overlap else 0.0
    return Measured(mean([took], count), mean_call(updating[1:]), mean_call(collecting[1:]), overlap, concurrent_share)


Call = tuple[Spent, Spent]
"""A thread's times at the start and at the end of a call."""


def timed(work: Callable[..., Any]) -> tuple[list[Call], Callable[..., Any]]:
    """Wrap `work`; returns it with a list of the times of its calls."""
    calls: list[Call] = []

    def measured(*given: Any) -> Any:  # noqa: ANN401 - what `work` takes and gives
        began = Spent.by_now()
        result = work(*given)
        calls.append((began, Spent.by_now()))
        return result

    return calls, measured


def watched(collect: Callable[[int], Rollout], watch: Callable[[Rollout], None]) -> Callable[[int], Rollout]:
    """Wrap `collect` so that `watch` is called with its result."""

    def collected(decisions: int) -> Rollout:
        rollout = collect(decisions)
        watch(rollout)
        return rollout

    return collected


def waiting(collector: CollectorAhead) -> Callable[[int], None]:
    """Wrap `begin` of `collector` so that it returns when the collection has ended."""
    begin = collector.begin

    def begun(decisions: int) -> None:
        begin(decisions)
        assert collector.running is not None
        collector.running.exception()  # waits; `collect` raises it

    return begun


def at_once(first: list[Call], second: list[Call], began_s: float, ended_s: float) -> float:
    """Wall time in s, from `began_s` to `ended_s`, in which calls of both lists ran."""
    return sum(
        max(0.0, min(a[1].wall, b[1].wall, ended_s) - max(a[0].wall, b[0].wall, began_s)) for a in first for b in second
    )


def mean_call(calls: list[Call]) -> Spent:
    """Mean times of a call."""
    return mean([ended.since(began) for began, ended in calls])


def mean(spent: list[Spent], count: int | None = None) -> Spent:
    """The sum of `spent` divided by `count`, or by their number if None."""
    return Spent(*(sum(each) / (count or len(spent)) for each in zip(*map(astuple, spent), strict=True)))


def asleep(times: float, num_envs: int, runs: int) -> dict[str, Any]:
    """Row of a simulator that sleeps until a collection takes `times` as long as an update, both in CPU time."""
    baseline = sleeping(False, 0.0, num_envs)
    sleep_s = max(0.0, times * baseline.update.cpu - baseline.collection.cpu) / T
    measurements: dict[bool, list[Measured]] = {False: [], True: []}
    for _ in range(runs):
        for overlap, measured in measurements.items():
            measured.append(sleeping(overlap, sleep_s, num_envs))
    update = statistics.median(each.update.cpu for each in measurements[False])
    collection = T * sleep_s + statistics.median(each.collection.cpu for each in measurements[False])
    row = compared({overlap: [each.learner.wall for each in measured] for overlap, measured in measurements.items()})
    row["bound"] = round(max(collection, update) / (collection + update), 3)
    with_cores = [
        statistics.median(each.seconds_with_cores for each in measurements[overlap]) for overlap in (False, True)
    ]
    row["ratio_with_cores"] = round(with_cores[1] / with_cores[0], 3)
    row["waited_s"], row["waited_s_with_overlap"] = (
        [round(each.waited_s, 3) for each in measured] for measured in measurements.values()
    )
    row |= {"collection_s": round(collection, 3), "update_s": round(update, 3), "sleeps_s": round(sleep_s, 5)}
    return row | {"num_envs": num_envs, "decisions": T}


def libero(overlap: bool, start: Path, env_steps: int) -> float:
    """Measure the seconds of reinforcement learning on libero_pick, from the run `start`."""
    options = ["stages=[rl]", f"start_from={start}", f"env_steps={env_steps}", f"overlap={str(overlap).lower()}"]
    took = trained(options)["wall_s"]
    return sum(took[phase] for phase in ("simulation", "policy", "update"))


def trained(options: list[str], run: Path | None = None) -> dict[str, Any]:
    """Run `train.py task=libero_pick` with minimal evaluation; returns its report."""
    common = ["task=libero_pick", "video=false", "control=false", "evaluation_starts=1", "evaluate_every_steps=null"]
    with tempfile.TemporaryDirectory() as folder:
        run = run or Path(folder, "run")
        command = [sys.executable, "train.py", *common, "task.assets=stand-in", *options, f"output={run}"]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
        return json.loads((run / "report.json").read_text())


def compared(found: dict[bool, list[float]]) -> dict[str, Any]:
    """Seconds without and with overlap, and the ratio of their medians."""
    without, with_overlap = (statistics.median(seconds) for seconds in found.values())
    return {
        "seconds": [round(each, 3) for each in found[False]],
        "seconds_with_overlap": [round(each, 3) for each in found[True]],
        "ratio": round(with_overlap / without, 3),
    }


def libero_row(runs: int, env_steps: int) -> dict[str, Any]:
    """Row `libero_pick`, measured alternately from one supervised policy."""
    measurements: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder, "start")
        trained(["stages=[sft]"], start)
        for _ in range(runs):
            for overlap, seconds in measurements.items():
                seconds.append(libero(overlap, start, env_steps))
    return compared(measurements) | {"env_steps": env_steps}


def main() -> int:
    """Measure all rows, print them, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: text.split(","), default=[*SLEEPS, "libero_pick"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--env-steps", type=int, default=140_000, help="of each run of libero_pick")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    about: dict[str, Any] = {
        "git_commit": git_commit(),
        "versions": versions(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "runs": options.runs,
    }
    for name in options.rows:
        if name in SLEEPS:
            about[name] = asleep(*SLEEPS[name], options.runs)
        else:
            about[name] = libero_row(options.runs, options.env_steps)
    about["load_after"] = os.getloadavg()[0]
    rows = [
        [
            name,
            *(f"{statistics.median(about[name][key]):.3f}" for key in ("seconds", "seconds_with_overlap")),
            f"{about[name]['ratio']:.2f}",
            *(f"{about[name].get(key, nan):.2f}" for key in ("ratio_with_cores", "bound")),
        ]
        for name in options.rows
    ]
    print(table(["", "s", "s with overlap", "ratio", "with cores", "bound"], rows))
    if options.output:
        with complete_or_absent(options.output) as temporary:
            temporary.write_text(dumps_rows(about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
