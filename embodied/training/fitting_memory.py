"""Whether a planned run fits into a device's memory; if not, options with which it does, which were tried."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from embodied.environments.latency import with_latency
from embodied.errors import UserError
from embodied.progress import Progress
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
"""Options that spare memory, those first that change least of what is learned."""


def device_memory(device: str) -> float | None:
    """Bytes of a GPU; None for other devices, and where there is none here."""
    if not (device.startswith("cuda") and torch.cuda.is_available()):
        return None
    return float(torch.cuda.get_device_properties(device).total_memory)


def show(composed: Callable[[Sequence[str]], Any], sources: Callable[..., Sequence[str] | None]) -> None:
    """Print what a run would take: `composed` gives its configuration, with further options.

    `sources` names demonstrations, as the configuration gives them and their weights.

    Raises:
        UserError: as `check`, for the `device_gb` of the configuration, or of the GPU.
    """

    def planned(more: Sequence[str]) -> Plan:
        config = composed(more)
        shown = sources(config.demonstrations, config.demonstration_weights)
        parts = with_latency(config.task, config.latency), config.policy, config.algorithm
        return plan(config, *parts, device=config.device, demonstrations=shown, placement=config.placement)

    config, found = composed(()), planned(())
    log.info(found.table())
    memory = device_memory(config.device) if config.device_gb is None else config.device_gb * 1e9
    if memory is not None:
        check(found, config.device, memory, planned)


def check(found: Plan, device: str, memory: float, again: Callable[[Sequence[str]], Plan]) -> None:
    """Whether `found` fits into `memory` bytes of `device`; `again` plans the same run with further options.

    Raises:
        UserError: naming options with which it fits, or what the best of those that were tried leave.
    """
    stage, taken = found.most(device)
    if taken <= memory:
        return
    told = f"{stage} would take {size_text(taken)} of the {size_text(int(memory))} of {device}"
    options, least = _sparing(taken, device, memory, again)
    if least > memory:
        after = f", with {' '.join(options)} still {size_text(least)}" if options else ""
        raise UserError(f"{told}{after}; use a smaller model, a larger GPU, or several (torchrun)")
    raise UserError(f"{told}; with {' '.join(options)} it would be {size_text(least)}")


def _sparing(taken: int, device: str, memory: float, again: Callable[[Sequence[str]], Plan]) -> tuple[list[str], int]:
    """Options that spare memory until the run fits, none of which can be left out, and the bytes with them."""

    def bytes_with(options: Sequence[str]) -> int:
        try:
            return again(options).most(device)[1]
        except UserError:  # the policy or the algorithm has no such option
            return taken

    options: list[str] = []
    least = taken
    tried = (f"algorithm.memory_gb={MICRO_BATCH * memory / 1e9:.2g}", *SPARING)
    with Progress("what would fit", 2 * len(tried), "option") as bar:
        for option in tried:
            if least > memory and (found := bytes_with([*options, option])) < least:
                options, least = [*options, option], found
            bar.update(1)
        for option in options if least <= memory else ():
            rest = [each for each in options if each != option]
            if rest and (found := bytes_with(rest)) <= memory:
                options, least = rest, found
            bar.update(1)
    return options, least
