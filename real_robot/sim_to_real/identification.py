"""System identification: simulator parameters, with intervals, from a robot's measurements.

Flights and drives are cut into short segments, each simulated from its own initial state, which is estimated too
(multiple shooting), because measured starts are noisy and rotor or wheel speeds are not measured at all. Nonlinear
least squares by Gauss-Newton steps, halved until they decrease the cost; initial states are eliminated from each
(variable projection, Golub and Pereyra 1973, SIAM J. Numer. Anal. 10(2)). Intervals are 95% and valid for correlated
errors within a segment, which an inexact model has: the covariance is clustered by segment (Liang and Zeger 1986,
Biometrika 73(1)).

Letters: S segments of T steps, D past actions, P parameters, X elements of the state, Y measured numbers, B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.data.episodes import Episodes
from embodied.errors import UserError

Simulate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps parameters [B, P], initial states [B, X] and actions [B, D+T, A], the first D past, to [B, T+1, Y] measurements.
"""
Z95 = 1.959964
ITERATIONS = 40
DAMPING = 1e-6
HALVINGS = 12
CONVERGED = 1e-6
"""The search has converged if a step decreases the weighted squares by a smaller share."""
RIDGE = 1e-6
"""Ridge penalty: fixes directions of the initial state without effect, such as the length of a quaternion."""
STEP = 1e-5
"""Step of central differences, relative to a parameter's scale; absolute for states, of order one in SI units."""


@dataclass(frozen=True)
class Parameter:
    """A parameter to estimate: an initial guess of the right order of magnitude, and its bounds."""

    name: str
    initial: float
    low: float
    high: float

    def __post_init__(self) -> None:
        """Raise UserError if the guess is out of bounds."""
        if not self.low <= self.initial <= self.high or self.initial == 0.0:
            raise UserError(f"expected {self.name} between {self.low} and {self.high}, but not 0, got {self.initial}")


@dataclass(frozen=True, eq=False)
class Segments:
    """Measurements `measured` [S, T+1, Y] and `actions` [S, D+T, A], of which the first D precede the segment."""

    measured: Tensor
    actions: Tensor


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Identification:
    """Estimates by name, standard deviation of the residuals of each measured number [Y], and number of steps."""

    estimates: dict[str, Estimate]
    noise: Tensor
    iterations: int

    def values(self) -> list[float]:
        """The estimated values, in order."""
        return [estimate.value for estimate in self.estimates.values()]

    def summary(self) -> dict[str, Any]:
        """Return the estimates, noise and number of steps as JSON-ready values."""
        estimates = {name: asdict(estimate) for name, estimate in self.estimates.items()}
        return {"estimates": estimates, "noise": self.noise.tolist(), "iterations": self.iterations}


def cut(episodes: Iterable[Episodes], keys: Sequence[str], steps: int, past: int) -> Segments:
    """Cut episodes into segments of `steps`, each after `past` actions; `keys` are the compared observations.

    Raises:
        UserError: if no episode is long enough.
    """
    measurements = []
    actions = []
    for episode in episodes:
        rows = torch.cat([episode.observation[key].reshape(len(episode), -1) for key in keys], 1)
        for first in range(past, len(episode) - steps, steps):
            measurements.append(rows[first : first + steps + 1])
            actions.append(episode.actions[first - past : first + steps])
    if not measurements:
        raise UserError(f"expected more than {past + steps} periods without a break, got fewer")
    return Segments(torch.stack(measurements).double(), torch.stack(actions).double())


def identify(
    simulate: Simulate,
    parameters: Sequence[Parameter],
    segments: Segments,
    start: Tensor,
) -> Identification:
    """Estimate `parameters` from `segments`; `start` [S, X] are initial guesses of their initial states.

    Raises:
        UserError: if there are too few segments, the simulation is not finite, or a parameter has no effect.
    """
    if len(start) <= len(parameters):
        raise UserError(f"expected more segments than the {len(parameters)} parameters, got {len(start)}; record more")
    fit = _Fit(simulate, parameters, segments, start)
    iterations = fit.run()
    # the fit is in units of theta / scale
    deviation = fit.covariance().diagonal().sqrt() * fit.scale
    values = fit.theta.tolist()
    estimates = {
        parameter.name: Estimate(value, max(parameter.low, value - Z95 * std), min(parameter.high, value + Z95 * std))
        for parameter, value, std in zip(parameters, values, deviation.tolist(), strict=True)
    }
    return Identification(estimates, fit.noise, iterations)


def prediction_error(simulate: Simulate, values: Sequence[float], segments: Segments, start: Tensor) -> Tensor:
    """Root mean square error [Y] of the simulation at the ends of the segments, with parameters `values`.

    Initial states are estimated from the first half of each segment; `start` [S, X] are their initial guesses.
    """
    theta = torch.tensor(values, dtype=torch.float64)

    def constant(_: Tensor, start: Tensor, actions: Tensor) -> Tensor:
        return simulate(theta.expand(len(start), -1), start, actions)

    steps = segments.measured.shape[1] - 1
    rest = steps - steps // 2
    fit = _Fit(constant, (), Segments(segments.measured[:, :-rest], segments.actions[:, :-rest]), start)
    fit.run()
    predicted = constant(theta, fit.start, segments.actions)
    return (predicted[:, -1] - segments.measured[:, -1]).square().mean(0).sqrt()


class _Fit:
    """State of the search: `theta` [P], initial states `start` [S, X], `residual` [S, R]."""

    def __init__(self, simulate: Simulate, parameters: Sequence[Parameter], segments: Segments, start: Tensor) -> None:
        self.simulate = simulate
        self.segments = segments
        self.start = start.double()
        self.names = [parameter.name for parameter in parameters]
        self.theta = torch.tensor([parameter.initial for parameter in parameters], dtype=torch.float64)
        self.low = torch.tensor([parameter.low for parameter in parameters], dtype=torch.float64)
        self.high = torch.tensor([parameter.high for parameter in parameters], dtype=torch.float64)
        self.scale = self.theta.abs()
        self.residual = self._residual(self.theta, self.start)
        self._weigh()

    def run(self) -> int:
        """Step until converged; returns the number of steps."""
        iterations = 0
        while iterations < ITERATIONS and self.step() > CONVERGED:
            iterations += 1
        return iterations

    def step(self) -> float:
        """Take one descent step; return the relative decrease of the weighted squares, 0 if no step decreases them."""
        # Gauss-Newton on the projected problem: (sum J^T J + damping) step = sum J^T r
        slopes, offsets, rest = self._projected()
        curvature = torch.einsum("srp,srq->pq", slopes, slopes)
        self._check(curvature)
        damped = curvature + DAMPING * torch.diag(curvature.diagonal())
        change = torch.linalg.solve(damped, torch.einsum("srp,sr->p", slopes, rest))
        cost = self._cost(self.residual)
        # backtracking: halve the step until the cost decreases
        for halvings in range(HALVINGS):
            theta = self.theta + 0.5**halvings * change * self.scale
            theta = torch.minimum(torch.maximum(theta, self.low), self.high)
            start = self.start + 0.5**halvings * offsets(change)
            residual = self._residual(theta, start)
            if (new_cost := self._cost(residual)) < cost:
                self.theta = theta
                self.start = start
                self.residual = residual
                self._weigh()
                return 1.0 - new_cost / cost
        return 0.0

    def covariance(self) -> Tensor:
        """Covariance of theta in units of its scale, [P, P]."""
        # sandwich, clustered by segment: (J^T J)^-1 (sum_s g_s g_s^T) (J^T J)^-1 S / (S - P) with g_s = J_s^T r_s
        slopes, _, rest = self._projected()
        inverse = torch.linalg.inv(torch.einsum("srp,srq->pq", slopes, slopes))
        scores = torch.einsum("srp,sr->sp", slopes, rest)
        count = len(scores)
        return inverse @ (scores.T @ scores) @ inverse * count / (count - len(self.theta))

    def _projected(self) -> tuple[Tensor, Callable[[Tensor], Tensor], Tensor]:
        """Weighted Jacobian [S, R, P] and residual [S, R] without initial states, and the states' best change."""
        slopes, state_slopes = self._slopes()
        ridge = RIDGE**0.5 * torch.eye(self.start.shape[1], dtype=torch.float64).expand(len(self.start), -1, -1)
        # with QR of the initial states' slopes, (1 - q q^T) projects both onto what initial states cannot explain
        q, r = torch.linalg.qr(torch.cat((state_slopes, ridge), 1))
        rest = (self.residual * self.weight).unsqueeze(-1)
        stacked = torch.cat((slopes, rest), -1)
        # the ridge adds rows of zero residual below, [S, R + X, P + 1]
        padded = torch.cat((stacked, stacked.new_zeros(len(stacked), ridge.shape[1], stacked.shape[2])), 1)
        explained = q.mT @ padded
        unexplained = padded - q @ explained
        solved = torch.linalg.solve_triangular(r, explained, upper=True)  # [S, X, P + 1]

        def offsets(change: Tensor) -> Tensor:
            """Change of initial states [S, X] that is best for the `change` [P] of theta / scale."""
            return solved[..., -1] - solved[..., :-1] @ change

        return unexplained[..., :-1], offsets, unexplained[..., -1]

    def _slopes(self) -> tuple[Tensor, Tensor]:
        """Weighted derivatives of the measurements by theta / scale [S, R, P] and by initial states [S, R, X]."""
        P, (S, X) = len(self.theta), self.start.shape
        moves = torch.cat((torch.eye(P + X, dtype=torch.float64), -torch.eye(P + X, dtype=torch.float64))) * STEP
        # all 2 (P + X) perturbations of all segments in one batch: [2 (P + X) S, ...]
        theta = (self.theta + moves[:, :P] * self.scale).repeat_interleave(S, 0)
        start = (self.start + moves[:, None, P:]).flatten(0, 1)
        actions = self.segments.actions.repeat(len(moves), 1, 1)
        values = self.simulate(theta, start, actions).reshape(2, P + X, S, -1)
        # central differences: (f(x + h) - f(x - h)) / 2h
        slopes = ((values[0] - values[1]) / (2.0 * STEP)).permute(1, 2, 0) * self.weight.unsqueeze(-1)
        return slopes[..., :P], slopes[..., P:]

    def _residual(self, theta: Tensor, start: Tensor) -> Tensor:
        """Measured minus simulated numbers [S, R], R = (T + 1) Y."""
        predicted = self.simulate(theta.expand(len(start), -1), start, self.segments.actions)
        return (self.segments.measured - predicted).flatten(1)

    def _weigh(self) -> None:
        """Weight every measured number by the inverse of its residuals' standard deviation."""
        if not self.residual.isfinite().all():
            raise UserError("the simulation is not finite; start from a better guess, or use shorter segments")
        Y = self.segments.measured.shape[-1]
        residuals = self.residual.reshape(-1, Y)
        # degrees of freedom: numbers minus estimated initial states and parameters
        free = residuals.numel() - self.start.numel() - len(self.theta)
        self.noise = residuals.square().mean(0).sqrt() * (residuals.numel() / max(1, free)) ** 0.5
        # a lower bound of the noise keeps weights finite for a perfect fit
        smallest = 1e-6 * self.segments.measured.flatten(0, 1).std(0).clamp_min(1e-3)
        self.weight = (1.0 / torch.maximum(self.noise, smallest)).repeat(self.residual.shape[1] // Y)

    def _cost(self, residual: Tensor) -> float:
        cost = float((residual * self.weight).square().sum())
        return cost if np.isfinite(cost) else np.inf

    def _check(self, curvature: Tensor) -> None:
        """Raise UserError for parameters without an effect on the measurements."""
        flat = curvature.diagonal() <= 1e-9
        if flat.any():
            names = ", ".join(name for name, is_flat in zip(self.names, flat.tolist(), strict=True) if is_flat)
            raise UserError(f"no effect on the recorded data: {names}; leave out what has none, or record more motion")
