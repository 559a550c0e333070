"""Numbers of contacts and constraint rows in mujoco_warp, which allocates them once; MuJoCo's arena grows instead.

mujoco_warp's own defaults are 48 contacts and 64 rows a world, however many bodies a model has, and drop the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import mujoco
import mujoco_warp
import numpy as np
from numpy.typing import NDArray

OVERFLOW = int(
    mujoco_warp.OverflowType.ALL
    # Limits of iterations are reached regularly, and MuJoCo has the same limit for pairs with a height field.
    & ~(mujoco_warp.OverflowType.ITERATIONS | mujoco_warp.OverflowType.LS_ITERATIONS)
    & ~(mujoco_warp.OverflowType.EPA_HORIZON | mujoco_warp.OverflowType.HFIELD)
)
"""Bits of mujoco_warp's `Data.overflow` for worlds with too few contacts, constraint rows or sensor readings."""
NEIGHBOURS = 6
POINTS = 3
"""Estimated number of bodies that a body touches, with each pair counted once, and of contacts with each of them.

Heaps of 40 boxes, capsules or spheres had up to 197, 145 and 112 contacts; the estimates are 720, 480 and 240.
"""
ROUND = mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_ELLIPSOID
GROUND = mujoco.mjtGeom.mjGEOM_HFIELD, mujoco.mjtGeom.mjGEOM_SDF


class Capacity(NamedTuple):
    """Contacts and constraint rows of one world, by their names in `mujoco_warp.make_data`.

    All worlds share the contacts, so that one may have more where others have fewer.
    """

    nconmax: int
    njmax: int


def capacity(
    model: mujoco.MjModel, compiled: mujoco_warp.Model, contacts: int | None = None, resting: int = 0
) -> Capacity:
    """Capacity of a world of `model`, whose pairs of geoms that can touch are those of `compiled`.

    It suffices for all contacts of all pairs if they are few, else for contacts of every body with `NEIGHBOURS` others,
    and for twice the `resting` contacts, those of a state at rest. `contacts` replaces the estimate.
    """
    if contacts is None:
        contacts = max(1, _contacts(model, compiled), 2 * resting)
    dim = max((1, *model.geom_condim, *model.pair_dim, *model.flex_condim))
    pyramidal = model.opt.cone == mujoco.mjtCone.mjCONE_PYRAMIDAL and dim > 1
    rows = contacts * (2 * (dim - 1) if pyramidal else dim)
    others = 6 * model.neq + model.nflexedge + model.nv + model.njnt + 2 * model.ntendon  # equality, friction, limits
    return Capacity(int(contacts), int(rows + others))


def _contacts(model: mujoco.MjModel, compiled: mujoco_warp.Model) -> int:
    pairs = compiled.nxn_geom_pair_filtered.numpy().reshape(-1, 2)
    points = _points(model.geom_type[pairs])
    body = model.body_weldid[model.geom_bodyid[pairs]]
    with_one = np.zeros(model.nbody, dtype=np.int64)  # contacts of each body with one neighbour
    for side in range(2):
        np.maximum.at(with_one, body[:, side], np.minimum(points, POINTS))
    of_bodies = NEIGHBOURS * with_one[1:].sum()  # the first is the world
    return int(min(points.sum(), of_bodies)) + NEIGHBOURS * model.nflexvert


def _points(kinds: NDArray[np.int32]) -> NDArray[np.int64]:
    """Largest numbers of contacts [P] of pairs of geoms of `kinds` [P, 2]."""
    points = np.full(len(kinds), 8)
    points[(kinds == mujoco.mjtGeom.mjGEOM_CAPSULE).any(1)] = 2
    points[np.isin(kinds, ROUND).any(1)] = 1
    points[np.isin(kinds, GROUND).any(1)] = mujoco.mjMAXCONPAIR
    return points
