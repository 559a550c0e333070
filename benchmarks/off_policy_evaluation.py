"""Off-policy evaluation beside the truth: `python benchmarks/off_policy_evaluation.py FOLDER [--task libero_pick]`.

The policies are checkpoints of offline learning (`--row` of from_logs.py) and the untrained policy. Each is estimated
by FQE and AM-Q from the logs that it learned from, and played from the initial states of the task. Printed are the
rank correlation (Spearman) of estimates and true returns, and how often the gate would decide wrongly: for all pairs of
policies, the share of worse ones that it accepts, and of better ones that it refuses.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.from_logs import ROWS, TASKS, Logs  # noqa: E402
from embodied import seeding  # noqa: E402
from embodied.algorithms.offline.dynamics import DynamicsConfig  # noqa: E402
from embodied.algorithms.offline.off_policy_evaluation import (  # noqa: E402
    Estimator,
    OffPolicyEvaluation,
    OffPolicyEvaluationConfig,
    initial_rows,
)
from embodied.data.recording import record_episodes  # noqa: E402
from embodied.data.transitions import rewards_to_go  # noqa: E402
from embodied.policy import Decision, TrainablePolicy  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402

MARGIN = 0.05


@dataclass
class Deployed:
    """A policy as it is deployed: without exploration."""

    policy: TrainablePolicy

    def act(self, observation: TensorDict, *, generator: torch.Generator) -> Decision:
        """Act deterministically."""
        return self.policy.act(observation, deterministic=True)


def checkpoints(logs: Logs, args: argparse.Namespace, seed: int) -> list[TrainablePolicy]:
    """The untrained policy, and policies after one gradient step to all, evenly on a logarithmic scale."""
    kind, config = ROWS[args.row]
    seeding.seed_everything(seed)
    env = logs.environment(args.envs)
    policy = logs.policies[kind].build(env.contract)
    env.close()
    policy.fit(*logs.episodes.by_weight())
    learner = config(steps=args.steps, batch=args.batch).build(policy, seeding.generator(seed, "offline"))
    saved = [copy.deepcopy(policy)]
    for number in range(1, args.policies):
        due = round(args.steps ** (number / (args.policies - 1)))
        learner.fit(logs.episodes, max(1, due - learner.gradient_steps))
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both estimators for every seed, and print the table."""
    args = _parse(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        logs = TASKS[args.task](args, args.episodes, seed)
        policies = checkpoints(logs, args, seed)
        discount = OffPolicyEvaluationConfig().discount
        truth = torch.tensor([true_return(policy, logs, args, discount) for policy in policies])
        for kind in args.estimators:
            rows.append(measured(Estimator(kind), policies, truth, logs, seed))
            sys.stderr.write(f"{rows[-1]}\n")
            report = {"rows": rows, "row": args.row, "task": args.task, "commit": git_commit(), "versions": versions()}
            with complete_or_absent(args.folder / f"off_policy_evaluation_{args.task}.json") as temporary:
                temporary.write_text(dumps_rows(report))
    columns = ["estimator", "seed", "spearman", "error", "accepted_worse", "refused_better", "cpu_s"]
    sys.stdout.write(table(columns, [[str(row[name]) for name in columns] for row in rows]) + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=TASKS, default="reach")
    parser.add_argument("--tasks", default="0,1,2,3,4,5,6,7,8,9", help="of libero_pick")
    parser.add_argument("--row", choices=ROWS, help="of from_logs.py; ReBRAC on reach, IQL on libero_pick")
    parser.add_argument("--estimators", nargs="+", default=["fqe", "am_q"])
    parser.add_argument("--policies", type=int, default=10)
    parser.add_argument("--episodes", type=int, default=60, help="of each task in the logs")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--envs", type=int, default=44, help="initial states of the true return")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args(arguments)
    if args.policies < 2:
        parser.error("expected --policies of at least 2")
    args.row = args.row or ("mlp, ReBRAC" if args.task == "reach" else "IQL")
    args.folder.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
