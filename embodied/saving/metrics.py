"""Metrics of a run, one JSON row per line of `metrics.jsonl`."""

from __future__ import annotations

from pathlib import Path

from embodied.saving.json_text import loads

METRICS = "metrics.jsonl"


def read_metrics(directory: str | Path) -> list[dict[str, float]]:
    """Rows of `metrics.jsonl` in `directory`, oldest first; invalid lines, such as truncated ones, are skipped."""
    return [row for row in read_rows(Path(directory) / METRICS) if row]


def read_rows(path: Path) -> list[dict[str, float] | None]:
    """One row per line of `path`; None for invalid lines."""
    lines = path.read_text(errors="replace", encoding="utf-8").splitlines() if path.exists() else []
    return [_row(line) for line in lines]


def _row(line: str) -> dict[str, float] | None:
    try:
        row = loads(line)
    except ValueError:
        return None
    numbers = isinstance(row, dict) and all(isinstance(value, int | float) for value in row.values())
    return row if numbers and {"step", "time"} <= row.keys() else None
