"""Latency of an exported policy that generates chunks, relative to PyTorch: `python benchmarks/export_latency.py RUN`.

    [--repeats 200] [--rows 8]

RUN is a run with policy=flow or diffusion, or one of its checkpoints. It is exported to ONNX and to TorchScript in a
temporary folder; then the policy, ONNX Runtime (by OnnxPolicy) and TorchScript decide on one random observation of
`rows` objects, text and noise included, in turn and with one thread. Prints the median and the 90th percentile of each
in milliseconds, and the share of the policy's median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402

from embodied.errors import UserError  # noqa: E402
from embodied.export.chunk_network import ChunkNetwork  # noqa: E402
from embodied.saving import checkpoint  # noqa: E402
from embodied.text import encode_as  # noqa: E402
from policies.registry import trained_policy  # noqa: E402
from real_robot.firmware.exporting import Export, Target, export  # noqa: E402
from real_robot.serving.onnx_policy import OnnxPolicy  # noqa: E402

SAID, NAMES = "pick the milk and place it in the basket", ("milk", "basket", "butter", "ketchup")


def observation(network: ChunkNetwork, rows: int) -> TensorDict:
    """Draw a random observation with text."""
    sample = network.example(1, rows, seed=0)
    for key, spec in network.contract.observation.items():
        if spec.is_text:
            text = SAID if len(spec.shape) == 1 else [f"{NAMES[row % len(NAMES)]} {row}" for row in range(rows)]
            sample[key] = torch.from_numpy(encode_as(text, spec.shape)).unsqueeze(0)
    return sample


def milliseconds(deciding: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Times of `repeats` decisions of each, alternating, so that other programs disturb all alike."""
    for decide in deciding.values():
        for _ in range(10):
            decide()
    durations_ms: dict[str, list[float]] = {name: [] for name in deciding}
    for _ in range(repeats):
        for name, decide in deciding.items():
            start_s = time.perf_counter()
            decide()
            durations_ms[name].append(1e3 * (time.perf_counter() - start_s))
    return durations_ms


def main() -> None:
    """Measure all latencies and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy = trained_policy(checkpoint.load(options.run))
    network = getattr(policy, "deployable", lambda: None)()
    if not isinstance(network, ChunkNetwork):
        raise UserError(f"expected a run with policy=flow or diffusion, got {type(policy).__name__}")
    sample, inputs = observation(network, options.rows), network.inputs
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for target in (Target.onnx, Target.torchscript):
            export(policy, Export(target), Path(folder) / target.value)
        onnx, script = OnnxPolicy(Path(folder) / "onnx"), torch.jit.load(Path(folder) / "torchscript" / "policy.pt")
        deciding = {
            "policy, PyTorch": lambda: policy.act(sample, deterministic=True),
            "ONNX Runtime": lambda: onnx.act(sample),
            "TorchScript": lambda: script(*inputs.of(sample).values()),
        }
        durations_ms = milliseconds(deciding, options.repeats)
    first = statistics.median(durations_ms["policy, PyTorch"])
    for name, times in durations_ms.items():
        middle, slow = statistics.median(times), statistics.quantiles(times, n=10)[-1]
        print(f"{name:16} {middle:7.2f} ms, 90% within {slow:7.2f} ms, {middle / first:5.2f} of the policy's")


if __name__ == "__main__":
    main()
