"""Our policy for any quadrotor and RAPTOR's: `python benchmarks/quadrotor_raptor.py RUN...`, runs of quadrotor_any.

    [--python PATH] [--episodes 256] [--output FILE]

RAPTOR (arXiv 2509.11481, MIT) is the policy that its authors publish as foundation-policy on PyPI. It runs in its own
interpreter: PATH, or a virtual environment made once in the user's cache. It is used as its authors document: position,
rotation matrix by rows and velocity in a world whose z is up, angular velocity of the body (x forward, y left), and the
last action; four set-points in [-1, 1] of the rotors front-right, back-right, back-left, front-left at 100 Hz. All of
these are the simulator's own, so that nothing is converted. `raptor_clipped` has position errors clipped to 0.5 m and
velocities to 1 m/s, as by its module for PX4; `raptor`, which does better here, has not.

All policies fly the same platforms from the same starts with the same forces, torques and noise, deterministically, for
500 steps. `forgetful` is our policy with its memory reset before each step. `told_by_memory` is the accuracy of a
linear regression, fitted on other episodes, that predicts numbers of random platforms after one second: R^2 from our
policy's memory, and from its observation at that step.

Writes benchmarks/results/quadrotor_raptor.json, only from a clean commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.quadrotor_training import RESULTS, machine  # noqa: E402
from embodied.command_line.config import compose  # noqa: E402
from embodied.errors import UserError  # noqa: E402
from embodied.evaluation.evaluation import EvaluationResult, evaluate, wilson  # noqa: E402
from embodied.policy import MEMORY, Decision  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.rollout.memory import Memory, RecurrentPolicy  # noqa: E402
from embodied.saving import checkpoint  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from embodied.training.compute import prepare  # noqa: E402
from sims.interpreter import own_python  # noqa: E402
from sims.quadrotor.observation import contract  # noqa: E402
from sims.quadrotor.platforms import NUMBERS  # noqa: E402
from sims.quadrotor.task import AnyPlatformTask  # noqa: E402
from sims.quadrotor.tasks.hover import Hover  # noqa: E402
from train import GROUPS, TrainConfig  # noqa: E402

PACKAGES = ("foundation-policy==1.0.2", "h5py==3.16.0", "importlib-resources==7.1.0")
READ = ("position", "rotation", "velocity", "angular_velocity", "previous_action")
"""Observations in RAPTOR's order."""
CLIPS = {"position": 0.5, "velocity": 1.0}
"""Limits of each coordinate in RAPTOR's module for PX4, m and m/s."""
TOLD_AFTER = 100
"""Steps after which the memory is read."""


class Raptor:
    """RAPTOR's published policy, run by the interpreter `python`; ends with `close`."""

    def __init__(self, python: str, clips: dict[str, float] | None = None) -> None:
        self.contract, self.clips = contract(Hover.OBSERVED), clips or {}
        command = [python, str(Path(__file__).with_name("raptor_policy.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        (self.size,) = np.frombuffer(self._read(1), np.int32).tolist()
        self._initial = self._floats(1, self.size)

    def initial_memory(self, count: int) -> Tensor:
        """Memory [count, M] at the beginning of episodes."""
        return self._initial.expand(count, -1)

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Actions [N, 1, 4]; the policy has only deterministic ones."""
        rows, count = torch.cat((observed(observation, self.clips), observation[MEMORY]), 1), len(observation)
        pipe = self._process.stdin
        assert pipe is not None
        values = rows[:, : -self.size].contiguous(), rows[:, -self.size :].contiguous()
        pipe.write(np.int32(count).tobytes() + b"".join(each.float().numpy().tobytes() for each in values))
        pipe.flush()
        actions, memory = self._floats(count, 4), self._floats(count, self.size)
        sample = TensorDict({MEMORY: memory}, batch_size=[count])
        return Decision(actions.unsqueeze(1), sample, torch.zeros(count, 1, 1), None)

    def close(self) -> None:
        """End the policy's process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _floats(self, rows: int, columns: int) -> Tensor:
        return torch.from_numpy(np.frombuffer(self._read(rows * columns), np.float32).reshape(rows, columns).copy())

    def _read(self, numbers: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(4 * numbers)
        if len(data) < 4 * numbers:
            raise UserError("RAPTOR's process ended, see above; its interpreter needs foundation-policy: --python PATH")
        return data


class Forgetful:
    """Wraps `policy` so that its memory is that of a new episode in every step."""

    def __init__(self, policy: RecurrentPolicy) -> None:
        self.policy, self.contract = policy, policy.contract

    def initial_memory(self, count: int) -> Tensor:
        """Memory [count, M] at the beginning of episodes."""
        return self.policy.initial_memory(count)

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """The policy's actions as if each were the first."""
        first_observation = observation.copy().update({MEMORY: self.initial_memory(len(observation))})
        return self.policy.act(first_observation, deterministic=deterministic, generator=generator)


def observed(observation: TensorDict, clips: dict[str, float]) -> Tensor:
    """Observations [N, 22] in RAPTOR's order, limited by `clips`."""
    parts = [observation[name] for name in READ]
    limits = [clips.get(name, torch.inf) for name in READ]
    return torch.cat([part.clamp(-limit, limit) for part, limit in zip(parts, limits, strict=True)], 1)


def saved_policy(run: str) -> tuple[RecurrentPolicy, AnyPlatformTask, dict[str, Any]]:
    """Load the policy of a run, the task of its training, and a label of the run.

    Raises:
        UserError: if the run has no policy, another task, or no memory.
    """
    saved = checkpoint.load(run)
    trained, _ = compose(TrainConfig, "train", [], GROUPS, saved.config)
    saved.restore(policy := trained.policy.build(saved.contract))
    if not isinstance(trained.task, AnyPlatformTask) or not isinstance(policy, RecurrentPolicy):
        raise UserError(f"expected runs of train.py task=quadrotor_any, got {run}: {trained.task.name}")
    report = json.loads((Path(run) / "report.json").read_text())
    return policy, trained.task, {name: report[name] for name in ("seed", "git_commit", "cpu_s", "env_steps")}


def row(result: EvaluationResult) -> dict[str, Any]:
    """JSON-ready row: survival with Wilson's interval, and the survivors' position error over the last second."""
    survived, episodes = int(result.success.sum()), result.success.numel()
    error = result.summary().get("position_error_m")
    return {"survive": survived / episodes, "survive_95": wilson(survived, episodes), "position_error_m": error}


def paired(ours: EvaluationResult, theirs: EvaluationResult) -> list[float]:
    """Difference of the survival rates of `ours` and `theirs` in the same episodes, and its 95% interval."""
    gain = ours.gain_over(theirs)
    return [gain.difference, gain.low, gain.high]


@torch.no_grad()
def told(policy: RecurrentPolicy, task: AnyPlatformTask, episodes: int) -> dict[str, dict[str, float]]:
    """R^2 of predictions of a platform's numbers from the memory and from the observation, by name of the number."""
    env = task.environment(episodes, "random", "eval")
    observation, memory = env.reset(starts=torch.arange(episodes)), Memory(policy, episodes)
    alive = torch.ones(episodes, dtype=torch.bool)
    for _ in range(TOLD_AFTER):
        decision = policy.act(memory.with_observation(observation), deterministic=True)
        memory.keep([decision])
        transition = env.step(decision.actions)
        observation, alive = transition.observation, alive & ~transition.terminated
    inputs = {"memory": memory.values, "observation": observed(observation, {})}
    platform = observation["platform"]
    scores = {name: explained(values[alive], platform[alive]) for name, values in inputs.items()}
    numbers = ("thrust_to_weight", "mass", "lag_rise", "lag_fall")
    return {number: {name: float(found[NUMBERS.index(number)]) for name, found in scores.items()} for number in numbers}


def explained(inputs: Tensor, targets: Tensor) -> Tensor:
    """R^2 [D] of `targets` [N, D] in the second half of the rows by a linear regression fitted on the first half."""
    half = len(inputs) // 2
    design = torch.nn.functional.pad(inputs.double(), (0, 1), value=1.0)
    fit = torch.linalg.lstsq(design[:half], targets[:half].double(), driver="gelsd").solution
    rest = targets[half:].double()
    return 1.0 - (rest - design[half:] @ fit).square().sum(0) / (rest - rest.mean(0)).square().sum(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all platforms, print the table, and write the JSON."""
    args = _parse(arguments)
    prepare("cpu", 1)
    python = args.python or str(own_python("RAPTOR's policy", "raptor", "20 MB", ("numpy",), (), PACKAGES))
    runs = [saved_policy(run) for run in args.runs]
    if any(task.platforms != runs[0][1].platforms for _, task, _ in runs):
        raise UserError("expected runs that were trained for the same platforms")
    report = {
        "command": "python benchmarks/quadrotor_raptor.py RUN...",
        "episodes": args.episodes,
        "git_commit": git_commit(),
        "machine": machine(),
        "versions": versions(),
        "raptor": installed(python),
        "runs": [about for *_, about in runs],
        **measure(runs, python, args.episodes),
    }
    sys.stdout.write(shown(report["rows"]) + "\n")
    with complete_or_absent(args.output) as temporary:
        temporary.write_text(dumps_rows(report))


def installed(python: str) -> dict[str, str]:
    """Versions of RAPTOR's packages in its interpreter."""
    names = "foundation-policy", "numpy", "h5py"
    program = (
        f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {names}}}))"
    )
    return json.loads(subprocess.run([python, "-c", program], stdout=subprocess.PIPE, check=True).stdout)


def measure(runs: Sequence[Any], python: str, episodes: int) -> dict[str, Any]:
    """Measure the rows of all platforms, and the information in memories."""
    task, rows = runs[0][1], []
    raptors = {"raptor": Raptor(python), "raptor_clipped": Raptor(python, CLIPS)}
    for platform in task.distributions:
        evaluate_on = partial(evaluate, task.environment(episodes, platform, "eval"), starts_per_task=episodes)
        raptor_results = {name: evaluate_on(policy) for name, policy in raptors.items()}
        entry: dict[str, Any] = {"platform": platform, **{name: row(result) for name, result in raptor_results.items()}}
        entry["ours"] = []
        for policy, _, about in runs:
            our_result, forgetful = evaluate_on(policy), evaluate_on(Forgetful(policy))
            differences = {f"more_than_{name}": paired(our_result, result) for name, result in raptor_results.items()}
            entry["ours"].append({"seed": about["seed"], **row(our_result), **differences, "forgetful": row(forgetful)})
        rows.append(entry)
        sys.stderr.write(shown([entry]).splitlines()[-1] + "\n")
    for policy in raptors.values():
        policy.close()
    memories = [{"seed": about["seed"], **told(policy, task, 4 * episodes)} for policy, _, about in runs]
    return {"rows": rows, "told_by_memory": memories}


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as Markdown; for several runs, show the lowest and the highest value."""

    def span(values: Sequence[float | None], form: str) -> str:
        present = [value for value in values if value is not None]
        low, high = (form.format(pick(present)) if present else "" for pick in (min, max))
        return low if low == high else f"{low} to {high}"

    lines = []
    for each in rows:
        theirs, ours = (each["raptor"], each["raptor_clipped"]), each["ours"]
        cells = [span([one["survive"] for one in group], "{:.1%}") for group in ([theirs[0]], [theirs[1]], ours)]
        cells += [span([one["forgetful"]["survive"] for one in ours], "{:.1%}")]
        cells += [span([one["position_error_m"] for one in group], "{:.3f}") for group in ([theirs[0]], ours)]
        lines.append([each["platform"], *cells])
    headings = ["platform", "RAPTOR", "RAPTOR clipped", "ours", "ours without memory", "RAPTOR's error, m", "ours, m"]
    return table(headings, lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished runs of task=quadrotor_any")
    parser.add_argument("--python", help="an interpreter that has foundation-policy")
    parser.add_argument("--episodes", type=int, default=256, help="on each platform")
    parser.add_argument("--output", type=Path, help="benchmarks/results/quadrotor_raptor.json")
    args = parser.parse_args(arguments)
    if args.output is None:
        if (commit := git_commit()).endswith("-dirty") or commit == "unknown":
            parser.error(f"results are measured on a clean commit, this is {commit}; commit, or name --output FILE")
        args.output = RESULTS / "quadrotor_raptor.json"
    return args


if __name__ == "__main__":
    main()
