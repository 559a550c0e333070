"""Replacements for missing visual files: plain materials, and collision shapes for missing meshes."""

import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

from sims.libero.scene import mjcf

COLOURS = {
    "akita_black_bowl": "0.13 0.12 0.12 1",
    "basket": "0.72 0.53 0.30 1",
    "desk_caddy": "0.45 0.33 0.24 1",
    "plate": "0.93 0.92 0.88 1",
    "porcelain_mug": "0.95 0.95 0.93 1",
    "red_bowl": "0.72 0.16 0.13 1",
    "red_coffee_mug": "0.74 0.15 0.12 1",
    "white_bowl": "0.94 0.94 0.92 1",
    "white_yellow_mug": "0.93 0.82 0.40 1",
    "wooden_tray": "0.62 0.44 0.26 1",
}
"""Category -> colour if the texture is missing."""
PLAIN = "0.75 0.75 0.75 1"
MISSING = (
    "visual files of the LIBERO assets are missing: plain colours and collision shapes are shown instead, "
    "so images differ from the benchmark's; the physics does not"
)


def repair_visuals(root: ET.Element, categories: dict[str, str]) -> None:
    """Remove references to missing visual files, with one warning; `categories` maps instance -> category.

    The dynamics never change: only visual geoms, textures and materials are touched, and the shapes shown instead of a
    missing mesh do not collide.
    """
    missing = [asset for asset in root.find("asset") if asset.get("file") and not Path(asset.get("file")).exists()]
    meshes = {asset.get("name") for asset in missing if asset.tag == "mesh"}
    textures = {asset.get("name") for asset in missing if asset.tag == "texture"}
    for asset in missing:
        root.find("asset").remove(asset)
    for material in root.iterfind("asset/material"):
        if material.get("texture") in textures:
            del material.attrib["texture"]
            material.set("rgba", _colour(material.get("name"), categories))
    for body in list(root.find("worldbody").iter("body")):
        if any(geom.get("mesh") in meshes and mjcf.is_visual(geom) for geom in body.findall("geom")):
            _show_collision_shapes(body, _colour(body.get("name"), categories))
    mjcf.remove_geoms(root, lambda geom: geom.get("mesh") in meshes and mjcf.is_visual(geom))
    if missing:
        files = sorted({"/".join(Path(asset.get("file")).parts[-2:]) for asset in missing})
        warnings.warn(f"{MISSING} ({', '.join(files)})", stacklevel=3)


def _colour(name: str, categories: dict[str, str]) -> str:
    category = next((category for instance, category in categories.items() if name.startswith(f"{instance}_")), "")
    return COLOURS.get(category, PLAIN)


def _show_collision_shapes(body: ET.Element, colour: str) -> None:
    for geom in body.findall("geom[@group='0']"):
        attributes = dict(geom.attrib) | {"name": f"{geom.get('name')}_shown", "group": "1", "rgba": colour}
        attributes |= {"contype": "0", "conaffinity": "0"}
        attributes.pop("material", None)
        ET.SubElement(body, "geom", attributes)
