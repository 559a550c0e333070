"""Interface of environments to the viewer: geometry once, poses at any time, pushes where supported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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


class View(Protocol):
    """View of N environments, which only reads them, except for `push`."""

    def scene(self, row: int) -> Scene:
        """Geometry of environment `row`; the same object while only poses change."""
        ...

    def poses(self, row: int) -> Array:
        """Current poses of the bodies of `scene`, [B, 7]: position, m, and quaternion (w, x, y, z), world frame."""
        ...

    def push(self, row: int, body: str, change_m_s: Array) -> None:
        """Push a `pushable` body: if it were free, its velocity would change by `change_m_s` [3], world frame."""
        ...


@runtime_checkable
class Viewable(Protocol):
    """An Environment that can be viewed."""

    def view(self) -> View:
        """View of the environment."""
        ...
