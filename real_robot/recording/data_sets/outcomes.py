"""Rewards, costs, outcomes and endings of the episodes of a data set, from columns with a number for each step.

An episode ends after every row that is terminated or truncated, so that values are never bootstrapped across one.
What no column has is unknown: rewards are NaN, outcomes `UNKNOWN`. Letters: L steps of an episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch

from embodied.data.episodes import SUCCEEDED, UNKNOWN, Episodes
from embodied.errors import UserError
from real_robot.robots.robot import Array

REWARD = "reward"
SUCCESS = "success"
TERMINATED = "terminated"
TRUNCATED = "truncated"
HUMAN = "human"
MEANINGS = REWARD, SUCCESS, TERMINATED, TRUNCATED, HUMAN
"""Meanings of columns; columns with other names are signals, such as a cost."""
NOT = "~"
"""Sign before the name of a column of which the negation is read: minus its values for a reward, else 1 less them."""


class Rewards(Enum):
    """Rewards of a data set: those that it has, or others in place of them."""

    RECORDED = "recorded"
    SUCCESS = "success"
    STEPS = "steps"
    TASK = "task"


@dataclass(frozen=True)
class Part:
    """Steps [begin, end) of an episode's rows, which end with a termination, or are cut off."""

    begin: int
    end: int
    terminated: bool
    success: bool | None


class Columns:
    """Columns of a data set by meaning: `defaults` that are among its `features`, and those of the option `chosen`.

    A choice of None leaves a default out, and recorded outcomes; True or False is the success of all episodes.

    Raises:
        UserError: for a column that the data set `place` lacks, or that has more than a number for each step.
    """

    def __init__(
        self, place: object, features: Mapping[str, Any], defaults: Mapping[str, str], chosen: Mapping[str, Any]
    ) -> None:
        self.success = chosen[SUCCESS] if isinstance(chosen.get(SUCCESS), bool) else None
        self._without_outcomes = SUCCESS in chosen and chosen[SUCCESS] is None
        names = {meaning: name for meaning, name in defaults.items() if name.removeprefix(NOT) in features}
        names |= {meaning: name for meaning, name in chosen.items() if not isinstance(name, bool)}
        self.names = {meaning: name for meaning, name in names.items() if name is not None}
        numbers = {key for key, each in features.items() if np.prod(each["shape"]) == 1 and is_number(each["dtype"])}
        for meaning, name in self.names.items():
            if name.removeprefix(NOT) not in numbers:
                columns = ", ".join(sorted(numbers)) or "none"
                raise UserError(
                    f"{place} has no column {name} with a number for each step, for demonstration_columns={meaning};"
                    f" it has {columns}"
                )

    @property
    def features(self) -> set[str]:
        """Names of the columns to read."""
        return {name.removeprefix(NOT) for name in self.names.values()}

    def values(self, meaning: str, rows: Mapping[str, Any]) -> Array | None:
        """Values [L] of the column of `meaning`; None without one."""
        if (name := self.names.get(meaning)) is None:
            return None
        values = np.asarray(rows[name.removeprefix(NOT)], np.float32).reshape(-1)
        if not name.startswith(NOT):
            return values
        return -values if meaning == REWARD else 1.0 - values

    def parts(self, rows: Mapping[str, Any], length: int, outcome: bool | None) -> Iterator[Part]:
        """Parts of an episode of `length` rows with the recorded `outcome`; one part unless it ends in the middle.

        With a success for each row a part succeeded if one of its rows did. A recorded success is that of the last
        part, and a recorded failure is one of all parts.
        """
        terminated, truncated, success = (self.values(each, rows) for each in (TERMINATED, TRUNCATED, SUCCESS))
        ended = np.zeros(length, bool)
        for flags in (terminated, truncated):
            ended |= flags > 0.5 if flags is not None else False
        begins = [0, *(np.flatnonzero(ended[:-1]) + 1).tolist()]
        for begin, end in zip(begins, [*begins[1:], length], strict=True):
            if self.success is not None:
                part_success = self.success
            elif success is not None:
                is_complete = not np.isnan(success[begin:end]).any()
                part_success = bool((success[begin:end] > 0.5).any()) or (False if is_complete else None)
            else:
                recorded = None if self._without_outcomes else outcome
                part_success = recorded if end == length or recorded is False else None
            last = end - 1
            if terminated is not None:
                is_terminated = bool(terminated[last] > 0.5)
            else:  # a success ends the episode, unless it was cut off
                is_terminated = bool(part_success) and not (truncated is not None and truncated[last] > 0.5)
            yield Part(begin, end, is_terminated, part_success)

    def signals(self) -> list[str]:
        """Names of the further signals."""
        return [name for name in self.names if name not in MEANINGS]


def parse_columns(option: Any) -> dict[str, Any]:  # noqa: ANN401 - as typed
    """Columns by meaning from demonstration_columns=.

    Raises:
        UserError: for anything but names of columns, null, and a success of true or false.
    """
    columns = {} if option is None else option
    valid = isinstance(columns, Mapping) and all(
        str(meaning).isidentifier()
        and (isinstance(name, str | None) or (meaning == SUCCESS and isinstance(name, bool)))
        for meaning, name in columns.items()
    )
    if not valid:
        expected = "'demonstration_columns={reward:NAME,success:NAME,terminated:NAME,truncated:NAME,COST:NAME}'"
        raise UserError(f"expected {expected}, got {option!r}")
    return dict(columns)


def rewarded(episodes: Episodes, rewards: Rewards) -> Episodes:
    """The same episodes with `rewards` from their outcomes; unknown for episodes of unknown outcome.

    SUCCESS: 1 for the last step of an episode that succeeded, else 0. STEPS: one less, which is -1 for each step until
    the success.

    Raises:
        UserError: for STEPS of an episode that failed and terminated, which would cost the less, the earlier it failed.
    """
    assert rewards in (Rewards.SUCCESS, Rewards.STEPS)
    if rewards is Rewards.STEPS and bool((episodes.failed & episodes.terminated).any()):
        raise UserError(
            "demonstration_rewards=steps costs nothing after an episode that failed and terminated, so that to fail"
            " early would be best; use demonstration_rewards=success"
        )
    reward = torch.full((episodes.steps,), -1.0 if rewards is Rewards.STEPS else 0.0)
    reward[episodes.ends[episodes.success == SUCCEEDED] - 1] += 1.0
    steps = torch.searchsorted(episodes.ends, torch.arange(episodes.steps), right=True)
    reward[(episodes.success == UNKNOWN)[steps]] = torch.nan
    return replace(episodes, reward=reward)


def is_number(dtype: str) -> bool:
    """Whether values of `dtype` are numbers, among which are true and false."""
    return dtype.startswith(("float", "int", "uint", "bool"))
