"""Views of recordings: rerun, a layout for Foxglove, and a summary in text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.extras import needs_extra
from embodied.text import decode
from real_robot.recording.recording import ROOT, Decided, Ended, Episode, Gap, Item, Recording, Tick
from real_robot.robots.robot import Array
from real_robot.safety.safety import State

APPLICATION = "embodied"
TIME = "time"
PLOTTED = 16
"""Largest number of elements drawn as curves; larger observations, such as scans, are drawn as bars."""


def to_rerun(recording: Recording, file: Path | None) -> int:
    """Show `recording` in rerun, or write it to the .rrd `file`; returns the number of control periods.

    Cameras are shown as pictures, small arrays as curves with the contract's names, positions as points in space, and
    text and safety's verdicts as logs.

    Raises:
        UserError: without the extra "rerun", and if `file` exists.
    """
    with needs_extra("rerun"):
        import rerun as rr
    if file is not None and file.exists():
        raise UserError(f"{file} exists; choose another output")
    rr.init(APPLICATION, recording_id=recording.path.stem, spawn=file is None)
    if file is not None:
        rr.save(file)
    rr.send_blueprint(_blueprint(recording.contract))
    _name_curves(rr, recording.contract)
    periods = 0
    episodes = 0
    previous_message = ""
    for item in recording:
        if isinstance(item, Tick):
            rr.set_time(TIME, duration=item.now_s)
            _log_tick(rr, item, recording.contract)
            periods += 1
            message = f"{item.verdict.state.value}: {item.verdict.reason}"
            if message != previous_message and (item.verdict.reason or previous_message):
                rr.log("events", rr.TextLog(message, level="WARN" if item.verdict.reason else "INFO"))
            previous_message = message
        elif event := _event(item, episodes):
            episodes += isinstance(item, Episode)
            rr.set_time(TIME, duration=item.stamp_s)
            rr.log("events", rr.TextLog(event, level="INFO"))
    rr.disconnect()
    return periods


def _event(item: Item, number: int) -> str:
    if isinstance(item, Episode):
        return f"episode {number} of {item.task or 'a task without a name'}"
    if isinstance(item, Ended):
        return "success" if item.success else "failure"
    return f"{item.dropped} items are missing here" if isinstance(item, Gap) else ""


def _log_tick(rr: Any, tick: Tick, contract: Contract) -> None:  # noqa: ANN401 - the package
    for key, values in tick.reading.observation.items() if tick.reading else ():
        spec = contract.observation[key]
        if spec.is_picture:
            rr.log(f"cameras/{key}", rr.Image(values).compress())
        elif spec.is_text:
            rows = values.reshape(-1, values.shape[-1])
            rr.log(f"text/{key}", rr.TextDocument("\n".join(decode(row) for row in rows)))
        elif _is_position(spec):
            rr.log(f"space/{key}", rr.Points3D(values.reshape(-1, 3)))
            _log_numbers(rr, f"observation/{key}", values)
        else:
            _log_numbers(rr, f"observation/{key}", values)
    for name, action in (("asked", tick.proposed_action), ("written", tick.verdict.action)):
        if action is not None:
            _log_numbers(rr, f"action/{name}", np.asarray(action))


def _log_numbers(rr: Any, path: str, values: Array) -> None:  # noqa: ANN401 - the package
    flat = values.reshape(-1).astype(np.float64)
    rr.log(path, rr.Scalars(flat) if len(flat) <= PLOTTED else rr.BarChart(flat))


def _is_position(spec: TensorSpec) -> bool:
    return spec.unit == "m" and spec.shape[-1:] == (3,) and spec.names in ((), ("x", "y", "z"))


def _name_curves(rr: Any, contract: Contract) -> None:  # noqa: ANN401 - the package
    specs = {f"observation/{key}": spec for key, spec in contract.observation.items()}
    for path, spec in (specs | dict.fromkeys(("action/asked", "action/written"), contract.action)).items():
        if spec.names and spec.shape == (len(spec.names),) and len(spec.names) <= PLOTTED:
            rr.log(path, rr.SeriesLines(names=[_label(name, spec) for name in spec.names]), static=True)


def _label(name: str, spec: TensorSpec) -> str:
    return f"{name} [{spec.unit}]" if spec.unit and "," not in spec.unit else name


def _blueprint(contract: Contract) -> Any:  # noqa: ANN401 - rerun's
    import rerun.blueprint as rrb

    specs = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
    views: list[Any] = [rrb.Spatial2DView(origin=f"cameras/{key}") for key, spec in specs.items() if spec.is_picture]
    if any(_is_position(spec) for spec in specs.values()):
        views.append(rrb.Spatial3DView(origin="space"))
    curves = [
        rrb.TimeSeriesView(origin="action"),
        *(rrb.TimeSeriesView(origin=f"observation/{k}") for k in plotted(specs)),
    ]
    right = rrb.Vertical(*curves, rrb.TextLogView(origin="events"))
    return rrb.Blueprint(rrb.Horizontal(rrb.Vertical(*views), right) if views else right)


def plotted(specs: dict[str, TensorSpec]) -> list[str]:
    """Keys of the observations `specs` with at most `PLOTTED` numbers."""
    return [key for key, spec in specs.items() if not spec.is_text and 0 < np.prod(spec.shape) <= PLOTTED]


def foxglove_layout(contract: Contract) -> str:
    """A Foxglove layout (JSON) for recordings with `contract`: cameras, commands, small observations and verdicts.

    Source of the format: docs.foxglove.dev, layouts that Foxglove exports.
    """
    specs = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
    panels: dict[str, dict[str, Any]] = {}
    for key in (key for key, spec in specs.items() if spec.is_picture):
        panels[f"Image!{key}"] = {"imageMode": {"imageTopic": f"{ROOT}/observation/{key}"}}
    actions = [(f"action/{name}", contract.action, f"{name} ") for name in ("asked", "written")]
    panels["Plot!action"] = _plot("action", actions)
    for key in plotted(specs):
        panels[f"Plot!{key}"] = _plot(key, [(f"observation/{key}", specs[key], "")])
    panels["RawMessages!tick"] = {"topicPath": f"{ROOT}/tick"}
    panels["DiagnosticSummary!nodes"] = {"topicToRender": "/diagnostics", "minLevel": 0, "sortByLevel": True}
    layout = {"configById": panels, "globalVariables": {}, "userNodes": {}, "playbackConfig": {"speed": 1}}
    return json.dumps(layout | {"layout": _tiled(list(panels), "row")}, indent=2) + "\n"


def _plot(title: str, curves: list[tuple[str, TensorSpec, str]]) -> dict[str, Any]:
    paths = [
        {
            "value": f"{ROOT}/{name}.data[{index}]",
            "label": f"{prefix}{_label(element, spec)}",
            "enabled": True,
            "timestampMethod": "receiveTime",
        }
        for name, spec, prefix in curves
        for index, element in enumerate(spec.names or map(str, range(int(np.prod(spec.shape)))))
    ]
    return {"foxglovePanelTitle": title, "paths": paths, "xAxisVal": "timestamp", "isSynced": True, "showLegend": True}


def _tiled(panels: list[str], direction: str) -> Any:  # noqa: ANN401 - a name, or a tree of them
    """Split the panels recursively into halves, alternating between rows and columns."""
    if len(panels) == 1:
        return panels[0]
    half = (len(panels) + 1) // 2
    other_direction = "column" if direction == "row" else "row"
    return {
        "direction": direction,
        "first": _tiled(panels[:half], other_direction),
        "second": _tiled(panels[half:], other_direction),
    }


@dataclass
class _Row:
    """Statistics of an episode."""

    title: str
    periods: int = 0
    human: int = 0
    holds: dict[str, int] = field(default_factory=dict)

    def add(self, tick: Tick) -> None:
        self.periods += 1
        self.human += tick.intervention
        if tick.verdict.state is not State.ACTIVE:
            self.holds[tick.verdict.reason] = self.holds.get(tick.verdict.reason, 0) + 1

    def text(self) -> str:
        share = f", {self.human} by a person" if self.human else ""
        holds = "".join(f"; {count} held: {reason}" for reason, count in self.holds.items())
        return f"{self.title}, {self.periods} periods{share}{holds}"


def summary(recording: Recording) -> str:
    """Summary of `recording`, one line per episode: periods, outcome, share of a person, reasons for holding."""
    decisions = missing = 0
    rows = [_Row("before the first episode")]
    outcomes = {number: "success" if success else "failure" for number, success in recording.outcomes().items()}
    for item in recording:
        if isinstance(item, Episode):
            number = len(rows) - 1
            rows.append(_Row(f"episode {number} {item.task}: {outcomes.get(number, 'no outcome')}"))
        if isinstance(item, Tick):
            rows[-1].add(item)
        decisions += isinstance(item, Decided)
        missing += item.dropped if isinstance(item, Gap) else 0
    lines = [f"{recording.path}, recorded with {json.dumps(recording.origin)}"]
    lines += [row.text() for row in rows[(rows[0].periods == 0) :]]
    lines += [f"{decisions} decisions of a policy"] * bool(decisions)
    lines += [f"{missing} items are missing: the disk was too slow"] * bool(missing)
    lines += [f"it is not whole: {recording.damage}"] * bool(recording.damage)
    return "\n".join(lines + ["it was not finished: the end is missing"] * (not recording.complete))
