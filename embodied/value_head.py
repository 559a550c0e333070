"""Outputs of a value network: scalars, or categorical values (HL-Gauss).

Critics of executed chunks and the value and advantage networks of policies have such a head. Source of the categorical
one: Stop Regressing (arXiv 2403.03950). Differs from the paper: targets outside the range of the bins are clamped to
it; learners report their share as `clamped_targets`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated

import torch
from torch import Tensor

from embodied.configuration import Configuration, FiniteFloat, PositiveFloat, Range
from embodied.errors import UserError


class CriticHead(Enum):
    """Output of a critic: SCALAR, trained by the squared error, or HL_GAUSS, a distribution over bins of values."""

    SCALAR = "scalar"
    HL_GAUSS = "hl_gauss"


@dataclass
class ValueHead(Configuration):
    """Kind of values.

    A `head` of kind hl_gauss divides values from `value_low` to `value_high` into `bins`; targets are smoothed by a
    normal distribution of deviation `smoothing`, in widths of a bin.
    """

    head: CriticHead = CriticHead.SCALAR
    bins: Annotated[int, Range(at_least=2)] = 101
    value_low: FiniteFloat | None = None
    value_high: FiniteFloat | None = None
    smoothing: PositiveFloat = 0.75

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are out of range or do not go together."""
        super().__post_init__()
        low = self.value_low
        high = self.value_high
        if self.head is CriticHead.SCALAR and (low is not None or high is not None):
            raise UserError("expected head=hl_gauss with value_low and value_high, got head=scalar")
        if self.head is CriticHead.HL_GAUSS and (low is None or high is None or low >= high):
            raise UserError(f"expected value_low < value_high with head=hl_gauss, got {low} and {high}")

    @property
    def categorical(self) -> bool:
        """Whether values are distributions over bins."""
        return self.head is not CriticHead.SCALAR

    @property
    def limits(self) -> tuple[float, float]:
        """Smallest and largest value of a categorical head."""
        assert self.value_low is not None
        assert self.value_high is not None
        return self.value_low, self.value_high

    @property
    def outputs(self) -> int:
        """Number of outputs O of the network: 1, or the number of bins."""
        return self.bins if self.categorical else 1

    def of_differences(self) -> ValueHead:
        """Head for differences of two such values, as advantages are."""
        if not self.categorical:
            return self
        low, high = self.limits
        return replace(self, value_low=low - high, value_high=high - low)

    def values(self, outputs: Tensor) -> Tensor:
        """Values [...] from `outputs` [..., O]."""
        if not self.categorical:
            return outputs.squeeze(-1)
        edges = self._edges(outputs.device)
        # V = sum_k p_k c_k over the centres of the bins
        return outputs.float().softmax(-1) @ ((edges[1:] + edges[:-1]) / 2)

    def errors(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Errors [...] of `outputs` [..., O] from `target` [...]: squared, or cross-entropies of a categorical head."""
        if not self.categorical:
            # (V - y)^2
            return (outputs.squeeze(-1) - target).square()
        # -sum_k p_k(y) log softmax(z)_k
        return -(self.histogram(target) * outputs.float().log_softmax(-1)).sum(-1)

    def histogram(self, target: Tensor) -> Tensor:
        """Probabilities [..., bins] of the bins for `target` [...]: those of N(y, sigma^2) within the range."""
        low, high = self.limits
        sigma = self.smoothing * (high - low) / self.bins
        # p_k = (Phi((e_{k+1} - y) / sigma) - Phi((e_k - y) / sigma)) / (Phi of the last edge - Phi of the first)
        offsets = self._edges(target.device) - target.float().clamp(low, high).unsqueeze(-1)
        cumulative = torch.special.ndtr(offsets / sigma)
        return cumulative.diff(dim=-1) / (cumulative[..., -1:] - cumulative[..., :1])

    def outside(self, target: Tensor) -> Tensor:
        """Which entries of `target` [...] are outside the values that a categorical head represents: 1 or 0."""
        low, high = self.limits
        return ((target < low) | (target > high)).float()

    def _edges(self, device: torch.device) -> Tensor:
        """Edges [bins + 1] of the bins."""
        return torch.linspace(*self.limits, self.bins + 1, device=device)
