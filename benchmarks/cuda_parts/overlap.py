"""Collection during the update (`overlap=true`) on the device: its numerical results, and the time it saves.

PPO of `benchmarks/overlap.py` on quadrotors that are simulated on the device, where the collection has its own stream.
Both threads call operations from Python, but only one can at a time: the ratio measures the rest of an iteration. A
race between the streams would show in the numbers of rollouts.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from benchmarks.cuda_parts.record import Options, Record
from benchmarks.overlap import Measured, sleeping
from embodied.rollout.rollout import Rollout

ROLLOUTS = 3
"""Iterations whose numbers are compared, after the first one."""
TOLERANCE = 1e-4
"""Both sides run the same operations in the same order, and usually agree bit for bit; products of matrices may be
summed in another order where another stream is busy, which updates amplify. A race shows in whole numbers.
"""


def run(record: Record, options: Options) -> None:
    """Compare the numbers, then measure the times."""
    ends = time.perf_counter() + 0.9 * options.seconds
    num_envs = options.size(4096, 8)
    iteration_s = [0.0]
    with record.row("numbers"):
        start_s = time.perf_counter()
        numbers(record, options, num_envs)
        iteration_s[0] = (time.perf_counter() - start_s) / (2 * (ROLLOUTS + 1))
    with record.row("times"):
        # two runs with as many iterations as there is time for, after a first one that is not counted
        remaining_s = 0.5 * (ends - time.perf_counter())
        iterations = int(remaining_s / max(iteration_s[0], 1e-3)) - 1
        times(record, options, num_envs, options.size(max(2, min(12, iterations)), 2))


def numbers(record: Record, options: Options, num_envs: int) -> None:
    """Compare rollouts during updates with rollouts that end before the updates begin."""
    rollouts: dict[str, list[dict[str, Tensor]]] = {"beside": [], "waiting": []}
    for name, found in rollouts.items():

        def keep(rollout: Rollout, found: list[dict[str, Tensor]] = found) -> None:
            parts = {"actions": rollout.actions, "reward": rollout.reward}
            found.append({part: values.detach().clone() for part, values in parts.items()})

        sleeping(
            True,
            0.0,
            num_envs,
            device=options.device,
            count=options.size(ROLLOUTS, 2),
            watch=keep,
            wait=name == "waiting",
        )
    equal = True
    for part in ("actions", "reward"):
        overlapping, waiting = (torch.stack([each[part] for each in found]) for found in rollouts.values())
        record.agree(part, waiting, overlapping, TOLERANCE)
        equal = equal and torch.equal(overlapping, waiting)
    record.figure("bit_for_bit", equal)


def times(record: Record, options: Options, num_envs: int, count: int) -> None:
    """Measure wall seconds of an iteration without and with overlap, and the share of time in which both are busy."""
    measurements: dict[str, Measured] = {}
    for name, overlap in (("without", False), ("with", True)):
        result = measurements[name] = sleeping(overlap, 0.0, num_envs, device=options.device, count=count)
        record.figure(
            f"{name}_overlap",
            {
                "iterations": count,
                "wall_s": count * result.learner.wall,
                "iteration_s": result.learner.wall,
                "collection_s": result.collection.wall,
                "update_s": result.update.wall,
                "update_cpu_s": result.update.cpu,
                "collection_cpu_s": result.collection.cpu,
                "both_busy_share": result.both_share,
                "num_envs": num_envs,
            },
        )
    without_overlap = measurements["without"]
    longer = max(without_overlap.collection.wall, without_overlap.update.wall)
    record.figure("ratio", measurements["with"].learner.wall / without_overlap.learner.wall)
    record.figure("bound", longer / (without_overlap.collection.wall + without_overlap.update.wall))
