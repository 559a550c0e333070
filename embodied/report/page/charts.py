"""Charts of a report as inline SVG, coloured by the classes of page.css."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

# chart, its margins, an extra column, px
WIDTH = 640
HEIGHT = 300
LEFT = 52
TOP = 34
BOTTOM = 46
COLUMN = 104
POINTS = 200
"""Largest number of points of a curve; where there are more, means of neighbours are drawn."""
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Mark:
    """Evaluation: its value and interval (None: unknown), after `steps` environment steps; None without any.

    `kind` is a class of page.css.
    """

    label: str
    kind: str
    value: float
    low: float | None
    high: float | None
    steps: float | None = None


class Scale:
    """Linear scale from values `low` to `high` to positions in pixels from `start` to `end`."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low = low
        self.high = high
        self.start = start
        self.end = end

    def __call__(self, value: float) -> float:
        """Position of `value`; values outside are clamped."""
        share = (min(max(value, self.low), self.high) - self.low) / ((self.high - self.low) or 1.0)
        return round(self.start + share * (self.end - self.start), 1)


def stages(marks: Sequence[Mark], steps: int, measure: str, between: Sequence[Mark] = ()) -> str:
    """Chart of evaluations over environment steps, with columns for those without steps; "" if there are none.

    Evaluations `between`, in training, are a curve with a band of their intervals.
    """
    along = [mark for mark in marks if mark.steps is not None]
    without_steps = [mark for mark in marks if mark.steps is None]
    if not marks:
        return ""
    all_marks = [*marks, *between]
    y = _axis(
        [bound for mark in all_marks for bound in (mark.value, mark.low, mark.high) if bound is not None], measure
    )
    right = WIDTH - 16 - COLUMN * len(without_steps)
    x = Scale(0.0, max(steps, 1), LEFT + 16, right - 16)
    parts = [_grid(y, measure, LEFT, right)]
    if along:
        parts.append(_steps_axis(x, steps))
    if between:
        parts.append(_band(between, x, y, measure))
    for mark in along:
        at = x(mark.steps or 0)
        parts.append(f'<line class="stage" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        last = at > (LEFT + right) / 2
        parts.append(_text(at, TOP - 12, mark.label, "end" if last else "start", f"strong {mark.kind}"))
        parts.append(_marked(mark, at, y, measure, -1 if last else 1))
    for column, mark in enumerate(without_steps):
        edge = right + COLUMN * column
        parts.append(_grid(y, measure, edge + 14, edge + COLUMN, labels=False))
        parts.append(_text(edge + 14, TOP - 12, _short(mark.label), "start", f"strong {mark.kind}"))
        parts.append(_marked(mark, edge + 30, y, measure, 1))
    values = "; ".join(f"{mark.label} {_value(mark.value, measure)}" for mark in marks)
    return _svg(f"{measure} by stage: {values}", parts)


def curves(series: Mapping[str, Points], steps: float, measure: str) -> str:
    """Chart of curves over environment steps, by label; "" if there are none."""
    thinned_series = {label: thinned(points) for label, points in series.items() if points}
    if not thinned_series:
        return ""
    y = _axis([value for points in thinned_series.values() for _, value in points], measure)
    x = Scale(0.0, max(steps, 1.0), LEFT + 4, WIDTH - 16)
    parts = [_grid(y, measure, LEFT, WIDTH - 16), _steps_axis(x, steps)]
    for number, (label, points) in enumerate(thinned_series.items()):
        line = " ".join(f"{x(step)},{y(value)}" for step, value in points)
        parts.append(f'<polyline class="curve c{number}" points="{line}"/>')
        parts.append(_text(LEFT + 4 + 190 * number, TOP - 12, label, "start", f"strong c{number}"))
    return _svg(f"{', '.join(thinned_series)} over environment steps", parts)


def bar(mark: Mark, low: float, high: float) -> str:
    """Bar from zero to a value, a dot where `low` to `high` do not contain zero, with its interval, for a table."""
    x = Scale(low, high, 1.5, 158.5)
    ends = [x(mark.value if bound is None else bound) for bound in (mark.low, mark.high)]
    at = x(mark.value)
    first, last = sorted((x(0.0), at))
    length = f'<rect class="fill {mark.kind}" x="{first}" y="3" width="{round(last - first, 1)}" height="10"/>'
    dot = f'<circle class="dot {mark.kind}" cx="{at}" cy="8" r="4"/>'
    return (
        '<svg class="bar" viewBox="0 0 160 16" aria-hidden="true"><line class="grid" x1="0" x2="160" y1="8" y2="8"/>'
        f"{length if low <= 0.0 <= high else dot}"
        f'<path class="interval {mark.kind}" d="M{ends[0]},8H{ends[1]}M{ends[0]},4v8M{ends[1]},4v8"/></svg>'
    )


def thinned(points: Points) -> list[tuple[float, float]]:
    """Reduce a curve to at most `POINTS` points, by means of neighbours."""
    size = math.ceil(len(points) / POINTS)
    groups = [points[first : first + size] for first in range(0, len(points), size)] if points else []
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover `low` to `high`, some `about` of them; steps are 1, 2, 2.5 or 5 times a power of ten."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    # the smallest round step with at most `about` intervals
    gap = next(power * each for each in (1.0, 2.0, 2.5, 5.0, 10.0) if power * each >= 0.999 * span / about)
    first = math.floor(low / gap + 1e-9)
    last = math.ceil(high / gap - 1e-9)
    return [round(number * gap, 10) for number in range(first, max(last, first + 1) + 1)]


def brief(steps: float) -> str:
    """Format a number of steps in few characters: 1.05M, 250k, 800."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if steps >= size:
            return f"{steps / size:.4g}{unit}"
    return f"{steps:.4g}"


def _axis(values: Sequence[float], measure: str) -> Scale:
    marked = [0.0, 1.0] if measure == "success" else ticks(min(values), max(values))
    return Scale(marked[0], marked[-1], HEIGHT - BOTTOM, TOP)


def _grid(y: Scale, measure: str, left: float, right: float, labels: bool = True) -> str:
    lines = []
    for value in [0.0, 0.25, 0.5, 0.75, 1.0] if measure == "success" else ticks(y.low, y.high):
        lines.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(value)}" y2="{y(value)}"/>')
        if labels:
            text = f"{value:.0%}" if measure == "success" else f"{value:.4g}"
            lines.append(_text(left - 8, y(value) + 4, text, "end", "soft"))
    return "".join(lines)


def _steps_axis(x: Scale, steps: float) -> str:
    marked = [tick for tick in ticks(0.0, max(steps, 1.0)) if tick <= steps]
    below = [_text(x(tick), HEIGHT - BOTTOM + 18, brief(tick), "middle", "soft") for tick in marked]
    return "".join([*below, _text((x.start + x.end) / 2, HEIGHT - 8, "environment steps", "middle", "soft")])


def _band(marks: Sequence[Mark], x: Scale, y: Scale, measure: str) -> str:
    """Curve of marks over steps, with the area between the ends of their intervals."""
    bounded = [mark for mark in marks if mark.low is not None]
    upper = [f"{x(mark.steps or 0)},{y(mark.high or 0.0)}" for mark in bounded]
    lower = [f"{x(mark.steps or 0)},{y(mark.low or 0.0)}" for mark in reversed(bounded)]
    line = " ".join(f"{x(mark.steps or 0)},{y(mark.value)}" for mark in marks)
    dots = [
        f'<circle class="dot {mark.kind}" cx="{x(mark.steps or 0)}" cy="{y(mark.value)}" r="3">'
        f"<title>{escape(mark.label)}: {_hover_text(mark, measure)}</title></circle>"
        for mark in marks
    ]
    area = f'<polygon class="band" points="{" ".join([*upper, *lower])}"/>'
    return "".join([area, f'<polyline class="curve rl" points="{line}"/>', *dots])


def _marked(mark: Mark, at: float, y: Scale, measure: str, side: int) -> str:
    bounds = [bound for bound in (mark.low, mark.high) if bound is not None]
    interval = ""
    if len(bounds) == 2:
        top = y(bounds[1])
        bottom = y(bounds[0])
        ends = "".join(f"M{at - 5},{end}h10" for end in (top, bottom))
        interval = f'<path class="interval {mark.kind}" d="M{at},{top}V{bottom}{ends}"/>'
    dot = f'<circle class="dot {mark.kind}" cx="{at}" cy="{y(mark.value)}" r="5"/>'
    label = _text(
        at + 11 * side, y(mark.value) + 4, _value(mark.value, measure), "start" if side > 0 else "end", "figure"
    )
    return f"<g><title>{escape(mark.label)}: {_hover_text(mark, measure)}</title>{interval}{dot}{label}</g>"


def _hover_text(mark: Mark, measure: str) -> str:
    if mark.low is None or mark.high is None:
        return _value(mark.value, measure)
    return f"{_value(mark.value, measure)} [{_value(mark.low, measure)}, {_value(mark.high, measure)}]"


def _value(value: float, measure: str) -> str:
    return f"{value:.1%}" if measure == "success" else f"{value:.4g}"


def _short(label: str) -> str:
    return label if len(label) <= 13 else f"{label[:12]}…"


def _text(x: float, y: float, text: str, anchor: str, classes: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{classes}">{escape(text)}</text>'


def _svg(label: str, parts: Sequence[str]) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{inside}</svg>'
