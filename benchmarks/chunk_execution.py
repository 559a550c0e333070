"""Cost of an inference delay under each execution of chunks: `python benchmarks/chunk_execution.py RUN`.

    [--delay-s 0.1] [--episodes 50] [--seed 1] [--rows inpaint:2,naive:4,...] [--delayed RUN] [--output FILE]

RUN is a run of `task=libero_pick`, or one of its checkpoints. Every row runs the same `episodes` initial states of each
task of the wide distribution: first without delay, then each execution with K control steps between observations
(EXECUTION:K), then the run `--delayed`, which was trained with delay=D, under that delay. Jumps are changes of the
commanded displacement between control steps, in mm, at borders between chunks and inside chunks. Pauses are the share
of control steps without a command.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from embodied.command_line.config import compose  # noqa: E402
from embodied.environment import NumberedStarts, Transition  # noqa: E402
from embodied.environments.delay import with_delay  # noqa: E402
from embodied.evaluation.evaluation import EvaluationResult, evaluate  # noqa: E402
from embodied.execution.chunking import Execution, steps_until  # noqa: E402
from embodied.execution.delay import DelayedPolicy  # noqa: E402
from embodied.saving import checkpoint  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from embodied.training.compute import prepare  # noqa: E402
from train import GROUPS, TrainConfig  # noqa: E402

ROWS = "inpaint:2,naive:4,blend:2,synchronous:4,inpaint:4,blend:4"
DISPLACEMENT, MM = slice(3), 50.0
"""Elements of LIBERO's action that move the hand, and the displacement in mm of an action of 1."""


class Jumps:
    """Collects commands as `watch` of `evaluate`; chunks begin at the window indices `borders`."""

    def __init__(self, num_envs: int, borders: Sequence[int]) -> None:
        self.last, self.borders = torch.full((num_envs, 3), torch.nan), borders
        self.at_borders: list[Tensor] = []
        self.inside: list[Tensor] = []
        self.pauses = self.commands = 0

    def watch(self, env: NumberedStarts, chunk: Tensor, transition: Transition) -> None:
        """Add a chunk [N, K, A] and its executed part."""
        executed = transition.executed & (chunk != 0).any(2).any(1, keepdim=True)  # zeros only: no chunk was executed
        new_episodes = getattr(env, "env", env).steps == transition.executed.sum(1)
        self.last[new_episodes] = torch.nan
        for index in range(chunk.shape[1]):
            current = torch.where(executed[:, index, None], chunk[:, index, DISPLACEMENT], torch.nan)
            # NaN after the beginning of an episode and around pauses, which have no jump
            jump = MM * (current - self.last).norm(dim=1)
            (self.at_borders if index in self.borders else self.inside).append(jump[jump.isfinite()])
            self.pauses += int((executed[:, index] & (chunk[:, index] == 0).all(1)).sum())
            self.commands += int(executed[:, index].sum())
            self.last = current

    def summary(self) -> dict[str, float]:
        """Mean, 95% quantile and maximum at borders, mean inside, share of pauses."""
        border, inside = torch.cat(self.at_borders), torch.cat([*self.inside, torch.empty(0)])
        return {
            "border_jump_mean_mm": float(border.mean()),
            "border_jump_p95_mm": float(border.quantile(0.95)),
            "border_jump_max_mm": float(border.max()),
            "inside_jump_mean_mm": float(inside.mean()),
            "pauses": self.pauses / self.commands,
        }


def measure(
    saved: checkpoint.Checkpoint, row: tuple[Execution, int] | None, options: argparse.Namespace
) -> tuple[dict[str, Any], EvaluationResult]:
    """Measure one row: without delay but that of the training (None), or an execution with its K."""
    executed = saved.contract.executed if row is None else row[1]
    trained_delay = saved.contract.delay
    trained, _ = compose(TrainConfig, "train", [f"task.executed={executed}"], GROUPS, saved.config)
    policy = trained.policy.build(saved.contract)
    saved.restore(policy)
    env = with_delay(trained.task, trained_delay).environment(100, "wide", "eval")
    borders = [0]
    if row:
        delay = steps_until(options.delay_s, env.contract.control_dt_s)
        borders = [0, delay] if row[0] is Execution.SYNCHRONOUS else [delay % executed]
        policy = DelayedPolicy(policy, options.delay_s, row[0], executed=executed)
    jumps = Jumps(env.num_envs, borders)
    cpu_start_s, first = time.process_time(), options.seed * options.episodes
    result = evaluate(env, policy, starts_per_task=options.episodes, first_start=first, watch=jumps.watch)
    summary = result.summary()
    entry = {
        "execution": row[0].value if row else Execution.DELAYED.value if trained_delay else "no delay",
        "delay_s": options.delay_s if row else trained_delay * env.contract.control_dt_s,
        "executed": executed,
        **{name: summary[name] for name in ("success", "low", "high", "episodes", "step_limit")},
        "mean_steps": float(result.steps.float().mean()),
        **jumps.summary(),
        "cpu_s": round(time.process_time() - cpu_start_s, 1),
    }
    sys.stderr.write(json.dumps(entry) + "\n")
    return entry, result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows, print the table, and write the JSON."""
    options = _options(arguments)
    prepare("cpu", 1)
    saved = checkpoint.load(options.run)
    report: dict[str, Any] = {
        "task": "libero_pick",
        "distribution": "wide",
        "first_start": options.seed * options.episodes,
        "contract": {"horizon": saved.contract.horizon, "executed": saved.contract.executed},
        "git_commit": git_commit(),
        "versions": versions(),
        "rows": [],
    }
    plain, reference = measure(saved, None, options)
    report["rows"].append(plain)
    runs = [(saved, row) for row in options.rows]
    if options.delayed:
        runs.append((checkpoint.load(options.delayed), None))
    for run, row in runs:
        entry, result = measure(run, row, options)
        gain = result.gain_over(reference)
        entry["over_no_delay"] = {"difference": gain.difference, "low": gain.low, "high": gain.high}
        report["rows"].append(entry)
        with complete_or_absent(options.output) as temporary:
            temporary.write_text(dumps_rows(report))
    sys.stdout.write(table(report["rows"]))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as Markdown."""
    columns = (
        "execution",
        "delay s",
        "K",
        "success [95%]",
        "over no delay",
        "steps",
        "border jump mm: mean, p95, max",
        "inside",
        "pauses",
    )
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for row in rows:
        gain = row.get("over_no_delay")
        over = f"{100 * gain['difference']:+.1f} [{100 * gain['low']:+.1f}, {100 * gain['high']:+.1f}]" if gain else ""
        cells = [
            row["execution"],
            f"{row['delay_s']:g}",
            str(row["executed"]),
            f"{row['success']:.1%} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]",
            over,
            f"{row['mean_steps']:.0f}",
            ", ".join(f"{row[f'border_jump_{name}_mm']:.1f}" for name in ("mean", "p95", "max")),
            f"{row['inside_jump_mean_mm']:.1f}",
            f"{row['pauses']:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n{rows[0]['episodes']} episodes a row, step limit {rows[0]['step_limit']}\n"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run's directory, or a checkpoint")
    parser.add_argument("--delay-s", type=float, default=0.1)
    parser.add_argument("--episodes", type=int, default=50, help="of each task")
    parser.add_argument("--seed", type=int, default=1, help="which episodes")
    parser.add_argument("--rows", type=_rows, default=_rows(ROWS), help="EXECUTION:K, with commas")
    parser.add_argument("--delayed", help="a run that was trained with delay=D")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "chunk_execution.json")
    return parser.parse_args(arguments)


def _rows(text: str) -> list[tuple[Execution, int]]:
    pairs = [entry.split(":") for entry in text.split(",")]
    return [(Execution(name), int(executed)) for name, executed in pairs]


if __name__ == "__main__":
    main()
