"""External simulators on the device, if their packages are installed: ManiSkill (PhysX) and Isaac Lab."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.cuda_parts.record import Options, Record, wait
from benchmarks.simulator_rows import stepping
from embodied.environment import Environment

STEPS = 50


def maniskill(count: int, device: str) -> Environment:
    """PickCube from state; on a GPU all worlds are in one scene."""
    from sims.maniskill.task import ManiSkillTask

    return ManiSkillTask(id="PickCube-v1").environment(count, "initial_states", "train", 0, device)


def isaac_lab(count: int, device: str) -> Environment:
    """A cartpole of our own, which needs nothing from NVIDIA's server."""
    from sims.isaac_lab.task import IsaacLabTask

    task = IsaacLabTask(assets="own", action_limit=1.0)
    return task.environment(count, task.id, "train", 0, device)


SIMULATORS: dict[str, tuple[Callable[[int, str], Environment], tuple[int, int]]] = {
    # each initial state of ManiSkill's scenes is made by a reset of its own the first time
    "maniskill": (maniskill, (256, 1)),
    "isaac_lab": (isaac_lab, (1024, 2)),
}
"""Factories of environments, and their numbers on a GPU and on a CPU."""


def run(record: Record, options: Options) -> None:
    """Run one row per simulator: make, reset, and step with random actions."""
    ends = time.perf_counter() + 0.9 * options.seconds
    for name, (make, (full, tiny)) in SIMULATORS.items():
        with record.row(name):
            stepped(record, name, make, options.size(full, tiny), options, ends)


def stepped(
    record: Record, name: str, make: Callable[[int, str], Environment], count: int, options: Options, ends: float
) -> None:
    """Take random steps with restarts, fewer if the time is over; observations must be finite."""
    start_s = time.perf_counter()
    env = make(count, options.device)
    record.figure(f"{name}_make_s", time.perf_counter() - start_s)
    try:
        start_s = time.perf_counter()
        loop = stepping(env)  # which resets all
        loop(2)  # first steps compile and allocate
        wait(options.device)
        record.figure(f"{name}_reset_s", time.perf_counter() - start_s)
        start_s, steps, executed = time.perf_counter(), 0, 0
        while steps < options.size(STEPS, 5) and (not steps or time.perf_counter() < ends):
            executed += loop(1)
            steps += 1
        wait(options.device)
        took = time.perf_counter() - start_s
        record.figure(
            f"{name}_steps",
            {
                "num_envs": count,
                "steps": steps,
                "seconds": took,
                "env_steps_per_s": executed / took,
                "device": str(env.device),
            },
        )
        observation = env.step(middle(env)).observation
        finite = all(bool(values.isfinite().all()) for values in observation.values())
        on_device = all(values.device.type == torch.device(options.device).type for values in observation.values())
        record.check(f"{name}_finite", 0.0 if finite else 1.0, 0.0)
        record.check(f"{name}_on_the_device", 0.0 if on_device else 1.0, 0.0)
    finally:
        env.close()


def middle(env: Environment) -> torch.Tensor:
    """Chunks in the middle of the actions' ranges, [N, K, A]."""
    action = env.contract.action
    centre = (torch.tensor(action.low) + torch.tensor(action.high)) / 2
    return centre.expand(env.num_envs, env.contract.executed, -1).to(env.device)
