"""Lidar and contact with circles and segments in torch: reference of the compiled code, and used on CUDA.

Circles are [N, C, 3] (centre x, y, radius), segments [N, S, 4] (x, y of both ends), m, world.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from embodied.configuration import Configuration, NonNegativeFloat, PositiveFloat, Range
from sims.counter_rng import COUNTER, GOLDEN, mix

FAR_M = 1e6
"""Position, m, of unused shapes, which pad worlds to the same number."""
# sum of four uniform bytes
BYTES_MEAN = 510.0
BYTES_STD = 147.8


@dataclass(frozen=True)
class Lidar(Configuration):
    """A planar lidar: `beams` over `field_rad` around the front, from right to left; `noise_m` is a standard deviation.

    In a full circle the last beam is one spacing before the first, else both ends of the field have a beam.
    """

    beams: Annotated[int, Range(at_least=2)] = 64
    field_rad: Annotated[float, Range(above=0, at_most=2.0 * math.pi + 1e-6)] = 2.0 * math.pi
    range_m: PositiveFloat = 10.0
    noise_m: NonNegativeFloat = 0.01

    @property
    def spacing_rad(self) -> float:
        """Angle between neighbouring beams."""
        return self.field_rad / (self.beams if self.field_rad > 6.28 else self.beams - 1)

    def angles(self) -> Tensor:
        """Angles of the beams from the front, rad, [beams]."""
        return -0.5 * self.field_rad + self.spacing_rad * torch.arange(self.beams)


def cast(origin: Tensor, angles: Tensor, circles: Tensor, segments: Tensor, range_m: float) -> Tensor:
    """Distance [N, B] from `origin` [N, 2] to the first shape in the directions `angles` [N, B] (rad, world).

    The distance is `range_m` if there is no shape. A circle that contains the origin is ignored.
    """
    direction = torch.stack((angles.cos(), angles.sin()), -1).unsqueeze(2)  # [N, B, 1, 2]
    far = torch.full((), range_m, device=origin.device)
    centre = (circles[..., :2] - origin.unsqueeze(1)).unsqueeze(1)  # [N, 1, C, 2]
    # Circle: t = along - sqrt(r^2 - aside^2), the nearer intersection of the beam with it.
    aside = _cross(direction, centre)
    along = (direction * centre).sum(-1)
    room = circles[..., 2].square().unsqueeze(1) - aside.square()
    near = along - room.clamp_min(0.0).sqrt()
    hits = torch.where((room >= 0.0) & (near > 0.0), near, far).amin(-1) if circles.shape[1] else far
    first = (segments[..., :2] - origin.unsqueeze(1)).unsqueeze(1)  # [N, 1, S, 2]
    edge = (segments[..., 2:] - segments[..., :2]).unsqueeze(1)
    crossing = _cross(direction, edge)
    crossing = torch.where(crossing.abs() < 1e-12, 1e-12, crossing)
    # Segment: t d = first + share edge, solved by Cramer's rule.
    distance = _cross(first, edge) / crossing
    share = _cross(first, direction) / crossing
    intersects = (distance > 0.0) & (share >= 0.0) & (share <= 1.0)
    wall_hits = torch.where(intersects, distance, far).amin(-1)
    return torch.minimum(torch.minimum(hits, wall_hits), far)


def noisy(ranges: Tensor, key: Tensor, steps: Tensor, lidar: Lidar) -> Tensor:
    """Ranges [N, B] with noise on hits; a function of `key` [N] and control `steps` [N] only.

    The noise is a sum of four uniform bytes of a counter-based generator: nearly normal, within 3.5 standard
    deviations.
    """
    draw = mix(key.long() + steps.long() * COUNTER).unsqueeze(1)
    words = mix(draw ^ ((torch.arange(ranges.shape[1], device=ranges.device) + 1) * GOLDEN & 0xFFFFFFFF))
    # A sum of four uniform bytes has mean 4 * 127.5 = 510 and deviation sqrt(4 (256^2 - 1) / 12) = 147.8.
    total = sum((words >> shift) & 0xFF for shift in (0, 8, 16, 24))
    noisy_ranges = ranges + (total.float() - BYTES_MEAN) * (lidar.noise_m / BYTES_STD)
    return torch.where(ranges < lidar.range_m, noisy_ranges.clamp(0.0, lidar.range_m), ranges)


def touching(pose: Tensor, half: Tensor, circles: Tensor, segments: Tensor) -> Tensor:
    """Whether rectangles at `pose` [N, 3] of half length and width `half` [N, 2] meet a shape, [N] bool."""
    cos = pose[:, 2].cos().unsqueeze(1)
    sin = pose[:, 2].sin().unsqueeze(1)

    def to_base(points: Tensor) -> Tensor:
        dx = points[..., 0] - pose[:, :1]
        dy = points[..., 1] - pose[:, 1:2]
        return torch.stack((cos * dx + sin * dy, cos * dy - sin * dx), -1)

    size = half.unsqueeze(1)
    outside = (to_base(circles[..., :2]).abs() - size).clamp_min(0.0)
    round_hit = (outside.square().sum(-1) < circles[..., 2].square()).any(1)
    first = to_base(segments[..., :2])
    last = to_base(segments[..., 2:])
    edge = last - first
    # Liang-Barsky: the part of each segment between both pairs of sides is not empty.
    edge = torch.where(edge.abs() < 1e-9, 1e-9, edge)
    one = (-size - first) / edge
    two = (size - first) / edge
    enter = torch.minimum(one, two).amax(-1).clamp_min(0.0)
    leave = torch.maximum(one, two).amin(-1).clamp_max(1.0)
    return round_hit | (enter <= leave).any(1)


def _cross(first: Tensor, second: Tensor) -> Tensor:
    return first[..., 0] * second[..., 1] - first[..., 1] * second[..., 0]
