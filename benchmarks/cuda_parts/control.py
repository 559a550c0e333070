"""Quadrotors and vehicles on the device: agreement with compiled C on the CPU, short trainings, steps/s by size.

Both simulators are compiled C on the CPU and torch operations elsewhere. Steps/s count `env.step` with random actions
and restarts, for up to a million environments, or until the time or the device's memory is used up.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.cuda_parts.record import Options, Record, seconds_per_call, wait
from benchmarks.simulator_rows import stepping
from embodied.environments.engine import EpisodeEngine
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.flights import HISTORY, named_flights
from sims.quadrotor.physics.airframes import AIRFRAMES
from sims.vehicle.environment import VehicleEnvironment
from sims.vehicle.navigate import Navigate
from sims.vehicle.vehicles import JACKAL

HOVER, NAVIGATE = "quadrotor_hover", "vehicle_navigate"
DIFFERENT, SHARE = 1e-3, 0.02
"""An observation (m, m/s, rad/s) or a reward that differs by more is another one; largest share of environments with
such ones. Both sides compute in float32, with other sines and contractions; after 30 steps most differ by 1e-5. A
beam that meets the edge of an obstacle on one side alone, or a hit that falls into another sector, differs by more.
"""
GRADIENT = 1e-3
"""Largest difference of gradients relative to their largest: sums over 20 steps and all quadrotors, in other orders."""
IMPROVES_AFTER = 6
"""Iterations after which both policies are better; that of quadrotors is worse after the first two, on the CPU too."""
WORLDS = 2048
"""Different worlds of the vehicles whose speed is measured: a CPU makes 5000/s, and each restart takes the next one."""
SIZES = 1_000, 10_000, 100_000, 1_000_000
SHARES = {"training hover": 0.2, "training navigate": 0.25, "cpu": 0.02, "sweep hover": 0.15, "sweep navigate": 0.2}
"""Of the part's time, at most."""


def quadrotors(count: int, device: str, backend: str | None = None) -> QuadrotorEnvironment:
    """Environments of quadrotor_hover, as in training."""
    flight = named_flights("crazyflie", AIRFRAMES["crazyflie"])["robust"]
    return QuadrotorEnvironment(
        count,
        mdp=flight.mdp,
        airframe=flight.airframe,
        variation=flight.variation,
        options=flight.options,
        history=HISTORY,
        step_limit=150,
        device=device,
        backend=backend,
    )


def vehicles(count: int, device: str, backend: str | None = None) -> VehicleEnvironment:
    """Environments of vehicle_navigate, as in training, with maps and guards."""
    return VehicleEnvironment(
        count, mdp=Navigate(), vehicle=JACKAL, mapped=True, guarded=True, device=device, backend=backend
    )


Maker = Callable[..., EpisodeEngine]
MAKERS: dict[str, Maker] = {HOVER: quadrotors, NAVIGATE: vehicles}


def run(record: Record, options: Options) -> None:
    """Run the rows in the order of their importance."""
    ends = time.perf_counter() + 0.95 * options.seconds

    def seconds(row: str) -> float:
        return max(0.0, min(SHARES[row] * options.seconds, ends - time.perf_counter()))

    for name, make in MAKERS.items():
        with record.row(f"{name}_agrees"), torch.no_grad():
            agreement(record, name, make, options)
    with record.row(f"{HOVER}_gradient"):
        gradient(record, options)
    with record.row(f"{HOVER}_training"):
        # a GPU computes many environments in the time of a few, and has time for few iterations
        training(record, HOVER, options.size(2048, 32), options, seconds("training hover"))
    with record.row(f"{NAVIGATE}_training"):
        training(record, NAVIGATE, options.size(2048, 16), options, seconds("training navigate"))
    for name, make in MAKERS.items():
        with record.row(f"{name}_on_the_cpu"), torch.no_grad():
            count = options.size(10_000, 16)
            measured = speed(make, count, "cpu", options.size(max(0.2, seconds("cpu")), 0.05))
            record.figure(f"{name}_{count}_on_the_cpu", measured | {"threads": torch.get_num_threads()})
    for name, row in ((HOVER, "sweep hover"), (NAVIGATE, "sweep navigate")):
        with record.row(f"{name}_steps"), torch.no_grad():
            sweep(record, name, options.size(SIZES, (8, 16)), options, seconds(row))


def agreement(record: Record, name: str, make: Maker, options: Options) -> None:
    """Compare observations, rewards and ends of some control steps from the same starts with the same actions."""
    count, steps = options.size((256, 30), (16, 5))
    host_env, device_env = make(count, "cpu"), make(count, options.device, "torch")
    starts = torch.arange(count)
    first, second = host_env.reset(starts=starts), device_env.reset(starts=starts)
    record.figure(f"{name}_reset_difference", largest(first, second))
    different = {"observation": differing(first, second), "reward": torch.zeros(count), "end": torch.zeros(count)}
    low, high = (torch.tensor(bound) for bound in (host_env.contract.action.low, host_env.contract.action.high))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        actions = low + (high - low) * torch.rand(count, 1, len(low), generator=generator)
        expected, actual = host_env.step(actions), device_env.step(actions.to(device_env.device))
        first, second = expected.observation, actual.observation
        different["observation"] += differing(first, second)
        different["reward"] += ((expected.reward - actual.reward.cpu()).abs() > DIFFERENT).any(1)
        different["end"] += (expected.terminated != actual.terminated.cpu()) | (
            expected.truncated != actual.truncated.cpu()
        )
    record.figure(f"{name}_difference", largest(first, second))
    for part, share in different.items():
        record.check(f"{name}_{part}_share", float((share > 0).float().mean()), SHARE)
    host_env.close()
    device_env.close()


def differing(first: Any, second: Any) -> Tensor:  # noqa: ANN401 - TensorDicts
    """1 for environments [N] in which any observation differs by more than `DIFFERENT` or is not a number, else 0."""
    parts = [((part - second[key].cpu()).flatten(1).abs() <= DIFFERENT).all(1) for key, part in first.items()]
    return (~torch.stack(parts).all(0)).float()


def largest(first: Any, second: Any) -> dict[str, float]:  # noqa: ANN401 - TensorDicts
    """The largest absolute difference of each observation."""
    return {key: float((part - second[key].cpu()).abs().max()) for key, part in first.items()}


def gradient(record: Record, options: Options) -> None:
    """Compare gradients of a policy's return through the simulator: compiled C and autograd through torch."""
    from policies.mlp import MLPConfig

    count, decisions = options.size((256, 20), (16, 3))
    host_env, device_env = quadrotors(count, "cpu"), quadrotors(count, options.device, "torch")
    starts = torch.arange(count)
    observation = host_env.reset(starts=starts)
    device_env.reset(starts=starts)
    torch.manual_seed(0)
    policy = MLPConfig(hidden=[64, 64]).build(host_env.contract)
    policy.fit(observation, torch.empty(0))
    gradients = []
    for env, actor in ((host_env, policy), (device_env, copy.deepcopy(policy).to(options.device))):
        loss = -env.unroll(actor.dense_layers(), decisions).reward.mean()
        parts = torch.autograd.grad(loss, actor.mean_parameters())
        gradients.append(torch.cat([part.flatten().cpu() for part in parts]))
    scale = gradients[0].abs().max()
    record.agree(f"{HOVER}_gradient", gradients[0] / scale, gradients[1] / scale, GRADIENT)


def training(record: Record, name: str, num_envs: int, options: Options, seconds: float) -> None:
    """Train some iterations with the settings of `train.py`; evaluate the policy on the CPU before and afterwards."""
    import train as program
    from embodied.training.loop import train

    config, _ = program.composed([f"task={name}", f"num_envs={num_envs}"])
    task, among = config.task, config.task.distributions[0]
    env = task.environment(num_envs, among, "train", 0, options.device)
    judge = task.environment(options.size(64, 4), among, "eval")
    torch.manual_seed(0)
    policy = config.policy.build(env.contract).to(options.device)
    iterations = train(env, policy, config.algorithm, env_steps=config.env_steps)  # also normalises the policy
    outcome = early_return if name == HOVER else success
    length = config.algorithm.rollout_length
    before, lengths, env_steps = outcome(judge, policy, options, length), [], 0
    seconds_by_phase = {"simulation_s": 0.0, "policy_s": 0.0}
    start_s = time.perf_counter()
    for iteration in iterations:
        wait(options.device)
        lengths.append(time.perf_counter() - start_s - sum(lengths))
        env_steps = iteration.env_steps
        seconds_by_phase = {part: seconds_by_phase[part] + getattr(iteration, part) for part in seconds_by_phase}
        if len(lengths) >= options.size(1000, 2) or sum(lengths) + lengths[-1] > seconds:
            break
    took, after = sum(lengths), outcome(judge, policy, options, length)
    record.figure(
        f"{name}_training",
        {
            "num_envs": num_envs,
            "iterations": len(lengths),
            "seconds": took,
            "iteration_s": statistics.median(lengths),
            **seconds_by_phase,
            "env_steps": env_steps,
            "env_steps_per_s": env_steps / took,
            "measure": outcome.__name__,
            "before": before,
            "after": after,
        },
    )
    if len(lengths) >= IMPROVES_AFTER:
        record.check(f"{name}_training_improves", before - after, -1e-6)
    env.close()
    judge.close()


def early_return(judge: QuadrotorEnvironment, policy: Any, options: Options, decisions: int) -> float:  # noqa: ANN401
    """Mean return of the first `decisions`, which analytic gradients improve before the length of episodes."""
    judge.reset(starts=torch.arange(judge.num_envs))
    with torch.no_grad():
        rollout = judge.unroll(copy.deepcopy(policy).to("cpu").dense_layers(), options.size(decisions, 3))
    return float(rollout.reward.sum(0).mean())


def success(judge: VehicleEnvironment, policy: Any, options: Options, decisions: int) -> float:  # noqa: ANN401
    """Share of complete episodes that reach their goals; only of `decisions` if sizes are tiny."""
    from embodied.evaluation.evaluation import evaluate

    judge.step_limit = options.size(judge.step_limit, decisions)
    result = evaluate(judge, copy.deepcopy(policy).to("cpu"), starts_per_task=judge.num_envs)
    return float(result.success.float().mean())


def sweep(record: Record, name: str, sizes: Sequence[int], options: Options, seconds: float) -> None:
    """Steps/s by number of environments, from few to many, until time or memory is used up."""
    ends, needed_s = time.perf_counter() + seconds, 0.0
    for count in sizes:
        remaining_s = ends - time.perf_counter()
        if remaining_s <= (0.0 if options.tiny else needed_s):
            record.figure(f"{name}_stopped_before", {"environments": count, "reason": "time", "needed_s": needed_s})
            return
        start_s = time.perf_counter()
        try:
            # "torch" is what a GPU runs, so that a CPU tries the same
            measured = speed(
                MAKERS[name], count, options.device, min(options.size(1.0, 0.05), 0.2 * remaining_s), "torch"
            )
        except torch.OutOfMemoryError as error:
            record.figure(f"{name}_stopped_before", {"environments": count, "reason": str(error).split(". ")[0]})
            return
        finally:
            free(options.device)
        # worlds are made on the CPU, ten times as many next; a GPU steps those hardly slower until it is full
        needed_s = 10.0 * measured["make_s"] + 2.0 * (time.perf_counter() - start_s - measured["make_s"])
        record.figure(f"{name}_{count}", measured)


def speed(make: Maker, count: int, device: str, seconds: float, backend: str | None = None) -> dict[str, float]:
    """Control steps/s of `count` environments with random actions and restarts; seconds until the first step.

    On a GPU also the peak of its memory, GB.
    """
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start_s = time.perf_counter()
    env = make(count, device, backend)
    if isinstance(env, VehicleEnvironment):
        env.num_starts = WORLDS
    loop = stepping(env, bank=4)
    wait(device)
    make_s = time.perf_counter() - start_s
    # episodes are at different times, as in training: in each step some end and restart
    env.steps = torch.randint(env.step_limit, (count,), generator=torch.Generator().manual_seed(0)).to(env.device)
    executed: list[int] = []
    warm_up = 3
    step_s = seconds_per_call(lambda: executed.append(loop(1)), device, seconds=max(seconds, 0.01), warm_up=warm_up)
    env.close()
    rate = statistics.mean(executed[warm_up:]) / step_s
    memory = {"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if on_gpu else {}
    return {"steps_per_s": round(rate), "step_ms": 1e3 * step_s, "make_s": make_s, **memory}


def free(device: str) -> None:
    """Release the memory of unreferenced environments."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
