"""From a log to the simulator: `python benchmarks/offline_to_online.py FOLDER [--seeds 0 1 2] [--env-steps 60000]`.

A quadrotor learns to hover from a log of a policy that learned briefly and flies with noise, by Cal-QL, then online:
WSRL goes on with its policy and critics and without the log, RLPD with its policy, ten new critics and the log in half
of each batch, and "RLPD, new" with a new policy. Written are curves of survival over environment steps on the same
episodes, and the dip: how far survival falls below that at the beginning (arXiv 2412.07762, figure 1).
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402

from embodied import seeding  # noqa: E402
from embodied.algorithms.off_policy.sac import RLPDConfig, SACConfig, WSRLConfig  # noqa: E402
from embodied.algorithms.offline.calql import CalQLConfig  # noqa: E402
from embodied.algorithms.on_policy.bptt import BPTTConfig  # noqa: E402
from embodied.command_line.config import compose  # noqa: E402
from embodied.configuration import common_options  # noqa: E402
from embodied.data.episodes import Episodes  # noqa: E402
from embodied.data.recording import record_episodes  # noqa: E402
from embodied.environment import Environment  # noqa: E402
from embodied.evaluation.evaluation import evaluate  # noqa: E402
from embodied.policy import Policy, TrainablePolicy  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.rollout.rollout import Collector  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from embodied.training.loop import build  # noqa: E402
from policies.mlp import MLPConfig  # noqa: E402
from train import GROUPS, TrainConfig  # noqa: E402

ROWS = "WSRL", "RLPD", "RLPD, new"
NOISE = 0.2
"""Deviation of the logged actions, in half ranges."""


class Noisy:
    """A policy with noise."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def act(self, observation: TensorDict, *, generator: torch.Generator) -> argparse.Namespace:
        """Noisy actions."""
        actions = self.policy.act(observation, deterministic=True).actions
        noise = NOISE * torch.randn(actions.shape, generator=generator)
        return argparse.Namespace(actions=(actions + noise).clamp(-1.0, 1.0))


def logged(env: Environment, pretraining: int, steps: int, seed: int) -> Episodes:
    """Log of at least `steps` control steps of a policy after `pretraining` updates with analytic gradients."""
    policy = MLPConfig(hidden=[64, 64]).build(env.contract)
    policy.fit(env.reset(), torch.zeros(1, 4))
    learner, collector = build(env, policy, config := BPTTConfig(), None, seed)
    for iteration in range(pretraining):
        learner.update(collector.collect(config.rollout_length), iteration / pretraining)
    generator = seeding.generator(seed, "log")
    parts: list[Episodes] = []
    while sum(part.steps for part in parts) < steps:
        parts.append(record_episodes(env, Noisy(policy), generator))
    return Episodes.join(parts)


def survival(policy: Policy, env: Environment) -> float:
    """Share of the same episodes that `policy` survives."""
    return float(evaluate(env, policy, starts_per_task=env.num_envs).metrics["survive"].mean())


class Problem:
    """Hovering in L2F's MDP with the settings of algorithm=sac, a log, and the policy that learned from it."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        # single actions: of this log Cal-QL learns nothing in the chunks of two that SAC hovers with
        chunks = "task.executed=1", "algorithm.lookahead=8"
        overrides = ["task=quadrotor_hover", "task.nominal=true", "algorithm=sac", *chunks]
        self.config = compose(TrainConfig, "train", overrides, GROUPS)[0]
        self.task, self.options = self.config.task, self.config.algorithm
        assert isinstance(self.options, SACConfig)
        name = self.task.distributions[0]
        self.evaluated = self.task.environment(args.episodes, name, "eval", seed)
        self.practice = lambda: self.task.environment(self.config.num_envs, name, "train", seed)
        seeding.seed_everything(seed)
        self.log = logged(self.practice(), args.pretraining, args.log_steps, seed)
        options = common_options(self.options, CalQLConfig) | {"layer_norm": True}
        offline = CalQLConfig(**(options | {"steps": args.updates, "batch": 256, "sampled_actions": 4}))
        self.new = self.config.policy.build(self.evaluated.contract)
        self.new.fit(*self.log.by_weight())
        self.trained = copy.deepcopy(self.new)
        learner = offline.build(self.trained, seeding.generator(seed, "offline"))
        learner.fit(self.log, args.updates)
        self.values = learner.values()


def curve(name: str, problem: Problem, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Learn online by the row `name`; returns [environment steps, survival], the dip and CPU seconds of learning."""
    seeding.seed_everything(seed)
    env, generator = problem.practice(), seeding.generator(seed, name)
    policy: TrainablePolicy = copy.deepcopy(problem.new if name == "RLPD, new" else problem.trained)
    kind = WSRLConfig if name == "WSRL" else RLPDConfig
    own = common_options(kind(), SACConfig)
    kept = ("ensemble", "subset", "layer_norm", "demonstration_share", "entropy_in_target", "actor_mean")
    options = common_options(problem.options, kind) | {key: own[key] for key in (*kept, "continue_values")}
    config = kind(**(options | {"warmup": args.warmup}))
    learner = config.build(policy, problem.log, env, generator)
    learner.continue_values(problem.values)
    collector = Collector(env, policy, generator)
    points = [[0, survival(policy, problem.evaluated)]]
    steps, cpu_s = 0, 0.0
    while steps < args.env_steps:
        began_s = time.process_time()
        rollout = collector.collect(config.rollout_length)
        learner.update(rollout, steps / args.env_steps)
        cpu_s += time.process_time() - began_s
        steps += int(rollout.executed.sum())
        if steps >= len(points) * args.every:
            points.append([steps, survival(policy, problem.evaluated)])
    first, *others = [share for _, share in points]
    return {
        "row": name,
        "seed": seed,
        "recorded_survival": float((problem.log.success == 1).float().mean()),
        "curve": points,
        "dip": max(0.0, first - min(others)),
        "final": others[-1],
        "cpu_s": round(cpu_s, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows, and print the table."""
    args = _parse(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        problem = Problem(args, seed)
        for name in args.rows:
            rows.append(curve(name, problem, args, seed) | {"commit": git_commit()})
            sys.stderr.write(f"{rows[-1]}\n")
            sizes = {key: value for key, value in vars(args).items() if key not in ("output", "rows", "seeds")}
            with complete_or_absent(args.output) as temporary:
                temporary.write_text(dumps_rows({"rows": rows, **sizes, "versions": versions()}))
    columns = ["row", "seed", "recorded_survival", "dip", "final", "cpu_s"]
    sys.stdout.write(table(columns, [[str(row[name]) for name in columns] for row in rows]) + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="JSON file")
    parser.add_argument("--rows", type=lambda names: names.split(";"), default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pretraining", type=int, default=150, help="updates of the logged policy")
    parser.add_argument("--log-steps", type=int, default=20_000)
    parser.add_argument("--updates", type=int, default=5_000, help="gradient steps on the log")
    parser.add_argument("--warmup", type=int, default=5_000, help="decisions before the first gradient step online")
    parser.add_argument("--env-steps", type=int, default=60_000)
    parser.add_argument("--every", type=int, default=5_000, help="environment steps between evaluations")
    parser.add_argument("--episodes", type=int, default=128, help="of an evaluation")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.rows if name not in ROWS]:
        parser.error(f"unknown rows {unknown}; expected some of {'; '.join(ROWS)}")
    return args


if __name__ == "__main__":
    main()
