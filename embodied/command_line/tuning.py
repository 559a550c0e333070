"""Hyper-parameter search: trainings one after the other, whose options optuna chooses from the scores before.

The search is determined by its tries: the options of try n are a function of those before it. A stopped search needs no
state but `tune.json` and the folders of its runs.
"""

from __future__ import annotations

import logging
import math
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from embodied.command_line.multirun import run_job
from embodied.command_line.program import Composed
from embodied.commands import command, option
from embodied.configuration import Configuration, PositiveInt
from embodied.errors import UserError
from embodied.extras import needs_extra
from embodied.report.comparison import written
from embodied.report.finished_run import REPORT, read
from embodied.report.markdown import table
from embodied.report.repeating import typed_path
from embodied.runtime.console import LOG
from embodied.runtime.foreign_code import PLACEMENT, TASK, named
from embodied.saving import checkpoint
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import dumps_rows, loads
from embodied.saving.metrics import METRICS, read_metrics
from embodied.saving.versions import git_commit, versions

log = logging.getLogger(__name__)
NAME = "tune.json"
FIRST_SEED = 100
"""Seed of the first try: reported runs have lower ones."""
RANDOM = 4
"""Number of tries before the sampler models the scores."""
DRAWS = 100
"""Largest number of draws of options that no earlier try has."""
DECADE = 10.0
"""Ratio of a range's bounds from which on its values are drawn on a logarithmic scale."""
FORCED = "seed", "output", "resume", "plan", "eval_only"
"""Options of train.py that the search sets, or that are no training."""
SCORING = "evaluation_first_start", "evaluation_starts", "comparison_starts", "control", "video"
"""Options of train.py that every try overrides, so that its score is comparable."""


@dataclass
class SearchOptions(Configuration):
    """Options of a search.

    `options` names the options of train.py to choose: two numbers are the bounds of a range, more values or texts are a
    list. `tries` is the number of trainings; the first one has the settings of the command. A try takes `env_steps`
    (null: those of the command). Its score is the success, or return, of its policy from `starts` initial states of
    each task, from number `first_start` on, which reported evaluations do not run.
    """

    options: dict[str, list[Any]] = field(default_factory=dict)
    tries: PositiveInt = 12
    env_steps: PositiveInt | None = None
    starts: PositiveInt = 20
    first_start: PositiveInt = 1 << 22


@dataclass
class Try:
    """Training of a search: values of the chosen options, seed, and what it reached.

    `points` are its evaluations during training, [environment steps, score]. A try that was `pruned` has no other
    score, one that failed has an `error`.
    """

    options: dict[str, Any]
    seed: int
    score: float | None = None
    low: float | None = None
    high: float | None = None
    points: list[list[float]] = field(default_factory=list)
    pruned: bool = False
    error: str | None = None
    wall_s: float | None = None

    @property
    def done(self) -> bool:
        """Whether the try has ended."""
        return self.score is not None or self.pruned or self.error is not None


class Search:
    """Search in `directory` by the program train.py in the file `program` with `arguments`, "key=value" each."""

    def __init__(
        self, program: Path, arguments: list[str], options: SearchOptions, directory: Path, composed: Composed
    ) -> None:
        """Check every option to choose, and continue the tries in `directory`, if there are any.

        Raises:
            UserError: for options that `composed` refuses, or whose search is impossible, and for other tries there.
        """
        self.program = program
        self.arguments = arguments
        self.options = options
        self.directory = directory
        self.name = str(typed_path(directory))
        self.distributions = {name: _distribution(name, values) for name, values in options.options.items()}
        self.config, self.values = self._check(composed)
        self.tries = self._read()

    @property
    def prunes(self) -> bool:
        """Whether tries are evaluated during training, and end early if they are worse than the median."""
        return isinstance(self.config.evaluate_every_steps, int)

    @cached_property
    def record(self) -> dict[str, Any]:
        """Facts that a continued search has in common with the earlier one."""
        search = {name: value for name, value in vars(self.options).items() if name != "tries"}
        return {"arguments": self.arguments, "tune": search}

    def run(self) -> str:
        """Run the missing tries; returns their table, with the command of the best one.

        Raises:
            UserError: if no try has a score.
            KeyboardInterrupt: after Ctrl-C or SIGTERM, once the running try has saved.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        while unfinished := self._following():
            self._announce(unfinished)
            self._write()
            began = time.perf_counter()
            try:
                self._train(unfinished)
            except KeyboardInterrupt:
                self._write_time(unfinished, began)
                raise
            self._write_time(unfinished, began)
        return self.summary()

    def summary(self) -> str:
        """Table of all tries, the best first, and the command of the best one.

        Raises:
            UserError: if none has a score.
        """
        rows = [(number, each) for number, each in enumerate(self.tries) if each.done]
        rows.sort(key=lambda row: -_score(row[1]))
        header = ["try", *self.distributions, "score", "95% interval", "min"]
        lines = [
            [
                str(number) if number else "0 (the command's settings)",
                *map(written, each.options.values()),
                *_result(each),
                f"{(each.wall_s or 0.0) / 60.0:.1f}",
            ]
            for number, each in rows
        ]
        number, best = rows[0]
        if best.score is None:
            log.info(table(header, lines))
            raise UserError(f"no try has a score; {self.name}/{NAME} has the error of each, choose other tune.options")
        arguments = [each for each in self.arguments if each.partition("=")[0] not in self.distributions or not number]
        options = self._typed(best) if number else []
        return (
            f"{table(header, lines)}\n\nThe best of {len(rows)} tries is try {number}. Its score is biased upwards, as "
            "it chose the try: measure these options with other seeds, from the starts of usual evaluations:\n\n"
            f"  {command('train')} {shlex.join([*arguments, *options])}\n\nwrote {self.name}/{NAME}"
        )

    def _check(self, composed: Composed) -> tuple[Any, dict[str, Any]]:
        """Compose the command, also with the bounds and values of its options; returns config and values.

        Raises:
            UserError: on one line, for everything that is known to be wrong before the first try.
        """
        if not self.distributions:
            raise UserError("expected options to choose: 'tune.options={algorithm.learning_rate: [1e-4, 1e-3]}'")
        if forced := [each for each in self.arguments if each.partition("=")[0] in FORCED]:
            raise UserError(f"{forced[0]} is set by the search itself; leave it out")
        if fixed := [name for name in self.distributions if name in (*FORCED, *SCORING)]:
            raise UserError(f"tune.options.{fixed[0]} is set by the search itself; leave it out")
        config, record = composed(self.arguments)
        for name, values in self.options.options.items():
            for value in values:
                composed([*self.arguments, f"{name}={written(value)}"])
        if config.task.held_out_share is not None:
            raise UserError(f"task={config.task.name} has no simulator in which tries could be scored")
        if self.options.env_steps is not None and "rl" not in (config.stages or ["rl"]):
            raise UserError(
                f"tune.env_steps is the length of the stage rl, not of stages={config.stages}; leave it out"
            )
        reported = config.evaluation_first_start + config.evaluation_starts
        if self.options.first_start < reported:
            raise UserError(
                f"tune.first_start={self.options.first_start} is an initial state of reported evaluations; expected at "
                f"least {reported}"
            )
        return config, record["values"]

    def _read(self) -> list[Try]:
        path = self.directory / NAME
        if not path.exists():
            return []
        saved = loads(path.read_text(encoding="utf-8"))
        if changed := [name for name, value in self.record.items() if saved[name] != value]:
            raise UserError(f"{self.name} has tries with other {changed[0]}; choose another output")
        return [Try(**each) for each in saved["tries"]]

    def _write(self) -> None:
        record = {**self.record, "tries": [asdict(each) for each in self.tries]}
        record |= {"git_commit": git_commit(), "versions": versions()}
        with complete_or_absent(self.directory / NAME) as temporary:
            temporary.write_text(dumps_rows(record), encoding="utf-8")

    def _write_time(self, each: Try, began: float) -> None:
        """Add the time since `began` to that of a try, which may have been interrupted before, and write all tries."""
        each.wall_s = (each.wall_s or 0.0) + time.perf_counter() - began
        self._write()

    def _following(self) -> Try | None:
        """Try that was interrupted, or a new one; None after the last one."""
        if self.tries and not self.tries[-1].done:
            return self.tries[-1]
        number = len(self.tries)
        if number >= self.options.tries:
            return None
        options = self._draw() if number else {name: _value(self.values, name) for name in self.distributions}
        if options is None:
            log.info(f"all combinations of the listed values are tried after {number} tries")
            return None
        self.tries.append(Try(options, FIRST_SEED + number))
        return self.tries[-1]

    def _draw(self) -> dict[str, Any] | None:
        """Draw options of a new try; None if each of `DRAWS` draws was tried before."""
        study = self._study()
        earlier = [each.options for each in self.tries]
        for _ in range(DRAWS):
            params = study.ask(self.distributions).params
            options = {name: _rounded(value, self.distributions[name]) for name, value in params.items()}
            if options not in earlier:
                return options
        return None

    def _study(self) -> Any:  # noqa: ANN401 - optuna's
        """Study with all tries that have ended: failures are worse than every score."""
        with needs_extra("tune"):
            import optuna  # pyright: ignore[reportMissingImports] - an extra
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=len(self.tries), n_startup_trials=RANDOM)
        pruner = optuna.pruners.MedianPruner(n_startup_trials=RANDOM)
        study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
        for each in self.tries:
            if not each.done:
                continue
            try:
                trial = optuna.trial.create_trial(
                    params=each.options,
                    distributions=self.distributions,
                    intermediate_values={number: score for number, (_, score) in enumerate(each.points)},
                    state=optuna.trial.TrialState.PRUNED if each.pruned else optuna.trial.TrialState.COMPLETE,
                    value=None if each.pruned else _score(each),
                )
            except ValueError:  # the settings of the command, the first try, may be outside of the ranges
                continue
            study.add_trial(trial)
        return study

    def _announce(self, unfinished: Try) -> None:
        number = self.tries.index(unfinished)
        took_s = [each.wall_s for each in self.tries[:number] if each.wall_s]
        rest_s = sum(took_s) / len(took_s) * (self.options.tries - number) if took_s else None
        eta = f", about {max(1, round(rest_s / 60.0))} min left" if rest_s else ""
        options = ", ".join(self._typed(unfinished))
        log.info(f"try {number}: {options}, in {self.name}/{number}; {number} of {self.options.tries} done{eta}")

    def _typed(self, each: Try) -> list[str]:
        return [f"{name}={written(value)}" for name, value in each.options.items()]

    def _train(self, unfinished: Try) -> None:
        """Train a try, or continue it, and fill in what it reached.

        Raises:
            UserError: if the first try fails before it trains: the command is wrong, not its options.
            KeyboardInterrupt: if the search is stopped.
        """
        number = self.tries.index(unfinished)
        folder = self.directory / str(number)
        if not (folder / REPORT).exists():
            arguments = self._training(unfinished, folder)
            status = run_job(self.program, arguments, "Stopping the search", lambda: self._hopeless(unfinished, folder))
            if unfinished.pruned and status:
                return
            if status:
                unfinished.error = _last_error(folder) or f"train.py ended with status {status}"
                log.warning(f"try {number} failed: {unfinished.error}")
                if not number and not (folder / METRICS).exists():
                    (self.directory / NAME).unlink()
                    raise UserError("the first try failed before it trained; correct the settings of the command")
                return
        unfinished.pruned = False
        row = next(iter(read(folder).results.values()))
        summary = row.summary()
        unfinished.score, unfinished.low, unfinished.high = (summary[name] for name in (row.measure, "low", "high"))
        unfinished.points = _points(folder)
        if unfinished.score is None:
            unfinished.error = f"its {row.measure} is not finite"

    def _training(self, unfinished: Try, folder: Path) -> list[str]:
        """Arguments of train.py for a try in `folder`, which continues if it has begun."""
        if checkpoint.newest(folder) is not None:
            return [option("resume", folder), *named(self.arguments, (TASK, PLACEMENT))]
        shutil.rmtree(folder, ignore_errors=True)
        env_steps = [] if self.options.env_steps is None else [f"env_steps={self.options.env_steps}"]
        return [
            "evaluate_every_steps=null",
            *self.arguments,
            *(self._typed(unfinished) if self.tries.index(unfinished) else []),
            *env_steps,
            f"seed={unfinished.seed}",
            f"evaluation_first_start={self.options.first_start}",
            f"evaluation_starts={self.options.starts}",
            "comparison_starts=0",
            "control=false",
            "video=false",
            option("output", folder),
        ]

    def _hopeless(self, running: Try, folder: Path) -> bool:
        """Whether the best evaluation of the `running` try is worse than the median of earlier tries at that time."""
        if not self.prunes or len(points := _points(folder)) == len(running.points):
            return False
        running.points = points
        trial = self._study().ask(self.distributions)
        for number, (_, score) in enumerate(points):
            trial.report(score, number)
        running.pruned = bool(trial.should_prune())
        return running.pruned


def _distribution(name: str, values: Sequence[Any]) -> Any:  # noqa: ANN401 - optuna's
    """Distribution of the option `name`: a range between two numbers, or a list of `values`."""
    with needs_extra("tune"):
        from optuna.distributions import (  # pyright: ignore[reportMissingImports] - an extra
            CategoricalDistribution,
            FloatDistribution,
            IntDistribution,
        )
    if len(values) != 2 or not all(type(each) in (int, float) for each in values):
        if len(values) < 2:
            raise UserError(f"tune.options.{name}: expected two numbers, the bounds of a range, or a list of values")
        return CategoricalDistribution(list(map(_scalar, values)))
    low, high = values
    if low >= high:
        raise UserError(f"tune.options.{name}=[{low},{high}]: expected the lower bound of the range first")
    kind = IntDistribution if all(type(each) is int for each in values) else FloatDistribution
    return kind(low, high, log=low > 0 and high / low >= DECADE)


def _scalar(value: Any) -> Any:  # noqa: ANN401 - any value of an option
    return value if value is None or isinstance(value, str | int | float) else written(value)


def _value(values: Any, name: str) -> Any:  # noqa: ANN401 - a tree of values
    """Value of the option `name` in composed `values`; None where it is not set."""
    for key in name.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return _scalar(values)


def _rounded(value: Any, distribution: Any) -> Any:  # noqa: ANN401 - optuna's
    """Value with three significant digits, within its range."""
    if not isinstance(value, float) or not hasattr(distribution, "low"):
        return value
    return min(max(float(f"{value:.3g}"), distribution.low), distribution.high)


def _points(folder: Path) -> list[list[float]]:
    """Evaluations during training of the run in `folder`: environment steps and success, or return."""
    names = "evaluation/success", "evaluation/return"
    return [[row["step"], row[name]] for row in read_metrics(folder) for name in names if name in row]


def _last_error(folder: Path) -> str:
    """Last error in the log of the run in `folder`; empty without one."""
    path = folder / LOG
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(" ERROR error: ")[2] for line in reversed(lines) if " ERROR error: " in line), "")


def _score(ended: Try) -> float:
    """Score of a try that has ended; a failure is worse than every score."""
    return -math.inf if ended.score is None else ended.score


def _result(ended: Try) -> tuple[str, str]:
    """Score and interval for people."""
    if ended.score is None:
        return ("failed", ended.error) if ended.error else (f"ended early at {ended.points[-1][1]:.4g}", "")
    bounds = "" if ended.low is None or ended.high is None else f"[{ended.low:.4g}, {ended.high:.4g}]"
    return f"{ended.score:.4g}", bounds
