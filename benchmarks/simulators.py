"""What this library adds to another one's simulator: control steps per CPU-second, ours beside the library's own loop.

    python benchmarks/simulators.py [maniskill robosuite] [--steps 100] [--runs 7] [--output FILE]

Both loops step as many worlds with the same random actions, alternating in every run; the library's resets where an
episode ends and keeps nothing. Rates are of CPU time in one thread: the best run of each, which a busy machine disturbs
least. The overhead is the time that ours takes beyond the library's, of the library's. One function a simulator.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed


@dataclass
class Row:
    """One simulator: `ours` and `theirs` make `steps` steps of each of `worlds` worlds."""

    name: str
    worlds: int
    ours: Callable[[], object]
    theirs: Callable[[], object]


def maniskill(steps: int) -> Row:
    """PickCube from state, eight worlds; the library's loop is over its base environments."""
    from sims.maniskill.environment import ManiSkillEnvironment
    from sims.maniskill.worlds import Options

    options, worlds = Options("PickCube-v1"), 8
    env = ManiSkillEnvironment(worlds, options=options)
    bare = [options.make() for _ in range(worlds)]
    shares = 2 * torch.rand(steps, worlds, 7, generator=torch.Generator().manual_seed(0)) - 1
    actions = shares / env.scale.gain + env.scale.centre

    def ours() -> None:
        env.reset(starts=torch.arange(worlds))
        for step in range(steps):
            done = env.step(actions[step].unsqueeze(1)).done
            if done.any():
                env.reset(mask=done)

    def theirs() -> None:
        for world, each in enumerate(bare):
            each.reset(seed=world)
        for step in range(steps):
            for world, each in enumerate(bare):
                _, _, ended, _, info = each.step(shares[step, world : world + 1])
                if ended or info["elapsed_steps"] >= env.step_limit:
                    each.reset(seed=step)

    return Row("ManiSkill PickCube-v1", worlds, ours, theirs)


def mjcf(task: str, worlds: int) -> Callable[[int], Row]:
    """An MJCF task of ours; the library's loop is one call of `mujoco.rollout` per control step, with its sensors.

    Ours computes observation, reward and endings as well, and restarts what has ended.
    """

    def make(steps: int) -> Row:
        import mujoco.rollout

        from sims.mjcf.environment import MjcfEnvironment
        from sims.mjcf.task import found

        env = MjcfEnvironment(worlds, mdp=found(task), threads=1)
        low, high = (torch.tensor(each) for each in (env.contract.action.low, env.contract.action.high))
        shares = 0.4 + 0.2 * torch.rand(steps, worlds, len(low), generator=torch.Generator().manual_seed(0))
        actions, model, data = low + (high - low) * shares, env.model, mujoco.MjData(env.model)
        controls, starts = actions.double().numpy(), torch.arange(worlds)
        env.reset(starts=starts)
        spec = mujoco.mjtState.mjSTATE_FULLPHYSICS
        size, substeps = mujoco.mj_stateSize(model, spec), env.mdp.SUBSTEPS
        first = np.empty((worlds, size))
        for world in range(worlds):
            mujoco.mj_getState(model, env.worlds.batch.get_data(world), first[world], spec)

        def ours() -> None:
            env.reset(starts=starts)
            for step in range(steps):
                done = env.step(actions[step].unsqueeze(1)).done
                if done.any():
                    env.reset(mask=done)

        def theirs() -> None:
            state = first
            with mujoco.rollout.Rollout(nthread=0) as rollout:
                for step in range(steps):
                    held = np.repeat(controls[step][:, None], substeps, 1)
                    state = rollout.rollout(model, data, state, held)[0][:, -1]

        return Row(f"MJCF {task}, {worlds} worlds", worlds, ours, theirs)

    return make


def robosuite(steps: int) -> Row:
    """Lift from state with its shaped reward, one world, chunks of four as its task runs; no model is built anew."""
    from sims.robosuite.adapted import robosuite as package
    from sims.robosuite.environment import RobosuiteEnvironment
    from sims.robosuite.world import Options

    env = RobosuiteEnvironment(1, options=Options("Lift", shaped=True), horizon=4, executed=4)
    bare = package().make(
        "Lift", robots="Panda", has_offscreen_renderer=False, use_camera_obs=False, reward_shaping=True,
        hard_reset=False, horizon=env.step_limit, seed=0,
    )  # fmt: skip
    actions = 2 * torch.rand(steps, 7, generator=torch.Generator().manual_seed(0)) - 1

    def ours() -> None:
        env.reset(starts=torch.zeros(1))
        for chunk in actions.view(-1, 1, 4, 7):
            if bool(env.step(chunk).done):
                env.reset()

    def theirs() -> None:
        bare.reset()
        for action in actions.double().numpy():
            if bare.step(action)[2]:
                bare.reset()

    return Row("robosuite Lift", 1, ours, theirs)


def gym(steps: int) -> Row:
    """Pusher-v5, 16 worlds; the library's loop is SyncVectorEnv's, whose resets take a step of their own."""
    import gymnasium

    from sims.gym.environment import GymEnvironment

    worlds = 16
    env = GymEnvironment(worlds, "Pusher-v5")
    bare = gymnasium.make_vec("Pusher-v5", worlds, vectorization_mode="sync")
    actions = 4 * torch.rand(steps, worlds, 7, generator=torch.Generator().manual_seed(0)) - 2

    def ours() -> None:
        env.reset(starts=torch.arange(worlds))
        done = torch.zeros(worlds, dtype=torch.bool)
        for step in range(steps):
            if done.any():
                env.reset(mask=done)
            done = env.step(actions[step].unsqueeze(1)).done

    def theirs() -> None:
        bare.reset(seed=0)
        for step in range(steps):
            done = np.logical_or(*bare.step(actions[step].numpy())[2:4])
            if done.all() and step + 1 < steps:  # all end together; what follows is their resets alone
                bare.step(actions[step].numpy())

    return Row("Gymnasium Pusher-v5", worlds, ours, theirs)


SIMULATORS = {
    "gym": gym,
    "maniskill": maniskill,
    "robosuite": robosuite,
    **{f"mjcf_{task}_{n}": mjcf(task, n) for task in ("cartpole", "quadruped") for n in (64, 256, 1024)},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("simulators", nargs="*", default=list(SIMULATORS), help=", ".join(SIMULATORS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = {}
    print(f"{'steps per CPU-second':28} {'ours':>8} {'library':>8} {'overhead':>9}")
    for name in options.simulators:
        row = SIMULATORS[name](options.steps)
        taken = {"ours": [], "theirs": []}
        for _ in range(options.runs):
            for which, times in taken.items():
                began = time.process_time()
                getattr(row, which)()
                times.append(time.process_time() - began)
        rates = {which: options.steps * row.worlds / min(times) for which, times in taken.items()}
        overhead = rates["theirs"] / rates["ours"] - 1
        print(f"{row.name:28} {rates['ours']:8.0f} {rates['theirs']:8.0f} {overhead:9.1%}", flush=True)
        rows[name] = {**rates, "overhead": overhead, "worlds": row.worlds}
    if options.output:
        where = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        record = {"steps": options.steps, "runs": options.runs, **where, "rows": rows}
        options.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
