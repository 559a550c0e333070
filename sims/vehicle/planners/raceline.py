"""The raceline of least curvature (Heilmeier et al. 2019, Vehicle System Dynamics 58(10)), driven by pure pursuit.

Unlike a learned policy it reads the map and its pose on it. Letters: M tracks, P points of a line,
N observations, W points of a window ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.policy import Decision
from sims.vehicle.dynamics import GRAVITY
from sims.vehicle.episode import Mdp
from sims.vehicle.planners.pursuit import Numbers, PurePursuit
from sims.vehicle.vehicles import Vehicle
from sims.vehicle.worlds import SPLITS, worlds

ROUNDS = 6
STEPS = 12
"""Linearisations of the curvature, and solver steps of each quadratic programme."""
SHARES = (1.0, 0.5, 0.2, 0.05)
"""Candidate step lengths of a solver step, which uses the best."""
FINER = 4
"""Points of a raceline for each point of the centre line."""
EASE_M_S = 0.3
"""Largest reduction, m/s, of the commanded speed below the present one in a curve."""
WINDOW = 100
"""Number of points ahead for pure pursuit."""


@dataclass(frozen=True)
class RacelineNumbers:
    """Parameters of the planner; tuned on training worlds, see README.md.

    Attributes:
        margin_m: clearance between the outline and the walls.
        lateral_m_s2, driving_m_s2, braking_m_s2: accelerations; lateral and longitudinal ones share the grip.
        join: the look-ahead distance is at least this multiple of the distance from the line.
        early_s: the commanded speed is that of the point of the line that the vehicle reaches this much later.
        pursuit: parameters of the pure pursuit.
    """

    margin_m: float = 0.353
    lateral_m_s2: float = 6.45
    driving_m_s2: float = 4.89
    braking_m_s2: float = 5.28
    join: float = 1.25
    early_s: float = 0.192
    pursuit: Numbers = field(default_factory=lambda: Numbers(ahead_m=0.456, ahead_s=0.111))


class Raceline:
    """Drives the minimum-curvature line as fast as grip allows."""

    def __init__(self, contract: Contract, vehicle: Vehicle, mdp: Mdp, numbers: RacelineNumbers | None = None) -> None:
        self.contract = contract
        self.vehicle = vehicle
        self.mdp = mdp
        self.numbers = numbers or RacelineNumbers()
        self.pursuit = PurePursuit(contract, vehicle, self.numbers.pursuit)
        self.lines: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Steering angle and speed [N, H, 2] for the N observations; nothing is random."""
        place = observation["place"].cpu()
        middle, line, speeds = self._values(place[:, :2].long())
        position = place[:, None, 2:4].float()
        yaw = place[:, 4:].float()
        nearest = (middle - position).square().sum(2).argmin(1, keepdim=True)  # limits the next search to this part
        rows = torch.arange(len(position)).unsqueeze(1)
        candidates = (FINER * nearest + torch.arange(-4 * FINER, 4 * FINER + 1)) % line.shape[1]
        nearest = candidates.gather(1, (line[rows, candidates] - position).square().sum(2).argmin(1, keepdim=True))
        ahead = (nearest + torch.arange(WINDOW)) % line.shape[1]
        dx, dy = (line[rows, ahead] - position).unbind(2)
        route = torch.stack((yaw.cos() * dx + yaw.sin() * dy, yaw.cos() * dy - yaw.sin() * dx), 2)
        speed = observation["velocity"][:, 0].cpu()
        bend = self.pursuit.curvature(route, speed, self.numbers.join * route[:, 0].norm(dim=1))
        length = (route[:, 1:] - route[:, :-1]).norm(dim=2)
        along = (-route[:, 0, 0]).clamp_min(0.0)  # distance of the nearest point behind the vehicle
        arc = torch.cat((torch.zeros_like(length[:, :1]), length.cumsum(1)), 1)
        planned = _at(arc, speeds[rows, ahead], (along + self.numbers.early_s * speed).unsqueeze(1))[:, 0]
        safe = (self.numbers.lateral_m_s2 / bend.abs().clamp_min(1e-3)).sqrt()  # for its circle back to the line
        safe = torch.maximum(safe, speed - EASE_M_S)
        steering = self.pursuit.steering(bend) + self._understeer() * speed.square() * bend
        limit = self.vehicle.steering_rad
        actions = torch.stack((steering.clamp(-limit, limit), torch.minimum(planned, safe)), 1)
        actions = actions.to(observation.device or "cpu").unsqueeze(1).expand(-1, self.contract.horizon, -1)
        empty = TensorDict({}, batch_size=[len(actions)])
        return Decision(actions, empty, torch.zeros(len(actions), 1, 1, device=actions.device))

    def _understeer(self) -> float:
        """Understeer gradient: slip angle of the front minus the rear axle, rad per m/s^2."""
        v = self.vehicle
        return (1.0 / v.front_stiffness - 1.0 / v.rear_stiffness) / (v.friction * GRAVITY)

    def _values(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Centre line and raceline [N, P, 2] and speeds [N, P] of the worlds `keys` [N, 2] (split, number)."""
        requested = [tuple(key) for key in keys.tolist()]
        for split in range(len(SPLITS)):
            new = sorted({key[1] for key in requested if key[0] == split and key not in self.lines})
            if new:
                new_worlds = worlds(self.mdp, SPLITS[split], torch.tensor(new))
                middle = new_worlds["route"].double()
                wide = (new_worlds["segments"][:, : middle.shape[1], :2] - middle).norm(dim=2)
                line = least_curvature(middle, wide - 0.5 * self.vehicle.width_m - self.numbers.margin_m)
                line = _finer(line)
                speeds = self._speeds(line)
                self.lines |= {
                    (split, number): (middle[i].float(), line[i].float(), speeds[i].float())
                    for i, number in enumerate(new)
                }
        middle, line, speeds = (
            torch.stack(parts) for parts in zip(*(self.lines[key] for key in requested), strict=True)
        )
        return middle, line, speeds

    def _speeds(self, line: Tensor) -> Tensor:
        """The highest speeds [M, P] on closed lines [M, P, 2] within the vehicle's and the grip's limits, m/s."""
        numbers = self.numbers
        length = (line.roll(-1, 1) - line).norm(dim=2)
        bend = curvature(line).abs().clamp_min(1e-3)
        speed = (numbers.lateral_m_s2 / bend).sqrt().clamp_max(self.vehicle.speed_max_m_s)
        squared = speed.square()
        points = line.shape[1]
        # Forwards v'^2 <= v^2 + 2 a s, backwards the same with braking; a is the rest of the friction ellipse that
        # the lateral acceleration leaves: a_max sqrt(1 - (v^2 kappa / a_lat)^2).
        for backwards, most in ((False, numbers.driving_m_s2), (True, numbers.braking_m_s2)):
            for step in range(2 * points):  # the second lap continues from the first
                point = step % points
                successor = (step + 1) % points
                edge = point
                if backwards:
                    point, successor, edge = -point % points, -(point + 1) % points, -(point + 1) % points
                used = (squared[:, point] * bend[:, point] / numbers.lateral_m_s2).clamp_max(1.0)
                gain = 2.0 * most * (1.0 - used.square()).sqrt() * length[:, edge]
                squared[:, successor] = torch.minimum(squared[:, successor], squared[:, point] + gain)
        return squared.sqrt()


def least_curvature(middle: Tensor, room: Tensor) -> Tensor:
    """Closed lines [M, P, 2] of least squared curvature within `room` [M, P], m, of the closed lines `middle`.

    The curvature is linearised in the offsets to the left of `middle` and the quadratic programme solved, repeatedly.
    """
    tangent = middle.roll(-1, 1) - middle.roll(1, 1)
    tangent = tangent / tangent.norm(dim=2, keepdim=True)
    normal = torch.stack((-tangent[..., 1], tangent[..., 0]), 2)
    offset = torch.zeros_like(room)
    for _ in range(ROUNDS):
        bend, slope = _linearised(middle, normal, offset)
        matrix = slope.mT @ slope
        matrix = matrix + 1e-6 * matrix.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1) * torch.eye(room.shape[1])
        # |bend + slope (x - offset)|^2 / 2 = x' matrix x / 2 + start' x + constant.
        start = (slope.mT @ bend.unsqueeze(2))[..., 0] - (matrix @ offset.unsqueeze(2))[..., 0]
        offset = _box_programme(matrix, start, offset, room)
    return middle + offset.unsqueeze(2) * normal


def curvature(line: Tensor) -> Tensor:
    """Curvature of closed lines [..., P, 2], positive to the left, 1/m."""
    first = 0.5 * (line.roll(-1, -2) - line.roll(1, -2))
    second = line.roll(-1, -2) - 2.0 * line + line.roll(1, -2)
    # kappa = (x' y'' - y' x'') / (x'^2 + y'^2)^(3/2).
    cross = first[..., 0] * second[..., 1] - first[..., 1] * second[..., 0]
    return cross / first.square().sum(-1).pow(1.5)


def _finer(line: Tensor) -> Tensor:
    """Fourier interpolation of the closed line `line` [M, P, 2] at FINER times as many points."""
    waves = torch.fft.rfft(line, dim=1)
    points = line.shape[1]
    return FINER * torch.fft.irfft(waves, FINER * points, dim=1)


def _linearised(middle: Tensor, normal: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Curvature [M, P] weighted by the root of the segment length, and its Jacobian [M, P, P] by the offsets."""

    def weighed(offset: Tensor) -> Tensor:
        line = middle + offset.unsqueeze(-1) * normal
        return curvature(line) * (0.5 * (line.roll(-1, -2) - line.roll(1, -2))).norm(dim=-1).sqrt()

    points = offset.shape[1]
    step = 1e-5
    bend = weighed(offset)
    slope = torch.zeros(*offset.shape, points, dtype=offset.dtype)
    for each in range(4):  # a point only affects its neighbours, so that every fourth can be perturbed at once
        perturbation = torch.zeros(points, dtype=offset.dtype)
        perturbation[each::4] = step
        change = (weighed(offset + perturbation) - bend) / step
        for column in range(each, points, 4):
            near = torch.tensor([column - 1, column, column + 1]) % points
            slope[:, near, column] = change[:, near]
    return bend, slope


def _box_programme(matrix: Tensor, start: Tensor, x: Tensor, room: Tensor) -> Tensor:
    """Minimiser [M, P] of x' matrix x / 2 + start' x within +-`room`, by projected Newton steps."""

    def cost(x: Tensor) -> Tensor:
        return ((0.5 * (matrix @ x.unsqueeze(2))[..., 0] + start) * x).sum(1)

    for _ in range(STEPS):
        slope = (matrix @ x.unsqueeze(2))[..., 0] + start
        fixed = ((x <= -room) & (slope > 0.0)) | ((x >= room) & (slope < 0.0))
        free = (~fixed).to(matrix.dtype)
        reduced = matrix * free.unsqueeze(1) * free.unsqueeze(2) + torch.diag_embed(1.0 - free)
        step = torch.linalg.solve(reduced, -slope * free)
        candidates = torch.stack([torch.minimum(torch.maximum(x + share * step, -room), room) for share in SHARES])
        best = torch.stack([cost(each) for each in candidates]).argmin(0)
        x = candidates[best, torch.arange(len(x))]
    return x


def _at(arc: Tensor, values: Tensor, query: Tensor) -> Tensor:
    """Interpolation at `query` [N, 1] of `values` [N, W] at increasing arc lengths `arc` [N, W]."""
    index = torch.searchsorted(arc, query).clamp(1, arc.shape[1] - 1)
    before = arc.gather(1, index - 1)
    after = arc.gather(1, index)
    share = ((query - before) / (after - before)).clamp(0.0, 1.0)
    return values.gather(1, index - 1) + share * (values.gather(1, index) - values.gather(1, index - 1))
