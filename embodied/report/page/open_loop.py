"""Section of report.html on the open-loop error of a run on recorded episodes."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from embodied.report.headline import Record
from embodied.report.open_loop import CHUNKS, HEADER, caption, cells
from embodied.report.page.parts import table


def open_loop(record: Record, directory: Path) -> str:
    """Table of errors by element, and pictures of predicted beside recorded chunks; "" of runs with a simulator."""
    if (summary := record.get("open_loop")) is None:
        return ""
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells(summary)]
    errors = table([f"<th>{escape(name)}</th>" for name in HEADER], rows)
    data = base64.b64encode((directory / CHUNKS).read_bytes()).decode()
    alternative = "Recorded actions, and predicted chunks"
    picture = f'<figure><img alt="{alternative}" src="data:image/png;base64,{data}"></figure>'
    return (
        f'<section>\n<h2>Open-loop error</h2>\n<div class="card scroll">{errors}'
        f'<p class="note">{escape(caption(summary))}</p></div>\n<div class="card">{picture}</div>\n</section>'
    )
