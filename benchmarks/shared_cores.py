"""Two simultaneous trainings on the same cores, and one alone: python benchmarks/shared_cores.py [--json FILE].

Each is a process that takes supervised steps of `libero_pick`'s policy with two threads. Threads that wait for each
other sleep, as `embodied` has it, or spin first, the default of the OpenMP library: both are measured in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

STEPS, ROUNDS, THREADS, BATCH, ENVS = 60, 3, 2, 256, 64
WAITING = {"sleeping": {}, "spinning": {"GOMP_SPINCOUNT": "300000"}}
"""Environment variables of the trainings; 300,000 is libgomp's default."""


def train() -> None:
    """Be one training: report that it is ready, wait for a line, take the steps, and report the seconds."""
    from embodied import seeding
    from embodied.command_line.config import compose
    from embodied.rollout.random_play import first_decisions
    from embodied.training.compute import prepare
    from train import GROUPS, TrainConfig

    import torch  # isort: skip - after embodied
    from tensordict import TensorDict  # isort: skip

    config, _ = compose(TrainConfig, "train", ["task=libero_pick"], GROUPS)
    prepare("cpu", THREADS)
    env = config.task.environment(ENVS, config.task.distributions[0], "train")
    observation, executed = first_decisions(env, seeding.generator(0, "random play"))
    policy = config.policy.build(env.contract)
    policy.fit(observation, executed)
    rows, horizon = torch.arange(BATCH) % len(executed), torch.arange(env.contract.horizon) % executed.shape[1]
    actions, valid = executed[rows][:, horizon], torch.ones(BATCH, len(horizon), dtype=torch.bool)
    batch = TensorDict({"observation": observation[rows], "actions": actions, "valid": valid}, [BATCH])
    learner = config.sft.build(policy, seeding.generator(0, "sft"))
    learner.step(batch, 0.0)
    print("ready", flush=True)
    sys.stdin.readline()
    start_s = time.perf_counter()
    for _ in range(STEPS):
        learner.step(batch, 0.0)
    print(time.perf_counter() - start_s, flush=True)


def slowest_s(count: int, variables: dict[str, str]) -> float:
    """Seconds of the slowest of `count` trainings that start together, with environment `variables`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--train"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | variables,
        )
        for _ in range(count)
    ]
    for child in children:
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin
        child.stdin.write("\n")
        child.stdin.flush()
    return max(float(child.communicate()[0]) for child in children)


def main(arguments: Sequence[str]) -> None:
    """Measure alternately; print milliseconds per step (median and range), and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.train:
        return train()
    loads, steps_ms = [os.getloadavg()[0]], {f"{how}, {count}": [] for how in WAITING for count in (1, 2)}
    for _ in range(ROUNDS):
        for how, variables in WAITING.items():
            for count in (1, 2):
                steps_ms[f"{how}, {count}"].append(1000.0 * slowest_s(count, variables) / STEPS)
        loads.append(os.getloadavg()[0])
    middle = {name: statistics.median(values) for name, values in steps_ms.items()}
    for name, values in steps_ms.items():
        print(f"{name} at once: {middle[name]:8.1f} ms a step [{min(values):.1f}, {max(values):.1f}]")
    ratios = {f"{how}: two at once over one alone": middle[f"{how}, 2"] / middle[f"{how}, 1"] for how in WAITING}
    ratios["one alone: sleeping over spinning"] = middle["sleeping, 1"] / middle["spinning, 1"]
    ratios["two at once: spinning over sleeping"] = middle["spinning, 2"] / middle["sleeping, 2"]
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    print(f"cores {os.cpu_count()}, load of the machine {min(loads):.1f} to {max(loads):.1f}")
    if options.json:
        from embodied.saving.json_text import dumps_rows
        from embodied.saving.versions import git_commit

        about = {"git_commit": git_commit(), "cores": os.cpu_count(), "load": loads, "steps": STEPS}
        record = about | {"step_ms": steps_ms, "ratios": ratios}
        options.json.write_text(dumps_rows(record))


if __name__ == "__main__":
    main(sys.argv[1:])
