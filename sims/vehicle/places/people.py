"""People who walk back and forth in rooms, by social forces (Helbing and Molnar 1995, circular form).

Each accelerates towards the end of its line at its own pace, away from others, the vehicle and walls. Letters: M
worlds, N vehicles, P people, C circles, S segments.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sims.vehicle.geometry import FAR_M
from sims.vehicle.worlds import Array

RADIUS_M = 0.25
VEHICLE_M = 0.35
"""Radius of a person, and of the disc that stands for the vehicle in their forces."""
PACE_M_S = 0.4, 1.0
"""Slowest and fastest pace."""
RELAXATION_S = 0.5
PUSH_M_S2 = 3.0
REACH_M = 0.3
WALL_M_S2 = 5.0
WALL_REACH_M = 0.1
"""Time constant of the pace; acceleration at contact with others and its range; the same for walls."""
SHORTEST_M = 2.5
CLEAR_M = 0.45
AWAY_M = 1.5
"""Smallest length of their lines, clearance of shapes, and distance of the first end from the vehicle's start."""
TRIED = 96
POINTS = 24
"""Number of random candidate lines, and number of tested points of a line."""
STATE = 5
"""Elements of a person's state: position, velocity, and the end that it walks to (0 or 1)."""


def lines(rng: np.random.Generator, worlds: dict[str, Array], most: int, half_m: float) -> dict[str, Array]:
    """Ends [M, P, 2, 2] of free lines in `worlds`, and paces [M, P], of up to P = `most` people in each world.

    The number is uniform from none to `most`, and smaller if no more lines are free; unused ones are far away.
    """
    circles = worlds["circles"]
    segments = worlds["segments"]
    start = worlds["pose"][:, :2]
    count = len(start)
    numbers = rng.integers(0, most + 1, count)
    ends = rng.uniform(-half_m + CLEAR_M, half_m - CLEAR_M, (count, TRIED, 2, 2))
    pace = rng.uniform(*PACE_M_S, (count, most))
    walks = np.full((count, most, 2, 2), FAR_M)
    shares = np.linspace(0.0, 1.0, POINTS)[:, None]
    eligible = np.linalg.norm(ends[:, :, 1] - ends[:, :, 0], axis=-1) > SHORTEST_M
    eligible &= np.linalg.norm(ends[:, :, 0] - start[:, None], axis=-1) > AWAY_M
    for row in range(count):
        first = ends[row, eligible[row], 0]
        second = ends[row, eligible[row], 1]
        points = (first[:, None] + shares * (second - first)[:, None]).reshape(-1, 2)
        clear = _clearance(points, circles[row], segments[row]).reshape(-1, POINTS).min(1) > CLEAR_M
        chosen = np.flatnonzero(clear)[: numbers[row]]
        walks[row, : len(chosen), 0] = first[chosen]
        walks[row, : len(chosen), 1] = second[chosen]
    return {"walks": walks, "pace": pace}


def begin(walks: Tensor) -> Tensor:
    """Initial states [N, P, STATE]: at rest, at the first ends of `walks` [N, P, 2, 2]."""
    state = torch.zeros(*walks.shape[:2], STATE, device=walks.device)
    state[..., :2] = walks[:, :, 0]
    state[..., 4] = 1.0
    return state


def circles(state: Tensor) -> Tensor:
    """People [N, P, STATE] as circles [N, P, 3]."""
    return torch.cat((state[..., :2], torch.full_like(state[..., :1], RADIUS_M)), -1)


def walk(
    state: Tensor, walks: Tensor, pace: Tensor, vehicle: Tensor, still: Tensor, segments: Tensor, dt_s: float
) -> Tensor:
    """States [N, P, STATE] of people after `dt_s`.

    Vehicles are at `vehicle` [N, 2]; `still` [N, C, 3] and `segments` [N, S, 4] are obstacles.
    """
    position = state[..., :2]
    velocity = state[..., 2:4]
    ahead = state[..., 4:]
    goal = torch.where(ahead > 0.5, walks[:, :, 1], walks[:, :, 0])
    to_goal = goal - position
    distance = to_goal.norm(dim=-1, keepdim=True)
    # Driving force (v_0 e - v) / tau, and repulsions A exp((r - d) / B) n of others, the vehicle and obstacles.
    force = (pace.unsqueeze(-1) * to_goal / distance.clamp_min(1e-6) - velocity) / RELAXATION_S
    separations = position.unsqueeze(2) - position.unsqueeze(1)
    force = force + _away(separations, 2.0 * RADIUS_M, PUSH_M_S2, REACH_M).sum(2)
    force = force + _away(position - vehicle.unsqueeze(1), RADIUS_M + VEHICLE_M, PUSH_M_S2, REACH_M)
    separation = position.unsqueeze(2) - still[:, None, :, :2]
    force = force + _away(separation, RADIUS_M + still[:, None, :, 2:], WALL_M_S2, WALL_REACH_M).sum(2)
    first = segments[:, None, :, :2]
    edge = (segments[..., 2:] - segments[..., :2]).unsqueeze(1)
    along = ((position.unsqueeze(2) - first) * edge).sum(-1, keepdim=True)
    share = along / edge.square().sum(-1, keepdim=True).clamp_min(1e-9)
    foot = first + share.clamp(0.0, 1.0) * edge
    force = force + _away(position.unsqueeze(2) - foot, RADIUS_M, WALL_M_S2, WALL_REACH_M).sum(2)
    velocity = velocity + dt_s * force
    overspeed = velocity.norm(dim=-1, keepdim=True) / (1.3 * pace.unsqueeze(-1))  # nobody runs
    velocity = velocity / overspeed.clamp_min(1.0)
    arrived = distance < 0.3
    ahead = torch.where(arrived, 1.0 - ahead, ahead)
    return torch.cat((position + dt_s * velocity, velocity, ahead), -1)


def _away(offset: Tensor, touching: Tensor | float, push: float, reach_m: float) -> Tensor:
    """Accelerations [..., 2] along `offset` [..., 2]: `push` at the distance `touching`, and 0 where `offset` is 0."""
    distance = offset.norm(dim=-1, keepdim=True)
    return push * ((touching - distance) / reach_m).clamp_max(2.0).exp() * offset / distance.clamp_min(1e-6)


def _clearance(points: Array, circles: Array, segments: Array) -> Array:
    """Distance [Q], m, of points [Q, 2] from the nearest of circles [C, 3] and segments [S, 4]."""
    used = circles[circles[:, 2] > 0.0]
    clearance = np.full(len(points), np.inf)
    if len(used):
        clearance = (np.linalg.norm(points[:, None] - used[:, :2], axis=-1) - used[:, 2]).min(1)
    sides = segments[np.abs(segments[:, 0]) < FAR_M / 2]
    edge = sides[:, 2:] - sides[:, :2]
    share = ((points[:, None] - sides[:, :2]) * edge).sum(-1) / np.maximum((edge * edge).sum(-1), 1e-9)
    foot = sides[:, :2] + np.clip(share, 0.0, 1.0)[..., None] * edge
    return np.minimum(clearance, np.linalg.norm(points[:, None] - foot, axis=-1).min(1))
