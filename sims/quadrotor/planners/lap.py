"""A fast lap through the gates of the race: a closed minimum-snap spline whose times, gates and turns are optimised.

Positions are splines of degree 7 with six continuous derivatives, which have the least snap between given points
(Mellinger and Kumar 2011, ICRA). By differential flatness they determine attitude, body rates and the thrust of every
rotor. The duration of all pieces is minimised by gradient descent with a penalty on rotors beyond their limits; each
gate is passed somewhere in its opening, and between two gates there is a free point.

Letters: S pieces of the spline, P samples of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sims.quadrotor.physics.airframes import GRAVITY, Airframe
from sims.quadrotor.tasks.race import HALF_OPENING_M, Gate

DEGREE = 7
SAMPLES = 24
"""Samples of a piece while optimising."""
FINER = 4
"""Factor by which the lap to follow has more samples."""
STEPS = 500
RATE = 0.05
"""Steps of Adam, and its learning rate."""
PENALTY = 30.0
"""Seconds per squared excess of a rotor's thrust, in units of the highest, averaged over samples; it grows to a hundred
times this value."""


@dataclass(frozen=True)
class Limits:
    """Limits of a lap; tuned on training starts, see README.md.

    Attributes:
        highest, lowest: thrust of a rotor as a share of its highest.
        opening: share of half an opening, from its middle, in which a gate is passed.
    """

    highest: float = 0.85
    lowest: float = 0.05
    opening: float = 0.5


@dataclass(frozen=True)
class Lap:
    """Samples of a closed lap at equal shares of each piece's time; all tensors are in the world, float64.

    Attributes:
        duration_s: duration of the lap.
        position, velocity, acceleration: [S * P, 3], from the first gate on, as many from each gate to the next.
        turning, spinning: [S * P, 3] angular velocity and acceleration of the rotors' thrust, rad/s, rad/s^2.
    """

    duration_s: float
    position: Tensor
    velocity: Tensor
    acceleration: Tensor
    turning: Tensor
    spinning: Tensor


def spline(points: Tensor, times: Tensor) -> Tensor:
    """Coefficients [S, 8, 3] of the closed minimum-snap spline through `points` [S, 3], m.

    Piece s begins at point s and takes `times` [S], s. The coefficients are of powers of the share of that time.
    """
    pieces = len(points)
    orders = range(DEGREE)
    # Derivatives of the powers at the end and at the beginning of a piece.
    ends = points.new_tensor([[math.perm(power, order) for power in range(DEGREE + 1)] for order in orders])
    starts = ends * torch.eye(DEGREE, DEGREE + 1, dtype=points.dtype)
    # In the share u = t / T of a piece, the derivative of order n in time is that in u times T^-n.
    scale = times.unsqueeze(1) ** -torch.arange(DEGREE, dtype=points.dtype)  # [S, 7]
    piece = torch.arange(pieces)
    following = (torch.arange(pieces) + 1) % pieces
    matrix = points.new_zeros(pieces, DEGREE + 1, pieces, DEGREE + 1)
    right_side = points.new_zeros(pieces, DEGREE + 1, 3)
    # Eight equations a piece: its end and its beginning are points (rows 0 and 1), and derivatives 1 to 6 at its end
    # equal those at the beginning of the following piece (rows 2 to 7).
    own = torch.cat(
        (ends[:1].expand(pieces, 1, -1), starts[:1].expand(pieces, 1, -1), scale[:, 1:, None] * ends[1:]), 1
    )
    matrix = matrix.index_put((piece, torch.arange(DEGREE + 1)[:, None], piece), own.transpose(0, 1))
    after = -scale[following, 1:, None] * starts[1:]
    rows = torch.arange(2, DEGREE + 1)[:, None]
    matrix = matrix.index_put((piece, rows, following), after.transpose(0, 1), accumulate=True)
    right_side = torch.cat((points[following].unsqueeze(1), points.unsqueeze(1), right_side[:, 2:]), 1)
    size = pieces * (DEGREE + 1)
    return torch.linalg.solve(matrix.reshape(size, size), right_side.reshape(size, 3)).view(pieces, DEGREE + 1, 3)


def derivatives(coefficients: Tensor, times: Tensor, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Position, velocity and acceleration [S * P, 3] at `samples` equal shares of each piece, from its beginning on."""
    share = torch.arange(samples, dtype=times.dtype) / samples
    powers = share.unsqueeze(1) ** torch.arange(DEGREE + 1, dtype=times.dtype)  # [P, 8]
    results = []
    for order in range(3):
        factors = powers.new_tensor([math.perm(power, order) for power in range(DEGREE + 1)])
        shifted = torch.cat((torch.zeros(samples, order, dtype=times.dtype), powers[:, : DEGREE + 1 - order]), 1)
        values = torch.einsum("pk,skx->spx", shifted * factors, coefficients)
        results.append((values / times.view(-1, 1, 1) ** order).flatten(0, 1))
    return results[0], results[1], results[2]


def thrust(velocity: Tensor, acceleration: Tensor, airframe: Airframe) -> Tensor:
    """Force [..., 3] of the rotors, N: along the body's z axis, with the drag that it has then."""
    # m (a + g z) = force - drag; the direction of the force, on which the drag depends, takes one fixed-point step.
    needed = airframe.mass_kg * (acceleration + acceleration.new_tensor([0.0, 0.0, GRAVITY]))
    sideways = needed + drag(velocity, torch.zeros_like(velocity), airframe)
    return needed + drag(velocity, sideways / sideways.norm(dim=-1, keepdim=True), airframe)


def drag(velocity: Tensor, up: Tensor, airframe: Airframe) -> Tensor:
    """Force [..., 3], N, that balances the drag at `velocity` with the body's z axis along `up`."""
    sideways = 0.5 * (airframe.drag_x + airframe.drag_y)  # whichever way the drone heads
    return sideways * velocity + (airframe.drag_z - sideways) * (velocity * up).sum(-1, keepdim=True) * up


def turned(up: Tensor, times: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Angular velocity and acceleration [S * P, 3] that turn `up` [S * P, 3] on a closed lap, without spin about it."""
    step = (times / samples).repeat_interleave(samples).unsqueeze(1)  # to the next sample
    before = step.roll(1, 0)
    whole = step + step.roll(1, 0)

    def slope(values: Tensor) -> Tensor:
        ahead = (values.roll(-1, 0) - values) / step
        behind = (values - values.roll(1, 0)) / before
        return (before * ahead + step * behind) / whole

    # omega = up x d(up)/dt.
    turning = torch.linalg.cross(up, slope(up))
    return turning, slope(turning)


def rotors(force: Tensor, spinning: Tensor, airframe: Airframe) -> tuple[Tensor, Tensor]:
    """The highest and the lowest thrust of a rotor [...], N, whichever way the drone heads."""
    inertia = max(airframe.inertia_x, airframe.inertia_y)
    arm = min(airframe.arm_x_m, airframe.arm_y_m)
    torque = inertia * spinning.norm(dim=-1)
    # A torque about x takes tau / (4 a) of each rotor. The worst axis is a diagonal, where x and y have tau / sqrt(2)
    # each, and one rotor contributes to both: 2 tau / (sqrt(2) 4 a) = sqrt(2) tau / (4 a).
    middle = 0.25 * force.norm(dim=-1)
    difference = torque * 2.0**0.5 / (4.0 * arm)
    return middle + difference, middle - difference


def fastest(track: Sequence[Gate], airframe: Airframe, limits: Limits) -> Lap:
    """Fastest lap, optimised by gradient descent from a slow one through the middles of all gates."""
    centres = torch.tensor([gate[:3] for gate in track], dtype=torch.float64)
    normals = torch.tensor([[*gate.normal, 0.0] for gate in track], dtype=torch.float64)
    aside = torch.stack((-normals[:, 1], normals[:, 0], torch.zeros(len(track), dtype=torch.float64)), 1)
    above = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).expand_as(aside)
    following = centres.roll(-1, 0)
    # A turn's first guess leaves a gate and meets the next one along their headings.
    reach = 0.25 * (following - centres).norm(dim=1, keepdim=True)
    between = 0.5 * (centres + reach * normals + following - reach * normals.roll(-1, 0))
    lengths = torch.stack(((between - centres).norm(dim=1), (following - between).norm(dim=1)), 1).flatten()
    offsets = torch.zeros(len(track), 2, dtype=torch.float64, requires_grad=True)
    shifts = torch.zeros_like(between, requires_grad=True)
    log_times = (lengths / 4.0).log().requires_grad_()
    full = airframe.thrust_0_n + airframe.thrust_1_n + airframe.thrust_2_n
    optimiser = torch.optim.Adam([offsets, shifts, log_times], RATE)

    def pieces() -> tuple[Tensor, Tensor]:
        passages = centres + limits.opening * HALF_OPENING_M * (
            offsets[:, :1].tanh() * aside + offsets[:, 1:].tanh() * above
        )
        points = torch.stack((passages, between + shifts), 1).flatten(0, 1)
        return spline(points, log_times.exp()), log_times.exp()

    for step in range(STEPS):
        optimiser.param_groups[0]["lr"] = RATE * (1.0 - step / STEPS)
        coefficients, times = pieces()
        _, velocity, acceleration = derivatives(coefficients, times, SAMPLES)
        force = thrust(velocity, acceleration, airframe)
        _, spinning = turned(force / force.norm(dim=1, keepdim=True), times, SAMPLES)
        high, low = rotors(force, spinning, airframe)
        excess = torch.stack((high / full - limits.highest, limits.lowest - low / full)).clamp_min(0.0)
        # Duration plus penalty: sum T + c_k mean((T_max / F - highest)+^2 + (lowest - T_min / F)+^2),
        # where F is the full thrust of a rotor.
        loss = times.sum() + PENALTY * 10.0 ** (2.0 * step / STEPS) * excess.square().sum(0).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        coefficients, times = pieces()
        return sampled(coefficients, times, airframe)


def sampled(coefficients: Tensor, times: Tensor, airframe: Airframe) -> Lap:
    """The lap of a spline with two pieces from each gate to the next, sampled."""
    samples = SAMPLES * FINER
    position, velocity, acceleration = derivatives(coefficients, times, samples)
    force = thrust(velocity, acceleration, airframe)
    up = force / force.norm(dim=1, keepdim=True)
    return Lap(float(times.sum()), position, velocity, acceleration, *turned(up, times, samples))
