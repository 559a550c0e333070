"""Margins of a policy: the range of single conditions around the task's in which it still succeeds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embodied.environment import Environment
from embodied.errors import UserError
from embodied.evaluation.evaluation import evaluate, wilson
from embodied.policy import Policy
from embodied.report.markdown import table
from embodied.runtime.progress import Progress
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import dumps_rows, loads
from embodied.saving.versions import git_commit
from embodied.task import Sweep, Task

log = logging.getLogger(__name__)
NAME = "margins"
ENOUGH = 0.95
"""Share of successes that bounds a margin."""


@dataclass(frozen=True)
class Margin:
    """Number of successes of `episodes` at each value of a sweep."""

    sweep: Sweep
    successes: tuple[int, ...]
    episodes: int

    def rates(self) -> list[tuple[float, float, float]]:
        """Share of successes at each value, with Wilson's 95% interval."""
        return [(count / self.episodes, *wilson(count, self.episodes)) for count in self.successes]

    def bounds(self) -> tuple[float | None, float | None]:
        """Lowest and highest value around the best one between which at least `ENOUGH` succeed everywhere.

        None stands for an end that the sweep does not reach; both are the best value where even that fails too often.
        """
        good = [count >= ENOUGH * self.episodes for count in self.successes]
        best = first = last = self.successes.index(max(self.successes))
        values = self.sweep.values
        if not good[best]:
            return values[best], values[best]
        # extend from the best value to both sides while enough episodes succeed
        while first > 0 and good[first - 1]:
            first -= 1
        while last + 1 < len(values) and good[last + 1]:
            last += 1
        return (values[first] if first > 0 else None), (values[last] if last + 1 < len(values) else None)

    def words(self) -> str:
        """Bounds in words."""
        (low, high), ends = self.bounds(), self.sweep.values
        if low is not None and low == high and max(self.successes) < ENOUGH * self.episodes:
            return f"nowhere {ENOUGH:.0%}"
        return f"{ends[0] if low is None else low:g}{' or less' if low is None and ends[0] > 0 else ''} to " + (
            f"{ends[-1]:g} or more" if high is None else f"{high:g}"
        )


def measure(
    task: Task,
    environment: Callable[[str], Environment],
    policy: Policy,
    *,
    starts_per_task: int,
    first_start: int = 0,
    device: str = "cpu",
) -> dict[str, Margin]:
    """Evaluate `policy` on the same starts at every point of the sweeps of `task`; `environment` takes its name.

    Raises:
        UserError: for a task without sweeps.
    """
    if not task.margins:
        raise UserError(f"{task.name} has no conditions to sweep; use margins=false")
    margins = {}
    points = sum(len(sweep.values) for sweep in task.margins.values())
    options = {"starts_per_task": starts_per_task, "first_start": first_start, "device": device}
    with Progress(NAME, points, "point") as bar:
        for name, sweep in task.margins.items():
            results = []
            for value in sweep.values:
                env = environment(f"{name}={value:g}")
                results.append(evaluate(env, policy, **options))
                env.close()
                bar.update(note=name)
            margins[name] = Margin(
                sweep, tuple(int(each.success.sum()) for each in results), results[0].success.numel()
            )
    return margins


def write(directory: Path, margins: Mapping[str, Margin], record: Mapping[str, Any]) -> str:
    """Log margins, write margins.json, .md and .png into `directory`, and return a line with their paths."""
    rows = [
        [name, f"{value:g}", margin.sweep.unit, f"{100 * rate:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"]
        for name, margin in margins.items()
        for value, (rate, low, high) in zip(margin.sweep.values, margin.rates(), strict=True)
    ]
    limits = [[name, m.words(), m.sweep.unit, m.sweep.means] for name, m in margins.items()]
    whole = {
        **record,
        "git_commit": git_commit(),
        "margins": {name: {**asdict(m), "bounds": m.bounds(), "words": m.words()} for name, m in margins.items()},
    }
    episodes = next(iter(margins.values())).episodes
    sections = [
        table(["condition", "value", "unit", f"success of {episodes} episodes, 95% interval"], rows),
        f"At least {ENOUGH:.0%} succeed, as far as the sweep goes:",
        table(["condition", "from, to", "unit", "value"], limits),
    ]
    log.info("\n\n".join(sections) + "\n")
    with complete_or_absent(directory / f"{NAME}.json") as temporary:
        temporary.write_text(dumps_rows(whole), encoding="utf-8")
    with complete_or_absent(directory / f"{NAME}.md") as temporary:
        temporary.write_text("\n\n".join(["# Margins", *sections, f"![Margins]({NAME}.png)"]) + "\n", encoding="utf-8")
    with complete_or_absent(directory / f"{NAME}.png") as temporary:
        _figure(margins).savefig(temporary, format="png", dpi=120)
    return f"wrote {directory / NAME}.md, .json and .png"


def read(directory: Path, weights_sha256: str | None) -> dict[str, Any] | None:
    """Contents of margins.json in `directory`; None if there is none or it is of other weights.

    Raises:
        UserError: for a file that is not JSON.
    """
    path = directory / f"{NAME}.json"
    if not path.is_file():
        return None
    try:
        record = loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}); measure again: evaluate.py margins=true") from None
    return record if record.get("weights_sha256") == weights_sha256 else None


def words(directory: Path, weights_sha256: str | None) -> dict[str, str]:
    """Margins of `read` in words, such as "0.8 to 1.2 (times the mass)", by condition.

    Raises:
        UserError: see `read`.
    """
    margins = (read(directory, weights_sha256) or {}).get("margins", {})
    texts = {}
    for name, each in margins.items():
        unit = "" if each["sweep"]["unit"] == "1" else f" {each['sweep']['unit']}"
        texts[name] = f"{each['words']}{unit} ({each['sweep']['means']})"
    return texts


def _figure(margins: Mapping[str, Margin]) -> Any:  # noqa: ANN401 - matplotlib's
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 2.8 * -(-len(margins) // 3)), layout="constrained")
    axes: Sequence[Any] = list(figure.subplots(-(-len(margins) // 3), 3, squeeze=False).flat)
    for axis, (name, margin) in zip(axes, margins.items(), strict=False):
        rates = [[100 * share for share in column] for column in zip(*margin.rates(), strict=True)]
        axis.fill_between(margin.sweep.values, rates[1], rates[2], alpha=0.25)
        axis.plot(margin.sweep.values, rates[0], marker="o", markersize=3)
        axis.axhline(100 * ENOUGH, linewidth=0.8, linestyle=":", color="grey")
        unit = "factor" if margin.sweep.unit == "1" else margin.sweep.unit
        axis.set(ylim=(-3, 103), xlabel=f"{name}, {unit}", ylabel="success, %")
    for axis in axes[len(margins) :]:
        axis.remove()
    return figure
