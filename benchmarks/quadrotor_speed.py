"""Speed of quadrotors in control steps per second, per core and on all cores.

NumPy, torch, torch.compile on one source.

    python benchmarks/quadrotor_speed.py [--seconds 0.3] [--runs 5] [--forward] [--output FILE]

All kinds are measured in one call, alternating in every run. "per core" counts CPU-seconds of one thread, "all cores"
wall seconds. The dynamics are those of a crazyflie without options: RK4 with rotor lag, yaw reaction, a disturbing
force and torque. K steps are fused into one call. A product is the vector-Jacobian product of one step. The task adds
reward, termination, noisy observation and bookkeeping; the policy is a multilayer perceptron 22-64-64-4, run for 48
steps at a time, with and without the backward pass. torch.compile gets the same functions: the dynamics, and one
decision of policy and task (without noise, whose integers it does not vectorise: our rows of these kinds have none
either), called 48 times. Finally the CPU seconds that each takes to compile, with an empty cache.

It takes about six CPU-minutes, four of them for torch.compile (an hour where other work leaves a tenth of a core);
with `--forward`, which leaves out torch.compile's gradients, three.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.native import compiler  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit  # noqa: E402
from sims.quadrotor.environment import QuadrotorEnvironment  # noqa: E402
from sims.quadrotor.physics import dynamics  # noqa: E402
from sims.quadrotor.physics.airframes import CRAZYFLIE  # noqa: E402
from sims.quadrotor.physics.simulator import Simulator  # noqa: E402

LANES = 8192
FUSED = 16
POLICY = (22, 64, 64, 4)
DECISIONS = 48
FLOWN = 512
"""Number of quadrotors in rollouts with a policy."""
CORES = len(os.sched_getaffinity(0))
PUBLISHED = {
    "Learning to Fly in Seconds, laptop GPU, dynamics (arXiv 2311.13081)": 1.3e9,
}
"""Published steps per second on the authors' machines, not measured here."""
Call = Callable[[], object]


@dataclass
class Kind:
    """One measured case: `call` makes `steps` control steps."""

    name: str
    steps: int
    call: Call
    threaded: bool = True
    per_core: list[float] = field(default_factory=list)
    all_cores: list[float] = field(default_factory=list)

    def row(self) -> dict:
        """JSON-ready row: medians, and every run."""
        entry = {"kind": self.name, "per_core": statistics.median(self.per_core), "runs_per_core": self.per_core}
        if self.all_cores:
            entry |= {"all_cores": statistics.median(self.all_cores), "runs_all_cores": self.all_cores}
        return entry


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all kinds, print the table, and write the JSON."""
    options = _options(arguments)
    record = {"git_commit": git_commit(), "machine": machine(), "lanes": LANES}
    with tempfile.TemporaryDirectory() as empty:
        os.environ |= {
            "TORCHINDUCTOR_CACHE_DIR": f"{empty}/torch",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "XDG_CACHE_HOME": f"{empty}/ours",
        }
        report = record | measured(options)
    sys.stdout.write(table(report))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(dumps_rows(report))


def measured(options: argparse.Namespace) -> dict:
    """Measure all kinds, alternating, and compile times."""
    torch.set_num_threads(1)  # fixed by torch.compile
    start_s, seconds = cpu_s(), {}
    quiet = flights(noise=False)
    seconds[f"ours, {named(noise=False)}, flown and with gradient"] = cpu_s() - start_s
    kinds, compiled_kinds = [*bare(), *baselines(), *task(), *flights(noise=True), *quiet], peers()
    compiled = compiled_kinds[:: 2 if options.forward else 1]  # every other kind is with a gradient
    for kind in compiled:
        start_s = cpu_s()
        kind.call()
        seconds[kind.name] = cpu_s() - start_s
    torch.testing.assert_close(compiled_kinds[2].call(), quiet[0].call().detach()[..., 0], rtol=1e-3, atol=1e-3)
    kinds += compiled
    for _ in range(options.runs):
        for kind in kinds:
            measure(kind, options.seconds)
    return {"rows": [kind.row() for kind in kinds], "compile_cpu_s": seconds, "published": PUBLISHED}


def cpu_s() -> float:
    """CPU seconds of this process and of its compilers."""
    return sum(os.times()[:4])


def bare() -> list[Kind]:
    """Kinds of the dynamics and their vector-Jacobian products."""
    simulator = Simulator(CRAZYFLIE)
    if simulator.kernels.backend != "c":
        sys.exit("a C compiler is needed to measure the compiled dynamics")
    state, actions, disturbance = flight(LANES)
    out, seeds = torch.empty_like(state), torch.randn_like(state)
    products = [torch.empty_like(state), torch.empty_like(actions[0])]
    arguments = [state, actions[0].contiguous(), disturbance, simulator.parameters]
    return [
        Kind("dynamics, K=1", LANES, lambda: simulator.kernels.launch("fly", arguments, [out])),
        Kind(f"dynamics, K={FUSED}", LANES * FUSED, lambda: simulator.steps(state, actions, disturbance, out)),
        Kind("product", LANES, lambda: simulator.kernels.launch("fly_vjp", [*arguments, seeds], products)),
        Kind("dynamics, with gradient", LANES, gradient(simulator.step)),
    ]


def gradient(step: Callable[..., torch.Tensor]) -> Call:
    """Run one step of the dynamics, forward and backward."""
    state, actions, disturbance = flight(LANES)
    inputs, seeds = (state.requires_grad_(), actions[0].contiguous().requires_grad_()), torch.randn_like(state)
    return lambda: torch.autograd.grad(step(*inputs, disturbance), inputs, seeds)


def baselines() -> list[Kind]:
    """Kinds of the same source, one NumPy or torch operation at a time, in single precision."""
    tensors = [list(tensor) for tensor in flight(LANES)]
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
    """Kinds of hover: one full step, its vector-Jacobian product, and the step as users call it."""
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


def policy() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Layers of a policy that approximately hovers."""
    g = torch.Generator().manual_seed(0)
    layers = [
        (torch.randn(b, a, generator=g).div_(10.0 * a**0.5).requires_grad_(), torch.zeros(b).requires_grad_())
        for a, b in pairwise(POLICY)
    ]
    layers[-1][1].data += float(np.arctanh(CRAZYFLIE.hover_action))
    return layers


def flights(noise: bool) -> list[Kind]:
    """Kinds of rollouts with a policy, with and without the gradient of their reward by its weights."""
    env = QuadrotorEnvironment(FLOWN, noise=noise)
    layers = policy()
    flat = [tensor for layer in layers for tensor in layer]

    def fly() -> torch.Tensor:
        env.reset(starts=torch.arange(FLOWN))
        return env.unroll(layers, DECISIONS).reward

    name, steps = named(noise), FLOWN * DECISIONS
    return [
        Kind(f"{name}, flown", steps, fly),
        Kind(f"{name}, with gradient", steps, lambda: torch.autograd.grad(fly().sum(), flat)),
    ]


def named(noise: bool) -> str:
    """Name of the policy's kind."""
    return f"policy {'-'.join(map(str, POLICY))}{'' if noise else ', no noise'}"


def peers() -> list[Kind]:
    """Kinds of torch.compile: the dynamics, and decisions of policy and task, forward and backward."""
    options = dynamics.Options()

    def bare_step(state: torch.Tensor, action: torch.Tensor, disturbance: torch.Tensor) -> torch.Tensor:
        return torch.stack(dynamics.step(list(state), list(action), list(disturbance), CRAZYFLIE, options))

    env = QuadrotorEnvironment(FLOWN, noise=False)
    program, layers = env.episode.programs()[-1], policy()
    flat = [tensor for layer in layers for tensor in layer]

    def decision(inputs: dict[str, torch.Tensor], seen: torch.Tensor, *flat: torch.Tensor) -> dict[str, torch.Tensor]:
        x = seen[: POLICY[0]].t()
        for weight, bias in zip(flat[::2], flat[1::2], strict=True):
            x = torch.tanh(torch.nn.functional.linear(x, weight, bias))
        return program.run(inputs | {"action": x.t()})

    step, decide = (torch.compile(function, fullgraph=True, dynamic=False) for function in (bare_step, decision))
    fixed, state = flight(LANES), flight(LANES)[0]

    def fly() -> torch.Tensor:
        env.reset(starts=torch.arange(FLOWN))
        inputs, seen, reward = env._inputs(), env._seen, []
        for _ in range(DECISIONS):
            found = decide(inputs, seen, *flat)
            inputs, seen = inputs | {name: found[name] for name in ("state", "record")}, found["observation"]
            reward.append(found["reward"])
        return torch.cat(reward)

    def flown() -> torch.Tensor:
        with torch.no_grad():
            return fly()

    name, steps = f"torch.compile, {named(noise=False)}", FLOWN * DECISIONS
    return [
        Kind("torch.compile, dynamics, K=1", LANES, lambda: step(state, fixed[1][0], fixed[2]), False),
        Kind("torch.compile, dynamics, with gradient", LANES, gradient(step), False),
        Kind(f"{name}, flown", steps, flown, False),
        Kind(f"{name}, with gradient", steps, lambda: torch.autograd.grad(fly().sum(), flat), False),
    ]


def flight(lanes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make hovering states [21, lanes], actions [FUSED, 4, lanes] and small disturbances [6, lanes]."""
    g = torch.Generator().manual_seed(0)
    state = torch.zeros(21, lanes)
    state[3] = 1.0
    actions = CRAZYFLIE.hover_action + 0.05 * torch.randn(FUSED, 4, lanes, generator=g)
    return state, actions, 1e-6 * torch.randn(6, lanes, generator=g)


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
    start_s, calls = clock(), 0
    while clock() - start_s < seconds:
        kind.call()
        calls += 1
    return kind.steps * calls / (clock() - start_s)


def machine() -> dict[str, str | int]:
    """Properties of the machine that the figures depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    version = subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "cpu": model,
        "cores": CORES,
        "compiler": version.splitlines()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
        "load": round(os.getloadavg()[0], 1),
    }


def table(report: dict) -> str:
    """Millions of steps per second, and the ratio to NumPy."""
    rows = report["rows"]
    numpy = next(row["per_core"] for row in rows if row["kind"].startswith("NumPy"))
    text = f"{'M steps/s':36}{'per core':>10}{'all cores':>11}{'x NumPy':>10}\n"
    for row in rows:
        wide = f"{row['all_cores'] / 1e6:11.2f}" if "all_cores" in row else f"{'-':>11}"
        text += f"{row['kind']:36}{row['per_core'] / 1e6:10.2f}{wide}{row['per_core'] / numpy:10.1f}\n"
    rates = {row["kind"]: row["per_core"] for row in rows}
    for name in (kind.removeprefix("torch.compile, ") for kind in rates if kind.startswith("torch.compile")):
        text += f"ours / torch.compile, {name}: {rates[name] / rates[f'torch.compile, {name}']:.2f}\n"
    text += "".join(f"{seconds:.0f} CPU-s to compile: {name}\n" for name, seconds in report["compile_cpu_s"].items())
    return text + "".join(f"{value / 1e6:.0f} M/s as published: {key}\n" for key, value in report["published"].items())


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="per kind and run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--forward", action="store_true", help="without torch.compile's gradients")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "quadrotor_speed.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
