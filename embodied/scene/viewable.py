"""What environments offer to the viewer: geometry once, poses at any time, pushes where the simulator can take them."""

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
    """A rigid body, by the name that people know it by."""

    name: str
    mesh: Mesh


@dataclass(frozen=True, eq=False)
class Scene:
    """The geometry of an environment: `bodies` B, and how to look at it.

    A camera at `eye` looks at `target`; a grid lies at the height `floor_m` and reaches as far as `reach_m` from the
    target. Lengths in m, world frame, z up. Bodies named in `pushable` take pushes; none if the simulator takes none.
    """

    bodies: tuple[Body, ...]
    eye: Point
    target: Point
    floor_m: float = 0.0
    reach_m: float = 2.0
    pushable: tuple[str, ...] = ()


class View(Protocol):
    """What N environments look like; it only reads them, but for `push`."""

    def scene(self, row: int) -> Scene:
        """The geometry of environment `row`; the same object as long as nothing but poses changes."""
        ...

    def poses(self, row: int) -> Array:
        """Where the bodies of `scene` are now, [B, 7]: position, m, and quaternion (w, x, y, z), world frame."""
        ...

    def push(self, row: int, body: str, change_m_s: Array) -> None:
        """Push a `pushable` body: if it were free, its velocity would change by `change_m_s` [3], world frame."""
        ...


@runtime_checkable
class Viewable(Protocol):
    """An Environment that can be viewed."""

    def view(self) -> View:
        """A view of it."""
        ...
