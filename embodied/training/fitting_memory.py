"""Check whether a planned run fits into a device's memory; if not, search options with which it does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from embodied.environments.delay import with_delay
from embodied.environments.latency import with_latency
from embodied.errors import UserError
from embodied.runtime.progress import Progress
from embodied.training.plan import Plan, plan, size_text

log = logging.getLogger(__name__)
MICRO_BATCH = 0.25
"""Share of a device's memory for the activations of a minibatch in pieces."""

SPARING = (
    "policy.gradient_checkpointing=true",
    "policy.precision=bfloat16",
    "control=false",
    "sft.batch=8",
    "policy.lora_rank=16",
)
"""Options that save memory, ordered by how little they change the result of training."""


def device_memory(device: str) -> float | None:
    """Memory of a GPU, bytes; None for other devices, and if there is no GPU here."""
    if not (device.startswith("cuda") and torch.cuda.is_available()):
        return None
    return float(torch.cuda.get_device_properties(device).total_memory)


def show(composed: Callable[[Sequence[str]], Any], sources: Callable[..., Sequence[str] | None]) -> None:
    """Log the memory plan of a run, whose configuration `composed` returns for further options.

    `sources` returns the folders of demonstrations, from the configured demonstrations and their weights.

    Raises:
        UserError: see `check`, for the `device_gb` of the configuration, or of the GPU.
    """

    def planned(more: Sequence[str]) -> Plan:
        config = composed(more)
        folders = sources(config.demonstrations, config.demonstration_weights)
        parts = with_delay(with_latency(config.task, config.latency), config.delay), config.policy, config.algorithm
        others = {"offline": config.offline, "device": config.device, "placement": config.placement}
        return plan(config, *parts, demonstrations=folders, **others)

    config = composed(())
    base_plan = planned(())
    log.info(base_plan.table())
    memory = device_memory(config.device) if config.device_gb is None else config.device_gb * 1e9
    if memory is not None:
        check(base_plan, config.device, memory, planned)


def check(planned: Plan, device: str, memory: float, again: Callable[[Sequence[str]], Plan]) -> None:
    """Check that the plan `planned` fits into `memory` bytes of `device`.

    `again` plans the same run with further options.

    Raises:
        UserError: with options with which it fits, or with the memory that the best of the tried options need.
    """
    stage, needed = planned.most(device)
    if needed <= memory:
        return
    summary = f"{stage} would take {size_text(needed)} of the {size_text(int(memory))} of {device}"
    options, best = _sparing(needed, device, memory, again)
    if best > memory:
        after = f", with {' '.join(options)} still {size_text(best)}" if options else ""
        raise UserError(f"{summary}{after}; use a smaller model, a larger GPU, or several (torchrun)")
    raise UserError(f"{summary}; with {' '.join(options)} it would be {size_text(best)}")


def _sparing(needed: int, device: str, memory: float, again: Callable[[Sequence[str]], Plan]) -> tuple[list[str], int]:
    """Minimal options with which the run fits into `memory`, and its bytes with them."""

    def bytes_with(options: Sequence[str]) -> int:
        try:
            return again(options).most(device)[1]
        except UserError:  # the policy or the algorithm has no such option
            return needed

    options: list[str] = []
    best = needed
    tried = (f"algorithm.memory_gb={MICRO_BATCH * memory / 1e9:.2g}", *SPARING)
    with Progress("what would fit", 2 * len(tried), "option") as bar:
        # Greedy: add options until the run fits, then drop each one that is not needed.
        for option in tried:
            if best > memory and (size := bytes_with([*options, option])) < best:
                options = [*options, option]
                best = size
            bar.update(1)
        for option in options if best <= memory else ():
            fewer = [each for each in options if each != option]
            if fewer and (size := bytes_with(fewer)) <= memory:
                options = fewer
                best = size
            bar.update(1)
    return options, best
