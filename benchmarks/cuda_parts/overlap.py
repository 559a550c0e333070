"""Collection during the update (`overlap=true`) on the device: its numerical results, and the time it saves.

PPO of `benchmarks/overlap.py` on quadrotors that are simulated on the device, where the collection has a stream of its
own. Both threads call operations from Python, which one of them can do at a time: the ratio tells how much of an
iteration is not that. A race between the streams would show in the numbers of rollouts.
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
    """Rows: numbers, then times."""
    ends = time.perf_counter() + 0.9 * options.seconds
    num_envs = options.size(4096, 8)
    iteration_s = [0.0]
    with record.row("numbers"):
        began = time.perf_counter()
        numbers(record, options, num_envs)
        iteration_s[0] = (time.perf_counter() - began) / (2 * (ROLLOUTS + 1))
    with record.row("times"):
        # two runs of as many iterations as there is time for, beside the first one that is not counted
        left = 0.5 * (ends - time.perf_counter())
        most = int(left / max(iteration_s[0], 1e-3)) - 1
        times(record, options, num_envs, options.size(max(2, min(12, most)), 2))


def numbers(record: Record, options: Options, num_envs: int) -> None:
    """Rollouts beside updates, and rollouts that end before the updates begin: the same numbers."""
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
    same = True
    for part in ("actions", "reward"):
        beside, waiting = (torch.stack([each[part] for each in found]) for found in rollouts.values())
        record.agree(part, waiting, beside, TOLERANCE)
        same = same and torch.equal(beside, waiting)
    record.figure("bit_for_bit", same)


def times(record: Record, options: Options, num_envs: int, count: int) -> None:
    """Wall seconds of an iteration without and with overlap, and the share of time in which both are busy."""
    measured: dict[str, Measured] = {}
    for name, overlap in (("without", False), ("with", True)):
        found = measured[name] = sleeping(overlap, 0.0, num_envs, device=options.device, count=count)
        record.figure(
            f"{name}_overlap",
            {
                "iterations": count,
                "wall_s": count * found.learner.wall,
                "iteration_s": found.learner.wall,
                "collection_s": found.collection.wall,
                "update_s": found.update.wall,
                "update_cpu_s": found.update.cpu,
                "collection_cpu_s": found.collection.cpu,
                "both_busy_share": found.both_share,
                "num_envs": num_envs,
            },
        )
    alone = measured["without"]
    longer = max(alone.collection.wall, alone.update.wall)
    record.figure("ratio", measured["with"].learner.wall / alone.learner.wall)
    record.figure("bound", longer / (alone.collection.wall + alone.update.wall))
