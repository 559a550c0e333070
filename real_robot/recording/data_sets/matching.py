"""Matches data sets with a run: texts with its tasks, names with its contract, rates and limits with its actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.task import Task
from real_robot.recording.data_sets.outcomes import Rewards, parse_columns
from real_robot.robots.robot import Array

TOLERANCE = 0.01
"""Share of an element's range by which an action may exceed its limits: rounding, and noise of measurements."""
LARGEST_SHARE = 0.05
"""Largest share of actions outside the limits; a larger share indicates another unit or another robot."""


@dataclass(frozen=True)
class MatchOptions:
    """Options of a user: further texts of tasks by the task's name, a data set's names by the contract's names.

    With `resampling`, data sets of another rate are resampled to the contract's rate. `columns` are a data set's
    columns by meaning (`outcomes.Columns`), `rewards` replace its rewards, `rate_hz` is the rate of data sets that do
    not state one, and `filter` is one of robomimic's filter keys.
    """

    tasks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    resampling: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)
    rewards: Rewards = Rewards.RECORDED
    rate_hz: float | None = None
    filter: str | None = None

    def recorded(self) -> dict[str, Any]:
        """JSON of the options that are set, and of those of earlier versions."""
        later = {"columns": dict(self.columns), "rate_hz": self.rate_hz, "filter": self.filter}
        later |= {} if self.rewards is Rewards.RECORDED else {"rewards": self.rewards.value}
        recorded = {"tasks": self.tasks, "names": self.names, "resampling": self.resampling}
        return recorded | {name: value for name, value in later.items() if value}


def match_options(
    tasks: Any,  # noqa: ANN401 - as typed
    names: Any,  # noqa: ANN401 - as typed
    resampling: bool,
    columns: Any = None,  # noqa: ANN401 - as typed
    rewards: Rewards = Rewards.RECORDED,
    rate_hz: float | None = None,
    selection: str | None = None,
) -> MatchOptions:
    """Options from demonstration_tasks=, `tasks`, demonstration_names=, `names`, and the others' likewise.

    Raises:
        UserError: for anything but a mapping to lists of texts, and mappings to names.
    """
    tasks, names = ({} if typed is None else typed for typed in (tasks, names))
    texts = list(tasks.values()) if isinstance(tasks, Mapping) else [None]
    if not all(isinstance(each, list) and each and all(isinstance(text, str) for text in each) for each in texts):
        raise UserError(f'expected demonstration_tasks={{TASK:["TEXT"]}}, got {tasks!r}')
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in (*names, *names.values())):
        raise UserError(f"expected demonstration_names={{OURS:THEIRS}}, got {names!r}")
    if twice := [text for text in {*chain(*texts)} if sum(text in each for each in texts) > 1]:
        raise UserError(f"demonstration_tasks has {twice[0]!r} for several tasks")
    return MatchOptions(tasks, names, resampling, parse_columns(columns), rewards, rate_hz, selection)


class Match:
    """Matches the data set `source` with a run's `task`; `notes` on it are for the run's report.

    A task with a published benchmark defines its texts. For other tasks any text matches, unless options name some.

    Raises:
        UserError: if the options name a task that the run does not have.
    """

    def __init__(self, source: Path, task: Task | None = None, options: MatchOptions | None = None) -> None:
        self.source = source
        self.options = options or MatchOptions()
        self.convention = task.convention() if task else None
        self.task_names = list(self.convention.names) if self.convention else [task.name] if task else []
        if unknown := [name for name in self.options.tasks if name not in self.task_names]:
            expected = ", ".join(self.task_names) or "no task"
            raise UserError(f"demonstration_tasks names {', '.join(unknown)}; expected {expected}")
        self.any_text = self.convention is None and not self.options.tasks
        self.notes: list[str] = []
        self._numbers: dict[str, int | None] = {}

    def task_number(self, text: str) -> int | None:
        """Number of the run's task that `text` describes; None for other tasks."""
        number = 0 if self.any_text else None
        for name, texts in self.options.tasks.items():
            number = self.task_names.index(name) if text in texts else number
        if number is None and self.convention is not None:
            number = self.convention.task_index(text)
        self._numbers[text] = number
        return number

    def name(self, name: str) -> str:
        """The data set's name for the contract's `name`."""
        return self.options.names.get(name, name)

    def check_rate(self, stated_hz: float) -> None:
        """Raise UserError if the option's rate is another than that which the data set states."""
        rate_hz = self.options.rate_hz
        if rate_hz and abs(rate_hz / stated_hz - 1.0) > 1e-4:
            raise UserError(f"{self.source} states {stated_hz:g} Hz; leave out demonstration_rate_hz={rate_hz:g}")

    def check_names(self, contract: Contract) -> None:
        """Check that the option's names are the contract's.

        Raises:
            UserError: for unknown names, which it lists.
        """
        specs = {**contract.observation, "action": contract.action}
        names = [*specs, *(name for spec in specs.values() for name in spec.names)]
        if unknown := [name for name in self.options.names if name not in names]:
            expected = ", ".join(dict.fromkeys(names))
            raise UserError(f"demonstration_names has {', '.join(unknown)}; expected names of the contract: {expected}")

    def has(self) -> str:
        """The data set's texts, as the end of an error message."""
        return f", which has: {'; '.join(self._numbers)}" if self._numbers else ""

    def conclude(self, contract: Contract) -> None:
        """Add notes on texts of other tasks, or on several texts that are imitated as one task.

        Raises:
            UserError: if no text is one of the run's tasks.
        """
        skipped = [text for text, number in self._numbers.items() if number is None]
        if skipped and len(skipped) == len(self._numbers):
            choice = "choose task.tasks=[...], or " if self.convention else ""
            raise UserError(
                f"no episodes of {', '.join(self.task_names)} in {self.source}, which has: {'; '.join(skipped)};"
                f' {choice}say what they are: demonstration_tasks={{{self.task_names[0]}:["TEXT"]}}'
            )
        if skipped:
            self.notes.append(f"episodes of other tasks are left out: {'; '.join(skipped)}.")
        if self.any_text and len(self._numbers) > 1 and not any(spec.is_text for spec in contract.observation.values()):
            texts = "; ".join(self._numbers)
            self.notes.append(f"all of its tasks are imitated as one: {texts}.")


class Limits:
    """Counts actions outside the limits of `spec`."""

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec
        self._count = 0
        self._outside = np.zeros(spec.shape[-1] if spec.shape else 1, np.int64)
        self._any = 0
        self._lowest, self._highest = np.full(len(self._outside), np.inf), np.full(len(self._outside), -np.inf)

    def add(self, actions: Tensor) -> None:
        """Count `actions` [L, A]."""
        if not self._spec.low or not self._spec.high or not len(actions):
            return
        low = np.array(self._spec.low)
        high = np.array(self._spec.high)
        values = actions.double().numpy().reshape(-1, len(low))
        margin = np.where(np.isfinite(high - low), TOLERANCE * (high - low), 0.0)
        outside = (values < low - margin) | (values > high + margin)
        self._count += len(values)
        self._outside += outside.sum(0)
        self._any += int(outside.any(1).sum())
        self._lowest, self._highest = np.minimum(self._lowest, values.min(0)), np.maximum(self._highest, values.max(0))

    def note(self, source: Path) -> list[str]:
        """Notes on the share of actions outside the limits; empty if it is 0.

        Raises:
            UserError: if the share is larger than `LARGEST_SHARE`.
        """
        if not self._any:
            return []
        worst = int(self._outside.argmax())
        share = self._any / self._count
        name = self._spec.names[worst] if self._spec.names else str(worst)
        unit = f" {self._spec.unit}" if self._spec.unit not in ("", "1") else ""
        value_range = f"{self._lowest[worst]:.4g} to {self._highest[worst]:.4g}"
        expected = f"{self._spec.low[worst]:.4g} to {self._spec.high[worst]:.4g}{unit}"
        message = f"{share:.1%} of the actions are outside the limits"
        message = f"{message}: {name} is from {value_range}, expected {expected}"
        if share > LARGEST_SHARE:
            raise UserError(f"{source}: {message}; convert the data set's units, or choose another")
        return [f"{message}."]


def resampled_rows(length: int, ratio: float) -> Array:
    """For each period of the contract, the row of an episode of `length` rows that is valid at the period's begin.

    `ratio` is the number of the episode's rows per period.
    """
    # row = floor(period * ratio); the tolerance absorbs rounding of the rates
    count = max(1, int(np.ceil(length / ratio - 1e-6)))
    return np.minimum(np.floor(np.arange(count) * ratio + 1e-6).astype(np.int64), length - 1)


def resampled_reward(reward: Array, ratio: float) -> Array:
    """Sums of the rows' `reward` [L] over the contract's periods; reward accrues evenly during a row."""
    # differences of the cumulative reward, interpolated linearly, at the contract's periods
    periods = len(resampled_rows(len(reward), ratio))
    earned = np.concatenate(([0.0], np.cumsum(reward, dtype=np.float64)))
    at_periods = np.interp(np.minimum(np.arange(periods + 1) * ratio, len(reward)), np.arange(len(earned)), earned)
    at_periods[-1] = earned[-1]
    return np.diff(at_periods).astype(np.float32)
