"""Learn from a log of a system and a simulator that differs: `python benchmarks/imperfect_simulator.py FOLDER`.

    FOLDER [--task quadrotor_track] [--delay-s 0] [--rows "simulator;H2O"] [--seeds 0 1 2] [--updates 28000]
    [--log-steps 20000]

`reach` is a point on a line; in one of two tasks the system's actions have the opposite effect, and the log is of this
task alone. On `quadrotor_track` the system has 1.3 times the mass, twice the rotors' lag and commands that arrive
`--delay-s` late; its log is of a policy that learned briefly in the system, with noise. Decisions are chunks of two
control steps: with single ones, SAC with one-step targets, which H2O needs, did not fly after 50,000 gradient steps.
All rows have the same log and as many gradient steps. They are evaluated in the system and in the simulator, with
success (reach) or survival (track), in the system also with the mean error of position, and CPU seconds of learning.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402

from benchmarks.offline_to_online import logged  # noqa: E402
from embodied import seeding  # noqa: E402
from embodied.algorithms.off_policy.h2o import H2OConfig  # noqa: E402
from embodied.algorithms.off_policy.sac import SACConfig  # noqa: E402
from embodied.algorithms.offline.calql import CalQLConfig  # noqa: E402
from embodied.data.episodes import Episodes  # noqa: E402
from embodied.environment import Environment  # noqa: E402
from embodied.evaluation.evaluation import evaluate  # noqa: E402
from embodied.policy import TrainablePolicy  # noqa: E402
from embodied.rollout.rollout import Collector  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from policies.squashed import SquashedConfig  # noqa: E402
from sims.quadrotor.environment import QuadrotorEnvironment  # noqa: E402
from sims.quadrotor.physics.dynamics import Options  # noqa: E402
from sims.quadrotor.physics.variation import Variation  # noqa: E402
from sims.quadrotor.tasks.track import Track  # noqa: E402

ROWS = ("log", "simulator", "both", "H2O")
"""The log alone learns by Cal-QL, the others by SAC; `both` has the log in each batch, without weights."""


@dataclass
class Problem:
    """A simulator in training and in evaluations, the system in evaluations, a log of it, and options of SAC."""

    simulator: Environment
    evaluated: Environment
    system: Environment
    log: Episodes
    options: dict[str, Any]


def reach(args: argparse.Namespace, seed: int) -> Problem:
    """A point on a line, and random actions towards the goal or away from it in the task that differs."""
    from tests.embodied.reach import Reach
    from tests.embodied.recorded_reach import MirroredReach
    from tests.embodied.recorded_reach import recorded as recorded_reach

    options = {"hidden": [64, 64], "minibatch": 64, "discount": 0.9, "averaging": 0.02, "initial_temperature": 0.05}
    options |= {"learning_rate": 3e-3, "value_learning_rate": 3e-3, "warmup": 200, "updates": 0.1}
    log = recorded_reach(args.log_steps // 3, seed, mirrored=True)
    log = log.selected(log.episode[log.observation["task"].squeeze(1) == 1.0].unique())
    options |= {"rollout_length": 8}
    return Problem(Reach(32, seed=seed), Reach(44, seed=seed + 1), MirroredReach(44), log, options)


def track(args: argparse.Namespace, seed: int) -> Problem:
    """A Crazyflie that follows a reference, and one that is heavier, slower and late."""
    # small rewards, of which flying on always earns some, as those of TD3 on hover (configs/settings/quadrotor.yaml)
    weights = {"weight_position": 0.8, "weight_rotation": 0.01, "weight_velocity": 2e-3}
    mdp = Track(reward_alive=0.3, weight_angular_velocity=5e-5, weight_action=3e-4, **weights)
    nominal = Variation()
    heavier = Variation(mass=(1.3, 1.3), lag=(2.0, 2.0), action_delay_s=(args.delay_s, args.delay_s))

    def environment(count: int, variation: Variation, split: str, executed: int = 2) -> QuadrotorEnvironment:
        options = Options(drag=True, delay_steps=1)
        return QuadrotorEnvironment(
            count,
            mdp=mdp,
            variation=variation,
            options=options,
            executed=executed,
            split=split,
            history=4,
            step_limit=300,
            seed=seed,
        )

    # analytic gradients pass through single control steps
    log = logged(environment(64, heavier, "train", executed=1), args.pretraining, args.log_steps, seed)
    # those of algorithm=sac on quadrotor_hover
    options: dict[str, Any] = {"hidden": [64, 64], "minibatch": 256, "discount": 0.98, "averaging": 0.02}
    options |= {"learning_rate": 1e-3, "value_learning_rate": 1e-3, "warmup": 5_000, "updates": 0.4}
    options |= {"activation": "TANH", "initial_temperature": 0.01, "target_std": 0.2, "rollout_length": 16}
    simulator, evaluated = (environment(*sizes) for sizes in ((64, nominal, "train"), (128, nominal, "eval")))
    return Problem(simulator, evaluated, environment(128, heavier, "eval"), log, options)


TASKS: dict[str, Callable[[argparse.Namespace, int], Problem]] = {"reach": reach, "quadrotor_track": track}


def learned(
    name: str, problem: Problem, updates: int, share: float, seed: int
) -> tuple[TrainablePolicy, dict[str, float]]:
    """Policy of the row `name` after `updates` gradient steps with a `share` of the log, and its last metrics."""
    seeding.seed_everything(seed)
    env = problem.simulator
    policy = SquashedConfig(hidden=problem.options["hidden"]).build(env.contract)
    policy.fit(*problem.log.by_weight())
    generator = seeding.generator(seed, "learner")
    if name == "log":
        shared = ("hidden", "discount", "averaging", "learning_rate", "value_learning_rate", "initial_temperature")
        options = {key: problem.options[key] for key in shared}
        offline = CalQLConfig(batch=problem.options["minibatch"], sampled_actions=4, **options)
        return policy, offline.build(policy, generator).fit(problem.log, updates)
    options = problem.options | {"entropy_in_target": False}
    share = 0.0 if name == "simulator" else share
    if name == "H2O":
        config = H2OConfig(
            demonstration_share=share, discriminator_learning_rate=options["value_learning_rate"], **options
        )
    else:
        config = SACConfig(demonstration_share=share, **options)
    learner = config.build(policy, problem.log, env, generator)
    collector = Collector(env, policy, generator)
    metrics: dict[str, float] = {}
    while learner.gradient_steps < updates:
        metrics = learner.update(collector.collect(config.rollout_length), 0.0)
    return policy, metrics


def measured(name: str, problem: Problem, updates: int, share: float, seed: int) -> dict[str, Any]:
    """Learn by the row `name`, and evaluate what was learned in the system."""
    began_s = time.process_time()
    policy, metrics = learned(name, problem, updates, share, seed)
    cpu_s = time.process_time() - began_s
    starts = 128 // len(problem.system.task_names)
    result, simulated = (evaluate(env, policy, starts_per_task=starts) for env in (problem.system, problem.evaluated))
    tasks, simulated_tasks = (
        [round(float(each), 3) for each in of.success.float().mean(1)] for of in (result, simulated)
    )
    means = {key: float(values.nanmean()) for key, values in result.metrics.items()}
    means = {key: value if math.isfinite(value) else None for key, value in means.items()}
    logged = {key: round(value, 3) for key, value in metrics.items() if math.isfinite(value)}
    return {
        "success": tasks,
        "success_simulated": simulated_tasks,
        **means,
        "metrics": logged,
        "cpu_s": round(cpu_s, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows, and write them to FOLDER/TASK.json."""
    args = _parse(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        seeding.seed_everything(seed)
        problem = TASKS[args.task](args, seed)
        for name in args.rows:
            rows.append({"row": name, "seed": seed, **measured(name, problem, args.updates, args.share, seed)})
            sys.stderr.write(f"{rows[-1]}\n")
            report = {
                "rows": rows,
                "task": args.task,
                "updates": args.updates,
                "log_steps": args.log_steps,
                "share": args.share,
                "delay_s": args.delay_s,
            }
            report |= {"commit": git_commit(), "versions": versions()}
            with complete_or_absent(args.folder / f"{args.task}.json") as temporary:
                temporary.write_text(dumps_rows(report))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=TASKS, default="reach")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--log-steps", type=int, default=1200)
    parser.add_argument("--share", type=float, default=0.5, help="of the log in batches")
    parser.add_argument("--pretraining", type=int, default=300, help="updates of the logged policy")
    parser.add_argument("--delay-s", type=float, default=0.01, help="of commands in quadrotor_track's system, s")
    parser.add_argument("--rows", type=lambda names: names.split(";"), default=list(ROWS))
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.rows if name not in ROWS]:
        parser.error(f"unknown rows {unknown}; expected some of {'; '.join(ROWS)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
