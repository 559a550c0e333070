"""Collisions of a vehicle with and without a reflex: `python benchmarks/reflex.py RUN REFLEX OUTPUT.json`.

RUN is a policy of `train.py task=vehicle_navigate task.guard=false task.executed=5`, which decides twice a second, and
REFLEX what `reflex.py checkpoint=RUN` has written: critic and threshold come from training worlds. Each row runs the
same held-out episodes: the policy alone; with its first action of each chunk checked alone; with every action checked;
and behind the analytic guard at every control step, which knows the vehicle's dynamics. Differences are paired. One
policy and one critic: intervals are over episodes, not over seeds.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torch import Tensor  # noqa: E402

from embodied.algorithms.off_policy import risk  # noqa: E402
from embodied.command_line.config import compose  # noqa: E402
from embodied.command_line.train_options import GROUPS, TrainConfig  # noqa: E402
from embodied.environment import Environment  # noqa: E402
from embodied.environments.reflex import STEPS, ReflexTask, in_steps  # noqa: E402
from embodied.evaluation.evaluation import EvaluationResult, evaluate, wilson  # noqa: E402
from embodied.evaluation.means import mean_interval  # noqa: E402
from embodied.execution.reflex import Reflex  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.saving import checkpoint  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from embodied.task import Task  # noqa: E402
from embodied.training.reflex import failed_episodes  # noqa: E402


@dataclass(frozen=True)
class OncePerChunk(Reflex):
    """A reflex that checks only the first of `executed` actions of a chunk."""

    executed: int = 1
    steps: list[int] = field(default_factory=lambda: [0])

    def check(self, observation: TensorDict, action: Tensor, cut: Tensor) -> tuple[Tensor, Tensor]:
        """See `Reflex.check`."""
        is_first = self.steps[0] % self.executed == 0
        self.steps[0] += 1
        if is_first:
            return super().check(observation, action, cut)
        return torch.where(cut.unsqueeze(1), self.candidates(action)[0], action), cut


def never(observation: TensorDict, actions: Tensor) -> Tensor:
    """No risk."""
    return torch.zeros(len(actions))


def conditions(task: Any, reflex: Reflex) -> dict[str, Task]:  # noqa: ANN401 - a VehicleTask
    """The task with each reflex, by name."""
    steps = in_steps(task)
    once = OncePerChunk(reflex.risk, reflex.contract, reflex.threshold, reflex.brake, executed=task.executed)
    return {
        "policy alone": task,
        "reflex once a chunk": ReflexTask(task, steps, once),
        "reflex every step": ReflexTask(task, steps, reflex),
        "guard every step": ReflexTask(task, replace(steps, guard=True), replace(reflex, risk=never)),
    }


def row(name: str, result: EvaluationResult, alone: EvaluationResult) -> dict[str, Any]:
    """Figures of `result`, and paired differences from the policy `alone`."""
    failed, before = failed_episodes(result), failed_episodes(alone)
    count = failed.numel()
    collisions = wilson(int(failed.sum()), count)
    fewer = mean_interval(before.double() - failed.double())
    gain = result.gain_over(alone)
    steps = result.metrics.get(STEPS)
    return {
        "condition": name,
        "episodes": count,
        "success": round(float(result.success.double().mean()), 4),
        "success_gain": [round(value, 4) for value in (gain.difference, gain.low, gain.high)],
        "collisions": round(float(failed.double().mean()), 4),
        "collisions_95": [round(value, 4) for value in collisions],
        "fewer_collisions": [round(value, 4) for value in fewer],
        "time_outs": round(1.0 - float((result.success | failed).double().mean()), 4),
        "reflex_steps": None if steps is None else round(float((steps / result.steps).mean()), 4),
    }


def main(arguments: list[str] | None = None) -> None:
    """Evaluate every condition, write the file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("reflex", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first held-out initial state")
    parser.add_argument("--distribution", default="people")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    saved = checkpoint.load(args.run)
    trained, _ = compose(TrainConfig, "train", [], GROUPS, saved.config)
    saved.restore(policy := trained.policy.build(saved.contract))
    reflex = risk.load(args.reflex)
    began_s = time.process_time()
    results: dict[str, EvaluationResult] = {}
    for name, task in conditions(trained.task, reflex).items():
        env: Environment = task.environment(min(args.episodes, 300), args.distribution, "eval")
        results[name] = evaluate(env, policy, starts_per_task=args.episodes, first_start=args.first)
        env.close()
    rows = [row(name, result, results["policy alone"]) for name, result in results.items()]
    report = {
        "rows": rows,
        "distribution": args.distribution,
        "first_start": args.first,
        "step_limit": trained.task.step_limit,
        "executed": saved.contract.executed,
        "threshold": reflex.threshold,
        "policy_seed": saved.config["values"]["seed"],
        "policy_env_steps": saved.counters["env_steps"],
        "policy_sha256": saved.weights_sha256,
        "cpu_s": round(time.process_time() - began_s, 1),
        "commit": git_commit(),
        "versions": versions(),
    }
    with complete_or_absent(args.output) as temporary:
        temporary.write_text(dumps_rows(report))
    names = ["condition", "success", "collisions", "collisions_95", "fewer_collisions", "time_outs", "reflex_steps"]
    sys.stdout.write(table(names, [[str(each[name]) for name in names] for each in rows]) + "\n")


if __name__ == "__main__":
    main()
