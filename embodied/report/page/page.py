"""Report of a run as one HTML file, report.html, which opens anywhere and loads nothing, from report.json's record.

Charts are inline SVG, pictures and the video are embedded; a large video is linked.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from embodied.data.round_results import collected_total
from embodied.environment import ODD_EVENTS
from embodied.evaluation.in_training import measure as _measure
from embodied.evaluation.in_training import odd_episodes
from embodied.report.headline import (
    BASELINE,
    ONE_STEP,
    TRAINED,
    UNTRAINED,
    Record,
    points,
    selection,
    significant,
    trained,
)
from embodied.report.page.charts import Mark, bar, curves, stages, ticks
from embodied.report.page.open_loop import open_loop
from embodied.report.page.parts import chart, costs, files, listed, repeat
from embodied.report.repeating import film_command
from embodied.saving.metrics import read_metrics

VIDEO_BYTES = 8_000_000
"""Largest size of an embedded video."""
LISTED = 60
"""Number of failed starts listed per task and reason; report.json has all."""
KINDS = {"start": "start", UNTRAINED: "start", "sft": "sft", "sft_control": "control", "offline": "offline", "rl": "rl"}
KINDS |= {ONE_STEP: "control"}
TRAINING = {
    "rollout/success": (
        "all episodes",
        "success",
        "share of the episodes that ended in an iteration of reinforcement learning and had succeeded, retries of"
        " failed starts among them",
    ),
    "rl/first_attempts_success": (
        "first attempts",
        "success",
        "the same of the last first attempts, without the retries of failed starts",
    ),
    "rollout/episode_return": (
        "return",
        "return",
        "mean sum of rewards of the episodes that ended in an iteration of reinforcement learning",
    ),
}
"""Curves of training by metric: label, measure, definition."""
POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(record: Record, directory: Path, commands: Sequence[str]) -> str:
    """Page of the run in `directory`, with its metrics, video and pictures, and the `commands` to run next.

    `record` is the content of report.json.
    """
    source_path = Path(__file__)
    style, script = (source_path.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".css", ".js"))
    sections = [
        _header(record),
        _video(directory),
        open_loop(record, directory),
        _results(record, directory),
        _meanings(record),
        _training(record, directory),
        costs(record),
        repeat(record, commands),
        files(directory),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(record['task'])}: report</title>\n<style>\n{style}</style>\n"
        "<noscript><style>tr[hidden] { display: table-row; }</style></noscript>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + f"\n</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _header(record: Record) -> str:
    commit = record["git_commit"]
    facts = [record["task"], f"seed {record['seed']}", *([] if commit == "unknown" else [f"commit {commit[:10]}"])]
    notes = list(record["notes"])
    if record["assets"] == "stand-in":
        notes.insert(0, "Stand-in assets: primitives in place of the official assets. These are not benchmark numbers.")
    card = f'<div class="card warning"><b>To know</b>{listed(notes)}</div>' if notes else ""
    return (
        f"<header><p>{escape(' · '.join(facts))}</p>\n<h1>{escape(record['headline'])}</h1>\n"
        f"<p>{escape(record['headline_intervals'])}</p></header>\n"
        f"{card}{_worse(record)}"
    )


def _worse(record: Record) -> str:
    if not (regressions := record["regressions"]):
        return ""
    lines = [
        f"{each['task']} ({each['distribution']}): {points(each)} since {_title(record, each['over'])},"
        f" {'significant' if significant(each) else 'not significant'}"
        for each in regressions
    ]
    details = f"<details><summary>Which</summary>{listed(lines)}</details>" if len(lines) > 5 else listed(lines)
    learning = TRAINED[trained({row["stage"] for row in record["evaluations"]})[-1]]
    count = sum(map(significant, regressions))
    number = len(regressions)
    title = f"{number} tasks fell with {learning}, {count} of them significantly"
    title = title if number > 1 else f"One task fell with {learning}"
    return f'<div class="card {"bad-news" if count else "warning"}"><b>{title}</b>{details}</div>'


def _video(directory: Path) -> str:
    path = directory / "video.mp4"
    if not path.exists():
        return ""
    size = path.stat().st_size
    if size > VIDEO_BYTES:
        body = f'<p><a href="video.mp4">video.mp4</a>, {size / 1e6:.1f} MB: too large to be contained in this page.</p>'
    else:
        data = base64.b64encode(path.read_bytes()).decode()
        body = f'<video controls muted loop playsinline preload="auto" src="data:video/mp4;base64,{data}"></video>'
    caption = "The same held-out starts in every row; a green border marks an episode once it has succeeded."
    return f"<section>\n<h2>Video</h2>\n<figure>{body}<figcaption>{caption}</figcaption></figure>\n</section>"


def _results(record: Record, directory: Path) -> str:
    """Table of all evaluations, a figure of those during training, and tables of tasks where there are several."""
    rows = record["evaluations"]
    if not rows:
        return ""
    steps = _steps_of_rl(record)
    between = _between(record)
    on = record["distributions"][0]
    figure = ""
    if between:
        marks = [_mark(row, steps) for row in rows if row["distribution"] == on]
        caption = f"Held-out {_measure(rows[0])} on {on}. The band: evaluations during training. {selection(record)}"
        figure = chart(stages(marks, steps, _measure(rows[0]), between), caption)
    by_distribution = [[row for row in rows if row["distribution"] == name] for name in record["distributions"]]
    tasks = [_tasks(record, directory, each) for each in by_distribution if len(each[-1]["per_task"]) > 1]
    table_of_rows = f'<div class="card"><div class="scroll">{_rows(record, directory)}</div>{_about(rows)}</div>'
    return "\n".join(["<section>\n<h2>Results</h2>", table_of_rows, figure, *tasks, "</section>"])


def _rows(record: Record, directory: Path) -> str:
    """Table of evaluations, a row each; columns without a value are left out."""
    rows = record["evaluations"]
    steps = _steps_of_rl(record)
    measure = _measure(rows[0])
    last = trained({row["stage"] for row in rows})[-1:]
    gains = {(gain["over"], gain["distribution"]): gain for gain in record["gains"]}
    ends = _ends([_mark(row, steps) for row in rows], measure)
    several = len({row["stage"] for row in rows}) > 1, len({row["episodes"] for row in rows}) > 1
    lines = []
    for row, above in zip(rows, [None, *rows], strict=False):
        first = above is None or above["distribution"] != row["distribution"]
        reasons = escape(_reasons(row["per_task"]))
        starts = ""
        if [row["stage"]] == last and len(row["per_task"]) == 1:
            starts = _failed_starts(row["per_task"][0], row["distribution"], directory, several=False)
        if starts:
            reasons = f'<button type="button" class="task" aria-expanded="false">{reasons}</button>'
        cells = {
            "condition": escape(row["distribution"]).replace("_", "_<wbr>") if first else "",
            "stage": escape(row["title"]) if several[0] else "",
            measure: f"{bar(_mark(row, steps), *ends)}{_figures(row)}",
            f"gain of {_title(record, last[0])}" if last else "": _gain(gains.get((row["stage"], row["distribution"]))),
            "failures": reasons,
            **{name: "" if row.get(name) is None else f"{row[name]:.3g}" for name in _metrics(row)},
            "episodes": str(row["episodes"]) if several[1] else "",
        }
        lines.append((first, cells, starts))
    names = [
        name
        for name in dict.fromkeys(n for _, cells, _ in lines for n in cells)
        if any(c.get(name) for _, c, _ in lines)
    ]
    bodies = []
    for first, cells, starts in lines:
        row_cells = "".join(
            f'<td class="{name if name in ("stage", "failures") else ""}">{cells.get(name, "")}</td>' for name in names
        )
        detail = f'<tr class="detail" hidden><td colspan="{len(names)}">{starts}</td></tr>' if starts else ""
        kind = "group" if first else "more"
        bodies.append(f'<tbody class="{kind}"><tr>{row_cells}</tr>{detail}</tbody>')
    header = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    return f'<table class="results"><thead><tr>{header}</tr></thead>\n' + "\n".join(bodies) + "\n</table>"


def _meanings(record: Record) -> str:
    """Meanings of the distributions; records of earlier versions have none."""
    meanings = record.get("meanings") or {}
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in meanings.items())
    return f"<section>\n<h2>Distributions</h2>\n<dl>{''.join(rows)}</dl>\n</section>" if meanings else ""


def _about(rows: Sequence[Record]) -> str:
    """Note on how the evaluations were made."""
    titles = list(dict.fromkeys(row["title"] for row in rows))
    episodes, limits = ({row[name] for row in rows} for name in ("episodes", "step_limit"))
    paired = all(row.get("repeatable", True) for row in rows)
    note = "Stages are evaluated " + ("on the same episodes" if paired else "on different episodes")
    note = (note if len(titles) > 1 else f"All rows are of {titles[0]}") + ", without exploration"
    note += f", in {episodes.pop()} episodes each. " if len(episodes) == 1 else ". "
    note += "Bars show the figure, lines its 95% interval."
    note += f" Episodes end after {limits.pop()} control steps." if len(limits) == 1 and None not in limits else ""
    if "sft_control" in {row["stage"] for row in rows}:
        note += (
            " The control continues supervised training for as many gradient steps as the stages after it took,"
            " and takes no environment steps."
        )
    return f'<p class="note">{escape(note)}</p>'


def _between(record: Record) -> list[Mark]:
    """Marks of the evaluations during reinforcement learning."""
    evaluations = record["in_training"]
    if not evaluations:
        return []
    names = "low", "high", "env_steps"
    return [
        Mark(f"after {each['env_steps']:,} steps", "rl", each[_measure(each)], *(each[name] for name in names))
        for each in evaluations["points"]
    ]


def _tasks(record: Record, directory: Path, rows: Sequence[Record]) -> str:
    """Table of the tasks of one distribution, with the failures of the last stage and commands that film them."""
    last = rows[-1]
    gains = {gain["over"]: gain for gain in record["gains"] if gain["distribution"] == last["distribution"]}
    before = next((gains[stage] for stage in reversed(TRAINED) if stage in gains), None)
    titles = [row["title"] for row in rows]
    over = [f"{last['title']} minus {_title(record, before['over'])}", ""] if before else []
    failed = [f"failures, {last['title']}"] if _measure(last) == "success" else []
    header = "".join(
        f'<th scope="col"><button type="button">{escape(name)}</button></th>' if name else '<th scope="col"></th>'
        for name in ["task", *titles, *over, *failed]
    )
    by_task = {row["stage"]: {each["task"]: each for each in row["per_task"]} for row in rows}
    changes = {each["task"]: {**each, "measure": before["measure"]} for each in before["per_task"]} if before else {}
    bodies = []
    for each in last["per_task"]:
        row_cells = "".join(_rate(by_task[row["stage"]].get(each["task"])) for row in rows)
        row_cells += _change(changes[each["task"]]) if before else ""
        row_cells += f'<td data-value="{_failures(each)}">{escape(_reasons([each]))}</td>' if failed else ""
        detail = _failed_starts(each, last["distribution"], directory, several=True) if failed else ""
        name = escape(each["task"]).replace("_", "_<wbr>")  # names are too long for a line
        button = f'<button type="button" class="task" aria-expanded="false">{name}</button>' if detail else name
        width = 1 + len(rows) + len(over) + len(failed)
        details_row = f'<tr class="detail" hidden><td colspan="{width}">{detail}</td></tr>' if detail else ""
        bodies.append(f"<tbody><tr><td>{button}</td>{row_cells}</tr>{details_row}</tbody>")
    note = "Click a heading to sort" + (", a task to see which of its starts failed." if failed else ".")
    note += " Intervals of single tasks are not corrected for their number."
    opened = " open" if last["distribution"] == record["distributions"][0] else ""
    return (
        f'<div class="card"><details{opened}><summary>By task on {escape(last["distribution"])}</summary>'
        f'<div class="scroll"><table class="tasks"><thead><tr>{header}</tr></thead>\n'
        + "\n".join(bodies)
        + f'\n</table></div><p class="note">{note}</p></details></div>'
    )


def _rate(row: Record | None) -> str:
    if row is None:
        return "<td></td>"
    value, interval = _value_and_interval(row)
    text = f'{value} <span class="interval-text">{interval}</span>'
    return f'<td class="nowrap" data-value="{row[_measure(row)]}">{text}</td>'


def _change(gain: Record) -> str:
    kind, text = ("fell", "▼ fell") if gain["difference"] < 0 else ("rose", "▲ rose")
    if not significant(gain):
        kind = "same"
        text = "not significant"
    return (
        f'<td class="nowrap" data-value="{gain["difference"]}">{points(gain)}</td>'
        f'<td><span class="flag {kind}">{text}</span></td>'
    )


def _failures(row: Record) -> int:
    return sum(failed["episodes"] for failed in row.get("failures", {}).values())


def _reasons(tasks: Sequence[Record]) -> str:
    """Failed episodes of `tasks` by reason; "" where success is undefined."""
    if "success" not in tasks[0]:
        return ""
    if any("failures" not in each and each["success"] < 1 for each in tasks):
        return "reasons were not recorded"  # by an earlier version
    reasons = Counter()
    for each in tasks:
        reasons.update({reason: failed["episodes"] for reason, failed in each.get("failures", {}).items()})
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"


def _failed_starts(row: Record, distribution: str, directory: Path, several: bool) -> str:
    """Failed starts by reason, and the command that films the selected one; "" if they have no numbers."""
    by_reason = {reason: failed["starts"] for reason, failed in row.get("failures", {}).items() if "starts" in failed}
    if not by_reason:
        return ""
    first = next(iter(by_reason.values()))[0]
    lines = []
    for reason, starts in by_reason.items():
        chips = "".join(
            f'<button type="button" class="chip" aria-pressed="{str(start == first).lower()}">{start}</button>'
            for start in starts[:LISTED]
        )
        rest = f" and {len(starts) - LISTED} more in report.json" if len(starts) > LISTED else ""
        lines.append(f"<p><b>{escape(reason)}</b>, starts {chips}{rest}</p>")
    command = escape(film_command(directory, distribution, first, row["task"] if several else None))
    command = command.replace(f"first_start={first}", f'first_start=<span class="number-of-start">{first}</span>')
    return f"{''.join(lines)}<p>Run and film the chosen start (evaluation.mp4):</p><pre>{command}</pre>"


def _training(record: Record, directory: Path) -> str:
    rows = read_metrics(directory)
    series = {name: [(row["step"], row[name]) for row in rows if name in row] for name in TRAINING}
    measure = "success" if series["rollout/success"] else "return"
    available = {name: points for name, points in series.items() if points and TRAINING[name][1] == measure}
    parts = []
    if available:
        by_label = {TRAINING[name][0]: points for name, points in available.items()}
        steps = max(points[-1][0] for points in available.values())
        definitions = "; ".join(f"{TRAINING[name][0]}: {TRAINING[name][2]}" for name in available)
        caption = (
            f"Training {measure}. {definitions}. The policy explores on training starts, so that these figures are not"
        )
        caption += " those of the evaluations above."
        parts.append(chart(curves(by_label, steps, measure), caption))
    for name, heading in (("trajectories.png", "Paths, before and after"), ("curves.png", "All learning curves")):
        if (directory / name).exists():
            data = base64.b64encode((directory / name).read_bytes()).decode()
            image = f'<figure><img alt="{heading}" src="data:image/png;base64,{data}"></figure>'
            parts.append(f'<div class="card"><details><summary>{heading}</summary>{image}</details></div>')
    return "<section>\n<h2>Training</h2>\n" + "\n".join(parts) + "\n</section>" if parts else ""


def _figures(row: Record) -> str:
    value, interval = _value_and_interval(row)
    odd = "".join(f" ({each})" for each in odd_episodes(row))
    return f'<b>{value}</b>{odd} <span class="interval-text">{interval}</span>'


def _value_and_interval(row: Record) -> tuple[str, str]:
    if "success" in row:
        return f"{row['success']:.1%}", f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
    return f"{row['return']:.4g}", "" if row["low"] is None else f"[{row['low']:.4g}, {row['high']:.4g}]"


def _gain(gain: Record | None) -> str:
    if gain is None:
        return ""
    note = "" if significant(gain) else '<br><span class="interval-text">not significant</span>'
    return f'<span class="nowrap">{points(gain)}</span>{note}'


def _steps_of_rl(record: Record) -> int:
    """Environment steps of reinforcement learning, without those between rounds of offline learning."""
    return record["env_steps"] - collected_total(record.get("rounds", ()), "env_steps")


def _mark(row: Record, steps: int) -> Mark:
    stage = row["stage"]
    kind = "baseline" if stage.startswith(BASELINE) else KINDS[stage]
    at = {"rl": steps, "sft": 0, UNTRAINED: 0, "start": 0}.get(stage)
    return Mark(row["title"], kind, row[_measure(row)], row["low"], row["high"], at)


def _ends(marks: Sequence[Mark], measure: str) -> tuple[float, float]:
    if measure == "success":
        return 0.0, 1.0
    bounds = [bound for mark in marks for bound in (mark.value, mark.low, mark.high) if bound is not None]
    marked = ticks(min(bounds), max(bounds))
    return marked[0], marked[-1]


def _metrics(row: Record) -> list[str]:
    table_names = {"stage", "title", "distribution", "success", "return", "low", "high", "episodes", "step_limit"}
    return [name for name in row if name not in table_names | {*ODD_EVENTS, "immediate", "repeatable", "per_task"}]


def _title(record: Record, stage: str) -> str:
    return next(row["title"] for row in record["evaluations"] if row["stage"] == stage)
