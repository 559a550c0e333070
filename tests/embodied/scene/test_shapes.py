"""Solids are closed, face outwards, have their size, and are files that browsers read."""

import json
import struct

import numpy as np
import pytest

from embodied.scene import shapes
from embodied.scene.shapes import Mesh

SOLIDS = {
    "box": (shapes.box((1.0, 2.0, 3.0)), 48.0),
    "sphere": (shapes.sphere(1.0), 4.0 / 3.0 * np.pi),
    "cylinder": (shapes.cylinder(1.0, 2.0), 4.0 * np.pi),
    "capsule": (shapes.capsule(1.0, 2.0), (4.0 + 4.0 / 3.0) * np.pi),
    "ellipsoid": (shapes.scaled(shapes.sphere(1.0), (1.0, 2.0, 3.0)), 8.0 * np.pi),
    "rod": (shapes.rod((1.0, 1.0, 1.0), (2.0, 3.0, 3.0), 0.5), (3.0 / 4.0 + 1.0 / 6.0) * np.pi),
}


@pytest.mark.parametrize("name", SOLIDS)
def test_faces_and_normals_point_outwards_around_the_volume(name: str):
    mesh, volume = SOLIDS[name]
    corners = mesh.vertices[mesh.faces]
    outward = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    real = np.linalg.norm(outward, axis=1) > 1e-9
    assert ((outward * mesh.normals[mesh.faces].mean(1)).sum(1)[real] > 0.0).all()
    enclosed = np.einsum("fi,fi->", corners[:, 0], np.cross(corners[:, 1], corners[:, 2])) / 6.0
    assert enclosed == pytest.approx(volume, rel=0.05)
    assert np.linalg.norm(mesh.normals, axis=1) == pytest.approx(1.0)


def test_meshes_are_moved_coloured_and_joined():
    turn = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    one = shapes.box((1.0, 2.0, 3.0)).moved((10.0, 0.0, 0.0), turn).coloured((1.0, 0.0, 0.0))
    both = shapes.joined([one, shapes.box((1.0, 1.0, 1.0))])
    assert one.vertices.min(0).tolist() == [8.0, -1.0, -3.0]
    assert both.faces.max() == len(both.vertices) - 1 == 47
    assert both.colours[0].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert both.colours[-1].tolist() == [1.0] * 4


def read(data: bytes) -> tuple[dict, bytes]:
    magic, version, length, size, kind = struct.unpack_from("<4sII I4s", data)
    assert (magic, version, length, kind) == (b"glTF", 2, len(data), b"JSON")
    document = json.loads(data[20 : 20 + size])
    count, kind = struct.unpack_from("<I4s", data, 20 + size)
    assert kind == b"BIN\0"
    assert count % 4 == 0
    return document, data[28 + size : 28 + size + count]


def test_a_file_has_the_mesh_in_amounts_of_light():
    mesh = shapes.sphere(0.5).coloured((1.0, 0.5, 0.0))
    document, binary = read(shapes.glb(mesh))
    assert document["buffers"][0]["byteLength"] == len(binary)
    attributes = document["meshes"][0]["primitives"][0]["attributes"]

    def values(number: int, dtype: str, width: int) -> np.ndarray:
        view = document["bufferViews"][number]
        part = binary[view["byteOffset"] : view["byteOffset"] + view["byteLength"]]
        return np.frombuffer(part, dtype).reshape(-1, width)

    assert values(attributes["POSITION"], "<f4", 3) == pytest.approx(mesh.vertices, abs=1e-6)
    bounds = document["accessors"][attributes["POSITION"]]
    assert bounds["min"] == pytest.approx(mesh.vertices.min(0).tolist())
    assert bounds["max"] == pytest.approx(mesh.vertices.max(0).tolist())
    assert values(3, "<u4", 3).tolist() == mesh.faces.tolist()
    assert values(attributes["COLOR_0"], "u1", 4)[0].tolist() == [255, 55, 0, 255]
    assert document["materials"][0]["alphaMode"] == "OPAQUE"
    # codes of glTF 2.0: 5126 float, 5121 unsigned byte, 5125 unsigned int
    count, indices = len(mesh.vertices), mesh.faces.size
    parts = [("VEC3", 5126, count), ("VEC3", 5126, count), ("VEC4", 5121, count), ("SCALAR", 5125, indices)]
    accessors = document["accessors"]
    assert [(each["type"], each["componentType"], each["count"]) for each in accessors] == parts
    assert [each["bufferView"] for each in accessors] == [0, 1, 2, 3]
    assert [each.get("normalized", False) for each in accessors] == [False, False, True, False]
    assert [view["buffer"] for view in document["bufferViews"]] == [0] * 4
    assert document["scenes"][document["scene"]]["nodes"] == [0]
    assert document["nodes"][0]["mesh"] == document["meshes"][0]["primitives"][0]["material"] == 0
    assert document["meshes"][0]["primitives"][0]["indices"] == 3
    glass = Mesh(mesh.vertices, mesh.normals, np.full((len(mesh.vertices), 4), 0.5), mesh.faces)
    assert read(shapes.glb(glass))[0]["materials"][0]["alphaMode"] == "BLEND"
