"""Random changes of pictures for a supervised loss: shifts and colours, one draw for each picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor, nn


@dataclass(frozen=True)
class PictureChanges:
    """Augmentation: shifts of pictures `keys` by up to `shift` pixels; colours scaled by 1 +- `colour`."""

    keys: Sequence[str]
    shift: int
    colour: float

    def __call__(self, observation: TensorDict, actions: Tensor) -> tuple[TensorDict, Tensor]:
        """Change the pictures, uint8 [N, height, width, 3]; actions are unchanged."""
        changed = observation.clone(recurse=False)
        for key in self.keys:
            picture = shifted(observation[key], self.shift) if self.shift else observation[key]
            changed[key] = recoloured(picture, self.colour) if self.colour else picture
        return changed, actions


def shifted(picture: Tensor, most: int) -> Tensor:
    """Move pictures [N, height, width, 3] by whole pixels, up to `most`; the border repeats (arXiv 2004.13649)."""
    n, height, width, _ = picture.shape
    padded = nn.functional.pad(picture.movedim(-1, 1).float(), (most,) * 4, mode="replicate").to(picture.dtype)
    rows, columns = (
        torch.randint(2 * most + 1, (n, 1), device=picture.device) + torch.arange(side, device=picture.device)
        for side in (height, width)
    )
    index = torch.arange(n, device=picture.device)[:, None, None]
    return padded.movedim(1, -1)[index, rows[:, :, None], columns[:, None, :]]


def recoloured(picture: Tensor, most: float) -> Tensor:
    """Scale brightness, contrast and saturation of pictures uint8 [N, height, width, 3], each by up to `most`."""
    scale = 1.0 + most * (2.0 * torch.rand(3, len(picture), 1, 1, 1, device=picture.device) - 1.0)
    colours = picture.float() * scale[0]
    mean = colours.mean((1, 2, 3), keepdim=True)
    # contrast scales the distance from the picture's mean
    colours = mean + scale[1] * (colours - mean)
    # saturation scales the distance from grey
    grey = colours.mean(-1, keepdim=True)
    return (grey + scale[2] * (colours - grey)).clamp(0.0, 255.0).to(picture.dtype)
