"""Interface of environments to the viewer: geometry once, poses at any time, pushes where supported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodied.scene.shapes import Mesh

Array = NDArray[np.floating]
Point = tuple[float, float, float]


@dataclass(frozen=True, eq=False)
class Body:
    """Rigid body with a name for people."""

    name: str
    mesh: Mesh


@dataclass(frozen=True, eq=False)
class Scene:
    """Geometry of an environment: `bodies` B, and a camera.

    A camera at `eye` looks at `target`; a grid lies at the height `floor_m` and reaches as far as `reach_m` from the
    target. Lengths in m, world frame, z up. Bodies named in `pushable` can be pushed, none in some simulators.
    """

    bodies: tuple[Body, ...]
    eye: Point
    target: Point
    floor_m: float = 0.0
    reach_m: float = 2.0
    pushable: tuple[str, ...] = ()


class View(ABC):
    """View of N environments, which only reads them, except for `push`."""

    @abstractmethod
    def scene(self, row: int) -> Scene:
        """Geometry of environment `row`; the same object while only poses change."""

    @abstractmethod
    def poses(self, row: int) -> Array:
        """Current poses of the bodies of `scene`, [B, 7]: position, m, and quaternion (w, x, y, z), world frame."""

    @abstractmethod
    def push(self, row: int, body: str, change_m_s: Array) -> None:
        """Push a `pushable` body: if it were free, its velocity would change by `change_m_s` [3], world frame."""


def view(env: object) -> View | None:
    """View of an environment with a method `view`; None if it cannot be viewed."""
    make = getattr(env, "view", None)
    return make() if make else None
