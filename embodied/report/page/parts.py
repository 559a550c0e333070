"""Sections of report.html on costs, repetition and files, and HTML elements of all sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from embodied.report.headline import Record

RL_PHASES = {"simulation": "simulation", "policy": "policy, acting", "update": "learning"}
FILES = {
    "report.md": "this report as text",
    "report.json": "this report for programs: every figure, every failed start",
    "video.mp4": "the policy before and after",
    "chunks.png": "recorded actions, and chunks that were predicted for them",
    "curves.png": "all learning curves",
    "trajectories.png": "paths, before and after",
    "config.yaml": "the full configuration",
    "best": "the policy of the highest held-out figure during training",
    "checkpoint": "weights and everything needed to resume or evaluate",
    "demonstrations": "the episodes that supervised training imitates",
    "metrics.jsonl": "all metrics of training",
    "tensorboard": "the same for TensorBoard",
    "run.log": "what the run printed",
}


def costs(record: Record) -> str:
    """Section on the time of the run, by phase, and its machine."""
    wall = record["wall_s"]
    cpu = record["phase_cpu_s"]
    other = [phase for phase in wall if phase not in RL_PHASES]
    rl = {name: wall[phase] for phase, name in RL_PHASES.items() if phase in wall}
    rows = [[phase, _seconds(wall[phase]), _seconds(cpu.get(phase, 0.0))] for phase in other]
    if rl:
        rows.append(["reinforcement learning", _seconds(sum(rl.values())), _seconds(record["cpu_s"])])
        rows += [[f"— {name}", _seconds(seconds), ""] for name, seconds in rl.items()]
    spent = sum(cpu.get(phase, 0.0) for phase in other) + record["cpu_s"]
    rows.append(["all", _seconds(sum(wall.values())), _seconds(spent)])
    cells = [
        f'<td>{escape(name)}</td><td class="number">{wall_s}</td><td class="number">{cpu_s}</td>'
        for name, wall_s, cpu_s in rows
    ]
    header = ["<th>phase</th>", '<th class="number">wall time</th>', '<th class="number">CPU time</th>']
    machine = record["machine"]
    details = {
        "environment steps": f"{record['env_steps']:,}",
        "training episodes": f"{record['episodes']:,}",
        **(
            {"of these lost": f"{record['lost']:,}, with processes of the simulator that died"}
            if record["lost"]
            else {}
        ),
        **({"of these pushed": f"{record['pushed']:,}, by a person in the viewer"} if record["pushed"] else {}),
        **{
            label: f"{record[name]:,}"
            for name, label in (("lost_collectors", "collectors that died"), ("dropped_rollouts", "rollouts too old"))
            if record.get(name)
        },
        "processor": f"{machine['processor']}, {machine['cores']} cores",
        "PyTorch": f"{machine['threads']} threads, device {machine['device']}",
        **({"GPU": machine["gpu"]} if "gpu" in machine else {}),
        "system": machine["system"],
    }
    note = "CPU time is that of the run's own process on all cores, without processes of simulators."
    return (
        '<section>\n<h2>Costs</h2>\n<div class="pair">'
        f'<div class="card">{table(header, cells)}<p class="note">{note}</p></div>'
        f'<div class="card">{facts(details)}</div></div>\n</section>'
    )


def repeat(record: Record, commands: Sequence[str]) -> str:
    """Section with the command that repeats the run, and the `commands` to continue with."""
    command = record["command"] or "A program made the parts of this run: run that program again."
    details = {
        "seed": str(record["seed"]),
        "commit": record["git_commit"],
        **({"assets": record["assets"]} if record["assets"] else {}),
        "versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    }
    return (
        '<section>\n<h2>Repeat it</h2>\n<div class="card">'
        f"<pre>{escape(command)}</pre><p></p>{facts(details)}</div>\n"
        f'<div class="card"><h3>Go on from it</h3><pre>{escape(chr(10).join(commands))}</pre></div>\n</section>'
    )


def files(directory: Path) -> str:
    """Section with links to the other files in the run's `directory`."""
    rows = [
        f'<td><a href="{name}">{name}</a></td><td>{description}</td>'
        for name, description in FILES.items()
        if (directory / name).exists() or name in ("report.md", "report.json")
    ]
    return f'<section>\n<h2>Files beside this page</h2>\n<div class="card">{table([], rows)}</div>\n</section>'


def _seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def table(header: Sequence[str], rows: Sequence[str]) -> str:
    """Table of HTML cells: a list for the header, and one string for each row."""
    head = f"<thead><tr>{''.join(header)}</tr></thead>" if header else ""
    return f"<table>{head}<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"


def facts(texts: Mapping[str, str]) -> str:
    """Description list of names and texts."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in texts.items()) + "</dl>"


def listed(lines: Sequence[str]) -> str:
    """List of lines of text."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def chart(svg: str, caption: str) -> str:
    """Figure of an SVG with its caption, which is text."""
    caption = f"<figcaption>{escape(caption)}</figcaption>"
    return f'<div class="card"><figure class="chart"><div class="scroll">{svg}</div>{caption}</figure></div>'
