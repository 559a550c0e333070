"""Intervals printed in documents and intervals in benchmarks/results; `tests/test_figures.py` compares them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath

NUMBER = r"[+-]?\d+(?:\.\d+)?"
UNIT = r"(?:\s*(?:%|points|CPU-s|s|m)(?!\w))?"
ESTIMATE = rf"(?:(?P<count>\d+) of (?P<total>\d+)|(?P<estimate>{NUMBER}){UNIT})(?:\*\*)?"
BOUNDS = rf"\[(?P<low>{NUMBER})%?,\s*(?P<high>{NUMBER})%?\](?!\()"
PATTERN = re.compile(rf"{ESTIMATE}\s*(?:{BOUNDS}|±\s*(?P<half_width>\d+(?:\.\d+)?))")
"""`94.0% [92.0, 96.1]`, `+6.5 points [+1.9, +11.0]`, `98 of 100 [93.0, 99.4]`, `0.060 m ± 0.002`."""
COMMIT = re.compile(r"[0-9a-f]{40}")
ESTIMATES = ("success", "return", "difference", "mean", "time_s")
"""Possible names of the estimate in a result's object with `low` and `high`."""


@dataclass(frozen=True)
class PrintedInterval:
    """An interval in a document: its text, line, decimals as printed, and the results that its section links to."""

    text: str
    line: int
    estimate: str
    low: str | None
    high: str | None
    half_width: str | None
    results: frozenset[str]

    def equals(self, interval: MeasuredInterval) -> bool:
        """Whether this is `interval` rounded, as a number or in percent; without a sign, a decrease matches, too."""
        measured = [interval] if self.text.startswith("+") else [interval, interval.negated()]
        return any(self._rounds(each, scale) for each in measured for scale in (1.0, 100.0))

    def _rounds(self, interval: MeasuredInterval, scale: float) -> bool:
        if self.half_width is not None:
            printed = ((self.estimate, interval.estimate), (self.half_width, (interval.high - interval.low) / 2))
        else:
            assert self.low is not None
            assert self.high is not None
            printed = ((self.estimate, interval.estimate), (self.low, interval.low), (self.high, interval.high))
        return all(_rounds(text, scale * value) for text, value in printed)


@dataclass(frozen=True)
class MeasuredInterval:
    """An interval of a result."""

    estimate: float
    low: float
    high: float

    def negated(self) -> MeasuredInterval:
        """The interval of the opposite quantity: seconds sooner instead of seconds later."""
        return MeasuredInterval(-self.estimate, -self.high, -self.low)


def printed_intervals(markdown: str) -> list[PrintedInterval]:
    """All intervals of a document, outside code, with the names of the JSON files that their section links to."""
    headings = [match.start() for match in re.finditer(r"^#+ ", _without_code(markdown), re.MULTILINE)]
    bounds = [0, *headings, len(markdown)]
    return [
        PrintedInterval(
            text=" ".join(match[0].split()),
            line=markdown.count("\n", 0, begin + match.start()) + 1,
            estimate=match["estimate"] or f"{100 * int(match['count']) / int(match['total']):.1f}",
            low=match["low"],
            high=match["high"],
            half_width=match["half_width"],
            results=frozenset(linked_results(markdown[begin:end])),
        )
        for begin, end in pairwise(bounds)
        for match in PATTERN.finditer(_without_code(markdown[begin:end]))
    ]


def linked_results(markdown: str) -> list[str]:
    """Names of the JSON files of benchmarks/results that a text links to."""
    links = re.findall(r"\]\(([^)\s#]*benchmarks/results/[^)\s#]+\.json)\)", markdown)
    return [PurePosixPath(link).name for link in links]


def measured_intervals(result: object) -> Iterator[MeasuredInterval]:
    """Yield all intervals of a result, at any depth."""
    if isinstance(result, list):
        if (
            len(result) == 3
            and all(isinstance(value, float) for value in result)
            and result[1] <= result[0] <= result[2]
        ):
            yield MeasuredInterval(*result)
        for entry in result:
            yield from measured_intervals(entry)
    if not isinstance(result, dict):
        return
    if isinstance(result.get("low"), float | int) and isinstance(result.get("high"), float | int):
        for name in ESTIMATES:
            if isinstance(result.get(name), float | int):
                yield MeasuredInterval(result[name], result["low"], result["high"])
    elif "half_width" in result:
        yield MeasuredInterval(
            result["mean"], result["mean"] - result["half_width"], result["mean"] + result["half_width"]
        )
    for name, value in result.items():
        if name.endswith("_95"):
            yield MeasuredInterval(result[name.removesuffix("_95")], *value)
        yield from measured_intervals(value)


def rates(result: object) -> Iterator[Mapping[str, float]]:
    """Yield all success rates of single evaluations with their episodes and bounds, at any depth of a result."""
    if isinstance(result, dict):
        if {"success", "low", "high", "episodes"} <= result.keys() and isinstance(result["success"], float | int):
            yield result
        for value in result.values():
            yield from rates(value)
    elif isinstance(result, list):
        for entry in result:
            yield from rates(entry)


def discordant_pairs(difference: float, low: float, high: float, pairs: int, z: float) -> tuple[float, float]:
    """Numbers of episodes that only one of two evaluations solved, from the adjusted Wald interval of their difference.

    Inverse of `EvaluationResult.gain_over`: both are whole numbers if the interval is that of `pairs` episodes.
    """
    # centre ± z sqrt((either - centre^2) / (pairs + 2)), solved for `either`
    centre, spread = (low + high) / 2, (high - low) / 2
    either = (spread / z) ** 2 * (pairs + 2) + centre**2  # share of discordant pairs, one added to each kind
    discordant, balance = either * (pairs + 2) - 2, difference * pairs
    return (discordant + balance) / 2, (discordant - balance) / 2


def commits(result: object) -> Iterator[str]:
    """Yield all commits in a result."""
    if isinstance(result, dict):
        for name, value in result.items():
            if name in ("git_commit", "commit"):
                yield value
            else:
                yield from commits(value)
    elif isinstance(result, list):
        for entry in result:
            yield from commits(entry)


def _without_code(markdown: str) -> str:
    """The text with every character of code replaced by a space."""
    blank = lambda match: re.sub(r"[^\n]", " ", match[0])  # noqa: E731
    return re.sub(r"`[^`\n]*`", blank, re.sub(r"```.*?```", blank, markdown, flags=re.DOTALL))


def _rounds(printed: str, value: float) -> bool:
    decimals = len(printed.partition(".")[2])
    return math.isfinite(value) and abs(float(printed) - value) <= 0.5 * 10.0**-decimals + 1e-9
