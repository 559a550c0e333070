"""The only module that converts frames and units, between the conventions of ROS, PX4 and this package's contracts.

World: ENU (x east, y north, z up) here and in ROS, NED (x north, y east, z down) in PX4. Body: FLU (x forward, y left,
z up) here and in ROS, FRD (x forward, y right, z down) in PX4 (REP 103). Quaternions rotate body vectors into the
world; here they are (w, x, y, z) as in PX4, in ROS messages (x, y, z, w). All functions take arrays [..., 3], [..., 4]
or [..., 3, 3] and compute in double precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from embodied.errors import UserError

Array = NDArray[np.float64]
HALF = np.sqrt(0.5)


def world_ned_enu(vector: ArrayLike) -> Array:
    """Convert a world vector [..., 3] from NED to ENU, or from ENU to NED."""
    x, y, z = _parts(vector, 3)
    return np.stack((y, x, -z), -1)  # its own inverse


def body_frd_flu(vector: ArrayLike) -> Array:
    """Convert a body vector or body rate [..., 3] from FRD to FLU, or from FLU to FRD."""
    x, y, z = _parts(vector, 3)
    return np.stack((x, -y, -z), -1)  # its own inverse


def attitude_ned_enu(quaternion: ArrayLike) -> Array:
    """Convert an attitude (w, x, y, z) [..., 4] of FRD in NED to FLU in ENU, or back."""
    # q_enu_flu = q_enu_ned * q * q_frd_flu with q_enu_ned = (0, 1, 1, 0) / sqrt(2) and q_frd_flu = (0, 1, 0, 0),
    # up to the sign of q
    w, x, y, z = _parts(quaternion, 4)
    return HALF * np.stack((w + z, x + y, x - y, w - z), -1)


def wxyz(xyzw: ArrayLike) -> Array:
    """Convert ROS's quaternion order [..., 4] to ours."""
    x, y, z, w = _parts(xyzw, 4)
    return np.stack((w, x, y, z), -1)


def xyzw(wxyz: ArrayLike) -> Array:
    """Convert our quaternion order [..., 4] to ROS's."""
    w, x, y, z = _parts(wxyz, 4)
    return np.stack((x, y, z, w), -1)


def matrix(quaternion: ArrayLike) -> Array:
    """Rotation matrix [..., 3, 3] of a quaternion (w, x, y, z) [..., 4], which is normalised first.

    Raises:
        UserError: for a quaternion that is not finite or far from unit length, as in a message that was not set.
    """
    values = np.asarray(quaternion, np.float64)
    length = np.linalg.norm(values, axis=-1, keepdims=True)
    if not (np.abs(length - 1.0) < 0.1).all():  # false for nan
        raise UserError(f"expected unit quaternions, got {values.tolist()}; is the sender's orientation filled in?")
    w, x, y, z = np.moveaxis(values / length, -1, 0)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return np.stack([np.stack(row, -1) for row in rows], -2)


def quaternion(rotation: ArrayLike) -> Array:
    """Quaternion (w, x, y, z) [..., 4], w >= 0, of a rotation matrix [..., 3, 3]."""
    m = np.asarray(rotation, np.float64)
    xx = m[..., 0, 0]
    yy = m[..., 1, 1]
    zz = m[..., 2, 2]
    # Four times each product of two elements; the column with the largest square loses no digits (Shepperd 1978).
    squares = np.stack((1 + xx + yy + zz, 1 + xx - yy - zz, 1 - xx + yy - zz, 1 - xx - yy + zz), -1)
    wx = m[..., 2, 1] - m[..., 1, 2]
    wy = m[..., 0, 2] - m[..., 2, 0]
    wz = m[..., 1, 0] - m[..., 0, 1]
    xy = m[..., 0, 1] + m[..., 1, 0]
    xz = m[..., 0, 2] + m[..., 2, 0]
    yz = m[..., 1, 2] + m[..., 2, 1]
    table = np.stack(
        [
            np.stack((squares[..., 0], wx, wy, wz), -1),
            np.stack((wx, squares[..., 1], xy, xz), -1),
            np.stack((wy, xy, squares[..., 2], yz), -1),
            np.stack((wz, xz, yz, squares[..., 3]), -1),
        ],
        -2,
    )
    best = np.take_along_axis(table, squares.argmax(-1)[..., None, None], -2)[..., 0, :]
    best = best / np.linalg.norm(best, axis=-1, keepdims=True)
    return np.where(best[..., :1] < 0, -best, best)


def two_columns(rotation: ArrayLike) -> Array:
    """The first two columns of a rotation matrix [..., 3, 3], concatenated to [..., 6]."""
    m = np.asarray(rotation, np.float64)
    return np.concatenate((m[..., 0], m[..., 1]), -1)


def from_two_columns(columns: ArrayLike) -> Array:
    """The rotation matrix [..., 3, 3] whose first two columns are [..., 6]."""
    # the third column is the cross product of the first two
    c = np.asarray(columns, np.float64)
    return np.stack((c[..., :3], c[..., 3:], np.cross(c[..., :3], c[..., 3:])), -1)


def to_world(rotation: ArrayLike, body: ArrayLike) -> Array:
    """A body vector [..., 3] in the world's axes, by the body's rotation matrix [..., 3, 3]."""
    return np.einsum("...ij,...j->...i", np.asarray(rotation, np.float64), np.asarray(body, np.float64))


def to_body(rotation: ArrayLike, world: ArrayLike) -> Array:
    """A world vector [..., 3] in the body's axes, by the body's rotation matrix [..., 3, 3]."""
    return np.einsum("...ji,...j->...i", np.asarray(rotation, np.float64), np.asarray(world, np.float64))


def thrust_of_rotor(action: ArrayLike) -> Array:
    """Normalised thrust in [0, 1] of a rotor set-point in [-1, 1]: thrust = ((1 + set-point) / 2)^2, speed squared."""
    return np.square(0.5 * (np.asarray(action, np.float64) + 1.0))


def rotor_of_thrust(thrust: ArrayLike) -> Array:
    """Rotor set-point in [-1, 1] of a normalised thrust in [0, 1], the inverse of `thrust_of_rotor`."""
    return 2.0 * np.sqrt(np.asarray(thrust, np.float64)) - 1.0


def _parts(values: ArrayLike, size: int) -> Sequence[Array]:
    vectors = np.asarray(values, np.float64)
    if vectors.shape[-1:] != (size,):
        raise ValueError(f"expected {size} elements on the last axis, got shape {vectors.shape}")
    return [vectors[..., index] for index in range(size)]
