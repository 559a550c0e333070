"""Speed and memory of pi0 of published sizes and random weights: `python benchmarks/vla_speed.py --device cuda`.

    [--size published|small|tiny] [--device cuda|cpu] [--compiled | --no-compiled] [--batch 1] [--denoising-steps 10]
    [--minibatch 32] [--piece 8] [--repeats 20] [--peak-tflops T] [--output FILE]

Rows: latency of a chunk from two pictures and an instruction (median and 90th percentile of `repeats`, for `batch`
robots at once), as it is, as a CUDA graph, compiled; and updates by PPO's loss on minibatches of Flow-SDE samples, in
pieces of `piece`, with adapters and of all weights: samples per second, peak memory and model FLOPs utilisation. All
compute in bfloat16 and store frozen weights in it; updates have gradient checkpointing. Utilisation counts a forward
pass and the backward pass that the trained weights need (twice a forward pass; with adapters once), without
recomputation, relative to the dense bfloat16 peak of the card, from `peak-tflops` if PEAKS lacks it. Rows that do not
fit are reported as such. Compiled rows are for GPUs: compilation takes minutes on a CPU, where it needs --compiled. A
CUDA graph replays the model's part of a chunk without the launch of each kernel; words, fixed noise and statistics are
computed by the host within the measured time. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
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
from embodied.networks.precision import Precision  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from embodied.text import encode, text_spec  # noqa: E402
from policies.vla import adapters  # noqa: E402
from policies.vla.computing import prepare  # noqa: E402
from policies.vla.model import Pi0Model  # noqa: E402
from policies.vla.pi0 import Pi0Config, Pi0Policy  # noqa: E402
from policies.vla.sizes import Size  # noqa: E402

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bfloat16 FLOP/s of cards, by a part of their name."""
PICTURE, WORDS, RANK = 224, 44, 16


ROUNDING = 0.02
"""Largest difference of an action in [-1, 1] between two ways to compute a chunk in bfloat16, whose unit is 0.004:
other kernels round the velocities of ten steps otherwise. Wrong inputs give differences of about 1."""


@dataclass(frozen=True)
class Setting:
    """Settings of the measurement, from the command line.

    `seconds` bounds the measurement of a row, of which the first repeat is always made. `depth` is the number of layers
    of each transformer of the published size; None: all.
    """

    size: str = "published"
    device: str = "cuda"
    batch: int = 1
    denoising_steps: int = 10
    minibatch: int = 32
    piece: int = 8
    repeats: int = 20
    horizon: int = 50
    peak_tflops: float | None = None
    seconds: float = float("inf")
    depth: int | None = None


def contract(horizon: int) -> Contract:
    """LIBERO's contract: two cameras, eight elements of state, seven of action."""
    cameras = {name: TensorSpec((PICTURE, PICTURE, 3), "uint8", camera=name) for name in ("front", "wrist")}
    rest = {"state": TensorSpec((8,)), "instruction": text_spec(WORDS)}
    return Contract(cameras | rest, TensorSpec((7,), low=(-1.0,) * 7, high=(1.0,) * 7), 0.05, horizon, 5)


class Published(Pi0Policy):
    """pi0 with published sizes and random weights; each transformer has `depth` layers if that is set."""

    depth: int | None = None

    def _new(self) -> Pi0Model:
        config = PI0Config(chunk_size=self.contract.horizon)
        if self.depth is not None:
            for part in (config.vlm_config.text_config, config.vlm_config.vision_config, config.dit_config):
                part.num_hidden_layers = self.depth
        return Pi0Model(PI0ForConditionalGeneration(config))


def policy(setting: Setting, *, rank: int, **how: bool) -> Pi0Policy:
    """Make a policy in bfloat16, with adapters of `rank` (0: all weights are trained), on the device of `setting`."""
    size = Size.TINY if setting.size == "published" else Size(setting.size)
    config = Pi0Config(size=size, denoising_steps=setting.denoising_steps, precision=Precision.BFLOAT16, **how)
    kind: Any = Pi0Policy
    if setting.size == "published":
        kind = type("Published", (Published,), {"depth": setting.depth})
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = kind(contract(setting.horizon), config)
        if rank:
            adapters.adapt(model.model, rank)
    prepare(model.model, Pi0Config(precision=Precision.BFLOAT16))  # what adapting has frozen
    model = model.to(setting.device)
    model.fit(observations(64, setting.device), torch.rand(64, 7, device=setting.device))
    return model


def observations(count: int, device: str) -> TensorDict:
    """Draw random pictures and states [count], with an instruction."""
    pictures = {
        name: torch.randint(256, (count, PICTURE, PICTURE, 3), dtype=torch.uint8, device=device)
        for name in ("front", "wrist")
    }
    instruction = (
        torch.from_numpy(encode("pick up the milk and place it in the basket", WORDS)).to(device).expand(count, -1)
    )
    return TensorDict(pictures | {"state": torch.rand(count, 8, device=device), "instruction": instruction}, [count])


class ChunkGraph:
    """CUDA graph of a policy's deterministic chunks, for observations of the shapes of `seen`.

    The model's inputs are copied into the memory that the graph reads. What needs the host is computed before every
    replay: words of the instruction, the fixed noise, and whether there are statistics.
    """

    def __init__(self, made: Pi0Policy, seen: TensorDict) -> None:
        self.made = made
        self.inputs = [each.clone() for each in model_inputs(made, seen)]
        side_stream = torch.cuda.Stream()  # libraries allocate their workspaces in the first passes, outside the graph
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(2):
                chunks(made, *self.inputs)
        torch.cuda.current_stream().wait_stream(side_stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.actions = chunks(made, *self.inputs)

    def __call__(self, seen: TensorDict) -> Tensor:
        """Chunks [N, H, A] in robot units, equal to those of `act(seen, deterministic=True)`."""
        for mine, new in zip(self.inputs, model_inputs(self.made, seen), strict=True):
            assert mine.shape == new.shape, f"the graph is of inputs {list(mine.shape)}, got {list(new.shape)}"
            mine.copy_(new)
        self.graph.replay()
        return self.actions.clone()


@torch.no_grad()
def model_inputs(made: Pi0Policy, seen: TensorDict) -> tuple[Tensor, ...]:
    """Inputs of `chunks` from observations [N]: noise, state, pictures, tokens, and the mask of real tokens."""
    inputs = made.inputs
    pictures = inputs.pictures(seen, made.model.picture_size)
    return made._noise(seen, True, None), inputs.standardised_state(seen), pictures, *inputs.tokens(seen)


@torch.no_grad()
def chunks(made: Pi0Policy, noise: Tensor, state: Tensor, pictures: Tensor, tokens: Tensor, real: Tensor) -> Tensor:
    """Deterministic chunks [N, H, A] in robot units, computed without the host."""
    prefix = made.model.prefix(pictures, tokens, real)
    path, _, _ = made.sampling.denoise(noise, made._field(state, prefix), True, None)
    return made.to_robot(path[:, -1])


def timed(function: Callable[[], object], repeats: int, device: str, limit_s: float = float("inf")) -> list[float]:
    """Seconds of each of `repeats` calls, after two warm-up calls; fewer calls if they take more than `limit_s`."""
    seconds, first = [], time.perf_counter()
    for repeat in range(repeats + 2):
        wait(device)
        start_s = time.perf_counter()
        function()
        wait(device)
        if repeat >= 2:
            seconds.append(time.perf_counter() - start_s)
        if seconds and time.perf_counter() - first > limit_s:
            break
    return seconds


def wait(device: str) -> None:
    """Wait until the device has finished all its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def latency(function: Callable[[], object], setting: Setting) -> dict[str, Any]:
    """Latency of a call, ms."""
    seconds = timed(function, setting.repeats, setting.device, setting.seconds)
    ordered = sorted(seconds)
    return {
        "median_ms": 1e3 * statistics.median(seconds),
        "p90_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "repeats": len(seconds),
    }


def sampling(made: Pi0Policy, setting: Setting) -> dict[str, Any]:
    """Latency of a chunk by `act`."""
    inputs = observations(setting.batch, setting.device)
    return latency(lambda: made.act(inputs, deterministic=True), setting)


def sampling_by_graph(made: Pi0Policy, setting: Setting) -> dict[str, Any]:
    """Latency of a chunk by a CUDA graph, and the largest difference from `act` for other observations.

    Raises:
        RuntimeError: if the chunks differ by more than `ROUNDING`.
    """
    first, inputs = (observations(setting.batch, setting.device) for _ in range(2))
    start_s = time.perf_counter()
    graph = ChunkGraph(made, first)
    wait(setting.device)
    capture_s = time.perf_counter() - start_s
    difference = float((graph(inputs) - made.act(inputs, deterministic=True).actions).abs().max())
    if not difference <= ROUNDING:
        raise RuntimeError(f"chunks of the CUDA graph differ from those of act by {difference:g}, at most {ROUNDING}")
    return latency(lambda: graph(inputs), setting) | {"capture_s": capture_s, "difference_from_act": difference}


def updating(made: Pi0Policy, setting: Setting, rank: int) -> dict[str, Any]:
    """Updates by PPO's loss: samples per second, and the share of peak FLOPs."""
    inputs = observations(setting.minibatch, setting.device)
    pieces = [part.clone() for part in inputs.split(setting.piece)]
    samples = [made.act(part) for part in pieces]
    trained = [*made.actor_parameters(), *made.critic_parameters()]
    optimiser = torch.optim.AdamW(trained, 1e-6, fused=True)

    def step() -> None:
        optimiser.zero_grad()
        for part, acted in zip(pieces, samples, strict=True):
            (loss(made, part, acted.sample, acted.log_prob) / setting.minibatch).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()

    every = timed(step, max(3, setting.repeats // 4), setting.device, setting.seconds)
    seconds = statistics.median(every)
    flops, peak = update_flops(made, pieces[0], samples[0].sample, rank) * setting.minibatch, peak_flops(setting)
    return {
        "samples_per_s": setting.minibatch / seconds,
        "trained_weights": sum(weight.numel() for weight in trained),
        "model_tflops_per_s": flops / seconds / 1e12,
        "mfu": flops / seconds / peak if peak else None,
        "repeats": len(every),
    }


def update_flops(made: Pi0Policy, seen: TensorDict, sample: TensorDict, rank: int) -> float:
    """FLOPs of an update per sample: a forward pass, and the backward pass that the trained weights need."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        made.evaluate(seen, sample)
    return (2 if rank else 3) * counter.get_total_flops() / len(seen)


def loss(made: Pi0Policy, seen: TensorDict, sample: TensorDict, before: Tensor) -> Tensor:
    """PPO's loss, summed over samples of advantage 1 and return 0."""
    evaluation = made.evaluate(seen, sample)
    ratio = (evaluation.log_prob - before).exp()
    return evaluation.value.square().sum() - torch.minimum(ratio, ratio.clamp(0.8, 1.2)).sum()


def peak_flops(setting: Setting) -> float | None:
    """FLOP/s of the device; None if unknown."""
    if setting.peak_tflops:
        return 1e12 * setting.peak_tflops
    name = torch.cuda.get_device_name() if setting.device.startswith("cuda") else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def measured(name: str, function: Callable[[], dict[str, Any]], device: str) -> dict[str, Any]:
    """Row of the measurement `function`, with the device's peak memory in GB (None on a CPU), or its failure to fit."""
    cuda = device.startswith("cuda")
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        row = function()
    except torch.OutOfMemoryError:
        row = {"failed": "out of memory"}
    return {"row": name} | row | {"peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None}


def text(row: dict[str, Any]) -> str:
    """Format a row on one line."""
    parts = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    return "  ".join(parts)


def table(setting: Setting, compiled: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    """Rows by name; each makes a policy of its own."""
    rows = {"sampling": lambda: sampling(policy(setting, rank=RANK), setting)}
    if setting.device.startswith("cuda"):
        rows["sampling, CUDA graph"] = lambda: sampling_by_graph(policy(setting, rank=RANK), setting)
    if compiled:
        rows["sampling, compiled"] = lambda: sampling(policy(setting, rank=RANK, compile=True), setting)
    for name, rank in ((f"adapters of rank {RANK}", RANK), ("all weights", 0)):
        made = partial(policy, setting, rank=rank, gradient_checkpointing=True)
        rows[f"update, {name}"] = lambda made=made, rank=rank: updating(made(), setting, rank)
    return rows


def arguments() -> tuple[Setting, bool, Path]:
    """Parse the command line: the setting, whether to compile, and the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="published", choices=("published", *(size.value for size in Size)))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction)
    for name, usual in (
        ("batch", 1),
        ("denoising-steps", 10),
        ("minibatch", 32),
        ("piece", 8),
        ("repeats", 20),
        ("horizon", 50),
    ):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--peak-tflops", type=float)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/vla_speed.json")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}, but there is no GPU here; try --size tiny --device cpu")
    values = vars(options)
    compiled, output = values.pop("compiled"), values.pop("output")
    setting = Setting(**values)
    return setting, setting.device.startswith("cuda") if compiled is None else compiled, output


def main() -> None:
    """Measure the rows, print them and write the file."""
    setting, compiled, output = arguments()
    name = torch.cuda.get_device_name() if setting.device.startswith("cuda") else platform.processor()
    about = {
        "git_commit": git_commit(),
        "machine": name or platform.machine(),
        "cores": os.cpu_count(),
        "versions": versions(),
        "options": {key: str(value) for key, value in asdict(setting).items()},
        "rows": [],
    }
    for title, function in table(setting, compiled).items():
        about["rows"].append(measured(title, function, setting.device))
        print(text(about["rows"][-1]))
    with complete_or_absent(output) as path:
        path.write_text(dumps_rows(about))


if __name__ == "__main__":
    main()
