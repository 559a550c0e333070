"""Milliseconds of acting, collecting and updating on the device, with 4,096 environments and default networks.

The environments are the tests' Reach, whose steps are cheap: the times are those of policy, collector and learner. For
collecting and updating, the places at which the CPU waits for the device are recorded, too.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.cuda_parts.record import Options, Record, seconds_per_call, wait
from embodied import seeding
from embodied.algorithms.off_policy.td3 import TD3Config
from embodied.algorithms.on_policy.bptt import BPTTConfig
from embodied.algorithms.on_policy.ppo import PPOConfig
from embodied.rollout.memory import Memory
from embodied.training.loop import build
from policies.diffusion import DiffusionConfig
from policies.flow import FlowConfig
from policies.mlp import MLPConfig
from policies.recurrent import RecurrentConfig

Result = TypeVar("Result")
ROOT = Path(__file__).resolve().parent.parent.parent
ENVS, DECISIONS, MINIBATCHES, EPOCHS = 4096, 16, 4, 4
POLICIES = {
    "mlp": (MLPConfig(), 1),
    "recurrent": (RecurrentConfig(), 1),
    "flow": (FlowConfig(initial_std=0.5), 8),
    "diffusion": (DiffusionConfig(), 8),
}
"""Configurations with default sizes, and number of actions of a chunk, of which half are executed."""
PLACES = 8
"""Number of recorded places of waiting, the most frequent ones."""


def rows(record: Record, options: Options) -> dict[str, Callable[[], None]]:
    """Measurements by name, the most important ones first; the last ones run on the CPU of the same machine."""
    measurements: dict[str, Callable[[], None]] = {}
    for name in POLICIES:
        measurements[f"act, {name}"] = partial(_act, record, options, name, options.device)
        measurements[f"ppo, {name}"] = partial(_update, record, options, "ppo", name, options.device)
    for name in ("td3", "bptt"):
        measurements[f"{name}, mlp"] = partial(_update, record, options, name, "mlp", options.device)
    measurements["act on object tokens, flow"] = partial(_act_on_tokens, record, options)
    if options.device != "cpu":
        measurements["act, mlp, on the CPU"] = partial(_act, record, options, "mlp", "cpu")
        measurements["act, flow, on the CPU"] = partial(_act, record, options, "flow", "cpu")
        measurements["ppo, mlp, on the CPU"] = partial(_update, record, options, "ppo", "mlp", "cpu")
    return measurements


def _algorithm(name: str, options: Options) -> Any:  # noqa: ANN401 - a LearnerConfig
    """PPO without a limit of the KL divergence, TD3 without a warm-up, or BPTT."""
    decisions, envs = _sizes(options)
    if name == "ppo":
        minibatch = decisions * envs // MINIBATCHES
        return PPOConfig(
            rollout_length=decisions, minibatch=minibatch, epochs=EPOCHS, target_kl=math.inf, critic_warmup=0
        )
    if name == "td3":
        return TD3Config(rollout_length=decisions, warmup=0, gradient_steps=options.size(100, 2))
    return BPTTConfig(rollout_length=decisions)


def _sizes(options: Options) -> tuple[int, int]:
    """Number of decisions and environments of a rollout."""
    return options.size((DECISIONS, ENVS), (4, 8))


def _made(name: str, envs: int, device: str, *, smooth: bool = False) -> tuple[Any, Any]:
    """Make environments and a policy with statistics, on `device`."""
    from tests.embodied.reach import Reach
    from tests.embodied.smooth_reach import SmoothReach

    config, horizon = POLICIES[name]
    torch.manual_seed(0)
    executed = max(1, horizon // 2)
    env: Any = (
        SmoothReach(envs, device=device) if smooth else Reach(envs, executed=executed, horizon=horizon, device=device)
    )
    policy = config.build(env.contract)
    policy.fit(Reach(64).reset(starts=torch.arange(64)), torch.tensor([[-0.25], [0.25]]))
    return env, policy.to(device)


def _act(record: Record, options: Options, name: str, device: str) -> None:
    """Measure the milliseconds of a call of `act` for one and for many observations."""
    figures = {}
    for count in (1, _sizes(options)[1]):
        env, policy = _made(name, count, device)
        inputs = Memory(policy, count, device).with_observation(env.reset())
        generator = seeding.generator(0, "noise", device=device)
        for kind, deterministic in (("sampled", False), ("deterministic", True)):
            seconds = seconds_per_call(
                lambda: policy.act(inputs, deterministic=deterministic, generator=generator),  # noqa: B023 - at once
                device,
                seconds=options.size(0.2, 0.01),
                warm_up=options.size(3, 1),
            )
            figures[f"{kind} {count}"] = 1e3 * seconds
    record.figure(f"act, {name}{_where(options, device)}_ms", figures)


def _act_on_tokens(record: Record, options: Options) -> None:
    """Measure the milliseconds of a call of `act` on LIBERO's object tokens, whose texts are looked up on the CPU."""
    from tests.policies import observations

    count, device = options.size(1024, 8), options.device
    policy = FlowConfig().build(observations.contract(8, 4, 7))
    inputs = observations.observations(count)
    policy.fit(inputs, 0.2 * torch.randn(64, 8, 7))
    policy, device_inputs = policy.to(device), inputs.to(device)
    figures = {}
    for kind, deterministic in (("sampled", False), ("deterministic", True)):
        seconds = seconds_per_call(
            lambda: policy.act(device_inputs, deterministic=deterministic),  # noqa: B023 - at once
            device,
            seconds=options.size(0.3, 0.01),
        )
        figures[f"{kind} {count}"] = 1e3 * seconds
    record.figure("act on object tokens, flow_ms", figures)


def _update(record: Record, options: Options, algorithm: str, name: str, device: str) -> None:
    """Measure the milliseconds of collecting a rollout and of an update from it, memory and places of waiting."""
    decisions, envs = _sizes(options)
    cuda, title = device.startswith("cuda"), f"{algorithm}, {name}{_where(options, device)}"
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
    env, policy = _made(name, envs, device, smooth=algorithm == "bptt")
    learner, collector = build(env, policy, _algorithm(algorithm, options), None, 0)
    learner.update(collector.collect(decisions), 0.0)  # kernels are loaded at their first use
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds: dict[str, list[float]] = {"collect": [], "update": []}
    steps, limit = learner.gradient_steps, time.monotonic() + options.size(1.0, 0.0)
    while not seconds["update"] or (time.monotonic() < limit and len(seconds["update"]) < 5):
        start_s = time.perf_counter()
        rollout = collector.collect(decisions)
        wait(device)
        collected = time.perf_counter()
        learner.update(rollout, 0.0)
        wait(device)
        seconds["collect"].append(collected - start_s)
        seconds["update"].append(time.perf_counter() - collected)
    steps = (learner.gradient_steps - steps) // len(seconds["update"])
    collect_s, update_s = min(seconds["collect"]), min(seconds["update"])
    figures = {
        "collect_ms_per_decision": 1e3 * collect_s / decisions,
        "collect_decisions_per_s": decisions * envs / collect_s,
        "update_ms": 1e3 * update_s,
        "gradient_steps": steps,
        "update_ms_per_gradient_step": 1e3 * update_s / max(1, steps),
    }
    if cuda:
        figures["peak_mb"] = torch.cuda.max_memory_allocated() / 1e6
    record.figure(title, figures)
    if cuda:
        rollout, places = waits(lambda: collector.collect(decisions))
        record.figure(f"{title}: waits of a collection", places)
        record.figure(f"{title}: waits of an update", waits(lambda: learner.update(rollout, 0.0))[1])


def _where(options: Options, device: str) -> str:
    return "" if device == options.device else ", on the CPU"


def waits(function: Callable[[], Result]) -> tuple[Result, dict[str, int]]:
    """Result of `function`, and number of waits of the CPU for the device, in total and at the most frequent places."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    warnings_of_waits = [each for each in caught if "synchroniz" in str(each.message)]
    places = Counter(f"{each.filename.removeprefix(f'{ROOT}/')}:{each.lineno}" for each in warnings_of_waits)
    return result, {"all": len(warnings_of_waits), **dict(places.most_common(PLACES))}
