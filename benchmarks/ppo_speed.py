"""PPO and SAC of this library, rsl_rl and Stable-Baselines3: control steps per second of training, and returns.

    python -m venv venv && venv/bin/pip install -c constraints.txt '.[gym,rsl-rl]' stable-baselines3==2.9.2
    venv/bin/python benchmarks/ppo_speed.py [rsl_rl sb3 sb3_sac sb3_sac_hopper sb3_sac_walker sb3_sac_pendulum]
        [--runs 3] [--seconds 20] [--steps N] [--plain] [--output FILE]

rsl_rl's OnPolicyRunner (version 5) trains on 1,024 quadrotors that learn to hover, in compiled C, through `as_rsl_rl`;
Stable-Baselines3's PPO on 16 HalfCheetahs of Gymnasium in its DummyVecEnv. Ours trains on the same environments with
the same networks (tanh, two layers of 128, and of 64), rollouts, epochs, minibatches, discounts, clipping and learning
rates; none stops an epoch early. All normalise observations, except Stable-Baselines3, which reads them unchanged.
Remaining differences: ours limits the mean action by tanh, scales rewards by the deviation of their returns, clips the
gradients of actor and critic separately, and bootstraps time limits from the true last observation.

SAC learns on 16 HalfCheetahs, Hoppers or Walker2ds (two layers of 256), and on one pendulum (of 64): one gradient step
of 256 rows per control step after the first 1,000, the same rates, targets and target entropy. Ours normalises
observations by those of random play, and explores with its own policy at first where Stable-Baselines3 acts at random.

Ours keeps freed memory as `train.py` does (`keep_freed_memory`; not with `--plain`), the others run unchanged. The two
of a pair, each in its own process, alternate iterations in one thread until each has had `seconds` of CPU time, or made
`steps` control steps; then the next seed follows. Steps are reported per CPU-second of the whole loop, environments
included, and separately without the environments; the ratio is ours over the other's. Returns are means of the episodes
that ended within the last fifth: those of 16 HalfCheetahs all end after 16,000, 32,000, ... steps, so that 30,000 steps
have no return, and 33,000 have one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.algorithms.off_policy.sac import SACConfig  # noqa: E402
from embodied.algorithms.on_policy.ppo import PPOConfig  # noqa: E402
from embodied.environment import NumberedStarts  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from embodied.training.compute import keep_freed_memory  # noqa: E402
from embodied.training.loop import train  # noqa: E402
from policies.mlp import MLPConfig  # noqa: E402
from policies.squashed import SquashedConfig  # noqa: E402

SHARED = {"discount": 0.99, "gae_lambda": 0.95, "clip": 0.2, "epochs": 5}
QUADROTORS, CHEETAHS = 1024, 16
LENGTHS, MINIBATCHES, RATES, HIDDEN = (24, 128), (4, 8), (1e-3, 3e-4), (128, 64)
"""Settings of the pairs with rsl_rl and Stable-Baselines3: rollout length, minibatches, learning rates, widths."""


class Clock:
    """Counts CPU seconds within the environment's steps and resets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, env: Any, *names: str) -> None:  # noqa: ANN401 - of any library
        """Count the time of calls of the methods `names` of `env` from now on."""
        for name in names:
            setattr(env, name, self._counting(getattr(env, name)))

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - began

        return counted


Iterations = Iterator[tuple[int, float | None]]
"""Yields control steps, and the mean return of ended episodes, if any, for each iteration."""


def ours(env: NumberedStarts, which: int, seed: int, clock: Clock) -> Iterations:
    """Iterate our loop, as a library user calls it."""
    torch.manual_seed(seed)
    steps = LENGTHS[which] * env.num_envs
    policy = MLPConfig(hidden=[HIDDEN[which]] * 2, running_statistics=True).build(env.contract).to(env.device)
    settings = PPOConfig(
        rollout_length=LENGTHS[which],
        minibatch=steps // MINIBATCHES[which],
        learning_rate=RATES[which],
        value_learning_rate=RATES[which],
        target_kl=float("inf"),
        critic_warmup=0,
        **SHARED,
    )
    clock.watch(env, "step", "reset")
    env_steps = 0
    for each in train(env, policy, settings, env_steps=1 << 40, seed=seed):
        yield each.env_steps - env_steps, each.ended.get("episode_return")
        env_steps = each.env_steps


def quadrotors(seed: int) -> NumberedStarts:
    """Make quadrotors that learn to hover, with single actions."""
    from sims.quadrotor.task import HoverTask

    task = HoverTask()
    return task.environment(QUADROTORS, task.distributions[0], "train", seed=seed)


def rsl_rl(env: NumberedStarts, seed: int, clock: Clock) -> Iterations:
    """Iterate rsl_rl's runner on the environment's device, without a log folder."""
    from rsl_rl.runners import OnPolicyRunner

    from sims.gym.rsl_rl import as_rsl_rl

    vector = as_rsl_rl(env)
    clock.watch(env, "step", "reset")
    torch.manual_seed(seed)
    model = {"class_name": "MLPModel", "hidden_dims": [HIDDEN[0]] * 2, "activation": "tanh", "obs_normalization": True}
    noise = {"class_name": "GaussianDistribution", "init_std": 0.5, "std_type": "log"}
    groups = list(vector.get_observations().keys())
    settings = {
        "num_steps_per_env": LENGTHS[0],
        "save_interval": 1 << 30,
        "env": {},
        "obs_groups": {"actor": ["policy"], "critic": groups},
        "actor": {**model, "distribution_cfg": noise},
        "critic": model,
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": SHARED["epochs"],
            "num_mini_batches": MINIBATCHES[0],
            "learning_rate": RATES[0],
            "gamma": SHARED["discount"],
            "lam": SHARED["gae_lambda"],
            "clip_param": SHARED["clip"],
            "entropy_coef": 0.0,
            "value_loss_coef": 1.0,
            "max_grad_norm": 1.0,
            "schedule": "fixed",
            "desired_kl": None,
            "use_clipped_value_loss": False,
        },
    }
    with contextlib.redirect_stdout(io.StringIO()):
        runner = OnPolicyRunner(vector, settings, log_dir=None, device=str(env.device))
    watched, totals, returns = vector.step, torch.zeros(env.num_envs, device=env.device), []

    def step(actions: torch.Tensor) -> Any:  # noqa: ANN401 - rsl_rl's
        nonlocal totals
        result = watched(actions)
        totals = totals + result[1]
        if (rows := result[2].nonzero().squeeze(1)).numel():
            returns.append(totals[rows])
            totals[rows] = 0.0
        return result

    vector.step = step
    while True:
        returns.clear()
        with contextlib.redirect_stdout(io.StringIO()):
            runner.learn(1)
        yield LENGTHS[0] * env.num_envs, float(torch.cat(returns).mean()) if returns else None


def cheetahs(seed: int) -> NumberedStarts:
    """Make Gymnasium's HalfCheetah."""
    from sims.gym.environment import GymEnvironment

    return GymEnvironment(CHEETAHS, "HalfCheetah-v5", seed=seed)


def sb3(seed: int, clock: Clock) -> Iterations:
    """Iterate Stable-Baselines3's PPO; its Monitor, which reports returns, costs one addition per step."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env("HalfCheetah-v5", CHEETAHS, seed=seed)
    clock.watch(env, "step", "reset")
    steps = LENGTHS[1] * CHEETAHS
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=LENGTHS[1],
        batch_size=steps // MINIBATCHES[1],
        n_epochs=SHARED["epochs"],
        learning_rate=RATES[1],
        gamma=SHARED["discount"],
        gae_lambda=SHARED["gae_lambda"],
        clip_range=SHARED["clip"],
        vf_coef=1.0,
        max_grad_norm=1.0,
        seed=seed,
        device="cpu",
        policy_kwargs={"net_arch": [HIDDEN[1]] * 2, "log_std_init": float(torch.tensor(0.5).log())},
    )
    first = True
    while True:
        model.learn(steps, reset_num_timesteps=first)
        first = False
        returns = [each["r"] for each in model.ep_info_buffer or ()]
        model.ep_info_buffer.clear()
        yield steps, statistics.fmean(returns) if returns else None


@dataclass(frozen=True)
class SACPair:
    """SAC of both libraries on `num_envs` of Gymnasium's `id`, with two layers of `hidden`.

    Each iteration takes `length` steps of each environment and as many gradient steps as steps; those of the `warmup`,
    which take none, are not counted.
    """

    id: str
    num_envs: int
    length: int
    hidden: int
    warmup: int = 1000

    def ours(self, seed: int, clock: Clock) -> Iterations:
        """Iterate our loop, as a library user calls it."""
        from sims.gym.environment import GymEnvironment

        torch.manual_seed(seed)
        env = GymEnvironment(self.num_envs, self.id, seed=seed)
        policy = SquashedConfig(hidden=[self.hidden] * 2).build(env.contract)
        settings = SACConfig(hidden=[self.hidden] * 2, rollout_length=self.length, warmup=self.warmup)
        clock.watch(env, "step", "reset")
        env_steps = 0
        for each in train(env, policy, settings, env_steps=1 << 40, seed=seed):
            if each.env_steps > self.warmup:
                yield each.env_steps - env_steps, each.ended.get("episode_return")
            env_steps = each.env_steps

    def sb3(self, seed: int, clock: Clock) -> Iterations:
        """Iterate Stable-Baselines3's SAC."""
        from stable_baselines3 import SAC
        from stable_baselines3.common.env_util import make_vec_env

        env = make_vec_env(self.id, self.num_envs, seed=seed)
        clock.watch(env, "step", "reset")
        steps = self.length * self.num_envs
        model = SAC(
            "MlpPolicy",
            env,
            learning_starts=self.warmup,
            train_freq=self.length,
            gradient_steps=steps,
            buffer_size=500_000,
            seed=seed,
            device="cpu",
            policy_kwargs={"net_arch": [self.hidden] * 2},
        )
        first = True
        while True:
            model.learn(steps, reset_num_timesteps=first)
            first = False
            returns = [each["r"] for each in model.ep_info_buffer or ()]
            model.ep_info_buffer.clear()
            if model.num_timesteps > self.warmup:
                yield steps, statistics.fmean(returns) if returns else None


SAC_PAIRS = {
    "sb3_sac": SACPair("HalfCheetah-v5", CHEETAHS, length=4, hidden=256),
    "sb3_sac_hopper": SACPair("Hopper-v5", CHEETAHS, length=4, hidden=256),
    "sb3_sac_walker": SACPair("Walker2d-v5", CHEETAHS, length=4, hidden=256),
    "sb3_sac_pendulum": SACPair("Pendulum-v1", 1, length=50, hidden=64),
}
Loop = Callable[[int, Clock], Iterations]
PAIRS: dict[str, tuple[Loop, Loop, str]] = {
    "rsl_rl": (
        lambda seed, clock: ours(quadrotors(seed), 0, seed, clock),
        lambda seed, clock: rsl_rl(quadrotors(seed), seed, clock),
        "quadrotor hover, 1,024",
    ),
    "sb3": (lambda seed, clock: ours(cheetahs(seed), 1, seed, clock), sb3, "HalfCheetah-v5, 16"),
    **{name: (pair.ours, pair.sb3, f"SAC, {pair.id}, {pair.num_envs}") for name, pair in SAC_PAIRS.items()},
}
"""Our loop, the other library's, and a description."""

LIBRARIES = {"rsl": "rsl-rl-lib", "sb3": "stable-baselines3"}
"""Distribution of the other library, by the first letters of a pair."""


class Player:
    """One of a pair in a process of its own, which runs an iteration in each of its turns."""

    def __init__(self, pair: str, name: str, seed: int, keep: bool) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, child_pipe = context.Pipe()
        self.process = context.Process(target=_play, args=(child_pipe, pair, name, seed, keep), daemon=True)
        self.process.start()
        child_pipe.close()

    def turn(self) -> tuple[int, float | None, float, float]:
        """Run an iteration; returns control steps, mean return, CPU seconds, and those within the environment."""
        self.pipe.send("go")
        return self.pipe.recv()

    def end(self) -> None:
        """End the process."""
        self.pipe.send("")
        self.process.join()


def _play(pipe: Any, pair: str, name: str, seed: int, keep: bool) -> None:  # noqa: ANN401 - a Connection
    """A player's process: an iteration for each message, until an empty one."""
    our_loop, other_loop, _ = PAIRS[pair]
    clock = Clock()
    if name == "ours" and keep:
        keep_freed_memory()
    loop = (our_loop if name == "ours" else other_loop)(seed, clock)
    while pipe.recv():
        start_s, inside = time.process_time(), clock.seconds
        steps, earned = next(loop)
        pipe.send((steps, earned, time.process_time() - start_s, clock.seconds - inside))


def run(pair: str, seed: int, seconds: float, steps: int | None, keep: bool) -> dict[str, dict[str, Any]]:
    """Run both of a pair by turns from one seed: steps per CPU-second and a curve (CPU seconds, steps, return).

    Each gets `seconds` of CPU time, or makes `steps` unless that is None.
    """
    players: dict[str, Player] = {}
    for name in ("ours", pair):
        players[name] = Player(pair, name, seed, keep)
        players[name].turn()  # compiles, allocates and fits; not counted
    cpu_s, step_counts, within = dict.fromkeys(players, 0.0), dict.fromkeys(players, 0), dict.fromkeys(players, 0.0)
    curves: dict[str, list[tuple[float, int, float | None]]] = {name: [] for name in players}
    spent, limit = (cpu_s, seconds) if steps is None else (step_counts, steps)
    while min(spent.values()) < limit:
        name = min(spent, key=lambda each: spent[each])  # the same for each
        made, earned, took, inside = players[name].turn()
        cpu_s[name] += took
        within[name] += inside
        step_counts[name] += made
        curves[name].append((round(cpu_s[name], 2), step_counts[name], earned))
    for player in players.values():
        player.end()
    return {name: _summary(curves[name], cpu_s[name], step_counts[name], within[name]) for name in players}


def _summary(curve: list[tuple[float, int, float | None]], spent: float, made: int, inside: float) -> dict[str, Any]:
    last = [earned for time_s, _, earned in curve if earned is not None and time_s > 0.8 * spent]
    return {
        "steps_per_cpu_s": round(made / spent),
        "steps": made,
        "environment_share": round(inside / spent, 3),
        "us_beside_environment": round(1e6 * (spent - inside) / made, 3),
        "return": round(statistics.fmean(last), 2) if last else None,
        "curve": curve[:: max(1, len(curve) // 20)],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all pairs, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", default=list(PAIRS), help=", ".join(PAIRS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU time of each in a run")
    parser.add_argument("--steps", type=int, help="control steps of each in a run, in place of a CPU time")
    parser.add_argument("--plain", action="store_true", help="ours gives freed memory back, too")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    head = "environments", "beside", "ours, steps per CPU-second", "theirs", "ratio", "our return", "theirs"
    sys.stdout.write("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|\n")
    rows = {}
    for pair in options.pairs:
        runs = [run(pair, seed, options.seconds, options.steps, not options.plain) for seed in range(options.runs)]
        ratios = sorted(each["ours"]["steps_per_cpu_s"] / each[pair]["steps_per_cpu_s"] for each in runs)
        rows[pair] = {"ratio": round(statistics.median(ratios), 3), "ratios": ratios, "runs": runs}
        cells = [PAIRS[pair][2], pair]
        cells += [f"{statistics.median(each[name]['steps_per_cpu_s'] for each in runs):,.0f}" for name in runs[0]]
        cells.append(f"{rows[pair]['ratio']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        cells += [", ".join(str(each[name]["return"]) for each in runs) for name in runs[0]]
        sys.stdout.write("| " + " | ".join(cells) + " |\n")
        sys.stdout.flush()
        if options.output:
            _write(options, rows, load_before)


def _write(options: argparse.Namespace, rows: dict[str, Any], load_before: float) -> None:
    """Write the `rows` so far, with the machine and versions."""
    package_versions = {name: metadata.version(name) for name in {LIBRARIES[pair[:3]] for pair in rows}}
    report = {
        "git_commit": git_commit(),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
        "seconds": options.seconds if options.steps is None else None,
        "steps": options.steps,
        "keeps_freed_memory": not options.plain,
        "load": [round(each, 1) for each in (load_before, os.getloadavg()[0])],
        "versions": versions() | package_versions,
        "rows": rows,
    }
    with complete_or_absent(options.output) as temporary:
        temporary.write_text(dumps_rows(report))


if __name__ == "__main__":
    main()
