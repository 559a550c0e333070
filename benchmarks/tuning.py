"""Choose settings of algorithms on `libero_pick`, each by as many tries: `python benchmarks/tuning.py [--tries 6]`.

    [--env-steps N] [--rows "NAME;NAME"] [--tasks 0,1,2] [--envs N] [--starts N] [--folder DIR]

Names are rows of `rl_algorithms.py`. Every search is `python tune.py ...` with the ranges of SPACES, from one
supervised start of two demonstrations for each policy. Its seed, 100, and the initial states of scores are those of no
reported run. The first try has the task's settings (`configs/settings`). A search that was interrupted goes on, and a
larger `--tries` extends it. Prints the table of each search; tries and figures are in `FOLDER/NAME/tune.json`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

from benchmarks.rl_algorithms import COMMON, ROWS, child_environment, supervised_start  # noqa: E402
from embodied.command_line.tuning import FIRST_SEED, SearchOptions  # noqa: E402

DEMONSTRATED = "algorithm.demonstration_share: [0.0, 0.5]"
RATE = "algorithm.learning_rate: [1e-4, 1e-3]"
SPACES = {
    "ranking": ("algorithm.gradient_steps: [50, 200]", "algorithm.window: [10, 50]", "algorithm.warmup: [3, 12]"),
    "ppo, Flow-SDE": (
        "algorithm.learning_rate: [1e-5, 2e-4]",
        "policy.noise_level: [0.5, 1.5]",
        "algorithm.epochs: [2, 8]",
    ),
    "rlpd": (
        "algorithm.learning_rate: [3e-5, 1e-3]",
        "algorithm.initial_temperature: [0.001, 0.03]",
        "algorithm.target_std: [0.03, 0.3]",
    ),
    "qc": (DEMONSTRATED, "policy.candidates: [4, 16]", "algorithm.sft.learning_rate: [3e-5, 1e-3]"),
    "qc_fql": (DEMONSTRATED, "algorithm.distillation: [1.0, 100.0]", RATE),
    "dsrl": (RATE, "policy.steering.noise_bound: [0.5, 2.5]", "algorithm.target_std: [0.05, 0.4]"),
    "residual": (RATE, "policy.steering.residual_scale: [0.03, 0.3]", "policy.steering.initial_std: [0.1, 1.0]"),
}
"""Three options of each algorithm, in the syntax of tune.py."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the searches one after the other."""
    args = _parse(arguments)
    for name in args.rows:
        options = [*(each for each in COMMON if not each.startswith("comparison_starts")), *ROWS[name]]
        options += [f"task.tasks=[{args.tasks}]", "task.episodes=2", f"num_envs={args.envs}"]
        first = f"evaluation_first_start={SearchOptions().first_start}"
        scored = (first, f"evaluation_starts={args.starts}", "comparison_starts=0", f"seed={FIRST_SEED}")
        start = supervised_start(args.folder, (*options, *scored), FIRST_SEED)
        space = f"tune.options={{{', '.join(SPACES[name])}}}"
        sizes = [f"tune.tries={args.tries}", f"tune.env_steps={args.env_steps}", f"tune.starts={args.starts}"]
        parts = ["stages=[rl]", f"start_from={start}", f"demonstrations={start}", space, *sizes]
        command = [sys.executable, "tune.py", *options, *parts, f"output={args.folder / name.partition(',')[0]}"]
        subprocess.run(command, cwd=ROOT, env=child_environment(), check=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: text.split(";"), default=list(SPACES), help="names, by ;")
    parser.add_argument("--tries", type=int, default=6)
    parser.add_argument("--env-steps", type=int, default=60_000)
    parser.add_argument("--tasks", default="", help="numbers, by comma; all if empty")
    parser.add_argument("--envs", type=int, default=100)
    parser.add_argument("--starts", type=int, default=10, help="initial states of each task, for the score")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "tuning", help="of the searches")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
