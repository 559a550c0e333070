"""Off-policy evaluation beside the truth: `python benchmarks/off_policy_evaluation.py FOLDER [--task libero_pick]`.

    [--rounds 3] [--policies 20] [--estimators fqe] [--output FILE]

The policies are checkpoints of offline learning (`--row` of from_logs.py) and the untrained policy. Each is estimated
by FQE and AM-Q from the logs that it learned from, and played from the initial states of the task. Printed are the
rank correlation (Spearman) of estimates and true returns, and how often the gate would decide wrongly: for all pairs of
policies, the share of worse ones that it accepts, and of better ones that it refuses.

With `--rounds` a policy that imitated the successes goes on in rounds of offline learning by `--row`, from the same
logs, with each gate and without one; the success of the present policy is measured before the first and after every
round, on the same episodes. A command that is repeated measures the missing rows only.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.from_logs import CHOSEN, ROWS, TASKS, Logs, learned, with_options  # noqa: E402
from embodied import seeding  # noqa: E402
from embodied.algorithms.imitation.sft import SFTConfig  # noqa: E402
from embodied.algorithms.offline.dynamics import DynamicsConfig  # noqa: E402
from embodied.algorithms.offline.off_policy_evaluation import (  # noqa: E402
    Estimator,
    OffPolicyEvaluation,
    OffPolicyEvaluationConfig,
    initial_rows,
)
from embodied.algorithms.offline.rounds import Rounds, RoundsConfig  # noqa: E402
from embodied.data.recording import record_episodes  # noqa: E402
from embodied.data.transitions import rewards_to_go  # noqa: E402
from embodied.evaluation.evaluation import evaluate  # noqa: E402
from embodied.policy import Decision, TrainablePolicy  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402

MARGIN = RoundsConfig().margin


@dataclass
class Deployed:
    """A policy as it is deployed: without exploration."""

    policy: TrainablePolicy

    def act(self, observation: TensorDict, *, generator: torch.Generator) -> Decision:
        """Act deterministically."""
        return self.policy.act(observation, deterministic=True)


def checkpoints(logs: Logs, args: argparse.Namespace, seed: int) -> list[TrainablePolicy]:
    """The untrained policy, and policies after equal numbers of gradient steps."""
    kind, config = ROWS[args.row]
    options = CHOSEN.get(args.task, {}).get(args.row, {})
    seeding.seed_everything(seed)
    env = logs.environment(args.envs)
    policy = logs.policies[kind].build(env.contract)
    env.close()
    policy.fit(*logs.episodes.by_weight())
    learning = with_options(config(steps=args.steps, batch=args.batch), options)
    learner = learning.build(policy, seeding.generator(seed, "offline"))
    saved = [copy.deepcopy(policy)]
    for number in range(1, args.policies):
        due = round(args.steps * number / (args.policies - 1))
        learner.fit(logs.episodes, due - learner.gradient_steps)
        saved.append(copy.deepcopy(policy))
    return saved


def true_return(policy: TrainablePolicy, logs: Logs, args: argparse.Namespace, discount: float) -> float:
    """Mean discounted return of `policy` from the initial states of the evaluation."""
    env = logs.environment(args.envs)
    episodes = record_episodes(env, Deployed(policy), torch.Generator())
    env.close()
    return float(rewards_to_go(episodes, discount)[episodes.first[initial_rows(episodes)]].mean())


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of `a` and `b`; equal entries share their mean rank."""

    def ranks(values: Tensor) -> Tensor:
        others = values.unsqueeze(1)
        return (values < others).sum(1) + 0.5 * (values == others).sum(1)

    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])


def wrong_decisions(estimate: Tensor, truth: Tensor) -> tuple[float, float]:
    """Share of worse policies that the gate accepts and of better ones that it refuses, over ordered pairs."""
    accepted = estimate.unsqueeze(0) > (estimate + MARGIN * estimate.abs()).unsqueeze(1)
    better = truth.unsqueeze(0) > (truth + MARGIN * truth.abs()).unsqueeze(1)
    worse = truth.unsqueeze(0) < truth.unsqueeze(1)
    return float((accepted & worse).sum() / worse.sum()), float((~accepted & better).sum() / better.sum())


def measured(kind: Estimator, policies: list[TrainablePolicy], truth: Tensor, logs: Logs, seed: int) -> dict[str, Any]:
    """Estimate all `policies`; for AM-Q the present policy, whose critics estimate, is the one in the middle."""
    evaluation = OffPolicyEvaluation(
        kind, OffPolicyEvaluationConfig(), DynamicsConfig(), seeding.generator(seed, kind.value)
    )
    middle = len(policies) // 2
    order = [middle, *(index for index in range(len(policies)) if index != middle)]
    began_s = time.process_time()
    results = evaluation.estimates([policies[index] for index in order], logs.episodes)
    estimate = torch.tensor([result.mean for result in results])[torch.tensor(order).argsort()]
    accepted_worse, refused_better = wrong_decisions(estimate, truth)
    return {
        "estimator": kind.value,
        "seed": seed,
        "spearman": round(spearman(estimate, truth), 3),
        "error": round(float((estimate - truth).abs().mean()), 4),
        "accepted_worse": round(accepted_worse, 3),
        "refused_better": round(refused_better, 3),
        "estimates": [round(value, 4) for value in estimate.tolist()],
        "truth": [round(value, 4) for value in truth.tolist()],
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def in_rounds(
    gate: Estimator, start: TrainablePolicy, logs: Logs, args: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """Let a copy of `start` learn in rounds with a `gate`; success of the present policy after each."""
    seeding.seed_everything(seed)
    policy = copy.deepcopy(start)
    options = CHOSEN.get(args.task, {}).get(args.row, {})
    learning = with_options(ROWS[args.row][1](steps=args.steps, batch=args.batch), options)
    config = RoundsConfig(count=args.rounds, gate=gate)
    rounds = Rounds(policy, config, learning, seeding.generator(seed, "rounds"), None, is_present=True)
    began_s = time.process_time()
    successes = [success(policy, logs, args)]
    for _ in range(args.rounds):
        rounds.fit(logs.episodes, args.steps)
        successes.append(success(policy, logs, args))
    return {
        "gate": gate.value,
        "seed": seed,
        "success": [round(each, 4) for each in successes],
        "accepted": [each["accepted"] for each in rounds.results],
        "estimates": [[each.get("present"), each.get("estimate")] for each in rounds.results],
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def success(policy: TrainablePolicy, logs: Logs, args: argparse.Namespace) -> float:
    """Success of `policy` from the initial states of the evaluation."""
    env = logs.environment(args.envs)
    result = evaluate(env, policy, starts_per_task=args.envs // len(env.task_names))
    env.close()
    return float(result.success.float().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure estimators, or rounds, for every seed, and print the table."""
    args = _parse(arguments)
    torch.set_num_threads(1)
    output = args.output or args.folder / f"off_policy_evaluation_{args.task}{'_rounds' * bool(args.rounds)}.json"
    rows: list[dict[str, Any]] = []
    if args.rounds and output.exists():
        rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    for row in _in_rounds(args, rows) if args.rounds else _estimates(args):
        rows.append(row | {"commit": git_commit()})
        sys.stderr.write(f"{rows[-1]}\n")
        sizes = {name: getattr(args, name) for name in ("task", "row", "episodes", "steps", "batch", "envs")}
        with complete_or_absent(output) as temporary:
            temporary.write_text(dumps_rows({"rows": rows, **sizes, "versions": versions()}))
    columns = ["gate", "seed", "success", "accepted", "cpu_s"] if args.rounds else COLUMNS
    sys.stdout.write(table(columns, [[str(row[name]) for name in columns] for row in rows]) + "\n")


COLUMNS = ["estimator", "seed", "spearman", "error", "accepted_worse", "refused_better", "cpu_s"]


def _in_rounds(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each seed and gate that the `rows` lack."""
    present = {(row["gate"], row["seed"]) for row in rows}
    for seed in args.seeds:
        gates = [gate for gate in ("none", *args.estimators) if (gate, seed) not in present]
        if not gates:
            continue
        logs = TASKS[args.task](args, args.episodes, seed)
        env = logs.environment(args.envs)
        imitation = SFTConfig(steps=args.steps, batch=args.batch)
        start = learned(imitation, logs.policies[ROWS[args.row][0]], env, logs.episodes, seed)
        env.close()
        for gate in gates:
            yield in_rounds(Estimator(gate), start, logs, args, seed)


def _estimates(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each seed and estimator."""
    for seed in args.seeds:
        logs = TASKS[args.task](args, args.episodes, seed)
        policies = checkpoints(logs, args, seed)
        discount = OffPolicyEvaluationConfig().discount
        truth = torch.tensor([true_return(policy, logs, args, discount) for policy in policies])
        for kind in args.estimators:
            yield measured(Estimator(kind), policies, truth, logs, seed)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=TASKS, default="reach")
    parser.add_argument("--tasks", default="0,1,2,3,4,5,6,7,8,9", help="of libero_pick")
    parser.add_argument("--row", choices=ROWS, help="of from_logs.py; ReBRAC on reach, IQL on libero_pick")
    parser.add_argument("--estimators", nargs="+", default=["fqe", "am_q"])
    parser.add_argument("--policies", type=int, default=10)
    parser.add_argument("--rounds", type=int, help="rounds of offline learning, in place of estimates")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--episodes", type=int, default=60, help="of each task in the logs")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--envs", type=int, default=44, help="initial states of the true return")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args(arguments)
    if args.policies < 2:
        parser.error("expected --policies of at least 2")
    if args.policies > args.steps:
        parser.error("expected --policies of at most --steps")
    args.row = args.row or ("mlp, ReBRAC" if args.task == "reach" else "IQL")
    args.folder.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
