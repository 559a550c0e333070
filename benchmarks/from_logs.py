"""Learn from logs alone: `python benchmarks/from_logs.py FOLDER [--rows "NAME;NAME"] [--seeds 0 1 2] [--output FILE]`.

    [--tries]

    FOLDER --task libero_pick --episodes 30 60 --steps 4000 --batch 256 --starts 20 --envs 100

Logs of a task are two thirds of good episodes and one third of a policy that mostly fails, with rewards: of
`libero_pick` the scripted expert's, and those of a policy after a tenth of the gradient steps; of `reach`, a point on a
line, those of a slow controller, and of one that moves away from the goal. Every row learns from the same logs by as
many gradient steps of the same batch, and is evaluated on the same starts. Imitation of all ignores which episodes
failed. Rows have success, mean steps of the episodes that succeeded, and CPU seconds of learning. Every row is written
as soon as it is measured, with its commit; a command that is repeated measures the missing rows only. Intervals of
success are for other seeds and other starts.

Options of rows are the learners' defaults and those of CHOSEN: on `libero_pick` the best of TRIES, as many for each
row, which `--tries` measures with a seed (`--seeds 100`) and initial states of no reported row.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs from a clone that is not installed

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402

from embodied import seeding  # noqa: E402
from embodied.algorithms.imitation.sft import SFTConfig  # noqa: E402
from embodied.algorithms.offline.co_rft import CoRFTConfig  # noqa: E402
from embodied.algorithms.offline.fql import FQLConfig, OfflineQCConfig  # noqa: E402
from embodied.algorithms.offline.iql import Extraction, FamO2OConfig, FDVLConfig, IQLConfig, ValueLoss  # noqa: E402
from embodied.algorithms.offline.rebrac import ReBRACConfig, TD3BCConfig  # noqa: E402
from embodied.algorithms.offline.recap import RECAPConfig  # noqa: E402
from embodied.command_line.tuning import SearchOptions  # noqa: E402
from embodied.data.episodes import SUCCEEDED, UNKNOWN, Episodes  # noqa: E402
from embodied.data.recording import record_episodes  # noqa: E402
from embodied.environment import Environment  # noqa: E402
from embodied.evaluation.evaluation import evaluate, rate_over_seeds  # noqa: E402
from embodied.policy import PolicyConfig, Steering, TrainablePolicy  # noqa: E402
from embodied.report.markdown import table  # noqa: E402
from embodied.saving.files import complete_or_absent  # noqa: E402
from embodied.saving.json_text import dumps_rows  # noqa: E402
from embodied.saving.versions import git_commit, versions  # noqa: E402
from embodied.task import OfflineLearnerConfig  # noqa: E402
from policies.flow import FlowConfig  # noqa: E402
from policies.generation.steering import SteeringConfig  # noqa: E402
from policies.mlp import MLPConfig  # noqa: E402
from policies.squashed import SquashedConfig  # noqa: E402

ROWS: dict[str, tuple[str, Callable[..., OfflineLearnerConfig]]] = {
    "imitation of all": ("flow", SFTConfig),
    "imitation of successes": ("flow", SFTConfig),
    "IQL": ("flow", IQLConfig),
    "QC": ("flow", OfflineQCConfig),
    "FQL": ("one-step flow", FQLConfig),
    "CO-RFT": ("one-step flow", CoRFTConfig),
    "f-DVL": ("flow", FDVLConfig),
    "f-DVL, chi-square": ("flow", lambda **sizes: FDVLConfig(value_loss=ValueLoss.CHI_SQUARE, **sizes)),
    "FamO2O": ("flow", FamO2OConfig),
    "RECAP": ("conditioned flow", RECAPConfig),
    "mlp, imitation of successes": ("mlp", SFTConfig),
    "mlp, IQL": ("mlp", IQLConfig),
    "mlp, f-DVL": ("mlp", FDVLConfig),
    "mlp, f-DVL, chi-square": ("mlp", lambda **sizes: FDVLConfig(value_loss=ValueLoss.CHI_SQUARE, **sizes)),
    "mlp, FamO2O": ("mlp", FamO2OConfig),
    "mlp, IQL with DDPG+BC": ("mlp", lambda **sizes: IQLConfig(extraction=Extraction.DDPG_BC, **sizes)),
    "mlp, TD3+BC": ("mlp", TD3BCConfig),
    "mlp, ReBRAC": ("mlp", ReBRACConfig),
    "squashed, imitation of successes": ("squashed", SFTConfig),
    "squashed, TD3+BC": ("squashed", TD3BCConfig),
    "squashed, ReBRAC": ("squashed", ReBRACConfig),
}
"""Policy and config of the learner by name; policy=mlp cannot read the objects of `libero_pick`."""
CHOSEN: dict[str, dict[str, Any]] = {
    "IQL": {"inverse_temperature": 1.0, "expectile": 0.7},
    "RECAP": {"positive_share": 0.6, "policy.advantage_guidance": 1.0},
    "FQL": {"distillation": 100.0, "sft.learning_rate": 1e-3},
}
"""Options of the learner, and of its policy ("policy.NAME"), by row."""
TRIES: dict[str, list[dict[str, Any]]] = {
    "imitation of all": [{}, {"learning_rate": 3e-4}, {"weight_decay": 1e-2}],
    "imitation of successes": [{}, {"learning_rate": 3e-4}, {"weight_decay": 1e-2}],
    "IQL": [{}, {"inverse_temperature": 3.0, "expectile": 0.7}, {"inverse_temperature": 1.0, "expectile": 0.7}],
    "RECAP": [{}, {"positive_share": 0.6}, {"positive_share": 0.6, "policy.advantage_guidance": 1.0}],
    "FQL": [
        {},
        {"distillation": 100.0, "sft.learning_rate": 1e-3},
        {"distillation": 1000.0, "sft.learning_rate": 1e-3},
    ],
    "CO-RFT": [
        {},
        {"distillation": 100.0, "sft.learning_rate": 1e-3},
        {"distillation": 1000.0, "sft.learning_rate": 1e-3},
    ],
    "squashed, imitation of successes": [{}, {"learning_rate": 3e-4}, {"weight_decay": 1e-2}],
    "squashed, ReBRAC": [{}, {"actor_bc": 1.0}, {"actor_bc": 10.0}],
    "QC": [{}, {"sft.learning_rate": 1e-3}, {"sft.learning_rate": 1e-3, "policy.candidates": 8}],
}
"""Options that were tried on `libero_pick`, by row."""
FAILED_SHARE = 1.0 / 3.0
GUIDANCE = 1.5
"""Classifier-free guidance of RECAP's policy."""


Config = TypeVar("Config")
"""A dataclass."""


@dataclass
class Logs:
    """Evaluation environments of a task, its logs, and the policies that can learn it, by kind."""

    environment: Callable[[int], Environment]
    episodes: Episodes
    policies: dict[str, PolicyConfig]


def reach(args: argparse.Namespace, count: int, seed: int) -> Logs:
    """A point on a line: a slow controller, and one that moves away from the goal, both with large noise."""
    from tests.embodied.reach import Reach

    class Controller:
        """Moves towards the goal by `share` of the largest step, with noise of half a step."""

        def __init__(self, share: float) -> None:
            self.share = share

        def act(self, observation: TensorDict, *, generator: torch.Generator) -> argparse.Namespace:
            """Two noisy steps."""
            noise = 0.125 * torch.randn(len(observation), 2, 1, generator=generator)
            towards = -self.share * 0.25 * observation["position"].sign().unsqueeze(1)
            return argparse.Namespace(actions=(towards + noise).clamp(-0.25, 0.25))

    generator = seeding.generator(seed, "logs")
    bad = round(FAILED_SHARE * count)
    good, failures = (
        record_episodes(Reach(size), Controller(share), generator) for size, share in ((count - bad, 0.3), (bad, -0.3))
    )
    flow = FlowConfig(width=16, hidden=32, turn_rad=0.0)
    return Logs(
        Reach,
        Episodes.join([good, failures]),
        {"mlp": MLPConfig(hidden=[32]), "squashed": SquashedConfig(hidden=[32]), **flows(flow)},
    )


def flows(policy: FlowConfig) -> dict[str, PolicyConfig]:
    """The flow `policy`, and those with a one-step actor and with a condition for RECAP, by kind."""
    return {
        "flow": policy,
        "one-step flow": replace(policy, steering=SteeringConfig(kind=Steering.ONE_STEP)),
        "conditioned flow": replace(policy, advantage_guidance=GUIDANCE),
    }


def libero_pick(args: argparse.Namespace, count: int, seed: int) -> Logs:
    """The scripted expert's episodes, and those of a policy that imitated them for a tenth of the steps."""
    from embodied.command_line.config import compose
    from train import GROUPS, TrainConfig

    bad = round(FAILED_SHARE * count)
    options = ["task=libero_pick", "task.assets=stand-in", f"task.tasks=[{args.tasks}]", f"task.episodes={count - bad}"]
    config, squashed = (
        compose(TrainConfig, "train", [*options, f"policy={name}"], GROUPS)[0] for name in ("flow", "squashed")
    )
    task = config.task
    (folder := args.folder / f"{count}_{seed}").mkdir(parents=True, exist_ok=True)
    good = task.demonstrations(folder, seed).expanded()
    env = task.environment(bad * len(args.tasks.split(",")), "wide", "train", seed)
    beginner = learned(SFTConfig(steps=args.steps // 10), config.policy, env, good, seed)
    poor = record_episodes(env, beginner, seeding.generator(seed, "logs"))
    env.close()
    poor = replace(
        poor,
        **{name: getattr(poor, name).select(*good.observation.keys()) for name in ("observation", "final_observation")},
    )
    return Logs(
        lambda number: task.environment(number, "wide", "eval", seed),
        Episodes.join([good, poor]),
        {"squashed": squashed.policy, **flows(config.policy)},
    )


TASKS = {"reach": reach, "libero_pick": libero_pick}


def learned(
    config: OfflineLearnerConfig, policy: PolicyConfig, env: Environment, episodes: Episodes, seed: int
) -> TrainablePolicy:
    """Policy for `env` that learned from `episodes`."""
    seeding.seed_everything(seed)
    built = policy.build(env.contract)
    built.fit(*episodes.by_weight())
    config.build(built, seeding.generator(seed, "offline")).fit(episodes, config.steps)
    return built


def with_options(config: Config, options: dict[str, Any]) -> Config:
    """Copy of a dataclass with `options` by name; "a.b" is the option b of the dataclass a."""
    for name, value in options.items():
        first, _, rest = name.partition(".")
        config = replace(config, **{first: with_options(getattr(config, first), {rest: value}) if rest else value})
    return config


def measured(name: str, options: dict[str, Any], logs: Logs, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Learn by the row `name` with `options`, and evaluate what was learned."""
    kind, config = ROWS[name]
    of_policy = {option.removeprefix("policy."): options[option] for option in options if option.startswith("policy.")}
    of_learner = {option: value for option, value in options.items() if not option.startswith("policy.")}
    learner = with_options(config(steps=args.steps, batch=args.batch), of_learner)
    unknown = torch.full_like(logs.episodes.success, UNKNOWN)
    episodes = replace(logs.episodes, success=unknown) if name == "imitation of all" else logs.episodes
    env = logs.environment(args.envs)
    began_s = time.process_time()
    policy = learned(learner, with_options(logs.policies[kind], of_policy), env, episodes, seed)
    cpu_s = time.process_time() - began_s
    first_start = SearchOptions().first_start if args.tries else 0
    result = evaluate(env, policy, starts_per_task=args.starts, first_start=first_start)
    env.close()
    steps = result.steps[result.success].float()
    return {
        "options": options,
        "success": float(result.success.float().mean()),
        "evaluated": result.success.numel(),
        "steps": float(steps.mean()) if len(steps) else None,
        "cpu_s": round(cpu_s, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows that the task has a policy for, and print the table."""
    args = _parse(arguments)
    torch.set_num_threads(1)
    output = args.output or args.folder / f"{args.task}.json"
    sizes = {name: getattr(args, name) for name in ("task", "tasks", "steps", "batch", "starts")}
    rows = _earlier_rows(output, sizes)
    for count in args.episodes:
        for seed in args.seeds:
            done = [(row["row"], row["options"]) for row in rows if (row["episodes"], row["seed"]) == (count, seed)]
            planned = [(name, options) for name in args.rows for options in _options(name, args.tries)]
            if not (missing := [row for row in planned if row not in done]):
                continue
            logs = TASKS[args.task](args, count, seed)
            succeeded = float((logs.episodes.success == SUCCEEDED).float().mean())
            for name, options in [row for row in missing if ROWS[row[0]][0] in logs.policies]:
                origin = {"episodes": count, "seed": seed, "recorded_success": round(succeeded, 3)}
                figures = measured(name, options, logs, args, seed)
                rows.append({"row": name, **origin, **figures, "commit": git_commit()})
                sys.stderr.write(f"{rows[-1]}\n")
                with complete_or_absent(output) as temporary:
                    temporary.write_text(dumps_rows({"rows": rows, **sizes, "versions": versions()}))
    sys.stdout.write(shown(rows) + "\n")


def _options(name: str, tries: bool) -> list[dict[str, Any]]:
    """Options to measure the row `name` with."""
    return TRIES.get(name, []) if tries else [CHOSEN.get(name, {})]


def _earlier_rows(output: Path, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows in the file `output`, which were measured with the same `sizes`."""
    if not output.exists():
        return []
    report = json.loads(output.read_text())
    if other := {name: report.get(name) for name, value in sizes.items() if report.get(name) != value}:
        raise SystemExit(f"{output} was measured with {other}; use --output with another file")
    return report["rows"]


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a table: success over seeds with its interval, steps to success and CPU seconds."""
    lines = []
    for name, count, options in dict.fromkeys(_key(row) for row in rows):
        own = [row for row in rows if _key(row) == (name, count, options)]
        rate, low, high = rate_over_seeds([row["success"] for row in own], own[0]["evaluated"])
        steps = [row["steps"] for row in own if row["steps"] is not None]
        lines.append(
            {
                "row": name,
                "options": options,
                "episodes": str(count),
                "success": f"{100 * rate:.1f}% [{100 * low:.1f}, {100 * high:.1f}]",
                "seeds": str(len(own)),
                "steps": f"{sum(steps) / len(steps):.1f}" if steps else "-",
                "CPU s": f"{sum(row['cpu_s'] for row in own) / len(own):.1f}",
            }
        )
    return table(list(lines[0]), [list(line.values()) for line in lines])


def _key(row: dict[str, Any]) -> tuple[str, int, str]:
    """Row, episodes of each task, and options."""
    return row["row"], row["episodes"], " ".join(f"{name}={value:g}" for name, value in row["options"].items())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=TASKS, default="reach")
    parser.add_argument("--tasks", default="0,1,2,3,4,5,6,7,8,9", help="of libero_pick")
    parser.add_argument("--episodes", type=int, nargs="+", default=[60], help="of each task")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--starts", type=int, default=22, help="of each task in evaluations")
    parser.add_argument("--envs", type=int, default=44, help="environments of evaluations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=lambda names: names.split(";"), default=list(ROWS))
    parser.add_argument("--tries", action="store_true", help="measure TRIES")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.rows if name not in ROWS]:
        parser.error(f"unknown rows {unknown}; expected some of {'; '.join(ROWS)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
