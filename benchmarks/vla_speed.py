"""Speed and memory of pi0 of published sizes and random weights: `python benchmarks/vla_speed.py --device cuda`.

    [--size published|small|tiny] [--device cuda|cpu] [--compiled | --no-compiled] [--batch 1] [--denoising-steps 10]
    [--minibatch 32] [--piece 8] [--repeats 20] [--peak-tflops T] [--output FILE]

Rows: latency of a chunk from two pictures and an instruction (median and 90th percentile of `repeats`, for `batch`
robots at once), as it is and compiled; and updates by PPO's loss on minibatches of Flow-SDE samples, in pieces of
`piece`, with adapters and of all weights: samples per second, peak memory and model FLOPs utilisation. All compute in
bfloat16 and store frozen weights so; updates have gradient checkpointing. Utilisation counts a forward pass and the
backward pass that the trained weights need (twice a forward pass; with adapters once), not what is computed again, over
the dense bfloat16 peak of the card, which `peak-tflops` names where PEAKS does not. What does not fit says so. Compiled
rows are for GPUs: compilation takes minutes on a CPU, where --compiled has to be asked for. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from transformers import PI0Config, PI0ForConditionalGeneration  # noqa: E402

from embodied.contract import Contract, TensorSpec  # noqa: E402
from embodied.evaluation.report import git_commit, versions  # noqa: E402
from embodied.precision import Precision  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.text import encode, text_spec  # noqa: E402
from policies.vla import adapters  # noqa: E402
from policies.vla.computing import prepare  # noqa: E402
from policies.vla.model import Pi0Model  # noqa: E402
from policies.vla.pi0 import Pi0Config, Pi0Policy  # noqa: E402
from policies.vla.sizes import Size  # noqa: E402

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bfloat16 FLOP/s of cards, by a part of their name."""
PICTURE, WORDS, RANK = 224, 44, 16


def contract(horizon: int) -> Contract:
    """LIBERO's: two cameras, eight elements of state, seven of action."""
    cameras = {name: TensorSpec((PICTURE, PICTURE, 3), "uint8", camera=name) for name in ("front", "wrist")}
    rest = {"state": TensorSpec((8,)), "instruction": text_spec(WORDS)}
    return Contract(cameras | rest, TensorSpec((7,), low=(-1.0,) * 7, high=(1.0,) * 7), 0.05, horizon, 5)


class Published(Pi0Policy):
    """pi0 of published sizes, with random weights."""

    def _new(self) -> Pi0Model:
        return Pi0Model(PI0ForConditionalGeneration(PI0Config(chunk_size=self.contract.horizon)))


def policy(options: argparse.Namespace, *, rank: int, **how: bool) -> Pi0Policy:
    """A policy in bfloat16, with adapters of `rank` (0: all weights are trained), on the device of `options`."""
    size = Size.TINY if options.size == "published" else Size(options.size)
    config = Pi0Config(size=size, denoising_steps=options.denoising_steps, precision=Precision.BFLOAT16, **how)
    torch.manual_seed(0)
    with torch.device(options.device):
        made = (Published if options.size == "published" else Pi0Policy)(contract(options.horizon), config)
        if rank:
            adapters.adapt(made.model, rank)
    prepare(made.model, Pi0Config(precision=Precision.BFLOAT16))  # what adapting has frozen
    made = made.to(options.device)
    made.fit(observations(64, options.device), torch.rand(64, 7, device=options.device))
    return made


def observations(count: int, device: str) -> TensorDict:
    """Random pictures and states [count], and an instruction."""
    pictures = {
        name: torch.randint(256, (count, PICTURE, PICTURE, 3), dtype=torch.uint8, device=device)
        for name in ("front", "wrist")
    }
    said = torch.from_numpy(encode("pick up the milk and place it in the basket", WORDS)).to(device).expand(count, -1)
    return TensorDict(pictures | {"state": torch.rand(count, 8, device=device), "instruction": said}, [count])


def timed(function: Callable[[], object], repeats: int, device: str) -> list[float]:
    """Seconds of each of `repeats` calls, after two that are not counted."""
    seconds = []
    for repeat in range(repeats + 2):
        wait(device)
        began = time.perf_counter()
        function()
        wait(device)
        if repeat >= 2:
            seconds.append(time.perf_counter() - began)
    return seconds


def wait(device: str) -> None:
    """Until the device has computed what it was asked to."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def sampling(options: argparse.Namespace, compiled: bool) -> dict[str, Any]:
    """Latency of a chunk, ms."""
    made, seen = policy(options, rank=RANK, compile=compiled), observations(options.batch, options.device)
    seconds = timed(lambda: made.act(seen, deterministic=True), options.repeats, options.device)
    ordered = sorted(seconds)
    return {
        "median_ms": 1e3 * statistics.median(seconds),
        "p90_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
    }


def updating(options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Updates by PPO's loss: samples per second, and FLOPs used of the peak."""
    made = policy(options, rank=rank, gradient_checkpointing=True)
    seen = observations(options.minibatch, options.device)
    pieces = [part.clone() for part in seen.split(options.piece)]
    samples = [made.act(part) for part in pieces]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        made.evaluate(pieces[0], samples[0].sample)
    passes = 2 if rank else 3
    flops = passes * counter.get_total_flops() / len(pieces[0]) * options.minibatch
    trained = [*made.actor_parameters(), *made.critic_parameters()]
    optimiser = torch.optim.AdamW(trained, 1e-6, fused=True)

    def step() -> None:
        optimiser.zero_grad()
        for part, acted in zip(pieces, samples, strict=True):
            (loss(made, part, acted.sample, acted.log_prob) / options.minibatch).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()

    seconds = statistics.median(timed(step, max(3, options.repeats // 4), options.device))
    peak = peak_flops(options)
    return {
        "samples_per_s": options.minibatch / seconds, "trained_weights": sum(weight.numel() for weight in trained),
        "model_tflops_per_s": flops / seconds / 1e12, "mfu": flops / seconds / peak if peak else None,
    }  # fmt: skip


def loss(made: Pi0Policy, seen: TensorDict, sample: TensorDict, before: Tensor) -> Tensor:
    """PPO's, summed over samples of advantage 1 and return 0."""
    found = made.evaluate(seen, sample)
    ratio = (found.log_prob - before).exp()
    return found.value.square().sum() - torch.minimum(ratio, ratio.clamp(0.8, 1.2)).sum()


def peak_flops(options: argparse.Namespace) -> float | None:
    """FLOP/s of the device; None if unknown."""
    if options.peak_tflops:
        return 1e12 * options.peak_tflops
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def measured(name: str, function: Callable[[], dict[str, Any]], device: str) -> dict[str, Any]:
    """A row: what `function` measures, with the device's peak memory in GB (None on a CPU), or that it did not fit."""
    cuda = device.startswith("cuda")
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        row = function()
    except torch.OutOfMemoryError:
        row = {"failed": "out of memory"}
    row = {"row": name} | row | {"peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None}
    told = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    print("  ".join(told))
    return row


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="published", choices=("published", *(size.value for size in Size)))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction)
    for name, usual in (
        ("batch", 1), ("denoising-steps", 10), ("minibatch", 32), ("piece", 8), ("repeats", 20), ("horizon", 50),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--peak-tflops", type=float)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/vla_speed.json")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}, but there is no GPU here; try --size tiny --device cpu")
    options.compiled = options.device.startswith("cuda") if options.compiled is None else options.compiled
    return options


def main() -> None:
    """Measure the rows, print them and write the file."""
    options = arguments()
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.processor()
    about = {
        "git_commit": git_commit(), "machine": name or platform.machine(), "cores": os.cpu_count(),
        "versions": versions(), "options": {key: str(value) for key, value in vars(options).items() if key != "output"},
    }  # fmt: skip
    rows = {"sampling": lambda: sampling(options, False)}
    rows |= {"sampling, compiled": lambda: sampling(options, True)} if options.compiled else {}
    rows |= {f"update, adapters of rank {RANK}": lambda: updating(options, RANK)}
    rows |= {"update, all weights": lambda: updating(options, 0)}
    about["rows"] = [measured(name, function, options.device) for name, function in rows.items()]
    with complete_or_absent(options.output) as path:
        path.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
