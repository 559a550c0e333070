"""Scores of the packages, as a table and as JSON."""

import json
import math
from pathlib import Path

from benchmarks.mutants.operators import Fault

LEAST = 0.9
"""Share of a package's sample that must be caught."""


def wilson(caught: int, count: int) -> tuple[float, float]:
    """95% confidence interval of a share, after Wilson (1927)."""
    z, share = 1.96, caught / count
    # (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    center = share + z**2 / (2 * count)
    spread = z * math.sqrt(share * (1.0 - share) / count + z**2 / (4 * count**2))
    low, high = ((center + side * spread) / (1.0 + z**2 / count) for side in (-1.0, 1.0))
    return round(max(low, 0.0), 3), round(min(high, 1.0), 3)


def row(outcomes: dict[Fault, str]) -> dict:
    """A package's entry of the table: outcomes of its sample, and of the faults that are written by hand."""
    sampled = {fault: outcome for fault, outcome in outcomes.items() if isinstance(fault.number, int)}
    written = {fault: outcome for fault, outcome in outcomes.items() if fault not in sampled}
    entry: dict = {}
    if sampled:
        caught = sum(outcome in ("caught", "timed out") for outcome in sampled.values())
        entry |= {"sample": len(sampled), "caught": caught, "score": round(caught / len(sampled), 3)}
        entry |= {"interval": wilson(caught, len(sampled)), "timed_out": [*sampled.values()].count("timed out")}
        entry |= {name.replace(" ", "_"): _names(sampled, name) for name in ("survived", "not covered")}
    missed = _names(written, "survived") + _names(written, "not covered")
    return entry | {"by_hand": {"faults": len(written), "caught": len(written) - len(missed), "missed": missed}}


def _names(outcomes: dict[Fault, str], outcome: str) -> list[str]:
    return [f"{fault}, {fault.change}" for fault, each in outcomes.items() if each == outcome]


def merge(path: Path, rows: dict[str, dict]) -> None:
    """Write `rows` into the table at `path`, which may not exist yet; keep the entries of other packages."""
    table = json.loads(path.read_text())["packages"] if path.exists() else {}
    path.write_text(json.dumps({"packages": dict(sorted((table | rows).items()))}, indent=2) + "\n")


def table(rows: dict[str, dict]) -> str:
    """The scores in Markdown."""
    lines = ["| package | caught | score | 95% interval | not covered | by hand |", "|---|---|---|---|---|---|"]
    for package, entry in rows.items():
        hand = f"{entry['by_hand']['caught']}/{entry['by_hand']['faults']}"
        if "sample" in entry:
            low, high = entry["interval"]
            counts = f"{entry['caught']}/{entry['sample']} | {entry['score']:.0%} | {low:.0%} to {high:.0%}"
            lines.append(f"| {package} | {counts} | {len(entry['not_covered'])} | {hand} |")
        else:
            lines.append(f"| {package} | - | - | - | - | {hand} |")
    return "\n".join(lines)


def is_enough(entry: dict) -> bool:
    """Whether a package's tests catch enough of the sample, and every fault that is written by hand."""
    return entry.get("score", 1.0) >= LEAST and not entry["by_hand"]["missed"]
