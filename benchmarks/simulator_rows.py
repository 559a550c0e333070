"""The rows of `simulators.py`: worlds of one kind, stepped by ours and by the library's own loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.environment import Environment  # noqa: E402
from embodied.environments.engine import light  # noqa: E402

BANK = 64
"""Number of different actions of each world, used cyclically."""
Loop = Callable[[int], int]
"""Makes a number of steps (ours: chunks) of all worlds; returns the total number of control steps."""


@dataclass
class Row:
    """One simulator with `worlds` worlds and two loops; `theirs` is None if there is no other library's loop."""

    name: str
    worlds: int
    ours: Callable[[], Loop]
    theirs: Callable[[], Loop] | None = None


def random_actions(worlds: int, *shape: int, bank: int = BANK) -> torch.Tensor:
    """Shares of the actions' ranges in [-1, 1], [bank, worlds, ...]."""
    return 2.0 * torch.rand(bank, worlds, *shape, generator=torch.Generator().manual_seed(0)) - 1.0


def stepping(env: Environment, bank: int = BANK) -> Loop:
    """Our loop: random chunks over the whole range; ended episodes restart before the next chunk.

    Each world has `bank` different actions, on the environment's device.
    """
    low, high = (torch.tensor(each) for each in (env.contract.action.low, env.contract.action.high))
    shares = random_actions(env.num_envs, env.contract.executed, len(low), bank=bank)
    chunks = ((high + low) / 2 + (high - low) / 2 * shares).to(env.device).unbind()
    taken, whole = 0, env.num_envs * env.contract.executed
    env.reset()

    def loop(steps: int) -> int:
        nonlocal taken
        executed = 0
        for _ in range(steps):
            transition = env.step(chunks[taken % bank])
            taken, done = taken + 1, transition.done
            if light(done).any():
                executed += int(transition.executed.sum())
                env.reset(done)
            else:
                executed += whole
        return executed

    return loop


def stepping_vector(env: Any, actions: np.ndarray) -> Loop:  # noqa: ANN401 - Gymnasium's or EnvPool's
    """The library's loop of a vector environment that was reset, with actions [bank, worlds, ...].

    The step after the end of an episode only resets it.
    """
    worlds = actions.shape[1]
    done, taken = np.zeros(worlds, dtype=bool), 0

    def loop(steps: int) -> int:
        nonlocal done, taken
        executed = 0
        for _ in range(steps):
            executed += worlds - int(done.sum())
            _, _, terminated, truncated, _ = env.step(actions[taken % BANK])
            done, taken = terminated | truncated, taken + 1
        return executed

    return loop


def gym(id: str, worlds: int) -> Row:
    """Rows of Gymnasium: the other loop is its default SyncVectorEnv, which resets an ended episode in its own step."""

    def ours() -> Loop:
        from sims.gym.environment import GymEnvironment

        return stepping(GymEnvironment(worlds, id))

    def theirs() -> Loop:
        import gymnasium

        env = gymnasium.make_vec(id, worlds, vectorization_mode="sync")
        space = env.single_action_space
        shares = random_actions(worlds, *space.shape).numpy()
        actions = ((space.high + space.low) / 2 + (space.high - space.low) / 2 * shares).astype(space.dtype)
        env.reset(seed=0)
        return stepping_vector(env, actions)

    return Row(f"Gymnasium {id}", worlds, ours, theirs)


def envpool(id: str, worlds: int) -> Row:
    """Ours steps Gymnasium's worlds; EnvPool has its own in C++, and takes an extra step to reset an ended episode."""

    def theirs() -> Loop:
        try:
            from envpool import make_gymnasium
        except ImportError as error:
            raise SystemExit(f"EnvPool is missing ({error}): pip install envpool, or name other rows") from error
        env = make_gymnasium(id, num_envs=worlds, num_threads=1, seed=0)
        space = env.action_space
        shares = random_actions(worlds, *space.shape).double().numpy()
        actions = (space.high + space.low) / 2 + (space.high - space.low) / 2 * shares
        env.reset()
        return stepping_vector(env, actions)

    return Row(f"EnvPool {id}", worlds, gym(id, worlds).ours, theirs)


def maniskill(worlds: int) -> Row:
    """PickCube from state; the library's loop is over its base environments, of which each holds one world on a CPU."""

    def ours() -> Loop:
        from sims.maniskill.environment import ManiSkillEnvironment
        from sims.maniskill.worlds import Options

        return stepping(ManiSkillEnvironment(worlds, options=Options("PickCube-v1")))

    def theirs() -> Loop:
        from sims.maniskill.worlds import Options

        options = Options("PickCube-v1")
        bare, shares = [options.make() for _ in range(worlds)], random_actions(worlds, 7)
        done, taken, episodes = [True] * worlds, 0, 0

        def loop(steps: int) -> int:
            nonlocal taken, episodes
            for _ in range(steps):
                for row, world in enumerate(bare):
                    if done[row]:
                        episodes += 1
                        world.reset(seed=episodes)
                    _, _, ended, _, info = world.step(shares[taken % BANK, row : row + 1])
                    done[row] = bool(ended) or int(info["elapsed_steps"]) >= options.step_limit
                taken += 1
            return steps * worlds

        return loop

    return Row("ManiSkill PickCube-v1", worlds, ours, theirs)


def robosuite(worlds: int, executed: int, camera: str = "", size: int = 128) -> Row:
    """Lift with its shaped reward; theirs observes every step, ours every chunk; no model is rebuilt."""

    def ours() -> Loop:
        from sims.robosuite.environment import RobosuiteEnvironment
        from sims.robosuite.world import Options

        return stepping(
            RobosuiteEnvironment(
                worlds,
                options=Options("Lift", shaped=True),
                horizon=executed,
                executed=executed,
                images=(camera,) if camera else (),
                image_size=size,
            )
        )

    def theirs() -> Loop:
        from sims.robosuite.adapted import robosuite as package
        from sims.robosuite.catalogue import entry

        pictures: dict[str, Any] = {"has_offscreen_renderer": False, "use_camera_obs": False}
        if camera:
            pictures = {"camera_names": camera, "camera_heights": size, "camera_widths": size}
        bare = [
            package().make(
                "Lift",
                robots="Panda",
                has_renderer=False,
                reward_shaping=True,
                hard_reset=False,
                horizon=entry("Lift").step_limit,
                seed=0,
                **pictures,
            )
            for _ in range(worlds)
        ]
        actions, done, taken = random_actions(worlds, 7).double().numpy(), [True] * worlds, 0

        def loop(steps: int) -> int:
            nonlocal taken
            for _ in range(steps * executed):
                for row, world in enumerate(bare):
                    if done[row]:
                        world.reset()
                    done[row] = world.step(actions[taken % BANK, row])[2]
                taken += 1
            return steps * executed * worlds

        return loop

    chunks = f", chunks of {executed}" if executed > 1 else ""
    return Row(f"robosuite Lift{chunks}{f', {camera} {size} x {size}' if camera else ''}", worlds, ours, theirs)


def mjcf(task: str, worlds: int) -> Row:
    """One of our MJCF tasks; the library's loop is one call of `mujoco.rollout` per control step, with its sensors.

    Ours computes observation, reward and terminations as well, and restarts ended episodes; the library's loop begins
    every turn from the same states.
    """

    def made() -> Any:  # noqa: ANN401 - imports of the simulator are its own
        from sims.mjcf.environment import MjcfEnvironment
        from sims.mjcf.task import find_mdp

        return MjcfEnvironment(worlds, mdp=find_mdp(task), threads=1)

    def controls() -> tuple[Any, torch.Tensor]:
        env = made()
        low, high = (torch.tensor(each) for each in (env.contract.action.low, env.contract.action.high))
        return env, (high + low) / 2 + 0.1 * (high - low) * random_actions(worlds, 1, len(low))

    def ours() -> Loop:
        env, actions = controls()
        env.reset(starts=torch.arange(worlds))
        taken = 0

        def loop(steps: int) -> int:
            nonlocal taken
            for _ in range(steps):
                done = env.step(actions[taken % BANK]).done
                taken += 1
                if done.any():
                    env.reset(mask=done)
            return steps * worlds

        return loop

    def theirs() -> Loop:
        import mujoco.rollout

        env, actions = controls()
        env.reset(starts=torch.arange(worlds))
        model, data = env.model, mujoco.MjData(env.model)
        spec, substeps = mujoco.mjtState.mjSTATE_FULLPHYSICS, env.mdp.SUBSTEPS
        first = np.empty((worlds, mujoco.mj_stateSize(model, spec)))
        for world in range(worlds):
            mujoco.mj_getState(model, env.worlds.batch.get_data(world), first[world], spec)
        held = np.repeat(actions[:, :, 0].double().numpy()[:, :, None], substeps, 2)

        def loop(steps: int) -> int:
            state = first
            with mujoco.rollout.Rollout(nthread=0) as rollout:
                for step in range(steps):
                    state = rollout.rollout(model, data, state, held[step % BANK])[0][:, -1]
            return steps * worlds

        return loop

    return Row(f"MJCF {task}", worlds, ours, theirs)


def isaac_lab(worlds: int) -> Row:
    """Cartpole, in Isaac Lab's interpreter; a process has one simulator, whose worlds both loops step alternately."""

    @cache
    def engine() -> Any:  # noqa: ANN401 - imports of the simulator are its own
        from sims.isaac_lab.environment import IsaacLabEngine
        from sims.isaac_lab.worlds import Options

        return IsaacLabEngine(worlds, options=Options("Isaac-Cartpole-Direct", "own", action_limit=1.0))

    def ours() -> Loop:
        env, simulator = engine(), engine().env
        loop = stepping(env)

        def turn(steps: int) -> int:
            simulator.cfg.compute_final_obs = True
            env.steps = simulator.episode_length_buf.clone()  # the other loop has stepped the simulator meanwhile
            return loop(steps)

        return turn

    def theirs() -> Loop:
        simulator, taken = engine().env, 0
        actions = random_actions(worlds, 1)
        simulator.reset()

        def loop(steps: int) -> int:
            nonlocal taken
            simulator.cfg.compute_final_obs = False  # as it comes
            for _ in range(steps):
                simulator.step(actions[taken % BANK])
                taken += 1
            return steps * worlds

        return loop

    return Row("Isaac Lab Isaac-Cartpole-Direct", worlds, ours, theirs)


def own(task: str, worlds: int, *options: str) -> Row:
    """One of our simulators, by a task and options of train.py, without another library's loop."""

    def ours() -> Loop:
        from embodied.command_line.config import compose
        from train import GROUPS, TrainConfig

        task_config = compose(TrainConfig, "train", [f"task={task}", *options], GROUPS)[0].task
        return stepping(task_config.environment(worlds, task_config.distributions[0], "train"))

    return Row(" ".join((task, *options)), worlds, ours)


STAND_IN = ("task.assets=stand-in", "task.tasks=[0]")
ROWS: dict[str, Row] = {
    **{f"gym_pendulum_{n}": gym("Pendulum-v1", n) for n in (1, 16)},
    **{f"gym_pusher_{n}": gym("Pusher-v5", n) for n in (1, 16, 64)},
    "gym_humanoid_16": gym("Humanoid-v5", 16),
    **{f"envpool_{name.lower()}_16": envpool(f"{name}-v5", 16) for name in ("HalfCheetah", "Humanoid")},
    **{f"maniskill_{n}": maniskill(n) for n in (2, 8)},
    **{f"robosuite_{n}": robosuite(n, 1) for n in (1, 4)},
    "robosuite_chunks": robosuite(1, 4),
    "robosuite_camera": robosuite(1, 1, "agentview"),
    "robosuite_camera_chunks": robosuite(1, 4, "agentview"),
    **{f"mjcf_{task}_{n}": mjcf(task, n) for task in ("cartpole", "quadruped") for n in (64, 256, 1024)},
    **{f"isaac_lab_{n}": isaac_lab(n) for n in (256, 1024)},
    "libero_8": own("libero_pick", 8, *STAND_IN),
    "libero_camera_8": own("libero_pick", 8, *STAND_IN, "task.images=[agentview]"),
    "quadrotor_1024": own("quadrotor_hover", 1024),
    "vehicle_256": own("vehicle_navigate", 256),
}
