"""Textures of a model, averaged down to the resolution of a picture."""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray


def textures(model: mujoco.MjModel, limit: int) -> list[NDArray[np.float32]]:
    """The model's textures [H, W, 3] from 0 to 1, none larger than `limit` pixels a side except the sky.

    Averaging replaces a graphics card's mipmaps: details finer than the image would only show as noise. In full size
    each of LIBERO's textures would take 64 MB.
    """
    result = []
    for index in range(model.ntex):
        shape = (model.tex_height[index], model.tex_width[index], model.tex_nchannel[index])
        first = model.tex_adr[index]
        pixels = model.tex_data[first : first + np.prod(shape)].reshape(shape)
        if model.tex_type[index] != mujoco.mjtTexture.mjTEXTURE_SKYBOX:
            pixels = shrink(pixels[: shape[1]], limit)  # cube faces are stacked; the first is used for all
        rgb = np.empty((*pixels.shape[:2], 3), dtype=np.float32)
        rgb[:] = pixels[..., :3] / np.float32(255)  # one channel is grey
        result.append(rgb)
    return result


def shrink(pixels: NDArray[np.uint8], limit: int) -> NDArray:
    """`pixels` [H, W, C] averaged over equal squares so that no side exceeds `limit`; the rest is cut off."""
    height, width, channels = pixels.shape
    step = -(-max(height, width) // limit)
    if step == 1:
        return pixels
    rows = height // step
    columns = width // step
    squares = pixels[: rows * step, : columns * step].reshape(rows, step, columns, step, channels)
    return squares.mean((1, 3))
