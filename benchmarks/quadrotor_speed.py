"""How fast quadrotors fly: control steps a second, per core and on all, beside NumPy and torch on the same dynamics.

    python benchmarks/quadrotor_speed.py [--seconds 0.3] [--runs 5] [--output FILE]

Everything is measured in one call, the kinds in turn, again in every run. "per core" counts CPU-seconds of one thread,
"all cores" wall seconds. The dynamics are those of a crazyflie without options: RK4 with rotor lag, yaw reaction, a
disturbing force and torque. K steps are fused into one call. A product is the vector-Jacobian product of one step. The
task adds reward, termination, noisy observation and bookkeeping; the policy is a multilayer perceptron
22-64-64-4, flown 48 steps at a time, and with gradient also backwards. On a CUDA device the dynamics are measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.report import git_commit  # noqa: E402
from sims.native import compiler  # noqa: E402
from sims.quadrotor import dynamics  # noqa: E402
from sims.quadrotor.airframes import CRAZYFLIE  # noqa: E402
from sims.quadrotor.environment import QuadrotorEnvironment  # noqa: E402
from sims.quadrotor.simulator import Simulator  # noqa: E402

LANES = 8192
CUDA_LANES = 1 << 20
FUSED = 16
POLICY = (22, 64, 64, 4)
DECISIONS = 48
CORES = len(os.sched_getaffinity(0))
PUBLISHED = {
    "Learning to Fly in Seconds, laptop GPU, dynamics (arXiv 2311.13081)": 1.3e9,
}
"""Steps per second as their authors give them, on their machines: not measured here."""
Call = Callable[[], object]


@dataclass
class Kind:
    """Something to measure: `call` makes `steps` control steps."""

    name: str
    steps: int
    call: Call
    threaded: bool = True
    per_core: list[float] = field(default_factory=list)
    all_cores: list[float] = field(default_factory=list)

    def row(self) -> dict:
        """JSON-ready: medians, and every run."""
        found = {"kind": self.name, "per_core": statistics.median(self.per_core), "runs_per_core": self.per_core}
        if self.all_cores:
            found |= {"all_cores": statistics.median(self.all_cores), "runs_all_cores": self.all_cores}
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    options = _options(arguments)
    before = {"git_commit": git_commit(), "machine": machine(), "lanes": LANES}
    kinds = [*bare(), *baselines(), *task(), *policy()]
    for _ in range(options.runs):
        for kind in kinds:
            measure(kind, options.seconds)
    report = before | {"rows": [kind.row() for kind in kinds], "cuda": cuda(options), "published": PUBLISHED}
    sys.stdout.write(table(report))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")


def bare() -> list[Kind]:
    """The dynamics, and their products."""
    simulator = Simulator(CRAZYFLIE)
    if simulator.kernels.backend != "c":
        sys.exit("a C compiler is needed to measure the compiled dynamics")
    state, actions, disturbance = flight("cpu", LANES)
    out, seeds = torch.empty_like(state), torch.randn_like(state)
    products = [torch.empty_like(state), torch.empty_like(actions[0])]
    given = [state, actions[0].contiguous(), disturbance, simulator.parameters]
    return [
        Kind("dynamics, K=1", LANES, lambda: simulator.kernels.launch("fly", given, [out])),
        Kind(f"dynamics, K={FUSED}", LANES * FUSED, lambda: simulator.steps(state, actions, disturbance, out)),
        Kind("product", LANES, lambda: simulator.kernels.launch("fly_vjp", [*given, seeds], products)),
    ]


def baselines() -> list[Kind]:
    """The same source, one NumPy or torch operation at a time, in the same precision."""
    tensors = [list(tensor) for tensor in flight("cpu", LANES)]
    tensors[1] = list(tensors[1][0])
    arrays = [[row.numpy() for row in part] for part in tensors]
    single = dynamics.parameters([np.float32(value) for value in CRAZYFLIE.values()])
    options = dynamics.Options()
    assert dynamics.step(*arrays, single, options)[0].dtype == np.float32
    return [
        Kind("NumPy, dynamics", LANES, lambda: dynamics.step(*arrays, single, options), False),
        Kind("torch eager, dynamics", LANES, lambda: dynamics.step(*tensors, CRAZYFLIE, options), False),
    ]


def task() -> list[Kind]:
    """Hover: one step with everything that happens in it, its product, and the same as users call it."""
    env = QuadrotorEnvironment(LANES)
    env.reset()
    action = torch.full((4, LANES), CRAZYFLIE.hover_action)
    chunk = torch.full((LANES, 1, 4), CRAZYFLIE.hover_action)
    step = env._kernels.traces["step_vjp"]
    values = {"action": action, **env._inputs()}
    given = [values.get(group.name, torch.randn(group.rows, LANES)) for group in step.inputs]
    inputs = given[: len(values)]
    out, products = ([torch.empty(g.rows, LANES) for g in env._kernels.traces[n].outputs] for n in ("step", "step_vjp"))
    return [
        Kind("hover task, K=1", LANES, lambda: env._kernels.launch("step", inputs, out)),
        Kind("hover task, product", LANES, lambda: env._kernels.launch("step_vjp", given, products)),
        Kind("hover task, env.step()", LANES, lambda: env.step(chunk)),
    ]


def policy() -> list[Kind]:
    """Flights with a policy, and with the gradient of their reward by its weights."""
    count = 512
    env = QuadrotorEnvironment(count)
    g = torch.Generator().manual_seed(0)
    layers = [
        (torch.randn(b, a, generator=g).div_(10.0 * a**0.5).requires_grad_(), torch.zeros(b).requires_grad_())
        for a, b in pairwise(POLICY)
    ]
    layers[-1][1].data += float(np.arctanh(CRAZYFLIE.hover_action))
    flat = [tensor for layer in layers for tensor in layer]

    def fly() -> torch.Tensor:
        env.reset()
        return env.unroll(layers, DECISIONS).reward

    name = f"policy {'-'.join(map(str, POLICY))}"
    steps = count * DECISIONS
    return [
        Kind(f"{name}, flown", steps, fly),
        Kind(f"{name}, with gradient", steps, lambda: torch.autograd.grad(fly().sum(), flat)),
    ]


def flight(device: str, lanes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hovering states [21, lanes], actions [FUSED, 4, lanes] and small disturbances [6, lanes]."""
    g = torch.Generator().manual_seed(0)
    state = torch.zeros(21, lanes)
    state[3] = 1.0
    actions = CRAZYFLIE.hover_action + 0.05 * torch.randn(FUSED, 4, lanes, generator=g)
    return state.to(device), actions.to(device), (1e-6 * torch.randn(6, lanes, generator=g)).to(device)


def measure(kind: Kind, seconds: float) -> None:
    """Add one run: CPU time on one thread, then wall time on all cores."""
    torch.set_num_threads(1)
    kind.per_core.append(rate(kind, seconds, time.process_time))
    if kind.threaded and CORES > 1:
        torch.set_num_threads(CORES)
        kind.all_cores.append(rate(kind, seconds, time.perf_counter))
        torch.set_num_threads(1)


def rate(kind: Kind, seconds: float, clock: Callable[[], float]) -> float:
    """Control steps per second of `clock`."""
    kind.call()
    began, calls = clock(), 0
    while clock() - began < seconds:
        kind.call()
        calls += 1
    return kind.steps * calls / (clock() - began)


def cuda(options: argparse.Namespace) -> dict[str, float] | None:
    """Steps per second of the dynamics with the state in registers over K steps; None without a CUDA device."""
    if not torch.cuda.is_available():
        return None
    simulator = Simulator(CRAZYFLIE, device="cuda")
    state, actions, disturbance = flight("cuda", CUDA_LANES)
    out, found = torch.empty_like(state), {}
    for K in (1, 4, FUSED):
        chunk = actions[:K].contiguous()
        simulator.steps(state, chunk, disturbance, out)
        torch.cuda.synchronize()
        began, calls = time.perf_counter(), 0
        while time.perf_counter() - began < options.seconds:
            for _ in range(50):
                simulator.steps(state, chunk, disturbance, out)
            torch.cuda.synchronize()
            calls += 50
        found[f"K={K}"] = CUDA_LANES * K * calls / (time.perf_counter() - began)
    return {"device": torch.cuda.get_device_name(), "lanes": CUDA_LANES, **found}


def machine() -> dict[str, str | int]:
    """What the figures depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    version = subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "cpu": model, "cores": CORES, "compiler": version.splitlines()[0], "torch": torch.__version__,
        "numpy": np.__version__, "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def table(report: dict) -> str:
    """Millions of steps per second, and how many times NumPy's."""
    rows = report["rows"]
    numpy = next(row["per_core"] for row in rows if row["kind"].startswith("NumPy"))
    text = f"{'M steps/s':36}{'per core':>10}{'all cores':>11}{'x NumPy':>10}\n"
    for row in rows:
        wide = f"{row['all_cores'] / 1e6:11.2f}" if "all_cores" in row else f"{'-':>11}"
        text += f"{row['kind']:36}{row['per_core'] / 1e6:10.2f}{wide}{row['per_core'] / numpy:10.1f}\n"
    if report["cuda"]:
        text += "".join(
            f"{f'CUDA, {key}':36}{value / 1e6:10.1f}\n" for key, value in report["cuda"].items() if "K" in key
        )
    return text + "".join(f"{value / 1e6:.0f} M/s as published: {key}\n" for key, value in report["published"].items())


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="per kind and run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "quadrotor_speed.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
