"""Result of a run in a sentence, from the record of report.json; and the tasks that became worse."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from embodied.evaluation.in_training import measure
from embodied.report import open_loop

BASELINE = "baseline "
"""Prefix of a baseline's stage; the baseline's name follows."""
UNTRAINED = "untrained"
"""Stage of the policy before reinforcement learning from scratch."""
ONE_STEP = "one_step"
"""Stage of the one-step actor that has learned beside the run's policy, which acts in its place in this evaluation."""
TRAINED = {"start": "the initial policy", UNTRAINED: "the untrained policy", "sft": "supervised training"}
TRAINED |= {"offline": "offline learning", "rl": "reinforcement learning"}
"""Stages with the run's policy, in their order, and their names in a sentence; a control and baselines have others."""
LEARNING = "offline", "rl"
"""Stages whose gains over earlier ones are reported, if they are the last."""
WORDS = 20
"""Largest number of words of a headline."""
Record = Mapping[str, Any]


def headline(record: Record) -> str:
    """Result on the training distribution in at most `WORDS` words, for readers who do not know the project."""
    if "open_loop" in record:
        return open_loop.headline(record["open_loop"])
    rows = _rows(record)
    if not (stages := trained(rows)):
        return f"No policy was evaluated in this run of {record['task']}."
    last = stages[-1]
    measured = _measured(rows[stages[-1]])
    figure = _figure(rows[stages[-1]])
    learning = TRAINED[last]
    on = f"on {record['task']}"
    gains = _gains(record)
    if last not in LEARNING or len(stages) == 1:
        reached = f"{figure} success" if measured == "success" else f"a mean return of {figure}"
        claim = f"{learning} reached {reached} {on}"
    elif significant(gain := gains[stages[-2]]):
        verb = "raised" if gain["difference"] > 0 else "lowered"
        claim = f"{learning} {verb} {measured} {on} from {_figure(rows[stages[-2]])} to {figure}"
    else:
        before = _figure(rows[stages[-2]])
        claim = f"{learning} did not significantly change {measured} {on}: {before} before, {figure} after"
    sentence = claim[0].upper() + claim[1:]
    for clause in (*_control(rows, gains), _baseline(rows)):
        if len(f"{sentence}{clause}".split()) > WORDS:
            break  # the table has these figures, too
        sentence += clause
    return f"{sentence}."


def intervals(record: Record) -> str:
    """Interval, episodes and gains of the headline's figure, with their distribution; "" without a policy."""
    rows = _rows(record)
    gains = _gains(record)
    if not (stages := trained(rows)):
        return ""
    row = rows[stages[-1]]
    effort = ""
    if stages[-1] == "rl" and record["env_steps"]:
        effort = (
            f", after {record['episodes'] or record['env_steps']:,} {'episodes' if record['episodes'] else 'steps'}"
        )
    starts = "held-out starts" if row.get("repeatable", True) else "new episodes"
    assets = ", stand-in assets" if record["assets"] == "stand-in" else ""
    texts = [f"{_interval(row)} on {row['episodes']} {starts} ({row['distribution']}{assets}){effort}"]
    for over, gain in gains.items():
        note = "" if significant(gain) else ", not significant"
        texts.append(f"{points(gain)} over {rows[over]['title']}{note}")
    return f"{'; '.join(texts)}. Brackets are 95% intervals."


def trained(stages: Collection[str]) -> list[str]:
    """Stages of those evaluated that have the run's policy, in order."""
    return [name for name in TRAINED if name in stages]


def selection(record: Record) -> str:
    """Sentences on the best policy of those evaluated during training, and why its figure is not a result."""
    best = record["in_training"]["best"]
    count = len(record["in_training"]["points"])
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


def _rows(record: Record) -> dict[str, Record]:
    """Evaluations on the training distribution, by stage."""
    return {row["stage"]: row for row in record["evaluations"] if row["distribution"] in record["distributions"][:1]}


def _gains(record: Record) -> dict[str, Record]:
    """Gains of the last stage on the training distribution, by the other stage."""
    return {gain["over"]: gain for gain in record["gains"] if gain["distribution"] in record["distributions"][:1]}


def _control(rows: Mapping[str, Record], gains: Mapping[str, Record]) -> tuple[str, str]:
    """Clauses on the result of supervised training for as many steps, and on its comparison with the last stage."""
    if "sft_control" not in rows:
        return "", ""
    gain = gains["sft_control"]
    verdict = "" if gain["low"] > 0 else ", significantly more" if gain["high"] < 0 else ", not significantly less"
    return f"; more supervised training reached {_figure(rows['sft_control'])}", verdict


def _baseline(rows: Mapping[str, Record]) -> str:
    """Clause on the task's best planner."""
    planners = {stage.removeprefix(BASELINE): row for stage, row in rows.items() if stage.startswith(BASELINE)}
    if not planners:
        return ""
    name = max(planners, key=lambda each: planners[each][measure(planners[each])])
    best = f"the best of {len(planners)} planners, {name}," if len(planners) > 1 else f"the planner {name}"
    return f"; {best} reached {_figure(planners[name])}"


def _measured(row: Record) -> str:
    return "mean return" if measure(row) == "return" else "success"


def _figure(row: Record) -> str:
    return f"{row['success']:.1%}" if "success" in row else f"{row['return']:.4g}"


def _interval(row: Record) -> str:
    if row["low"] is None:
        return _figure(row)
    if "success" in row:
        return f"{row['success']:.1%} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
    return f"{row['return']:.4g} [{row['low']:.4g}, {row['high']:.4g}]"


def reset_sentence(resets: Mapping[str, Any]) -> str:
    """Sentence about a second policy that brought the scene back."""
    share = f"{resets['successes']:,} of {resets['attempts']:,} attempts ({resets['steps']:,} more steps)"
    every = resets["minutes_between_requests"]
    asked = f"was asked {resets['requests']:,} times, every {every:.1f} minutes" if every else "was never asked"
    return (
        f" A second policy brought the scene back in {share}; a person {asked}, in {resets['minutes']:.1f} minutes of"
        " motion."
    )
