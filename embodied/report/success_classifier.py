"""Report of a success classifier: report.md, report.html and results.json, with pictures of its worst errors.

Pictures say more about an error than rates: a hand in the picture, a light that changed, an object that fell over.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from embodied.contract import Contract
from embodied.data.episodes import SUCCEEDED
from embodied.data.pictures import encode
from embodied.data.success_frames import TEST, Frames, counts
from embodied.evaluation.detection import Detection, worst
from embodied.report.markdown import markdown
from embodied.report.markdown import table as markdown_table
from embodied.report.page.page import POLICY
from embodied.report.page.parts import facts, listed, table
from embodied.saving.files import complete_or_absent
from embodied.saving.json_text import dumps_rows
from embodied.saving.versions import git_commit, versions

HEADER = ["on held-out episodes", "rate", "95% interval", "count"]
ROWS = {
    "episode_accuracy": "episodes classified correctly",
    "false_positives_per_episode": "episodes ended by a false positive",
    "false_positives_of_failures": "failed episodes called a success",
    "missed_successes": "successes missed",
    "frame_accuracy": "frames classified correctly",
}
FRAMES = (
    "An episode ends at its first detection and has at most one false positive. Frames of an episode are alike: the"
    " interval by frame is too narrow, that by episode is over independent episodes."
)
SCORES = "scores.png"
SHOWN = 6
"""Largest number of worst false positives, and of worst misses, in a report."""
SIDE = 256
"""Smallest height of a picture in the report, pixels; smaller pictures are enlarged by a whole factor."""


@dataclass(frozen=True)
class Error:
    """Frame that the classifier rates wrongly: its episode, time, s, and score, with `pictures` by camera."""

    kind: str
    episode: str
    time_s: float
    score: float
    pictures: Mapping[str, NDArray[np.uint8]]
    values: Mapping[str, Sequence[float]]

    @property
    def caption(self) -> str:
        """Sentence on the frame."""
        measured = "; ".join(f"{key}: {', '.join(f'{x:.3g}' for x in each)}" for key, each in self.values.items())
        text = f"{self.kind}: {self.episode}, {self.time_s:.2f} s, score {self.score:.3f}"
        return f"{text}; {measured}" if measured else text


def headline(record: Mapping[str, Any]) -> str:
    """Result in two sentences."""
    rates = record["held_out"]
    accuracy = rates["episode_accuracy"]
    missed = rates["missed_successes"]
    false = rates["false_positives_per_episode"]
    return (
        f"Of {accuracy['total']} held-out episodes {accuracy['count']} are classified correctly"
        f" ({_interval(accuracy)}): {false['count']} end by a false positive, and {missed['count']} of"
        f" {missed['total']} successes are missed. The threshold is {record['threshold']:.3f} over {record['frames']}"
        f" frame{'s' if record['frames'] > 1 else ''}."
    )


def cells(record: Mapping[str, Any]) -> list[list[str]]:
    """Cells of the table with `HEADER`; a rate without any episode of its kind is unknown."""
    rows = []
    for name, title in ROWS.items():
        rate = record["held_out"][name]
        figures = ["unknown", "", "0"] if rate is None else _figures(rate)
        rows.append([title, *figures])
    return rows


def _figures(rate: Mapping[str, Any]) -> list[str]:
    return [f"{rate['rate']:.1%}", _interval(rate), f"{rate['count']:,} of {rate['total']:,}"]


def _interval(rate: Mapping[str, Any]) -> str:
    return f"{rate['low']:.1%} to {rate['high']:.1%}"


def worst_errors(
    frames: Frames, score: Tensor, index: Tensor, threshold: float, contract: Contract, most: int = SHOWN
) -> list[Error]:
    """Worst false positives, then the worst misses, among the frames `index` with their `score` [F] of all frames."""
    kinds = worst(score[index], frames.label[index], frames.episode[index], threshold, most)
    errors = []
    time_s = frames.step * contract.control_dt_s
    for kind, places in zip(("false positive", "missed success"), kinds, strict=True):
        for frame in index[places].tolist():
            episode = int(frames.episode[frame])
            observation = frames.take(torch.tensor([frame]))[0]
            cameras = [key for key, spec in contract.observation.items() if spec.is_picture]
            errors.append(
                Error(
                    kind,
                    frames.names[episode],
                    float(time_s[frame]),
                    float(score[frame]),
                    {key: observation[key].numpy() for key in cameras},
                    {k: observation[k].flatten().tolist() for k in contract.observation if k not in cameras},
                )
            )
    return errors


def measured(frames: Frames, part: Tensor, score: Tensor, threshold: float, consecutive: int) -> dict[str, Any]:
    """Record of a classifier's errors on the held-out episodes, JSON, with the size of each part of the data.

    `score` [F] is that of all `frames`, `part` [E] the part of each episode, and a success is `consecutive` frames.
    """
    index = frames.of_part(part, TEST)
    own = score[index], frames.label[index], frames.episode[index]
    return {
        "threshold": threshold,
        "frames": consecutive,
        "held_out": Detection.of(*own, frames.success, threshold, consecutive).summary(),
        "parts": counts(frames, part),
        "git_commit": git_commit(),
        "versions": versions(),
    }


def write(folder: Path, record: Mapping[str, Any], errors: Sequence[Error]) -> None:
    """Write the report with `record`, JSON, and pictures of the worst `errors` into `folder`; `SCORES` lies there."""
    pictures = []
    for number, error in enumerate(errors):
        if error.pictures:
            pictures.append((f"error_{number + 1}.png", error))
            with complete_or_absent(folder / pictures[-1][0]) as temporary:
                temporary.write_bytes(encode(side_by_side(list(error.pictures.values()))))
    names = {id(error): name for name, error in pictures}
    pages = {
        "report.md": _text(record, errors, names),
        "report.html": _page(folder, record, errors, names),
        "results.json": dumps_rows(dict(record)),
    }
    for name, text in pages.items():
        with complete_or_absent(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def side_by_side(pictures: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Pictures [height, width, 3] of several cameras in one, each at least `SIDE` pixels high."""
    height = max(SIDE, *(len(picture) for picture in pictures))
    scaled = []
    for picture in pictures:
        width = round(picture.shape[1] * height / len(picture))
        scaled.append(np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.NEAREST)))
    return np.concatenate(scaled, 1)


def _text(record: Mapping[str, Any], errors: Sequence[Error], names: Mapping[int, str]) -> str:
    shown = [
        f"![{markdown(error.caption)}]({names[id(error)]})\n\n{markdown(error.caption)}"
        if id(error) in names
        else f"- {markdown(error.caption)}"
        for error in errors
    ]
    parts = [
        "# Success classifier",
        markdown(headline(record)),
        markdown_table(HEADER, cells(record)),
        FRAMES,
        "\n".join(f"- {markdown(note)}" for note in record["notes"]),
        f"![Scores of held-out episodes over time]({SCORES})",
        "## Worst errors" if shown else "No held-out frame with a known label is on the wrong side of the threshold.",
        *shown,
        "## Data",
        "\n".join(f"- {name}: {text}" for name, text in _data(record).items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _data(record: Mapping[str, Any]) -> dict[str, str]:
    """Sentences on the data of each part, and on what repeats the training."""
    data = {
        name: f"{each['episodes']} episodes, {each['successes']} of them successes;"
        f" {each['positive_frames']:,} positive and {each['negative_frames']:,} negative frames"
        for name, each in record["parts"].items()
    }
    return data | {
        "observations": ", ".join(record["observations"]),
        "command": record["command"],
        "seed": str(record["seed"]),
        "commit": record["git_commit"],
    }


def _page(folder: Path, record: Mapping[str, Any], errors: Sequence[Error], names: Mapping[int, str]) -> str:
    style = (Path(__file__).parent / "page" / "page.css").read_text(encoding="utf-8")
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells(record)]
    rates = table([f"<th>{escape(name)}</th>" for name in HEADER], rows)
    shown = "\n".join(_shown(folder, error, names.get(id(error))) for error in errors)
    worst = shown or "<p>No held-out frame with a known label is on the wrong side of the threshold.</p>"
    notes = record["notes"]
    warning = f'<div class="card warning"><b>To know</b>{listed(notes)}</div>' if notes else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>Success classifier: report</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"<header><p>Success classifier</p>\n<h1>{escape(headline(record))}</h1></header>\n{warning}"
        f'<section>\n<h2>Errors</h2>\n<div class="card scroll">{rates}<p class="note">{escape(FRAMES)}</p></div>'
        f'<div class="card">{_picture(folder / SCORES, "Scores of held-out episodes over time")}</div>\n</section>\n'
        f'<section>\n<h2>Worst errors</h2>\n<div class="pair">{worst}</div>\n</section>\n'
        f'<section>\n<h2>Data</h2>\n<div class="card">{facts(_data(record))}</div>\n</section>\n'
        "</main>\n</body>\n</html>\n"
    )


def _shown(folder: Path, error: Error, name: str | None) -> str:
    picture = _picture(folder / name, error.caption) if name else ""
    caption = "" if name else f"<p>{escape(error.caption)}</p>"
    return f'<div class="card">{picture}{caption}</div>'


def _picture(path: Path, caption: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    text = escape(caption, quote=True)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'


def plot_scores(path: Path, frames: Frames, score: Tensor, index: Tensor, threshold: float, dt_s: float) -> None:
    """Draw the `score` [F] of the episodes of the frames `index` over time, with the `threshold`."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(10.0, 3.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    numbers = frames.episode[index].unique()
    succeeded = frames.success[numbers] == SUCCEEDED
    time_s = frames.step * dt_s
    for axis, own, title in zip(axes, (numbers[succeeded], numbers[~succeeded]), ("successful", "failed"), strict=True):
        for number in own:
            mine = frames.episode == number
            axis.plot(time_s[mine].numpy(), score[mine].numpy(), linewidth=1.0, alpha=0.7)
        axis.axhline(threshold, color="black", linestyle="--", linewidth=1.0)
        axis.set(title=f"{len(own)} {title} episodes", xlabel="time [s]", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("probability of success")
    with complete_or_absent(path) as temporary:
        figure.savefig(temporary, format="png", dpi=100)
