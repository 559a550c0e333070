"""Success of LIBERO's scripted expert: `python benchmarks/libero_expert.py [SUITE ...] [--starts 20] [--output FILE]`.

Without noise on its actions, from the first `--starts` official initial states of every task and as many held-out ones
of the wide distribution, within the suite's step limit. Needs LIBERO's official assets. The results of each task are
added to `--output`, JSON, as soon as they are there; tasks that it has are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402

from embodied.evaluation.evaluation import wilson  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from sims.libero.assets import Assets, find_assets  # noqa: E402
from sims.libero.environment import LiberoEnvironment  # noqa: E402
from sims.libero.expert.expert import Expert  # noqa: E402
from sims.libero.suite import STEP_LIMITS, SUITES, Task, load_tasks  # noqa: E402

SHOWN = ("libero_object", "libero_spatial", "libero_goal")
DISTRIBUTIONS = ("official", "wide")
Results = dict[str, dict[str, dict[str, list[int | None]]]]
"""Maps suite, task and distribution to the control steps until success, None after a failure."""
WEAK = 0.8
"""Success rate below which a task is reported as weak."""


def successes(task: Task, distribution: str, starts: int, assets: Assets) -> list[int | None]:
    """Control steps until success from each start; None if the expert fails."""
    env = LiberoEnvironment(
        [task], starts, distribution=distribution, split="eval", horizon=1, executed=1, assets=assets
    )
    env.reset(starts=torch.arange(starts))
    expert, running = Expert(env.simulation), torch.ones(starts, dtype=torch.bool)
    while running.any():
        actions, ids = torch.zeros(starts, 1, 7), running.nonzero().flatten()
        actions[ids, 0] = torch.from_numpy(expert.act(ids.numpy())).float()
        transition = env.step(actions)
        running &= ~transition.done
    steps = [int(step) if bool(ok) else None for step, ok in zip(env.steps, transition.success, strict=True)]
    env.close()
    return steps


def rates(results: Results) -> list[dict[str, Any]]:
    """Success by suite and distribution with 95% Wilson intervals, and the weak tasks."""
    rows = []
    for suite, tasks in results.items():
        for distribution in DISTRIBUTIONS:
            each = {name: [step is not None for step in steps[distribution]] for name, steps in tasks.items()}
            runs = [ok for oks in each.values() for ok in oks]
            low, high = wilson(sum(runs), len(runs))
            weak = [f"{name} {sum(oks)} of {len(oks)}" for name, oks in each.items() if sum(oks) < WEAK * len(oks)]
            rows.append(
                {
                    "suite": suite,
                    "distribution": distribution,
                    "success": sum(runs) / len(runs),
                    "low": low,
                    "high": high,
                    "episodes": len(runs),
                    "tasks": len(each),
                    "weak": weak,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as lines of text."""
    return "\n".join(
        f"{row['suite']}, {row['distribution']}: {row['success']:.1%} [{row['low']:.3f}, {row['high']:.3f}] of"
        f" {row['episodes']} episodes in {row['tasks']} tasks; below {WEAK:.0%}: {', '.join(row['weak']) or 'none'}"
        for row in rows
    )


def main() -> None:
    """Measure the rows that are missing in `--output`, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", default=SHOWN, help=f"some of {', '.join(SUITES)}")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    assets, output = find_assets(), options.output
    new_results = {"commit": git_commit(), "starts": options.starts, "step_limits": STEP_LIMITS, "versions": versions()}
    old = json.loads(output.read_text()) if output and output.exists() else new_results
    comparable = all(old[key] == json.loads(json.dumps(new_results[key])) for key in ("commit", "starts"))
    results = old.get("results", {}) if comparable else {}
    for suite in options.suites:
        for task in load_tasks(suite):
            if task.name in results.setdefault(suite, {}):
                continue
            results[suite][task.name] = {name: successes(task, name, options.starts, assets) for name in DISTRIBUTIONS}
            if output:
                with complete_or_absent(output) as temporary:
                    record = new_results | {"rates": rates(results), "results": results}
                    temporary.write_text(dumps_rows(record))
    print(table(rates(results)))


if __name__ == "__main__":
    main()
