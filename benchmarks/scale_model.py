"""Throughput by number of collectors, from a model that is checked against 1, 2 and 4 processes of Ray.

    python benchmarks/scale_model.py [--runs 3] [--output FILE.json] [--plot FILE.svg]
    python benchmarks/scale_model.py --read FILE.json --plot FILE.svg    # the plot alone

Each collector has 8 quadrotors, so that more collectors collect more. Row `sleeping`: their simulator sleeps 3 ms for
each of them in a step, as one with a device of its own would. Row `computing`: it computes for as long, and four
collectors on two cores cannot collect four times as much.

The parts are measured one by one, in CPU time: a step, the policy by its batch, an update by its decisions, weights and
rollouts through Ray; and what this machine gives to 1, 2 and 4 busy processes, as others may run here.
`scale_simulation` puts them together. The prediction for up to 1000 collectors gives each cores of its own, and the
learner too, and takes a network for no slower than the memory of this machine: it is not checked. Needs Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from benchmarks.overlap import Spent, timed  # noqa: E402
from benchmarks.scale_simulation import Costs, Line, Setting, simulate  # noqa: E402
from embodied.algorithms.on_policy.ppo import PPOConfig  # noqa: E402
from embodied.environment import Transition  # noqa: E402
from embodied.environments.wrapping import WrappedEnvironment  # noqa: E402
from embodied.placement.collectors import RemoteCollectors  # noqa: E402
from embodied.placement.ray import RayCollectors, RayConfig, cluster, library  # noqa: E402
from embodied.placement.worker import CollectorRecipe, part_of  # noqa: E402
from embodied.policy import TrainablePolicy  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.rollout.joining import joined  # noqa: E402
from embodied.rollout.random_play import first_decisions  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from embodied.training.loop import build, iterations  # noqa: E402
from embodied.world import ALONE  # noqa: E402
from policies.mlp import MLPConfig  # noqa: E402
from sims.quadrotor.task import HoverTask  # noqa: E402

ENVIRONMENTS, T, STEP_S = 8, 16, 0.003
# without a stop by the KL divergence: all updates are of one length
ALGORITHM = PPOConfig(rollout_length=T, minibatch=128, epochs=10, learning_rate=3e-4, critic_warmup=0, target_kl=1e9)
PROCESSES = (1, 2, 4)
ROWS = {"sleeping": (0, 1, 4), "computing": (0,)}
"""Measured values of staleness."""
MODES = {
    "synchronous": Setting(1),
    "overlap (staleness 1)": Setting(1, 1),
    "asynchronous (staleness 4)": Setting(1, 4),
    "synchronous, one inference server": Setting(1, 0, True),
    "staleness 4, one inference server": Setting(1, 4, True),
}
"""Predicted modes; inference runs in the collectors unless a mode is central."""
COLLECTORS = (1, 2, 4, 10, 20, 50, 100, 200, 500, 1000)
WARM_UP, UPDATES = 2, 7


class Slow(WrappedEnvironment):
    """A simulator that takes `STEP_S` for each environment and step, as CPU time if it is `computing`."""

    computing = False

    def step(self, actions: torch.Tensor) -> Transition:
        """Step after a delay; see `Environment.step`."""
        seconds, start_s = STEP_S * self.num_envs, time.thread_time()
        if not self.computing:
            time.sleep(seconds)
        while self.computing and time.thread_time() - start_s < seconds:
            pass
        return super().step(actions)


def slow(computing: bool, first: int, count: int, seed: int) -> Slow:
    """Make a part of the environments."""
    simulator = Slow(part_of(HoverTask(), "cpu", first, count, seed))
    simulator.computing = computing
    return simulator


def new_policy() -> TrainablePolicy:
    """Make the policy that is trained."""
    torch.manual_seed(0)
    env = HoverTask().environment(ENVIRONMENTS, "robust", "train", 0, "cpu")
    policy = MLPConfig(hidden=[256, 256]).build(env.contract)
    policy.fit(*first_decisions(env, torch.Generator().manual_seed(0), 256))
    return policy


def line(found: dict[int, list[float]]) -> Line:
    """Line through the medians at the smallest and the largest number."""
    low, high = min(found), max(found)
    a, b = (statistics.median(found[number]) for number in (low, high))
    each = max(0.0, (b - a) / (high - low))
    return Line(max(0.0, a - each * low), each)


def parts(computing: bool) -> Costs:
    """Measure the parts in this process, without transfers."""
    env, policy = slow(computing, 0, ENVIRONMENTS, 0), new_policy()
    learner, collector = build(env, policy, ALGORITHM, None, 0)
    stepping, env.step = timed(env.step)
    rollout = [collector.collect(T) for _ in range(4)][-1]
    acting: dict[int, list[float]] = {}
    observation = rollout.observation[0]
    for count in (1, 8, 64):
        act_spent, act = timed(partial(policy.act, generator=collector.generator))
        batch = torch.cat([observation] * count)
        for _ in range(30):
            act(batch)
        acting[count * ENVIRONMENTS] = [each.cpu for each in act_spent[5:]]
    updating: dict[int, list[float]] = {}
    for count in (1, 4, 16):
        update_spent, update = timed(learner.update)
        for _ in range(4):
            update(joined([rollout] * count), 0.5, ALONE)
        updating[count * ENVIRONMENTS * T] = [each.cpu for each in update_spent[1:]]
    steps = stepping[T:]
    wait = statistics.median(each.wall - each.cpu - each.waited for each in steps)
    step = statistics.median(each.cpu for each in steps)
    return Costs(T, ENVIRONMENTS, max(0.0, wait), step, line(acting), line(updating))


class Other:
    """One process of Ray."""

    def spin(self, seconds: float) -> float:
        """Compute for a wall time in s; returns the share of a core."""
        start_s, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - start_s < seconds:
            pass
        return (time.process_time() - cpu) / (time.perf_counter() - start_s)

    def echo(self, given: np.ndarray) -> np.ndarray:
        """Return `given`."""
        return given


class Others:
    """Four processes of Ray."""

    def __init__(self) -> None:
        self.ray = library()
        self.actors = [self.ray.remote(Other).options(num_cpus=0).remote() for _ in range(max(PROCESSES))]
        self.ray.get([each.spin.remote(0.1) for each in self.actors])

    def speeds(self) -> list[float]:
        """Total number of cores that 1, 2, 3 and 4 busy processes get."""
        cores = {n: sum(self.ray.get([each.spin.remote(1.5) for each in self.actors[:n]])) for n in PROCESSES}
        return [cores[1], cores[2], (cores[2] + cores[4]) / 2, cores[4]]

    def round_trip_s(self) -> float:
        """Time to send an observation to another process and back, s."""
        observation, took = np.zeros((ENVIRONMENTS, 32), np.float32), []
        for _ in range(60):
            start_s = time.perf_counter()
            self.ray.get(self.actors[0].echo.remote(observation))
            took.append(time.perf_counter() - start_s)
        return statistics.median(took[10:])


@contextmanager
def pool_of(count: int, computing: bool, policy: TrainablePolicy) -> Iterator[tuple[RayCollectors, Any]]:
    """Make collectors and their learner."""
    env = HoverTask().environment(ENVIRONMENTS, "robust", "train", 0, "cpu")
    learner, _ = build(env, policy, ALGORITHM, None, 0)
    recipe = CollectorRecipe(partial(slow, computing), learner.collector, ALGORITHM.remote_starts, policy)
    pool = RayCollectors(RayConfig(collectors=count), recipe, count * ENVIRONMENTS)
    try:
        yield pool, learner
    finally:
        pool.close()


def measured(pool: RayCollectors, learner: Any, policy: TrainablePolicy, staleness: int) -> dict[str, float]:  # noqa: ANN401
    """Measure control steps per second, and the share of dropped rollouts."""
    collectors = RemoteCollectors(pool, policy, max_staleness=staleness)
    steps = iterations(learner, collectors, T, 10**9)  # type: ignore[arg-type]
    steps_before = [each.env_steps for each in islice(steps, WARM_UP + staleness)][-1]
    start_s, dropped = time.perf_counter(), collectors.dropped
    steps_after = [each.env_steps for each in islice(steps, UPDATES)][-1]
    took, dropped = time.perf_counter() - start_s, collectors.dropped - dropped
    rollouts = (steps_after - steps_before) / (T * ENVIRONMENTS)
    while any(handle.pending for handle in pool.handles):
        pool.receive()
    # dropped rollouts as a share of all that arrived
    return {"steps_per_s": (steps_after - steps_before) / took, "dropped": dropped / (rollouts + dropped)}


def sending(pool: RayCollectors, policy: TrainablePolicy, rounds: int = 12) -> dict[str, float]:
    """Measure transfers of weights and rollouts (learner's time, latency, memory), and the spread of collections."""
    publish_spent, publish = timed(pool.publish)
    ask_spent, ask = timed(pool.request)
    join_spent, join = timed(joined)
    ways, hears, took, sent_before = [], [], [], pool.sent_bytes
    for version in range(rounds):
        publish({name: part.detach() for name, part in policy.state_dict().items()})
        start = Spent.by_now()
        ask(pool.handles[0], version, T)
        rollouts: list[Any] = []
        while not rollouts:
            rollouts = pool.receive()
        spent = Spent.by_now().since(start)
        rollout = join([rollouts[0][1]])
        took.append(rollout.simulation_s + rollout.policy_s)
        hears.append(spent.cpu - ask_spent[-1].cpu)
        ways.append(spent.wall - spent.cpu - spent.waited - took[-1])
    middle = statistics.median
    return {
        "publish_s": middle(each.cpu for each in publish_spent),
        "ask_s": middle(each.cpu for each in ask_spent),
        "receive_s": middle(hears) + middle(each.cpu for each in join_spent),
        "transit_s": max(0.0, middle(ways)),
        "spread": statistics.stdev(took[1:]) / statistics.mean(took[1:]),
        "weights_mb": (pool.sent_bytes - sent_before) / rounds / 1e6,
        "rollout_mb": rollout.placement_metrics["received_mb"],
    }


def row(computing: bool, staleness: tuple[int, ...], runs: int, others: Others) -> dict[str, Any]:
    """Row of the parts, measurements with 1, 2 and 4 collectors, and the model's predictions of them."""
    costs = parts(computing)
    policy = new_policy()
    with pool_of(1, computing, policy) as (pool, _):
        RemoteCollectors(pool, policy).collect(T)
        sent = sending(pool, policy)
    sizes = {name: round(sent.pop(name), 4) for name in ("weights_mb", "rollout_mb")}
    costs = replace(costs, **sent, round_trip_s=others.round_trip_s())
    measurements: dict[tuple[int, int], list[dict[str, float]]] = {(n, s): [] for n in PROCESSES for s in staleness}
    core_counts: list[list[float]] = []
    for _ in range(runs):
        for count in PROCESSES:
            core_counts.append(others.speeds())
            with pool_of(count, computing, policy) as (pool, learner):
                for each in staleness:
                    measurements[count, each].append(measured(pool, learner, policy, each))
                    print(computing, count, each, measurements[count, each][-1], os.getloadavg()[0], flush=True)
    cores = tuple(statistics.median(each) for each in zip(*core_counts, strict=True))
    checks = []
    for (count, each), runs_of_it in measurements.items():
        rates = [run["steps_per_s"] for run in runs_of_it]
        model = simulate(costs, Setting(count, each, speeds=cores), updates=100)
        error = model.steps_per_s / statistics.median(rates) - 1
        checks.append(
            {
                "collectors": count,
                "max_staleness": each,
                "steps_per_s": [round(rate, 1) for rate in rates],
                "model_steps_per_s": round(model.steps_per_s, 1),
                "error": round(error, 3),
                "dropped": round(statistics.mean(run["dropped"] for run in runs_of_it), 3),
                "model": {name: round(value, 3) for name, value in asdict(model).items()},
            }
        )
    return {
        "costs": asdict(costs),
        **sizes,
        "cores_of_1_2_3_4_busy": [round(each, 3) for each in cores],
        "checks": checks,
    }


def predicted(costs: Costs) -> dict[str, list[dict[str, float]]]:
    """Predictions of each mode with up to 1000 collectors, each with its own cores."""
    predictions = {}
    for name, mode in MODES.items():
        predictions[name] = []
        for count in COLLECTORS:
            outcome = simulate(costs, replace(mode, collectors=count), updates=10)
            predictions[name].append(
                {"collectors": count} | {key: float(f"{v:.4g}") for key, v in asdict(outcome).items()}
            )
    return predictions


def draw(about: dict[str, Any], path: Path) -> None:
    """Plot throughput and the learner's utilisation by number of collectors; points are measured."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "embodied", "font.size": 9}
    import matplotlib.pyplot as plt

    figure, (rates, shares) = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    for index, (name, curve) in enumerate(about["predicted"].items()):
        counts = [each["collectors"] for each in curve]
        style = {"color": f"C{index}", "linestyle": "--" if "server" in name else "-", "label": name}
        rates.loglog(counts, [each["steps_per_s"] for each in curve], **style)
        shares.semilogx(counts, [100 * each["learning"] for each in curve], **style)
    for index, staleness in enumerate(ROWS["sleeping"]):
        checks = [each for each in about["sleeping"]["checks"] if each["max_staleness"] == staleness]
        measured_rates = [statistics.median(each["steps_per_s"]) for each in checks]
        rates.plot([each["collectors"] for each in checks], measured_rates, "o", color=f"C{index}", markersize=4)
    rates.set(xlabel="collectors", ylabel="control steps/s (points: measured)")
    shares.set(xlabel="collectors", ylabel="learner busy, %", ylim=(0, 105))
    shares.legend(fontsize=7, loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    """Measure, check the model, predict, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--read", type=Path, help="figures to plot, in place of measuring")
    options = parser.parse_args()
    about = json.loads(options.read.read_text()) if options.read else all_rows(options.runs)
    if options.output:
        with complete_or_absent(options.output) as temporary:
            temporary.write_text(dumps_rows(about))
    if options.plot:
        draw(about, options.plot)
    return 0


def all_rows(runs: int) -> dict[str, Any]:
    """All results."""
    torch.set_num_threads(1)
    about: dict[str, Any] = {
        "git_commit": git_commit(),
        "versions": versions() | {"ray": library().__version__},
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "runs": runs,
        "step_ms_of_an_environment": 1000 * STEP_S,
    }
    with cluster(RayConfig(collectors=max(PROCESSES))):
        others = Others()
        for name, staleness in ROWS.items():
            about[name] = row(name == "computing", staleness, runs, others)
    costs = about["sleeping"]["costs"]
    lines = {name: Line(**costs[name]) for name in ("act", "update")}
    about["predicted"] = predicted(Costs(**costs | lines))
    about["load_after"] = os.getloadavg()[0]
    checks = [
        [
            name,
            *(str(each[key]) for key in ("collectors", "max_staleness", "model_steps_per_s")),
            f"{statistics.median(each['steps_per_s']):.1f}",
            f"{each['error']:+.1%}",
        ]
        for name in ROWS
        for each in about[name]["checks"]
    ]
    print(table(["row", "collectors", "staleness", "model, steps/s", "measured", "error"], checks))
    return about


if __name__ == "__main__":
    sys.exit(main())
