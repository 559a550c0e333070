"""Learning beside a person: `python benchmarks/robot_learning.py FOLDER [--seeds 0 1 2] [--env-steps 12000]`.

    [--rows "NAME;NAME"] [--starts 50] [--output FILE] [--show]

LIBERO's simulator plays the robot (task 0 of `libero_pick`, wide, from state, stand-in assets), behind the interface of
a robot: one action per control period through the safety layer. Every row begins with the same policy, supervised by
three demonstrations. A scripted person takes over after 15 steps without progress, 100 times at most; they help for 60
steps (long) or 10; within an hour, 72,000 steps, 400 times. `qc` learns values, too, and goes on for 36,000 steps,
without the person after their last take-over. The last row is the comparison that a person's time has to beat: as many
more steps of the same expert as the long helper of `hg_dagger` took, as whole demonstrations beforehand, and as many
gradient steps. The table has success of the policy alone on `--starts` held-out starts with Wilson's interval, the
person's steps, take-overs of an episode in the first and last quarter, and minutes of the robot's time. A row is
written when it is measured; a repeated command measures the missing ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from embodied.report.markdown import table  # noqa: E402
from embodied.saving import checkpoint  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402

TASK = ("task=libero_pick", "task.tasks=[0]", "task.assets=stand-in", "robot=simulation", "threads=1")
DEMONSTRATIONS, SFT_STEPS = 3, 1000
EPISODE_STEPS = 95
"""Mean steps of a demonstration."""
LONG_HELP = "hg_dagger, long help"
BEFORE = "as much help as demonstrations"
ROWS = {
    LONG_HELP: ("algorithm=hg_dagger", "algorithm.updates=2", "robot.help.lasting=60"),
    "hg_dagger, an hour": (
        "algorithm=hg_dagger",
        "algorithm.updates=2",
        "robot.help.lasting=60",
        "robot.help.budget=400",
        "env_steps=72000",
    ),
    "hg_dagger, short help": ("algorithm=hg_dagger", "algorithm.updates=2"),
    "iwr, long help": ("algorithm=iwr", "algorithm.updates=2", "robot.help.lasting=60"),
    "qc, long help": ("algorithm=qc", "robot.help.lasting=60", "env_steps=36000"),
    BEFORE: (),
}
RESULT = ROOT / "benchmarks" / "results" / "robot_learning.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the missing rows, and print the table."""
    args = _parse(arguments)
    report = json.loads(args.output.read_text()) if args.output.exists() else {"rows": []}
    for seed in [] if args.show else args.seeds:
        start = trained(args.folder / f"start_{seed}", seed, args.starts, sft(DEMONSTRATIONS, SFT_STEPS))
        for name in args.rows:
            options = ROWS[name]
            done = {row["name"]: row for row in report["rows"] if row["seed"] == seed}
            if name in done:
                continue
            if name == BEFORE:
                if LONG_HELP not in done:
                    raise SystemExit(f"the row {BEFORE!r} needs the person's steps of {LONG_HELP!r}: measure it first")
                helped = done[LONG_HELP]
                episodes = DEMONSTRATIONS + round(helped["human_steps"] / EPISODE_STEPS)
                options = sft(episodes, SFT_STEPS + helped["gradient_steps"])
            else:
                options = ("stages=[rl]", f"start_from={start}", f"env_steps={args.env_steps}", *options)
            run = trained(args.folder / f"{name.replace(' ', '_').replace(',', '')}_{seed}", seed, args.starts, options)
            report["rows"].append({"name": name, "seed": seed, **measured(run, start), "git_commit": git_commit()})
            report |= {"command": "python benchmarks/robot_learning.py FOLDER", "versions": versions()}
            with complete_or_absent(args.output) as temporary:
                temporary.write_text(dumps_rows(report))
    sys.stdout.write(shown(report["rows"]) + "\n")


def sft(episodes: int, steps: int) -> tuple[str, ...]:
    """Options of supervised training alone."""
    return ("algorithm=hg_dagger", "stages=[sft]", f"task.episodes={episodes}", f"sft.steps={steps}")


def trained(run: Path, seed: int, starts: int, options: Sequence[str]) -> Path:
    """Train once, as a user types it, into the folder `run`; returns it."""
    if not (run / "report.json").exists():
        common = (f"evaluation_starts={starts}", f"seed={seed}", f"output={run}")
        episodes = (
            () if any(each.startswith("task.episodes") for each in options) else (f"task.episodes={DEMONSTRATIONS}",)
        )
        command = (sys.executable, str(ROOT / "train.py"), *TASK, *episodes, *options, *common)
        subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
    return run


def measured(run: Path, start: Path) -> dict[str, Any]:
    """Success before and after, the person's part, and CPU seconds of training, of a finished `run`."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    episodes = [line for line in lines if "rollout/takeovers" in line]
    quarter = max(1, len(episodes) // 4)
    parts = {"first": episodes[:quarter], "last": episodes[-quarter:]} if episodes else {}
    takeovers = {name: sum(line["rollout/takeovers"] for line in part) / len(part) for name, part in parts.items()}
    report = json.loads((run / "report.json").read_text())
    saved = checkpoint.newest(run)
    assert saved is not None
    gradient_steps = json.loads((saved / "checkpoint.json").read_text())["counters"]["rl_gradient_steps"]
    return {
        "before": _success(start),
        **_success(run),
        "human_steps": report.get("human_steps") or 0,
        "takeovers": takeovers,
        "env_steps": report.get("env_steps") or 0,
        "gradient_steps": gradient_steps,
        "cpu_s": report["cpu_s"],
    }


def _success(run: Path) -> dict[str, Any]:
    evaluation = json.loads((run / "report.json").read_text())["evaluations"][-1]
    return {name: evaluation[name] for name in ("success", "low", "high", "episodes")}


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a table."""
    lines = [
        {
            "row": f"{row['name']}, seed {row['seed']}",
            "before": f"{100 * row['before']['success']:.0f}%",
            "after": f"{100 * row['success']:.0f}% [{100 * row['low']:.0f}, {100 * row['high']:.0f}]",
            "person's steps": str(row["human_steps"]),
            "take-overs, first and last quarter": " / ".join(f"{each:.1f}" for each in row["takeovers"].values())
            or "-",
            "robot's minutes": f"{row['env_steps'] / 20 / 60:.1f}",
            "CPU s": f"{row['cpu_s']:.0f}",
        }
        for row in rows
    ]
    return table(list(lines[0]), [list(line.values()) for line in lines]) if lines else "no rows yet"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=lambda names: names.split(";"), default=list(ROWS))
    parser.add_argument("--env-steps", type=int, default=12_000)
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--show", action="store_true", help="print the table of what is measured")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.rows if name not in ROWS]:
        parser.error(f"unknown rows {unknown}; expected some of {'; '.join(ROWS)}")
    args.folder = args.folder.absolute()
    return args


if __name__ == "__main__":
    main()
