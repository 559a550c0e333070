"""The MJCF quadruped on mujoco_warp: agreement with MuJoCo, steps per second, and our PPO compared with rsl_rl's."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from benchmarks.cuda_parts.record import Options, Record
from benchmarks.cuda_parts.sweep import free, sweep

if TYPE_CHECKING:
    from benchmarks.ppo_speed import Iterations
    from sims.mjcf.environment import MjcfEnvironment

WORLDS = (256, 512, 1024, 2048, 4096, 8192)
LEARNING, TARGET = 2048, 400.0
"""Number of worlds of PPO, and target return: a robot that only stands earns 344 in a complete episode."""
STATES, STEPS = 128, 50
MEDIAN, P99 = 1e-4, 2e-2
"""Errors of positions (m, rad) after one control step of four physics steps from the same state. Single precision
differs by 1e-6; a foot that lands in another physics step moves a joint by some hundredths."""


def run(record: Record, options: Options) -> None:
    """Run the agreement, then speed, then learning."""
    ends = time.perf_counter() + options.seconds
    with record.row("agreement"):
        agreement(record, options)
    with record.row("steps per second"):
        sweep(
            record,
            "steps_per_s",
            options.size(WORLDS, (2,)),
            lambda worlds: rate(options, worlds),
            0.35 * (ends - time.perf_counter()),
        )
    remaining_s = 0.85 * (ends - time.perf_counter())  # the rest is for making environments
    with record.row("ppo ours"):
        learn(record, options, "ours", 0.5 * remaining_s)
    with record.row("ppo rsl_rl"):
        learn(record, options, "rsl_rl", 0.5 * remaining_s)


def environment(options: Options, worlds: int, sim: str = "mjwarp", split: str = "train") -> MjcfEnvironment:
    """Make quadrupeds on flat ground."""
    from sims.backend import Sim
    from sims.mjcf.task import MjcfTask

    task = MjcfTask(mdp="quadruped", sim=Sim(sim))
    return task.environment(worlds, task.distributions[0], split, device=options.device)


def agreement(record: Record, options: Options) -> None:
    """Compare starts, one control step from states along MuJoCo's episodes, and rewards of an episode's first steps."""
    count, steps = options.size(STATES, 2), options.size(STEPS, 3)
    start_s = time.perf_counter()
    host, device = (environment(options, count, sim, "eval") for sim in ("mujoco", "mjwarp"))
    starts = torch.arange(count)
    first = [env.reset(starts=starts) for env in (host, device)]
    for name, expected in first[0].items():
        record.agree(f"reset_{name}", expected, first[1][name], 1e-5)  # nothing has moved: rounding alone
    actions = _actions(host, steps)
    errors, velocities = [], []
    for step, action in enumerate(actions):
        if step % max(1, steps // 5) == 0:
            position, velocity = _step_errors(host, device, action[:, 0])
            errors.append(position)
            velocities.append(velocity)
        host.step(action)
    record.figure("first_steps_s", time.perf_counter() - start_s)  # with the compilation of kernels
    position, velocity = torch.cat(errors), torch.cat(velocities)
    record.check("step_median", float(position.median()), MEDIAN)
    record.check("step_p99", float(position.quantile(0.99)), P99)
    record.figure("velocity_error_median", float(velocity.median()))

    for env in (host, device):
        env.reset(starts=starts)
    # The feet stand on the ground from the first steps on; ten steps are few enough for errors to stay small.
    pairs = [(host.step(each), device.step(each.to(device.device))) for each in actions[:10]]
    rewards = [torch.cat([pair[side].reward.cpu() for pair in pairs], 1) for side in range(2)]
    record.check("rewards_of_ten_steps_median", float((rewards[0] - rewards[1]).abs().median()), 1e-3)
    record.check("endings_that_differ", float((pairs[-1][0].done != pairs[-1][1].done.cpu()).float().mean()), 0.02)


def _actions(env: MjcfEnvironment, steps: int) -> torch.Tensor:
    """Noisy targets around the stance, [steps, N, 1, 12], on the CPU."""
    from sims.mjcf.tasks.quadruped import STANCE

    generator = torch.Generator().manual_seed(0)
    return torch.tensor(STANCE) + 0.2 * torch.randn(steps, env.num_envs, 1, 12, generator=generator)


def _step_errors(host: MjcfEnvironment, device: MjcfEnvironment, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Largest errors [N] of positions and of velocities of one control step from the present states of `host`.

    The worlds of the `host` are restored, so that its episodes continue.
    """
    saved = host.worlds.save()
    state = {name: host.worlds.fields[name].clone() for name in ("qpos", "qvel")}
    positions_after = []
    for env in (host, device):
        everyone = torch.arange(env.num_envs, device=env.device)
        env.worlds.begin(everyone, {name: values.to(env.device) for name, values in state.items()}, {})
        active = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        env.worlds.step(active, action.to(env.device), env.mdp.SUBSTEPS)
        positions_after.append([env.worlds.fields[name].double().cpu().clone() for name in state])
    host.worlds.restore(saved)
    return tuple(
        (host_values - device_values).abs().amax(1) for host_values, device_values in zip(*positions_after, strict=True)
    )


def rate(options: Options, worlds: int) -> float:
    """Control steps per second of `worlds` that move around their stance and restart after a fall."""
    env, timed = environment(options, worlds), options.size(30, 1)
    env.reset()
    actions = _actions(env, 2 + timed).to(env.device)
    start_s = 0.0
    for step, action in enumerate(actions):
        if step == 2:  # kernels are compiled and the graph is captured
            start_s = _now(env)
        done = env.step(action).done
        if bool(done.any()):
            env.reset(done)
    return worlds * timed / (_now(env) - start_s)


def _now(env: MjcfEnvironment) -> float:
    """Time after the device has finished all its work, s."""
    env.worlds.fields["qpos"].sum().item()
    return time.perf_counter()


def learn(record: Record, options: Options, name: str, seconds: float) -> None:
    """Run the PPO `name` until the return is TARGET or for `seconds`: the same worlds, networks and settings.

    The first iteration, which compiles and allocates, counts neither as time nor as steps.
    """
    from benchmarks import ppo_speed

    clock = ppo_speed.Clock()
    if name == "rsl_rl":
        import rsl_rl  # noqa: F401 - skipped where it is missing, before worlds are made
    env = environment(options, options.size(LEARNING, 32))
    loop = ppo_speed.ours(env, 0, 0, clock) if name == "ours" else ppo_speed.rsl_rl(env, 0, clock)
    start_s = time.perf_counter()
    next(loop)
    record.figure(f"{name}_first_iteration_s", time.perf_counter() - start_s)
    _curve(record, name, loop, options.size(seconds - (time.perf_counter() - start_s), 0.0))
    del loop, env
    free()


def _curve(record: Record, name: str, loop: Iterations, seconds: float) -> None:
    """Figures of the iterations of `loop` within `seconds`, at least one."""
    start_s, spent_s, steps = time.perf_counter(), 0.0, 0
    curve: list[tuple[float, int, float | None]] = []
    for step_count, earned in loop:
        spent_s, steps = time.perf_counter() - start_s, steps + step_count
        curve.append((round(spent_s, 2), steps, earned))
        if (earned is not None and earned >= TARGET) or spent_s + spent_s / len(curve) > seconds:
            break
    returns = [earned for _, _, earned in curve if earned is not None]
    record.figure(f"{name}_steps_per_s", steps / spent_s)
    record.figure(f"{name}_seconds", spent_s)
    record.figure(f"{name}_steps", steps)
    record.figure(f"{name}_return", statistics.fmean(returns[-5:]) if returns else None)
    record.figure(f"{name}_reached", bool(returns) and returns[-1] >= TARGET)
    record.figure(f"{name}_curve_s_steps_return", curve[:: max(1, len(curve) // 20)])
