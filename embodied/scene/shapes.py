"""Triangles of simple solids, and binary glTF, which browsers draw. V vertices, F faces, lengths in m."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.floating]
SIDES = 24
"""Number of sides of round solids."""
GAMMA = 2.2
"""Exponent from screen colours to the linear light of glTF."""
FLOATS = 5126
BYTES = 5121
INDICES = 5125
"""Codes of types in glTF."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """Mesh of triangles: vertices [V, 3], their normals [V, 3] and colours [V, 4] from 0 to 1, and faces [F, 3]."""

    vertices: Array
    normals: Array
    colours: Array
    faces: NDArray[np.integer]

    def moved(self, position: ArrayLike, rotation: ArrayLike | None = None) -> Mesh:
        """Rotate the mesh by the matrix `rotation` [3, 3], then move it by `position` [3]."""
        turn = np.eye(3) if rotation is None else np.asarray(rotation, dtype=float)
        return replace(self, vertices=self.vertices @ turn.T + np.asarray(position), normals=self.normals @ turn.T)

    def coloured(self, colour: ArrayLike) -> Mesh:
        """Colour the whole mesh with `colour` [3] or [4], from 0 to 1."""
        rgba = np.append(np.asarray(colour, dtype=float), 1.0)[:4]
        return replace(self, colours=np.broadcast_to(rgba, (len(self.vertices), 4)))


def triangles(vertices: Array, normals: Array, faces: NDArray[np.integer]) -> Mesh:
    """Build a white mesh."""
    return Mesh(vertices, normals, np.ones((len(vertices), 4)), faces)


def joined(meshes: Sequence[Mesh]) -> Mesh:
    """Join several meshes, at least one, into one."""
    first = np.cumsum([0, *(len(mesh.vertices) for mesh in meshes)])
    faces = [mesh.faces + start for mesh, start in zip(meshes, first, strict=False)]
    vertices, normals, colours = (
        np.concatenate([getattr(mesh, name) for mesh in meshes]) for name in ("vertices", "normals", "colours")
    )
    return Mesh(vertices, normals, colours, np.concatenate(faces))


def box(half: ArrayLike) -> Mesh:
    """Box with half the sides `half` [3]."""
    square = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], dtype=float)
    corners = []
    normals = []
    for axis in range(3):
        for sign in (1.0, -1.0):
            face = np.insert(square[:: int(sign)], axis, sign, axis=1)
            corners.append(face if axis != 1 else face[::-1])  # counter-clockwise from outside
            normals.append(np.tile(sign * np.eye(3)[axis], (4, 1)))
    faces = np.concatenate([np.array([[0, 1, 2], [0, 2, 3]]) + 4 * side for side in range(6)])
    return triangles(np.concatenate(corners) * np.asarray(half), np.concatenate(normals), faces)


def sphere(radius: float) -> Mesh:
    """Ball."""
    return capsule(radius, 0.0)


def capsule(radius: float, half: float) -> Mesh:
    """Capsule along z, whose cylinder is twice `half` long."""
    angle = np.linspace(-0.5 * np.pi, 0.5 * np.pi, SIDES // 2 + 2)
    across = np.cos(angle)
    along = np.sin(angle)
    ends = np.where(along > 0, half, -half)
    return _turned(radius * across, radius * along + ends, across, along)


def cylinder(radius: float, half: float) -> Mesh:
    """Cylinder along z, twice `half` long."""
    side = _turned(np.array([radius, radius]), np.array([-half, half]), np.ones(2), np.zeros(2))
    caps = [
        _turned(np.array(radii), np.full(2, sign * half), np.zeros(2), np.full(2, sign))
        for sign, radii in ((1.0, [radius, 0.0]), (-1.0, [0.0, radius]))
    ]
    return joined([side, *caps])


def scaled(mesh: Mesh, factors: ArrayLike) -> Mesh:
    """Stretch `mesh` along its axes by `factors` [3]."""
    # normals transform by the inverse transpose
    normals = mesh.normals / np.asarray(factors)
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    return replace(mesh, vertices=mesh.vertices * np.asarray(factors), normals=normals)


def rod(start: ArrayLike, end: ArrayLike, radius: float) -> Mesh:
    """Capsule between two points [3]."""
    start = np.asarray(start, dtype=float)
    end = np.asarray(end, dtype=float)
    along = end - start
    length = float(np.linalg.norm(along))
    z = along / max(length, 1e-9)
    # a perpendicular direction, from the coordinate axis that is least aligned with z
    x = np.cross(z, np.eye(3)[np.argmin(np.abs(z))])
    x /= np.linalg.norm(x)
    return capsule(radius, 0.5 * length).moved(0.5 * (start + end), np.stack((x, np.cross(z, x), z), 1))


def path(points: ArrayLike, radius: float) -> Mesh:
    """Line of rods through `points` [P, 3]."""
    points = np.asarray(points, dtype=float)
    return joined([rod(*ends, radius) for ends in pairwise(points)])


def _turned(radii: Array, heights: Array, across: Array, along: Array) -> Mesh:
    """Surface of revolution of a profile, [P] each from below to above, about z; (`across`, `along`) is its normal."""
    angle = np.linspace(0.0, 2.0 * np.pi, SIDES + 1)
    cos = np.cos(angle)[:, None]
    sin = np.sin(angle)[:, None]
    vertices = np.stack((cos * radii, sin * radii, np.broadcast_to(heights, (SIDES + 1, len(radii)))), -1)
    normals = np.stack((cos * across, sin * across, np.broadcast_to(along, (SIDES + 1, len(radii)))), -1)
    # two triangles for each quad between neighbouring angles and profile points
    row = np.arange(SIDES)[:, None] * len(radii) + np.arange(len(radii) - 1)
    ahead = row + len(radii)
    faces = np.stack((np.stack((row, ahead, ahead + 1), -1), np.stack((row, ahead + 1, row + 1), -1)), 2)
    return triangles(vertices.reshape(-1, 3), normals.reshape(-1, 3), faces.reshape(-1, 3))


def glb(mesh: Mesh) -> bytes:
    """Encode `mesh` as a binary glTF 2.0 file: matt colours, both sides visible."""
    light = np.asarray(mesh.colours, dtype=np.float32).copy()
    light[:, :3] **= GAMMA
    arrays = {
        "POSITION": np.ascontiguousarray(mesh.vertices, dtype=np.float32),
        "NORMAL": np.ascontiguousarray(mesh.normals, dtype=np.float32),
        "COLOR_0": np.rint(255.0 * light.clip(0.0, 1.0)).astype(np.uint8),
        "indices": np.ascontiguousarray(mesh.faces, dtype=np.uint32).ravel(),
    }
    kinds = {"POSITION": ("VEC3", FLOATS), "NORMAL": ("VEC3", FLOATS), "COLOR_0": ("VEC4", BYTES)}
    accessors = []
    views = []
    start = 0
    for number, (name, values) in enumerate(arrays.items()):
        shape, component = kinds.get(name, ("SCALAR", INDICES))
        accessor = {"bufferView": number, "componentType": component, "count": len(values), "type": shape}
        if name == "POSITION":
            accessor |= {"min": values.min(0).tolist(), "max": values.max(0).tolist()}
        accessors.append(accessor | ({"normalized": True} if name == "COLOR_0" else {}))
        views.append({"buffer": 0, "byteOffset": start, "byteLength": values.nbytes})
        start += values.nbytes
    transparent = bool((mesh.colours[:, 3] < 1.0).any())
    material = {
        "pbrMetallicRoughness": {"metallicFactor": 0.0, "roughnessFactor": 0.75},
        "doubleSided": True,
        "alphaMode": "BLEND" if transparent else "OPAQUE",
    }
    primitive = {"attributes": {name: i for i, name in enumerate(kinds)}, "indices": len(kinds), "material": 0}
    document = {
        "asset": {"version": "2.0"},
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"mesh": 0}],
        "meshes": [{"primitives": [primitive]}],
        "materials": [material],
        "accessors": accessors,
        "bufferViews": views,
        "buffers": [{"byteLength": start}],
    }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    binary = b"".join(values.tobytes() for values in arrays.values())  # each has a length in whole words
    chunks = struct.pack("<I4s", len(text), b"JSON") + text + struct.pack("<I4s", len(binary), b"BIN\0") + binary
    return struct.pack("<4sII", b"glTF", 2, 12 + len(chunks)) + chunks
