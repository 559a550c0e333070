"""In which precision networks compute."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import Enum

import torch


class Precision(Enum):
    """Precision of matrix products; trained weights, advantages and losses are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    def on(self, device: torch.device | str) -> AbstractContextManager[object]:
        """Context in which `device` computes with this precision."""
        # Autocast's cache would keep the weights as they were before an optimiser's step within the context.
        enabled = self is Precision.BFLOAT16
        return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=enabled, cache_enabled=False)
