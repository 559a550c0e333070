"""Outputs of a value network: scalars, or categorical values (HL-Gauss, C51).

Critics of executed chunks and the value and advantage networks of policies have such a head. Sources of the categorical
ones: Stop Regressing (arXiv 2403.03950); C51 (arXiv 1707.06887). Differs from Stop Regressing: targets outside the
range of the bins are clamped to it; learners report their share as `clamped_targets`.
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
    """Output of a critic: SCALAR, trained by the squared error, or a distribution over bins of values.

    A target of HL_GAUSS is a normal distribution around a value. That of C51 is a distribution of returns, or a value
    that is divided between its two neighbours.
    """

    SCALAR = "scalar"
    HL_GAUSS = "hl_gauss"
    C51 = "c51"


@dataclass
class ValueHead(Configuration):
    """Kind of values.

    A `head` of kind hl_gauss divides values from `value_low` to `value_high` into `bins`; targets are smoothed by a
    normal distribution of deviation `smoothing`, in widths of a bin. One of kind c51 has as many atoms from
    `value_low` to `value_high`.
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
            raise UserError("expected head=hl_gauss or c51 with value_low and value_high, got head=scalar")
        if self.categorical and (low is None or high is None or low >= high):
            raise UserError(f"expected value_low < value_high with head={self.head.value}, got {low} and {high}")

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
        """Head for differences of two such values, as advantages are, and for the values themselves, as qc ranks by."""
        if not self.categorical:
            return self
        low, high = self.limits
        return replace(self, value_low=min(low, low - high), value_high=max(high, high - low))

    def values(self, outputs: Tensor) -> Tensor:
        """Values [...] from `outputs` [..., O]."""
        if not self.categorical:
            return outputs.squeeze(-1)
        # V = sum_k p_k c_k over the centres of the bins
        return outputs.float().softmax(-1) @ self.centres(outputs.device)

    def errors(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Errors [...] of `outputs` [..., O] from `target` [...]: squared, or cross-entropies of a categorical head.

        The target of a categorical head may also be a distribution [..., bins], of one axis more.
        """
        if not self.categorical:
            # (V - y)^2
            return (outputs.squeeze(-1) - target).square()
        probabilities = target if target.ndim == outputs.ndim else self.histogram(target)
        # -sum_k p_k(y) log softmax(z)_k
        return -(probabilities * outputs.float().log_softmax(-1)).sum(-1)

    def histogram(self, target: Tensor) -> Tensor:
        """Probabilities [..., bins] of the bins for values `target` [...].

        HL-Gauss: those of N(y, sigma^2) within the range. C51: those of the two neighbours of y.
        """
        if self.head is CriticHead.C51:
            return self.projected(target.unsqueeze(-1), torch.ones_like(target).unsqueeze(-1))
        low, high = self.limits
        sigma = self.smoothing * (high - low) / self.bins
        # p_k = (Phi((e_{k+1} - y) / sigma) - Phi((e_k - y) / sigma)) / (Phi of the last edge - Phi of the first)
        offsets = self._edges(target.device) - target.float().clamp(low, high).unsqueeze(-1)
        cumulative = torch.special.ndtr(offsets / sigma)
        return cumulative.diff(dim=-1) / (cumulative[..., -1:] - cumulative[..., :1])

    def projected(self, atoms: Tensor, probabilities: Tensor) -> Tensor:
        """Distribution [..., bins] over C51's atoms, from `probabilities` [..., J] of other `atoms` [..., J]."""
        low, high = self.limits
        # b = (clip(z) - low) / width of a bin; its mass goes to floor(b) and floor(b) + 1
        position = (atoms.clamp(low, high) - low) * ((self.bins - 1) / (high - low))
        lower = position.floor().clamp_max(self.bins - 2)
        share = position - lower
        index = lower.nan_to_num().long()
        distribution = probabilities.new_zeros(*probabilities.shape[:-1], self.bins)
        distribution.scatter_add_(-1, index, probabilities * (1.0 - share))
        return distribution.scatter_add_(-1, index + 1, probabilities * share)

    def centres(self, device: torch.device) -> Tensor:
        """Value [bins] that each bin stands for."""
        if self.head is CriticHead.C51:
            return torch.linspace(*self.limits, self.bins, device=device)
        edges = self._edges(device)
        return (edges[1:] + edges[:-1]) / 2

    def outside(self, target: Tensor) -> Tensor:
        """Which entries of `target` [...] are outside the values that a categorical head represents: 1 or 0."""
        low, high = self.limits
        return ((target < low) | (target > high)).float()

    def _edges(self, device: torch.device) -> Tensor:
        """Edges [bins + 1] of the bins."""
        return torch.linspace(*self.limits, self.bins + 1, device=device)
