"""Instruments drawn over a picture: speed, time, rotors, gates and laps, and how the episode ended."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sims.quadrotor.video.camera import Array
from sims.quadrotor.video.gates import Colour

INK = (238, 241, 246)
DIM = (176, 186, 202)
SHADE = (12, 14, 18, 150)
GOOD = (92, 214, 126)
BAD = (255, 96, 84)
ROTOR = (98, 176, 255)
PAD = 7
MAP_PIXELS_M = 6.0
MAP_MARGIN_M = 1.2


@dataclass(frozen=True, eq=False)
class Instruments:
    """Values of the instruments.

    Attributes:
        time_s: time since the beginning of the episode.
        speed_m_s: speed of the drone; the scale reaches to `speed_full_m_s`.
        rotors, commanded: speeds of the four rotors as shares of the highest, and the commanded ones.
        title: title of the task, such as the lap.
        detail: text below the title.
        pips: colours of the gates in the order of a lap.
        below: text below the time.
        ending: how the episode ended, "" while it runs; `won` if well.
    """

    time_s: float
    speed_m_s: float
    speed_full_m_s: float
    rotors: Array
    commanded: Array
    title: str
    detail: str = ""
    pips: tuple[Colour, ...] = ()
    below: str = ""
    ending: str = ""
    won: bool = False


def draw(image: Image.Image, instruments: Instruments) -> None:
    """Draw the instruments over `image`."""
    width, height = image.size
    pen = ImageDraw.Draw(image, "RGBA")
    pen.rectangle((0, 0, width, 46), fill=SHADE)
    pen.rounded_rectangle((-PAD, height - 50, 104, height + PAD), PAD, fill=SHADE)
    pen.rounded_rectangle((width - 62, height - 56, width + PAD, height + PAD), PAD, fill=SHADE)
    pen.text((PAD + 1, PAD - 2), instruments.title, fill=INK, font=_font(17))
    line = PAD + 20
    for number, colour in enumerate(instruments.pips):
        left = PAD + 1 + 15 * number
        pen.rounded_rectangle((left, line + 2, left + 11, line + 8), 2, fill=colour)
    if instruments.detail:
        pen.text((PAD + 1, line + (11 if instruments.pips else 0)), instruments.detail, fill=DIM, font=_font(12))
    pen.text((width - PAD, PAD - 2), f"{instruments.time_s:.2f} s", fill=INK, font=_font(17), anchor="ra")
    if instruments.below:
        pen.text((width - PAD, line), instruments.below, fill=DIM, font=_font(12), anchor="ra")
    _speed(pen, height - PAD, instruments)
    _rotors(pen, width - PAD, height - PAD, instruments)
    if instruments.ending:
        middle = 0.5 * width, 0.74 * height
        left, top, right, bottom = pen.textbbox(middle, instruments.ending, font=_font(20), anchor="mm")
        pen.rounded_rectangle((left - 12, top - 8, right + 12, bottom + 8), 6, fill=(12, 14, 18, 190))
        pen.text(middle, instruments.ending, fill=GOOD if instruments.won else BAD, font=_font(20), anchor="mm")


def draw_map(image: Image.Image, lines: Array, colours: Sequence[Colour], way: Array) -> None:
    """Draw `lines` [L, 2, 2] m in `colours` and the `way` [P, 3] m so far, seen from above, small."""
    pen = ImageDraw.Draw(image, "RGBA")
    low = lines.min((0, 1)) - MAP_MARGIN_M
    high = lines.max((0, 1)) + MAP_MARGIN_M
    left = image.width - PAD - MAP_PIXELS_M * (high[0] - low[0])
    top = 46 + PAD

    def at(points: Array) -> list[tuple[float, float]]:
        inside = np.clip(points[:, :2], low, high)
        return [(left + MAP_PIXELS_M * (x - low[0]), top + MAP_PIXELS_M * (high[1] - y)) for x, y in inside.tolist()]

    pen.rounded_rectangle((left, top, image.width - PAD, top + MAP_PIXELS_M * (high[1] - low[1])), 5, fill=SHADE)
    if len(way) > 1:
        pen.line(at(way), fill=(*ROTOR, 120), width=1)
    for line, colour in zip(lines, colours, strict=True):
        pen.line(at(line), fill=colour, width=2)
    x, y = at(way[-1:])[0]
    pen.ellipse((x - 2.5, y - 2.5, x + 2.5, y + 2.5), fill=INK)


def _speed(pen: ImageDraw.ImageDraw, bottom: float, instruments: Instruments) -> None:
    number = f"{instruments.speed_m_s:.1f}"
    share = min(instruments.speed_m_s / instruments.speed_full_m_s, 1.0)
    pen.text((PAD, bottom - 8), number, fill=INK, font=_font(26), anchor="ls")
    behind = PAD + 4 + pen.textlength(number, font=_font(26))
    pen.text((behind, bottom - 8), "m/s", fill=DIM, font=_font(12), anchor="ls")
    pen.rectangle((PAD, bottom - 3, PAD + 90, bottom), fill=SHADE)
    pen.rectangle((PAD, bottom - 3, PAD + 90 * share, bottom), fill=ROTOR)


def _rotors(pen: ImageDraw.ImageDraw, right: float, bottom: float, instruments: Instruments) -> None:
    """A bar for each rotor's speed, a tick at the commanded one."""
    pen.text((right, bottom + 1), "rotors", fill=DIM, font=_font(11), anchor="rs")
    for number, (speed, command) in enumerate(
        zip(instruments.rotors.tolist(), instruments.commanded.tolist(), strict=True)
    ):
        left = right - 12 * (4 - number) + 3
        base = bottom - 12
        pen.rectangle((left, base - 34, left + 8, base), fill=SHADE)
        pen.rectangle((left, base - 34 * min(max(speed, 0.0), 1.0), left + 8, base), fill=ROTOR)
        tick = base - 34 * min(max(command, 0.0), 1.0)
        pen.line((left - 1, tick, left + 9, tick), fill=INK, width=1)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
