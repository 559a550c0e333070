"""Collectors on a Ray cluster of local nodes: throughput of two nodes against one, and a run with killed collectors.

    python benchmarks/scale_ray.py [--iterations 12] [--env-steps N] [--output benchmarks/results/scale_ray.json]

The simulator sleeps 4 ms for each environment and step, as one with a device of its own would: a collector waits as
long as it has environments. A node has two CPUs and so two collectors; `num_envs` is the same with one node and with
two, which are measured in turns. Then `train.py` trains twice, by four collectors of which one is killed (SIGKILL)
every 20 s, and undisturbed. Needs Ray and psutil.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.algorithms.on_policy.ppo import PPOConfig  # noqa: E402
from embodied.environment import Transition  # noqa: E402
from embodied.environments.wrapping import WrappedEnvironment  # noqa: E402
from embodied.placement.collectors import RemoteCollectors  # noqa: E402
from embodied.placement.ray import RayCollectors, RayConfig, cluster, library  # noqa: E402
from embodied.placement.worker import CollectorRecipe, part_of  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.rollout.random_play import first_decisions  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from embodied.training.loop import Iteration, build, iterations  # noqa: E402
from policies.mlp import MLPConfig  # noqa: E402
from sims.quadrotor.task import HoverTask  # noqa: E402

NUM_ENVS, T, CPUS = 32, 16, 2
SLEEP_S, KILL_S = 0.004, 20.0
ALGORITHM = PPOConfig(rollout_length=T, minibatch=256, epochs=2, learning_rate=3e-4, critic_warmup=0)


class Slow(WrappedEnvironment):
    """A simulator that takes time, but no CPU."""

    def step(self, actions: torch.Tensor) -> Transition:
        """Step after a delay; see `Environment.step`."""
        time.sleep(SLEEP_S * self.num_envs)
        return super().step(actions)


def slow(first: int, count: int, seed: int) -> Slow:
    """Make a part of the environments."""
    return Slow(part_of(HoverTask(), "cpu", first, count, seed))


@contextmanager
def nodes(count: int) -> Iterator[str]:
    """Start a cluster of local nodes; yields its address."""
    library()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False})
    for _ in range(count - 1):
        cluster.add_node(num_cpus=CPUS)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


@contextmanager
def training(count: int) -> Iterator[Iterator[Iteration]]:
    """Iterate PPO on a cluster of nodes."""
    env = HoverTask().environment(NUM_ENVS, "robust", "train", 0, "cpu")
    torch.manual_seed(0)
    policy = MLPConfig(hidden=[64]).build(env.contract)
    policy.fit(*first_decisions(env, torch.Generator().manual_seed(0), 256))
    with nodes(count) as address:
        config = RayConfig(collectors=CPUS * count, address=address)
        with cluster(config):
            learner, _ = build(env, policy, ALGORITHM, None, 0)
            recipe = CollectorRecipe(slow, learner.collector, ALGORITHM.remote_starts, policy)
            pool = RayCollectors(config, recipe, NUM_ENVS)
            yield iterations(learner, RemoteCollectors(pool, policy), T, 10**9)
            pool.close()


def throughput(count: int, repeats: int) -> float:
    """Environment steps per second on so many nodes; the first iteration is not counted."""
    with training(count) as steps:
        steps_before = next(steps).env_steps
        start_s = time.perf_counter()
        steps_after = [next(steps).env_steps for _ in range(repeats)][-1]
        return (steps_after - steps_before) / (time.perf_counter() - start_s)


def trained(folder: Path, env_steps: int, kill: bool) -> dict[str, Any]:
    """Run `train.py task=mjcf_cartpole` with collectors; with `kill`, one of them is killed every `KILL_S`."""
    options = f"task=mjcf_cartpole placement=ray placement.collectors=4 env_steps={env_steps} video=false"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", *options.split(), "placement.cpus=0.5", f"output={folder}"]
    killed, start_s = 0, time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, env=environment) as run:
        while True:
            try:
                if run.wait(KILL_S):
                    raise SystemExit(f"{' '.join(command)} has failed")
                break
            except subprocess.TimeoutExpired:
                collectors = [each for each in psutil.Process(run.pid).children(True) if _collects(each)]
                if kill and collectors:
                    random.choice(collectors).kill()
                    killed += 1
    report = json.loads((folder / "report.json").read_text())
    evaluation = next(each for each in report["evaluations"] if each["stage"] == "rl")
    return {
        "command": " ".join(command[1:-1]),
        "wall_s": round(time.perf_counter() - start_s),
        "killed": killed,
        "counted": report["lost_collectors"],
        "lost_episodes": report["lost"],
        "env_steps": report["env_steps"],
        **{name: evaluation[name] for name in ("success", "low", "high", "episodes")},
    }


def _collects(process: psutil.Process) -> bool:
    try:
        return "ray::Worker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def main() -> int:
    """Measure both parts, print them, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-steps", type=int, default=3_000_000, help="of the runs with and without kills")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    about = {
        "git_commit": git_commit(),
        "versions": versions(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "num_envs": NUM_ENVS,
        "decisions": T,
        "sleep_ms_per_environment_and_step": 1000 * SLEEP_S,
    }
    found = {count: [] for count in (1, 2)}
    for _ in range(options.runs):
        for count, rates in found.items():
            rates.append(throughput(count, options.iterations))
    one, two = (statistics.median(rates) for rates in found.values())
    about |= {"steps_per_s": {str(count): [round(rate) for rate in rates] for count, rates in found.items()}}
    about["ratio"] = round(two / one, 2)
    print(table(["nodes", "environment steps/s"], [["1", f"{one:.0f}"], ["2", f"{two:.0f}"]]))
    print(f"two nodes against one: {two / one:.2f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        about["killed"] = trained(Path(folder, "killed"), options.env_steps, kill=True)
        about["undisturbed"] = trained(Path(folder, "undisturbed"), options.env_steps, kill=False)
    about["load_after"] = os.getloadavg()[0]
    print(json.dumps({name: about[name] for name in ("killed", "undisturbed")}, indent=2))
    if options.output:
        options.output.write_text(dumps_rows(about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
