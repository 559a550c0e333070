"""Precision of the computation of networks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import Enum

import torch

from embodied.errors import UserError


class Precision(Enum):
    """Precision of matrix products; trained weights, advantages and losses are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    def on(self, device: torch.device | str) -> AbstractContextManager[object]:
        """Context in which `device` computes with this precision."""
        # Autocast's cache would return the weights from before an optimiser's step within the context.
        enabled = self is Precision.BFLOAT16
        return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=enabled, cache_enabled=False)


def precision_of(training: Precision, own: Precision | None) -> Precision:
    """Precision in which a run trains a policy: its `own`, if it has one, or `training`.

    Raises:
        UserError: if both are set, of which one would have no effect.
    """
    if own is None:
        return training
    if training is Precision.BFLOAT16:
        raise UserError(
            "this policy has its own precision, in training and wherever it runs, so that precision=bfloat16 is of no "
            "use: use policy.precision=bfloat16 in its place"
        )
    return own
