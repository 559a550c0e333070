"""Reports of a run: report.json, report.md, report.html and the summary on the console."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from embodied.data.round_results import collected_total
from embodied.environment import ODD_EVENTS
from embodied.evaluation.evaluation import EvaluationResult, Gain
from embodied.evaluation.groups import NO_KINDS, Kinds, Results, summary
from embodied.evaluation.in_training import InTraining, measure, odd_episodes
from embodied.evaluation.open_loop import OpenLoopResult
from embodied.report import open_loop
from embodied.report.curves import plot_curves
from embodied.report.headline import (
    BASELINE,
    LEARNING,
    ONE_STEP,
    UNTRAINED,
    headline,
    intervals,
    points,
    regressions,
    reset_sentence,
    selection,
    significant,
    trained,
)
from embodied.report.markdown import markdown, table, without_empty_columns
from embodied.report.page.page import page
from embodied.report.repeating import machine, next_commands, train_command, typed_path
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import dumps_rows
from embodied.saving.versions import git_commit, versions
from embodied.task import Task

STAGES = {"start": "start", UNTRAINED: "untrained", "sft": "SFT", "sft_control": "SFT control"}
STAGES |= {"offline": "offline", "rl": "RL", ONE_STEP: "one-step actor"}
"""Evaluated stages, in the order of a report, and their titles."""
POLICY = "policy"
"""Name of the evaluated policy among baselines."""
log = logging.getLogger(__name__)
STAND_IN = "**Stand-in assets**: primitives in place of the official assets. These are not benchmark numbers."


@dataclass
class Report:
    """Evaluations of one run by stage (of `STAGES`, or a baseline) and distribution, and their cost.

    `assets` is "official" or "stand-in", None for tasks without assets; `wall_s` is seconds per phase, `cpu_s` the CPU
    time of reinforcement learning on all cores, `phase_cpu_s` that of the other phases. `arguments` are the options
    of the run, None if a program passed objects. `export_target` is the format into which export.py converts the
    policy, None if there is none. `meanings` are sentences on distributions (`Task.meanings`). `notes` list missing
    capabilities of the simulator; `in_training` are evaluations during reinforcement learning; `open_loop` that of a
    run without a simulator; `rounds` are those of offline learning. `env_steps` and `episodes` are those of
    reinforcement learning; the record adds those that were collected between offline rounds. Of the `episodes` of
    training, `lost` ended because a process of the simulator died, and in `pushed` a person pushed a robot or object.
    In `human_steps` of the environment steps a person acted, who took over `takeovers` times. `resets` is the record of
    how a robot brought its scene back (`embodied.environment.Resets`), None without.
    `lost_collectors` died and were replaced; `dropped_rollouts` were too old to use.
    """

    task: str
    assets: str | None
    seed: int
    export_target: str | None = None
    env_steps: int = 0
    episodes: int = 0
    lost: int = 0
    pushed: int = 0
    takeovers: int = 0
    human_steps: int = 0
    resets: dict[str, Any] | None = None
    lost_collectors: int = 0
    dropped_rollouts: int = 0
    wall_s: dict[str, float] = field(default_factory=dict)
    cpu_s: float = 0.0
    phase_cpu_s: dict[str, float] = field(default_factory=dict)
    device: str = "cpu"
    arguments: list[str] | None = None
    meanings: Mapping[str, str] = field(default_factory=dict)
    results: dict[tuple[str, str], EvaluationResult] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    in_training: InTraining = field(default_factory=InTraining)
    open_loop: OpenLoopResult | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def add(self, stage: str, distribution: str, result: EvaluationResult) -> None:
        """Add one evaluation.

        Raises:
            ValueError: for an unknown stage.
        """
        if stage not in STAGES and not stage.startswith(BASELINE):
            raise ValueError(f"unknown stage {stage!r}; expected one of {', '.join(STAGES)}, or {BASELINE}NAME")
        self.results[stage, distribution] = result

    def gains(self) -> dict[tuple[str, str], Gain]:
        """Gain of RL, else offline learning, over each other stage, by (stage, distribution).

        It is paired if both ran the same episodes.
        """
        last = self._last
        return {
            (stage, distribution): self.results[last, distribution].gain_over(before)
            for (stage, distribution), before in self._ordered().items()
            if stage != last and last in LEARNING and (last, distribution) in self.results
        }

    @property
    def _last(self) -> str:
        """Last stage with the run's policy; "" if there is none."""
        return next(reversed(trained({stage for stage, _ in self.results})), "")

    def gains_over_better(self) -> dict[str, tuple[str, Gain]]:
        """For each distribution with both: the better of the other stages, and the last stage's gain over it."""
        gains: dict[str, tuple[str, Gain]] = {}
        for (stage, distribution), gain in self.gains().items():
            both = {("sft", distribution), ("sft_control", distribution)} <= self.results.keys()
            better = distribution not in gains or gain.difference <= gains[distribution][1].difference
            if both and better and stage != ONE_STEP and not stage.startswith(BASELINE):
                gains[distribution] = (stage, gain)
        return gains

    def to_dict(self) -> dict[str, Any]:
        """Content of report.json, from which the pages are built."""
        record = {
            "task": self.task,
            "assets": self.assets,
            "seed": self.seed,
            "git_commit": git_commit(),
            "versions": versions(),
            "machine": machine(self.device),
            "command": None if self.arguments is None else train_command(self.arguments),
            "distributions": list(dict.fromkeys(distribution for _, distribution in self.results)),
            "meanings": {
                name: text for name, text in self.meanings.items() if name in {each for _, each in self.results}
            },
            "evaluations": [
                {"stage": stage, "title": title(stage), "distribution": distribution, **result.summary()}
                for (stage, distribution), result in self._ordered().items()
            ],
            "gains": [
                {"over": stage, "distribution": distribution, **vars(gain), "per_task": self._by_task(*key)}
                for key, gain in self.gains().items()
                for stage, distribution in [key]
            ],
            "gains_over_better": [
                {"over": stage, "distribution": distribution, **vars(gain)}
                for distribution, (stage, gain) in self.gains_over_better().items()
            ],
            "in_training": self.in_training.record(),
            **({"open_loop": self.open_loop.summary()} if self.open_loop else {}),
            **({"rounds": self.rounds} if self.rounds else {}),
            "notes": self._notes(),
            "env_steps": self._with_collected("env_steps"),
            "episodes": self._with_collected("episodes"),
            "lost": self.lost,
            "pushed": self.pushed,
            "takeovers": self.takeovers,
            "human_steps": self.human_steps,
            **({"resets": self.resets} if self.resets else {}),
            "lost_collectors": self.lost_collectors,
            "dropped_rollouts": self.dropped_rollouts,
            "wall_s": {phase: round(seconds, 2) for phase, seconds in self.wall_s.items()},
            "cpu_s": round(self.cpu_s, 2),
            "phase_cpu_s": {phase: round(seconds, 2) for phase, seconds in self.phase_cpu_s.items()},
        }
        sentences = {"headline": headline(record), "headline_intervals": intervals(record)}
        return {**sentences, **record, "regressions": regressions(record)}

    def _with_collected(self, quantity: str) -> int:
        """Number of env_steps or episodes of training, with those that were collected between offline rounds."""
        return getattr(self, quantity) + collected_total(self.rounds, quantity)

    def _next(self, directory: Path) -> list[str]:
        """Commands to run after this one in `directory`."""
        return next_commands(
            directory, self.export_target, self.arguments or (), is_recorded=self.open_loop is not None
        )

    def _notes(self) -> list[str]:
        """Notes of the run, then remarks on its evaluations."""
        remarks = (
            f"{title(key[0])} on {key[1]}: {text}" for key, each in self._ordered().items() for text in each.remarks()
        )
        rounds = [each["sentence"] for each in self.rounds]
        return [
            *self.notes,
            *rounds,
            *(open_loop.remarks(self.open_loop.summary()) if self.open_loop else []),
            *remarks,
        ]

    def _by_task(self, stage: str, distribution: str) -> list[dict[str, Any]]:
        after = self.results[self._last, distribution]
        before = self.results[stage, distribution]
        gains = [(name, after.of_task(row).gain_over(before.of_task(row))) for row, name in enumerate(after.tasks)]
        return [
            {"task": task, "difference": gain.difference, "low": gain.low, "high": gain.high} for task, gain in gains
        ]

    def write(self, directory: str | Path, curves: Mapping[str, str]) -> None:
        """Write report.md, report.html, report.json and curves.png into `directory`; `curves`: see `plot_curves`."""
        directory = Path(directory)
        plot_curves(directory, curves, self._marks(), self._measure(), self._marks_along())
        if self.open_loop:
            open_loop.plot_chunks(directory / open_loop.CHUNKS, self.open_loop)
        record = self.to_dict()
        commands = self._next(directory)
        pages = {"report.md": self._page(record, directory), "report.html": page(record, directory, commands)}
        pages["report.json"] = dumps_rows(record)  # read by programs: last
        for name, text in pages.items():
            with complete_or_absent(directory / name) as temporary:
                temporary.write_text(text, encoding="utf-8")

    def summary(self, directory: str | Path) -> str:
        """Lines for the console: results, files, and commands to run next."""
        width = max((len(distribution) for _, distribution in self.results), default=0)
        rows = [
            f"  {title(stage):<14} {distribution:<{width}} {_rate(result.summary())}, {result.success.numel()} episodes"
            f"{_metrics(result, result.summary())}"
            for (stage, distribution), result in self._ordered().items()
        ]
        gains = [f"  {line}" for line in self._gains()]
        assets = [] if self.assets in ("official", None) else [f"  with {self.assets} assets: not benchmark numbers"]
        next_lines = [
            "Next:",
            *(f"  {command}" for command in self._next(Path(directory))),
        ]
        location = f"Report: {typed_path(Path(directory) / 'report.html')} (as text: report.md)"
        notes = [f"  {note}" for note in self._notes()]
        record = self.to_dict()
        measured = f"{self.task}, {self._measure()} [95% interval]:"
        if "open_loop" in record:
            measured = "Mean errors of held-out actions [95% interval], of holding the last one, and of the mean:"
            rows = [f"  {line}" for line in open_loop.lines(record["open_loop"])]
        worse = [f"  fell: {line}" for line in _worse(record)]
        return "\n".join(
            [
                record["headline"],
                *([record["headline_intervals"]] if record["headline_intervals"] else []),
                measured,
                *rows,
                *gains,
                *worse,
                *([f"  {selection(record)}"] if record["in_training"] else []),
                *assets,
                *notes,
                location,
                *next_lines,
            ]
        )

    def state_dict(self) -> dict[str, Any]:
        """Evaluations so far, as a tree for the checkpoint."""
        results = [[*key, vars(result)] for key, result in self.results.items()]
        measured = {"open_loop": vars(self.open_loop)} if self.open_loop else {}
        measured |= {"resets": self.resets} if self.resets else {}
        return {"results": results, "in_training": list(self.in_training.points), "rounds": self.rounds, **measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the evaluations of a checkpoint."""
        for stage, distribution, result in state["results"]:
            self.add(stage, distribution, _result(result))
        self.in_training.points = list(state.get("in_training", []))
        self.rounds = list(state.get("rounds", []))
        self.open_loop = OpenLoopResult(**state["open_loop"]) if "open_loop" in state else None
        self.resets = state.get("resets")

    def _ordered(self) -> dict[tuple[str, str], EvaluationResult]:
        """Evaluations, those on the training distribution first, of each distribution in the order of stages."""
        order = ["start", UNTRAINED, "sft", "sft_control", BASELINE, "offline", "rl", ONE_STEP]
        position = {stage: order.index(BASELINE if stage.startswith(BASELINE) else stage) for stage, _ in self.results}
        distributions = list(dict.fromkeys(distribution for _, distribution in self.results))
        places = lambda key: (distributions.index(key[1]), position[key[0]])  # noqa: E731
        return {key: self.results[key] for key in sorted(self.results, key=places)}

    def _measure(self) -> str:
        return next((result.measure for result in self.results.values()), "success")

    def _marks(self) -> dict[str, tuple[float, float, float]]:
        marks = {}
        for (stage, distribution), result in self._ordered().items():
            row = result.summary()
            numbers = (row[name] for name in (result.measure, "low", "high"))
            marks[f"{title(stage)} on {distribution}"] = tuple(math.nan if x is None else x for x in numbers)
        return marks

    def _marks_along(self) -> dict[str, tuple[float, float, float, float]]:
        """Evaluations before and after RL on the distribution of those in training: steps, value, low and high."""
        stage_steps = {"start": 0, UNTRAINED: 0, "sft": 0, "rl": self.env_steps}
        distribution = self.in_training.distribution
        marks = self._marks() if self.in_training.points else {}
        stage_marks = {stage: marks.get(f"{title(stage)} on {distribution}") for stage in stage_steps}
        return {title(stage): (stage_steps[stage], *mark) for stage, mark in stage_marks.items() if mark}

    def _page(self, record: dict[str, Any], directory: Path) -> str:
        stand_in = [STAND_IN] if self.assets == "stand-in" else []
        parts = [f"# {markdown(self.task)}", markdown(record["headline"]), markdown(record["headline_intervals"])]
        parts += [*stand_in, open_loop.section(record["open_loop"]) if "open_loop" in record else self._rates()]
        parts.append("\n".join(f"- {markdown(f'{name}: {text}')}" for name, text in record["meanings"].items()))
        paired = ", paired on the same episodes" if all(each.repeatable for each in self.results.values()) else ""
        parts.append("\n".join(f"- {markdown(line)}{paired}" for line in self._gains()))
        parts.append("\n".join(f"- **Fell**: {markdown(line)}" for line in _worse(record)))
        parts += map(markdown, self._notes())
        parts.append("![Learning curves](curves.png)")
        if (directory / "video.mp4").exists():
            parts.append("Video, before and after: [video.mp4](video.mp4)")
        if (directory / "trajectories.png").exists():
            parts.append("![Trajectories, before and after](trajectories.png)")
        parts += [self._tasks(), _in_training(record), self._cost(), _provenance(self.seed)]
        parts.append("## Next\n\n```\n" + "\n".join(self._next(directory)) + "\n```")
        return "\n\n".join(part for part in parts if part) + "\n"

    def _rates(self) -> str:
        metrics = list(dict.fromkeys(name for result in self.results.values() for name in result.metrics))
        header = ["stage", "distribution", f"{self._measure()} [95% interval]", *metrics, "episodes", "step limit"]
        rows = []
        for (stage, distribution), result in self._ordered().items():
            row = result.summary()
            numbers = [_number(row.get(name)) for name in metrics]
            episodes = f"{row['episodes']}{_odd(row)}"
            rows.append([title(stage), distribution, _rate(row), *numbers, episodes, str(result.step_limit or "")])
        return table(*without_empty_columns(header, rows))

    def _gains(self) -> list[str]:
        both = f"the better of {STAGES['sft']} and {STAGES['sft_control']}"
        better = [
            f"{title(self._last)} over {both} on {distribution}, which is {title(stage)}: {_points(gain)}"
            for distribution, (stage, gain) in self.gains_over_better().items()
        ]
        each = [
            f"{title(self._last)} over {title(stage)} on {distribution}: {_points(gain)}"
            for (stage, distribution), gain in self.gains().items()
        ]
        return better + each

    def _tasks(self) -> str:
        columns = {
            key: result.summary()["per_task"] for key, result in self._ordered().items() if len(result.tasks) > 1
        }
        if not columns:  # the results are those of the only task
            return ""
        header = ["task", *(f"{title(stage)}, {distribution}" for stage, distribution in columns)]
        tasks = list(dict.fromkeys(row["task"] for rows in columns.values() for row in rows))
        cells = {key: {row["task"]: _rate(row) for row in rows} for key, rows in columns.items()}
        rows = [[task, *(cells[key].get(task, "") for key in columns)] for task in tasks]
        return "## Tasks\n\n" + table(header, rows)

    def _cost(self) -> str:
        rows = [[phase, f"{seconds:.0f}"] for phase, seconds in self.wall_s.items()]
        total = [["total", f"{sum(self.wall_s.values()):.0f}"]]
        steps, episodes = (self._with_collected(name) for name in ("env_steps", "episodes"))
        count = f"{steps:,} environment steps in {episodes:,} episodes of training"
        count += f", {self.cpu_s:.1f} CPU seconds."
        if self.lost:
            count += f" {self.lost:,} of the episodes were lost with processes of the simulator that died."
        if self.lost_collectors:
            count += f" {self.lost_collectors:,} collectors died and were replaced."
        if self.dropped_rollouts:
            count += f" {self.dropped_rollouts:,} rollouts were too old to learn from."
        if self.pushed:
            count += f" In {self.pushed:,} of the episodes a person pushed something."
        if self.takeovers:
            share = self.human_steps / max(1, self.env_steps)
            length = self.human_steps / self.takeovers
            count += f" A person took over {self.takeovers:,} times, for {length:.1f} steps each:"
            count += f" {share:.1%} of the environment steps."
        if self.resets:
            count += reset_sentence(self.resets)
        return f"## Cost\n\n{count}\n\n" + table(["phase", "wall s"], rows + total)


def _result(state: Mapping[str, Any]) -> EvaluationResult:
    """Evaluation of a checkpoint; in earlier releases it has numbers of odd episodes instead of `events`."""
    fields: dict[str, Any] = {name: value for name, value in state.items() if name not in ODD_EVENTS}
    if "events" not in state:
        number = torch.arange(state["success"].numel()).view_as(state["success"])
        fields["events"] = {name: number < state[name] for name in ODD_EVENTS if name in state}  # only sums are read
    return EvaluationResult(**fields)


def title(stage: str) -> str:
    """Title of a stage in a report."""
    return STAGES.get(stage, stage.removeprefix(BASELINE))


def evaluation_table(results: Mapping[str, EvaluationResult], kinds: Kinds = NO_KINDS) -> str:
    """Success rates and metrics by task, or by kind, a column for each of `results`, all together in the last row."""
    summaries = {name: summary(result, kinds) for name, result in results.items()}
    part, tasks = ("kinds", tuple(kinds)) if kinds else ("per_task", next(iter(results.values())).tasks)

    def cells(pick: Callable[[dict[str, Any]], dict[str, Any]]) -> list[str]:
        picked = {name: pick(summaries[name]) for name in results}
        return [_rate(picked[name]) + _metrics(result, picked[name]) for name, result in results.items()]

    rows = [[task, *cells(lambda each, i=i: each[part][i])] for i, task in enumerate(tasks)]
    episodes = " + ".join(str(each["episodes"]) for each in summaries.values())
    total = [f"all ({episodes} episodes)", *cells(lambda each: each)]
    return table(["task", *results], [*rows, total])


def write_evaluation(path: Path, record: Mapping[str, Any], results: Results, task: Task | None = None) -> str:
    """Log `results`, write them with `record` into the JSON file `path`, and return a line with the path.

    Their keys are POLICY or the name of a baseline, and the distribution. Baselines, if any, are shown with the policy
    and its gain over each, paired if both ran the same episodes.
    """
    kinds, left_out = (task.kinds, task.left_out) if task else (NO_KINDS, {})
    stages = {key: POLICY if key[0] == POLICY else BASELINE + key[0] for key in results}
    evaluations = [
        {"stage": stages[key], "distribution": key[1], **summary(result, kinds)} for key, result in results.items()
    ]
    gains = {key: results[POLICY, key[1]].gain_over(result) for key, result in results.items() if key[0] != POLICY}
    content = {**record, "git_commit": git_commit(), "versions": versions(), "evaluations": evaluations}
    content |= {"left_out": dict(left_out)} if left_out else {}
    content["gains"] = [{"over": stages[key], "distribution": key[1], **vars(gain)} for key, gain in gains.items()]
    columns = {
        distribution if name == POLICY else f"{name}, {distribution}": result
        for (name, distribution), result in results.items()
    }
    paired = ", paired" if all(result.repeatable for result in results.values()) else ""
    over = [
        f"policy over {name} on {distribution}: {_points(gain)}{paired}" for (name, distribution), gain in gains.items()
    ]
    assets = [f"{content['assets']} assets"] if content.get("assets") else []
    remarks = [
        f"{name} on {distribution}: {text}"
        for (name, distribution), result in results.items()
        for text in result.remarks()
    ]
    remarks += [f"{count:,} tasks of {kind} cannot run here and were left out" for kind, count in left_out.items()]
    log.info("\n".join([evaluation_table(columns, kinds), *over, *assets, *remarks]))
    with complete_or_absent(path) as temporary:
        temporary.write_text(dumps_rows(content), encoding="utf-8")
    return f"wrote {path}"


def _provenance(seed: int) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"Seed {seed}, commit {git_commit()}, {packages}."


def _in_training(record: Mapping[str, Any]) -> str:
    """Section on the evaluations during reinforcement learning, and the policy chosen by them."""
    if not (evaluations := record["in_training"]):
        return ""
    header = [
        "environment steps",
        f"{measure(evaluations['best'])} on {evaluations['distribution']} [95% interval]",
        "episodes",
    ]
    rows = [[f"{each['env_steps']:,}", _rate(each), str(each["episodes"])] for each in evaluations["points"]]
    return f"## During training\n\n{markdown(selection(record))}\n\n{table(header, rows)}"


def _worse(record: Mapping[str, Any]) -> list[str]:
    last = title("".join(trained({row["stage"] for row in record["evaluations"]})[-1:]))
    return [
        f"{each['task']} on {each['distribution']} from {title(each['over'])} to {last}: {points(each)},"
        f" {'significant' if significant(each) else 'not significant'}"
        for each in record["regressions"]
    ]


def result_text(row: Mapping[str, Any]) -> str:
    """Success or return of a summary with its interval, preceded by its name."""
    return f"{'success' if 'success' in row else 'return'} {_rate(row)}"


def _rate(row: Mapping[str, Any]) -> str:
    if "success" in row:  # even if there is also a return
        return f"{row['success']:.1%} [{row['low']:.1%}, {row['high']:.1%}]"
    bounds = "" if row["low"] is None else f" [{row['low']:.4g}, {row['high']:.4g}]"
    return f"{row['return']:.4g}{bounds}"


def _metrics(result: EvaluationResult, row: Mapping[str, Any]) -> str:
    return "".join(f", {name} {_number(row[name])}" for name in result.metrics if row[name] is not None) + _odd(row)


def _odd(row: Mapping[str, Any]) -> str:
    return "".join(f", {each}" for each in odd_episodes(row))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _points(gain: Gain) -> str:
    note = "" if significant(vars(gain)) else ", not significant"
    return f"{'return ' if gain.measure == 'return' else ''}{points(vars(gain))}{note}"
