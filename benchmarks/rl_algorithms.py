"""Compare algorithms from one start: `python benchmarks/rl_algorithms.py [--seeds 0] [--env-steps N]`.

    [--rows "NAME;NAME"] [--tasks 0,1,2] [--demonstrations N] [--sft-steps N] [--starts N] [--folder DIR]
    [--output FILE] [--show]

All rows fine-tune on `libero_pick` (state observations, stand-in assets, two demonstrations of each task) by the same
number of environment steps, from the same supervised policy; policy=diffusion and policy=squashed, and values as
classes (HL-Gauss), are other networks with starts of their own. The last row is the control: supervised training goes
on from the start, at its final learning rate, for as many gradient steps as the row of that seed with the most of them.
Settings are the task's for each algorithm (`configs/settings`) and those of ROWS, whose offline stages are short:
Cal-QL's 10,000 steps of 256 rows take 40 minutes of one core. They are not tuned any further. Every run is `python
train.py ...` in its own process, one after the other. A row is written to the JSON file as soon as it is done, with its
commit; rows that are there are not measured again, and a run that was interrupted goes on from its last checkpoint.
Intervals of success are Wilson's, those of gains are paired: the same episodes before and after. CPU seconds are those
of collection and updates (of the control: none), wall seconds of the whole command with its evaluations, null if it was
interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.report.finished_run import evaluation_result  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.saving import checkpoint  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402

FLOW_SDE = ("algorithm=ppo",)
GRPO = ("algorithm=grpo", "policy.noise_level=1.0")
REINFLOW = (
    *FLOW_SDE,
    "policy.sampler=REINFLOW",
    "policy.aggregate=MEAN",
    "policy.std_min=0.1",
    "policy.std_max=0.24",
    "algorithm.clip=0.01",
    "algorithm.entropy_weight=0.03",
)
FLOW_NOISE = (*FLOW_SDE, "policy.sampler=FLOW_NOISE")
SRPO = (*GRPO, "algorithm.outcome=PROGRESS")
CONTROL = "SFT control"
ROWS: dict[str, tuple[str, ...]] = {
    "ppo, Flow-SDE": FLOW_SDE,
    "grpo, Flow-SDE": GRPO,
    "self_imitation": ("algorithm=self_imitation",),
    "ranking": ("algorithm=ranking",),
    "ranking, HL-Gauss": (
        "algorithm=ranking",
        "policy.values.head=HL_GAUSS",
        "policy.values.value_low=-1",
        "policy.values.value_high=2",
    ),
    "ppo, ReinFlow": REINFLOW,
    "ppo, Flow-Noise": (*FLOW_NOISE, "policy.aggregate=STEP_MEAN", "algorithm.entropy_weight=0.005"),
    "grpo, SRPO's reward": SRPO,
    "grpo, SimpleVLA-RL": (*GRPO, "algorithm.of_running=false", "algorithm.min_groups=40"),
    "grpo, RIPT-VLA": (
        *GRPO,
        "algorithm.of_running=false",
        "algorithm.leave_one_out=true",
        "algorithm.by_deviation=false",
        "algorithm.clip_high=null",
        "algorithm.lowest=0",
        "algorithm.highest=1",
        "algorithm.min_groups=40",
    ),
    "ppo, VLA-RL": (
        *FLOW_SDE,
        "algorithm.process_reward=1",
        "algorithm.curriculum=0.5",
        "algorithm.curriculum_favours=FAILURES",
    ),
    "grpo, SRPO with a learned encoder": (*SRPO, "algorithm.progress_features=true"),
    "ppo, ReinFlow with narrowing noise": (*REINFLOW, "policy.noise_decay=0.3"),
    "ppo, ReinFlow with its W2 regulariser": (*REINFLOW, "policy.noise_decay=0.3", "algorithm.wasserstein=0.1"),
    # RLinf's entropy is a mean over elements: 0.005 / (4 actions * 7 elements) * 5 / 4, of ours over S + 1 = 5 steps
    "ppo, Flow-Noise in RLinf": (*FLOW_NOISE, "policy.aggregate=PATH_MEAN", "algorithm.entropy_weight=2.2e-4"),
    "grpo, partial rollouts": (*GRPO, "algorithm.partial=true"),
    "grpo, early stop": (*GRPO, "algorithm.patience=1.5"),
    "ppo, DPPO": ("policy=diffusion", "algorithm=ppo"),
    # within 120,000 steps: the task's rollouts of 70 decisions would only warm up the critic
    "ppo, short rollouts": (
        *FLOW_SDE,
        "algorithm.rollout_length=28",
        "algorithm.critic_warmup=1",
        "algorithm.learning_rate=1e-4",
    ),
    "rlpd": ("policy=squashed", "algorithm=rlpd"),
    "qc": ("algorithm=qc",),
    "qc_fql": ("algorithm=qc_fql",),
    "dsrl": ("algorithm=dsrl",),
    "residual": ("algorithm=residual",),
    "wsrl": (
        "policy=squashed",
        "algorithm=wsrl",
        "offline=calql",
        "offline.steps=3000",
        "offline.batch=128",
        "offline.sampled_actions=4",
    ),
    "iql, then online": ("policy=squashed", "algorithm=wsrl", "offline=iql", "offline.steps=3000"),
    # distils the start in 64,000 steps of its own: rows of other numbers of steps have their own `--env-steps`
    "one_step": ("algorithm=one_step", "algorithm.gradient_steps=600"),
    CONTROL: ("algorithm=self_imitation", "sft.learning_rate=1e-4"),
}
"""Options of train.py by name; more important rows first, the control last. Noise, clip and entropy follow papers."""
COMMON = (
    "task=libero_pick",
    "task.assets=stand-in",
    "video=false",
    "threads=1",
    "overlap=false",
    "comparison_starts=null",
    "task.areas_share=0",
)
RATE = "success", "low", "high", "episodes", "step_limit"
RESULT = ROOT / "benchmarks" / "results" / "rl_algorithms.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the missing rows, and print the table."""
    args = _parse(arguments)
    sizes = (
        f"task.tasks=[{args.tasks}]",
        f"task.episodes={args.demonstrations}",
        f"evaluation_starts={args.starts}",
        f"sft.steps={args.sft_steps}",
    )
    report = json.loads(args.output.read_text()) if args.output.exists() else {"rows": []}
    for seed in [] if args.show else args.seeds:
        for name in args.rows:
            options = (*COMMON, *sizes, *ROWS[name], f"seed={seed}")
            rows = {row["name"]: row for row in report["rows"] if row["seed"] == seed}
            if name in rows:
                continue
            start = supervised_start(args.folder, options, seed)
            if name == CONTROL:
                steps = max((row.get("gradient_steps", 0) for row in rows.values()), default=0)
                if not steps:
                    sys.exit(f"seed {seed} has no row whose gradient steps the {CONTROL} could take; measure one first")
                options = (*options, f"sft.steps={steps}")
            run = args.folder / f"{_plain(name)}_{seed}"
            row = _measured(name, (*options, f"env_steps={args.env_steps}"), start, run)
            report["rows"].append({"name": name, "seed": seed, **row})
            report |= {
                "command": f"python benchmarks/rl_algorithms.py {' '.join(sys.argv[1:])}",
                "versions": versions(),
            }
            with complete_or_absent(args.output) as temporary:
                temporary.write_text(dumps_rows(report))
    sys.stdout.write(shown(report["rows"]) + "\n")


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a table: success before and after on both distributions, gains, steps and seconds."""
    lines = []
    for row in rows:
        for distribution in ("wide", "official"):
            before, after, gain = row["before"][distribution], row["after"][distribution], row["gain"][distribution]
            lines.append(
                {
                    "row": f"{row['name']}, seed {row['seed']}",
                    "starts": distribution,
                    "before": _rate(before),
                    "after": _rate(after),
                    "gain": f"{100 * gain['difference']:+.1f} [{100 * gain['low']:+.1f}, {100 * gain['high']:+.1f}]",
                    "steps": f"{row['env_steps']:,}",
                    "CPU s": f"{row['cpu_s']:.0f}",
                }
            )
    return table(list(lines[0]), [list(line.values()) for line in lines]) if lines else "no rows yet"


def _rate(found: dict[str, Any]) -> str:
    return f"{100 * found['success']:.1f}% [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


def _plain(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def supervised_start(folder: Path, options: Sequence[str], seed: int) -> Path:
    """Train, once, the supervised run from which rows with the policy of `options` begin; returns its folder."""
    policy = next((option.partition("=")[2] for option in options if option.startswith("policy=")), "flow")
    values = [option for option in options if option.startswith("policy.values.")]
    run = folder / f"start_{policy}{'_hl_gauss' * bool(values)}_{seed}"
    if not (run / "report.json").exists():
        parts = ("algorithm", "offline", "policy.", "sft.learning_rate")
        policy_options = [*(option for option in options if not option.startswith(parts)), *values]
        algorithm = "ppo" if policy == "squashed" else "self_imitation"
        _train([*policy_options, f"algorithm={algorithm}", "stages=[sft]"], run)
    return run


def _stages(name: str) -> list[str]:
    """Stages of a row after its start."""
    if name == CONTROL:
        return ["sft"]
    return ["offline", "rl"] if any(option.startswith("offline=") for option in ROWS[name]) else ["rl"]


def _measured(name: str, options: Sequence[str], start: Path, run: Path) -> dict[str, Any]:
    """Measure one row: success before and after, gain by distribution, steps, seconds, commit and options."""
    start_s, uninterrupted = time.perf_counter(), not _saved(run)
    stages = _stages(name)
    _train([*options, f"stages=[{','.join(stages)}]", f"start_from={start}"], run)
    wall_s = time.perf_counter() - start_s
    report = json.loads((run / "report.json").read_text())
    sys.stderr.write(f"{name}: {wall_s:.0f} s\n")
    before, after = (
        {each["distribution"]: each for each in report["evaluations"] if each["stage"] == stage}
        for stage in ("start", stages[-1])
    )
    gains = {each: vars(evaluation_result(after[each]).gain_over(evaluation_result(before[each]))) for each in before}
    saved = checkpoint.newest(run)
    assert saved is not None
    counters = json.loads((saved / "checkpoint.json").read_text())["counters"]
    return {
        "before": {each: _facts(row, *RATE) for each, row in before.items()},
        "after": {each: _facts(row, *RATE) for each, row in after.items()},
        "gain": {each: _facts(row, "difference", "low", "high") for each, row in gains.items()},
        "env_steps": report["env_steps"],
        "gradient_steps": counters["offline_gradient_steps"] + counters["rl_gradient_steps"],
        "cpu_s": report["cpu_s"],
        "wall_s": wall_s if uninterrupted else None,
        "git_commit": git_commit(),
        "options": list(options),
    }


def _facts(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names}


def _saved(run: Path) -> bool:
    """Whether a run was interrupted, or has ended."""
    return any((run / "checkpoint").glob("[0-9]*"))


def _train(options: Sequence[str], run: Path) -> None:
    """Run train.py with its output in `run`, from the last checkpoint if there is one, else from the beginning."""
    if _saved(run):
        options = [f"resume={run}"]
    else:
        shutil.rmtree(run, ignore_errors=True)
        options = [*options, f"output={run}"]
    subprocess.run([sys.executable, "train.py", *options], cwd=ROOT, env=child_environment(), check=True)


def child_environment() -> dict[str, str]:
    """Environment of a program of this clone on one core, with the other paths of this process."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: text.split(";"), default=list(ROWS), help="names, by ;")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--env-steps", type=int, default=1_000_000)
    parser.add_argument("--tasks", default="", help="numbers, by comma; all if empty")
    parser.add_argument("--demonstrations", type=int, default=2, help="of each task")
    parser.add_argument("--sft-steps", type=int, default=4000)
    parser.add_argument("--starts", type=int, default=50, help="initial states of each task and distribution")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "rl_algorithms", help="of the runs")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--show", action="store_true", help="only print the table of the JSON file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
