"""Result of a run in a sentence, from the record of report.json; and the tasks that became worse."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from embodied.evaluation.in_training import measure
from embodied.report import open_loop

BASELINE = "baseline "
"""Prefix of a baseline's stage; the baseline's name follows."""
TRAINED = "start", "sft", "offline", "rl"
"""Stages with the run's policy, in their order; a control and baselines have others."""
LEARNING = {"rl": "reinforcement learning", "offline": "offline learning"}
"""Stages whose gains over earlier ones are reported, if they are the last."""
Record = Mapping[str, Any]


def headline(record: Record) -> str:
    """Result on the training distribution, as a sentence for readers who do not know the project."""
    if "open_loop" in record:
        return open_loop.headline(record["open_loop"])
    rows = {row["stage"]: row for row in record["evaluations"] if row["distribution"] in record["distributions"][:1]}
    if not (stages := trained(rows)):
        return f"No policy was evaluated in this run of {record['task']}."
    last, baseline = stages[-1], _baseline(rows)
    if last not in LEARNING:
        training = "supervised training, without reinforcement learning," if "sft" in rows else "no training at all"
        return f"After {training} {_reached(rows[last], record)}."
    if len(stages) == 1:
        effort = f"{_effort(record)} of " if last == "rl" else ""
        return f"After {effort}{LEARNING[last]} {_reached(rows[last], record)}{baseline}."
    gains = {gain["over"]: gain for gain in record["gains"] if gain["distribution"] in record["distributions"][:1]}
    change = _change(LEARNING[last], rows[stages[-2]], rows[last], gains[stages[-2]], record)
    return f"{change}{_control(rows, gains)}{baseline}."


def trained(stages: Collection[str]) -> list[str]:
    """Stages of those evaluated that have the run's policy, in order."""
    return [name for name in TRAINED if name in stages]


def selection(record: Record) -> str:
    """Sentences on the best policy of those evaluated during training, and why its figure is not a result."""
    best, count = record["in_training"]["best"], len(record["in_training"]["points"])
    name = "mean return" if measure(best) == "return" else "success"
    return (
        f"The folder best has the policy after {best['env_steps']:,} environment steps, chosen as the best of {count}"
        f" evaluated during training: {name} {_interval(best)} on {best['episodes']} held-out episodes. The best of"
        " several is favoured by chance: its figure is too high. All others are the last policy's, on other episodes."
    )


def regressions(record: Record) -> list[dict[str, Any]]:
    """Gains, with distribution and task, of tasks whose success or mean return fell during RL."""
    before = next(iter(trained({row["stage"] for row in record["evaluations"]})[-2:-1]), None)
    return [
        {**row, "distribution": gain["distribution"], "over": before, "measure": gain["measure"]}
        for gain in record["gains"]
        if gain["over"] == before
        for row in gain["per_task"]
        if row["difference"] < 0
    ]


def significant(gain: Mapping[str, Any]) -> bool:
    """Whether the interval of a gain excludes zero."""
    return gain["low"] > 0 or gain["high"] < 0


def points(gain: Mapping[str, Any]) -> str:
    """Format a gain with its interval, in percentage points, or in the unit of returns."""
    if gain["measure"] == "return":
        return f"{gain['difference']:+.4g} [{gain['low']:+.4g}, {gain['high']:+.4g}]"
    return f"{100 * gain['difference']:+.1f} points [{100 * gain['low']:+.1f}, {100 * gain['high']:+.1f}]"


def _change(learning: str, before: Record, after: Record, gain: Record, record: Record) -> str:
    measured = "the mean return" if gain["measure"] == "return" else "success"
    on = f"{measured} on {_starts(after, record)}"
    if not significant(gain):
        return (
            f"{learning.capitalize()} made no significant difference to {on}: {_figure(before)} before and "
            f"{_interval(after)} after{_after(record)} ({points(gain)})"
        )
    verb = "raised" if gain["difference"] > 0 else "lowered"
    over = " over" if record["env_steps"] else ""
    return f"{learning.capitalize()} {verb} {on} from {_figure(before)} to {_interval(after)}{over}{_after(record)}"


def _control(rows: Mapping[str, Record], gains: Mapping[str, Record]) -> str:
    """Clause on the result of supervised training for as many steps, and whether RL is better."""
    if "sft_control" not in rows:
        return ""
    clause = f"; supervised training for as many steps reached {_figure(rows['sft_control'])}"
    gain = gains["sft_control"]
    if gain["low"] > 0:
        return clause
    if gain["high"] < 0:
        return f"{clause}, which is better ({points(gain)})"
    return f"{clause}, and the difference from that is not significant ({points(gain)})"


def _baseline(rows: Mapping[str, Record]) -> str:
    rows_by_name = {stage.removeprefix(BASELINE): row for stage, row in rows.items() if stage.startswith(BASELINE)}
    if not rows_by_name:
        return ""
    name = max(rows_by_name, key=lambda each: rows_by_name[each][measure(rows_by_name[each])])
    best = f"the best of {len(rows_by_name)} planners, {name}," if len(rows_by_name) > 1 else f"the planner {name}"
    return f"; {best} reached {_figure(rows_by_name[name])}"


def _reached(row: Record, record: Record) -> str:
    starts = _starts(row, record)
    if measure(row) == "return":
        return f"the policy earned a mean return of {_interval(row)} on {row['episodes']} {starts}"
    return f"the policy succeeded on {_interval(row)} of {row['episodes']} {starts}"


def _starts(row: Record, record: Record) -> str:
    starts = "held-out starts" if row.get("repeatable", True) else "new episodes"
    assets = ", stand-in assets" if record["assets"] == "stand-in" else ""
    return f"{starts} of {record['task']} ({row['distribution']}{assets})"


def _after(record: Record) -> str:
    """Effort of reinforcement learning after a space; "" without it."""
    return f" {_effort(record)}" if record["env_steps"] else ""


def _effort(record: Record) -> str:
    return f"{record['episodes']:,} episodes" if record["episodes"] else f"{record['env_steps']:,} environment steps"


def _figure(row: Record) -> str:
    return f"{row['success']:.1%}" if "success" in row else f"{row['return']:.4g}"


def _interval(row: Record) -> str:
    if row["low"] is None:
        return _figure(row)
    if "success" in row:
        return f"{row['success']:.1%} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
    return f"{row['return']:.4g} [{row['low']:.4g}, {row['high']:.4g}]"
