"""Videos of policies: episodes side by side, one row per policy, from the same starts."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from embodied.environment import NumberedStarts
from embodied.errors import UserError
from embodied.evaluation.evaluation import act
from embodied.policy import Policy
from embodied.rollout.memory import Memory
from embodied.saving.files import complete_or_absent

Frames = NDArray[np.uint8]
Render = Callable[[NDArray[np.int64]], Frames]
"""Function that returns images [n, height, width, 3] of the current state of environments [n]."""

INK = (235, 235, 235)
PAPER = (24, 26, 30)
SUCCESS = (70, 190, 90)
# pixels
MARGIN = 4
BORDER = 3
STRIP = 26


@dataclass(frozen=True, eq=False)
class Film:
    """Film of N episodes: `frames` [T, N, height, width, 3], constant after an episode's end.

    The flags `success` [T, N] are those until each frame; undefined without `has_success`.
    """

    frames: Frames
    success: NDArray[np.bool_]
    has_success: bool = True


def film(
    env: NumberedStarts,
    policy: Policy,
    starts: Tensor,
    render: Render,
    device: torch.device | str = "cpu",
    stride: int = 1,
) -> Film:
    """Film one episode of the deterministic `policy` in each environment, from initial states `starts` [N].

    There is a frame after every `stride` chunks of `env.contract.executed` actions; the policy decides as often as in
    its own contract, so that episodes equal those of `evaluate`. `device` is the policy's.

    Raises:
        UserError: if the policy was built for other tensors, or its chunk is no multiple of the environment's.
    """
    policy.contract.check(env.contract)
    executed = policy.contract.executed
    every = env.contract.executed
    if executed % every:
        raise UserError(f"expected executed={executed} of the policy to be a multiple of the environment's {every}")
    if env.num_starts:  # wraps around after the last start
        starts = starts % env.num_starts
    observation = env.reset(starts=starts)
    memory = Memory(policy, env.num_envs, env.device)
    running = torch.ones(env.num_envs, dtype=torch.bool)
    solved = torch.zeros_like(running)
    has_success = True
    frames = [render(np.arange(env.num_envs))]
    success = [solved.numpy()]
    chunks = 0
    changed = torch.zeros_like(running)
    while running.any():
        actions = act(policy, observation, running, device, memory)[:, :executed]
        for part in actions.to(env.device).split(every, 1):
            transition = env.step(part)
            chunks = chunks + 1
            changed = changed | running
            solved = solved | transition.success.cpu()
            observation = transition.observation
            running = running & ~transition.done.cpu()
            has_success = transition.has_success
            if chunks % stride == 0 or not running.any():
                frames.append(frames[-1].copy())
                rows = changed.nonzero().squeeze(1).numpy()
                frames[-1][rows] = render(rows)
                success.append(solved.numpy())
                changed = torch.zeros_like(running)
            if not running.any():
                break
    return Film(np.stack(frames), np.stack(success), has_success)


def tile(films: Mapping[str, Film], titles: Sequence[str] = ()) -> Frames:
    """Combine films into a video [T, height, width, 3]: a row per film under its caption, a column per episode.

    Captions count the episodes that have succeeded so far, which get a green border. `titles` are column headings.
    Shorter films repeat their last frame.

    Raises:
        ValueError: if films or titles differ in their number of episodes, or frames in size.
    """
    shapes = {film.frames.shape[1:] for film in films.values()}
    if len(shapes) != 1 or len(titles) not in (0, next(iter(shapes))[0]):
        raise ValueError(f"expected films of one size and a title per column, got {shapes} and {len(titles)} titles")
    longest = max(len(film.frames) for film in films.values())
    _, episodes, height, width, _ = next(iter(films.values())).frames.shape
    high = STRIP + height + 2 * MARGIN
    wide = width + 2 * MARGIN
    head = _titles(titles, episodes * wide) if titles else np.zeros((0, episodes * wide, 3), dtype=np.uint8)
    video = np.empty((longest, len(head) + high * len(films), episodes * wide, 3), dtype=np.uint8)
    video[:, : len(head)] = head
    for number, (caption, film) in enumerate(films.items()):
        top = len(head) + high * number
        _fill(video[:, top : top + high], caption, film)
    return video


def write_video(path: str | Path, frames: Frames, fps: float) -> None:
    """Write `frames` [T, height, width, 3] as H.264 in MP4; the file is complete or absent.

    Raises:
        ValueError: for other frames, or a rate that is not positive.
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size:
        raise ValueError(f"expected frames uint8 [T, height, width, 3], got {frames.dtype} {list(frames.shape)}")
    if fps <= 0:
        raise ValueError(f"expected a positive frame rate, got {fps}")
    height, width = frames.shape[1:3]
    odd = (0, height % 2), (0, width % 2), (0, 0)  # H.264 needs even sizes
    with complete_or_absent(Path(path)) as temporary:
        writer = imageio_ffmpeg.write_frames(
            str(temporary),
            (width + width % 2, height + height % 2),
            fps=fps,  # pyright: ignore[reportArgumentType] - any number
            macro_block_size=2,
            ffmpeg_log_level="error",
            output_params=["-f", "mp4", "-movflags", "+faststart", "-preset", "veryfast"],
        )
        writer.send(None)
        for frame in frames:
            writer.send(np.pad(frame, odd, mode="edge"))
        writer.close()


def trajectories_path(film: Path) -> Path:
    """Path of the picture of trajectories that belongs to `film`.

    It is trajectories.png for a run's video.mp4; other videos have it under their own name.
    """
    return film.with_name("trajectories.png" if film.stem == "video" else f"{film.stem}_trajectories.png")


def averaged(picture: Frames, scale: int) -> Frames:
    """Shrink `picture` [height, width, 3] to 1 / `scale` of its size, which smooths the edges of a larger drawing.

    `scale` divides its sides.
    """
    if scale == 1:
        return picture
    height, width, channels = picture.shape
    squares = picture.reshape(height // scale, scale, width // scale, scale, channels)
    return ((squares.sum((1, 3), dtype=np.uint16) + scale * scale // 2) // (scale * scale)).astype(np.uint8)


def _fill(row: Frames, caption: str, film: Film) -> None:
    """Fill `row` [T, height, width, 3] with a film under its caption, the last frame repeated."""
    length = len(film.frames)
    row[:length] = PAPER
    episodes, height, width, _ = film.frames.shape[1:]
    rim = MARGIN - BORDER
    for number in range(episodes):
        column = row[:length, STRIP:, number * (width + 2 * MARGIN) : (number + 1) * (width + 2 * MARGIN)]
        for moment in np.flatnonzero(film.success[:, number]):  # a green border once the episode has succeeded
            column[moment, rim : height + 2 * MARGIN - rim, rim : width + 2 * MARGIN - rim] = SUCCESS
        column[:, MARGIN : MARGIN + height, MARGIN : MARGIN + width] = film.frames[:, number]
    for number_won in np.unique(successes := film.success.sum(1)):
        text = f"{caption}   {number_won} of {episodes}" if film.has_success else caption
        row[:length][successes == number_won, :STRIP] = _strip([text], row.shape[2], STRIP, 16)
    row[length:] = row[length - 1]


def _titles(titles: Sequence[str], width: int) -> Frames:
    """Column headings [height, width, 3]."""
    column = width // len(titles)
    lines = [textwrap.wrap(title, max(8, column // 7)) for title in titles]
    height = 16 * max(map(len, lines)) + 8
    return np.concatenate([_strip(text, column, height, 12) for text in lines], 1)


def _strip(lines: Sequence[str], width: int, height: int, size: int) -> Frames:
    """Light text on a dark background, [height, width, 3]."""
    image = Image.new("RGB", (width, height), PAPER)
    font = ImageFont.load_default(size)
    for number, line in enumerate(lines):
        ImageDraw.Draw(image).text((2 * MARGIN, 4 + 16 * number), line, fill=INK, font=font)
    return np.asarray(image)
