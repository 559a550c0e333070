"""Observations and actions of a policy as tables in HTML; K executed actions, A action dimension."""

from __future__ import annotations

from html import escape

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.text import decode

MOST = 24
"""Largest number of elements of an observation that are shown."""
STYLE = "font-size:0.78em;line-height:1.35;padding:0.2em 0.6em;overflow-wrap:anywhere"
NUMBERS = "font-family:monospace;white-space:pre-wrap"


def observation_text(contract: Contract, observation: TensorDict) -> str:
    """Table of the observation of one environment, without pictures: names, units and values."""
    rows = []
    for name, spec in contract.observation.items():
        if not spec.is_picture and name in observation.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            values = observation[name].detach().cpu().numpy()
            critic = " (critic only)" if spec.privileged else ""
            unit = "" if spec.is_text or not spec.unit else f", {spec.unit}"
            rows.append((f"{name}{unit}{critic}", _text(values) if spec.is_text else _values(values)))
    return table(rows)


def pictures(contract: Contract, observation: TensorDict) -> dict[str, NDArray[np.uint8]]:
    """Pictures in the observation of one environment, by name."""
    names = [name for name, spec in contract.observation.items() if spec.is_picture]
    return {name: observation[name].cpu().numpy() for name in names}


def answered(spec: TensorSpec, chunk: NDArray[np.floating], value: float | None) -> str:
    """Table of the chunk [K, A] that is executed next, a line per element, and the `value`, if any."""
    names = spec.names or tuple(f"{number}" for number in range(chunk.shape[-1]))
    rows = [(name, _values(chunk[:, column])) for column, name in enumerate(names)]
    return table([*rows, *([] if value is None else [("value", f"{value:.4g}")])])


def table(rows: list[tuple[str, str]]) -> str:
    """Table of two columns of text, which is escaped."""
    cells = (
        f'<div><b>{escape(name)}</b><br><span style="{NUMBERS}">{escape(text)}</span></div>' for name, text in rows
    )
    return f'<div style="{STYLE}">{"".join(cells)}</div>'


def line(text: str) -> str:
    """Paragraph of text, which is escaped."""
    return f'<div style="{STYLE}">{escape(text)}</div>'


def _values(values: NDArray) -> str:
    if values.dtype == bool or np.issubdtype(values.dtype, np.integer):
        numbers = [str(int(value)) for value in values.ravel()[:MOST]]
    else:
        numbers = [f"{value:+.3f}" if abs(value) < 100 else f"{value:+.4g}" for value in values.ravel()[:MOST]]
    more = f" … {values.size - MOST} more" if values.size > MOST else ""
    return " ".join(numbers) + more


def _text(values: NDArray[np.uint8]) -> str:
    return ", ".join(text for row in values.reshape(-1, values.shape[-1]) if (text := decode(row)))
