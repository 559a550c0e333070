"""Part of the CUDA check for pi0: agreement of a tiny model with the CPU, and speed of the published size.

The published size has random weights, in bfloat16; its rows are those of `benchmarks/vla_speed.py`: latency of a chunk
(as it is, as a CUDA graph, compiled) and updates by PPO's loss.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.cuda_parts.draws import CpuDraws
from benchmarks.cuda_parts.record import Options, Record, wait
from embodied.execution.chunking import Running
from embodied.extras import needs_extra
from embodied.networks.precision import Precision

if TYPE_CHECKING:
    from benchmarks.vla_speed import Setting
    from policies.vla.pi0 import Pi0Policy

FLOAT32 = 1e-4
"""Sums of up to some hundred products in another order differ by 1e-6, which four denoising steps of four layers and
attention's other kernel add up; inputs that are wrong differ by 1e-2 and more."""
GRADIENT = 1e-3
"""Tolerance of gradients, relative to the largest one: they contain a division by noise's variance, up to 1/0.1."""
BFLOAT16 = 0.01
"""The unit of bfloat16 is 0.004 at 1; its results are within 0.002 of those in float32, on the CPU."""
COMPILING_S = 200.0
"""Remaining time above which all layers of the published size are compiled; otherwise three per transformer."""
FEW_LAYERS = 3


def run(record: Record, options: Options) -> None:
    """Run the agreement of a tiny pi0, then latency and updates of the published size, then compilation."""
    ends = time.perf_counter() + options.seconds
    with record.row("transformers"):
        with needs_extra("vla"):
            import transformers  # noqa: F401
        agreement(record, options)
        setting = published(options)
        sampling(record, setting)
        updates(record, setting)
        compilation(record, setting, ends)


def published(options: Options) -> Setting:
    """Sizes of the speed measurements."""
    from benchmarks.vla_speed import Setting

    return Setting(
        size=options.size("published", "tiny"),
        device=options.device,
        denoising_steps=options.size(10, 2),
        minibatch=options.size(32, 4),
        piece=options.size(8, 2),
        repeats=options.size(20, 1),
        horizon=options.size(50, 5),
        seconds=2.0,
    )


def agreement(record: Record, options: Options) -> None:
    """Compare acting, scoring and learning of a tiny pi0 on the device and on the CPU, with the same random numbers."""
    # The convolution that reads pictures would compute in TF32, of ten bits, by cuDNN's default.
    previous_setting, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    rows: dict[str, Callable[[Pi0Policy], dict[str, Tensor]]] = {
        "act": acted,
        "act, exploring": explored,
        "inpaint": inpainted,
        "evaluate": scored,
        "loss": learned,
    }
    for precision in (Precision.FLOAT32, Precision.BFLOAT16):
        host = remote = None
        with record.row(f"tiny pi0, {precision.value}"):
            host = tiny(precision)
            remote = copy.deepcopy(host).to(options.device)
        for name, function in rows.items() if host is not None and remote is not None else ():
            if precision is Precision.BFLOAT16 and name not in ("act", "evaluate"):
                continue
            with record.row(f"{name}, {precision.value}"):
                compare(record, f"{name}, {precision.value}", function(host), function(remote), precision)
    torch.backends.cudnn.allow_tf32 = previous_setting


def compare(
    record: Record, name: str, expected: dict[str, Tensor], measured: dict[str, Tensor], precision: Precision
) -> None:
    """Record the agreement of results by name; gradients are compared relative to the largest one, in float32 only."""
    for key, value in expected.items():
        if key != "gradient":
            tolerance = FLOAT32 if precision is Precision.FLOAT32 else BFLOAT16
            record.agree(f"{name}: {key}", value, measured[key], tolerance)
        elif precision is Precision.FLOAT32:
            largest = value.abs().max()
            record.agree(f"{name}: {key}", value / largest, measured[key].cpu() / largest, GRADIENT)


def tiny(precision: Precision) -> Pi0Policy:
    """Make a pi0 of two layers on the CPU, with the same weights in every precision."""
    from benchmarks.vla_speed import contract, observations
    from policies.vla.pi0 import Pi0Config

    torch.manual_seed(0)
    policy = Pi0Config(hidden=16, precision=precision).build(contract(8))
    policy.fit(observations(16, "cpu"), 2.0 * torch.rand(16, 7) - 1.0)
    return policy


def few(made: Pi0Policy) -> Any:  # noqa: ANN401 - a TensorDict
    """The same four observations on each device."""
    from benchmarks.vla_speed import observations

    torch.manual_seed(1)
    return observations(4, "cpu").to(made.device)


def acted(made: Pi0Policy) -> dict[str, Tensor]:
    """Deterministic chunks, whose noise is a function of the robot's state."""
    return {"actions": made.act(few(made), deterministic=True).actions}


def explored(made: Pi0Policy) -> dict[str, Tensor]:
    """Chunks with noise, their likelihood and values."""
    observation = few(made)
    with CpuDraws():
        decision = made.act(observation)
    assert decision.value is not None
    return {"path": decision.sample["path"], "log_prob": decision.log_prob, "value": decision.value}


def inpainted(made: Pi0Policy) -> dict[str, Tensor]:
    """Chunks that continue running ones, guided by gradients of the model."""
    observation, actions = few(made), (torch.rand(4, 8, 7) - 0.5).to(made.device)
    frozen, overlap = (torch.tensor(each, device=made.device) for each in ([0, 1, 2, 3], [4, 5, 6, 7]))
    with CpuDraws():
        return {"actions": made.inpaint(observation, Running(actions, frozen, overlap)).actions}


def scored(made: Pi0Policy) -> dict[str, Tensor]:
    """Likelihood of given paths, the value, and the gradient of both."""
    observation = few(made)
    shape = (4, made.grid.steps + 1, made.contract.horizon, made.model.action_size)
    sample = observation.empty().update({"path": torch.randn(shape).to(made.device)})
    sample["noisy"] = torch.arange(4, device=made.device) % made.grid.steps
    evaluation = made.evaluate(observation, sample)
    # The likelihood of random paths is large; in the gradient it is averaged over the actions' elements.
    gradient = gradients(made, evaluation.log_prob.mean() / 35.0 + evaluation.value.square().mean())
    return {"log_prob": evaluation.log_prob, "value": evaluation.value, "gradient": gradient}


def learned(made: Pi0Policy) -> dict[str, Tensor]:
    """The supervised loss and its gradient."""
    observation, actions = few(made), (torch.rand(4, 8, 7) - 0.5).to(made.device)
    with CpuDraws():
        loss = made.loss(observation, actions, torch.ones(4, 8, device=made.device))
    return {"loss": loss, "gradient": gradients(made, loss)}


def gradients(made: Pi0Policy, loss: Tensor) -> Tensor:
    """Gradients of all weights that `loss` reaches, as one vector."""
    made.zero_grad(set_to_none=True)
    loss.backward()
    return torch.cat([each.grad.flatten() for each in made.parameters() if each.grad is not None])


def row(record: Record, name: str, function: Callable[[], dict[str, Any]], device: str) -> None:
    """Record what `function` measures and the peak memory, or that the device's memory does not suffice."""
    from benchmarks.vla_speed import measured

    with record.row(name):
        figures = measured(name, function, device)
        del figures["row"]
        record.figure(name, figures)


def sampling(record: Record, setting: Setting) -> None:
    """Latency of a chunk with adapters and with adapters merged into the weights, as it is and as a CUDA graph."""
    from benchmarks import vla_speed
    from policies.vla import adapters

    with record.row("policy of published size"):
        start_s = time.perf_counter()
        policy = vla_speed.policy(setting, rank=vla_speed.RANK)
        wait(setting.device)
        count = sum(each.numel() for name, each in policy.model.named_parameters() if ".lora_" not in name)
        stored = sum(each.nbytes for each in policy.parameters())
        # Trained weights, their gradients and AdamW's two moments are float32: sixteen bytes a weight.
        trained_gb, built_s = 16e-9 * count, time.perf_counter() - start_s
        record.figure(
            "policy of published size",
            {
                "build_s": built_s,
                "weights": count,
                "stored_gb": 1e-9 * stored,
                "training_all_needs_gb": trained_gb,
            },
        )
        latencies(record, "chunk, adapters", policy, setting)
        with record.row("chunk, adapters merged"):
            adapters.merge(policy.model)
            latencies(record, "chunk, adapters merged", policy, setting)
    free(setting.device)


def latencies(record: Record, name: str, made: Pi0Policy, setting: Setting) -> None:
    """Rows of one policy: a chunk as it is, and as a CUDA graph."""
    from benchmarks import vla_speed

    row(record, f"{name}, eager", lambda: vla_speed.sampling(made, setting), setting.device)
    title = f"{name}, CUDA graph"
    if setting.device == "cpu":
        with record.row(title):  # what a graph would replay
            observation = vla_speed.observations(setting.batch, setting.device)
            replayed = vla_speed.chunks(made, *vla_speed.model_inputs(made, observation))
            record.agree(title, made.act(observation, deterministic=True).actions, replayed, 0.0)
        record.skip(title, "CUDA graphs need CUDA")
        return
    row(record, title, lambda: vla_speed.sampling_by_graph(made, setting), setting.device)


def updates(record: Record, setting: Setting) -> None:
    """Updates by PPO's loss, with adapters and of all weights."""
    from benchmarks import vla_speed

    setting = replace(setting, seconds=2.0 * setting.seconds)
    for name, rank in (("update, adapters", vla_speed.RANK), ("update, all weights", 0)):

        def measure(rank: int = rank) -> dict[str, Any]:
            policy = vla_speed.policy(setting, rank=rank, gradient_checkpointing=True)
            return vla_speed.updating(policy, setting, rank)

        row(record, name, measure, setting.device)
        free(setting.device)


def compilation(record: Record, setting: Setting, ends: float) -> None:
    """Measure the latency of a chunk by torch.compile; in a short check, all latencies of a model of few layers.

    Compilation takes time in proportion to the layers, which are compiled one after another.
    """
    from benchmarks import vla_speed
    from policies.vla import adapters

    remaining_s = ends - time.perf_counter()
    layers = None if remaining_s > COMPILING_S else FEW_LAYERS
    title = "chunk, adapters merged" if layers is None else f"chunk, {layers} layers of each transformer"
    name = f"{title}, compiled"
    if setting.device == "cpu":
        record.skip(name, "compilation takes minutes on a CPU")
        return
    setting = replace(setting, depth=layers)
    with record.row(name):
        if layers is not None:
            policy = vla_speed.policy(setting, rank=vla_speed.RANK)
            adapters.merge(policy.model)
            latencies(record, title, policy, setting)
            del policy
        # Replaced when it has finished: otherwise the end of the part leaves no row.
        record.figure(name, f"not finished: compilation began {ends - time.perf_counter():.0f} s before the part's end")
        policy = vla_speed.policy(setting, rank=vla_speed.RANK, compile=True)
        adapters.merge(policy.model)
        start_s = time.perf_counter()
        compiled = policy.act(vla_speed.observations(setting.batch, setting.device), deterministic=True)
        wait(setting.device)
        assert compiled.actions.isfinite().all()
        compile_s = time.perf_counter() - start_s
        row(record, name, lambda: vla_speed.sampling(policy, setting) | {"compile_s": compile_s}, setting.device)


def free(device: str) -> None:
    """Release the memory of deleted policies."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
