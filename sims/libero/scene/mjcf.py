"""MJCF as element trees: load, prefix and merge models as robosuite does, so that ids and names equal stock's."""

import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from pathlib import Path

from embodied.errors import UserError

SECTIONS = ("actuator", "sensor", "tendon", "equality", "contact")
REFERENCES = ("name", "material", "texture", "joint", "joint1", "joint2", "mesh", "site", "body1", "body2", "geom")
"""Attributes that contain a name of the model and therefore get the instance's prefix."""


def numbers(values: Iterable[float]) -> str:
    """Values as an MJCF attribute, exact to the last bit."""
    return " ".join(repr(float(value)) for value in values)


def load(path: Path) -> ET.Element:
    """Model at `path`: default classes written out, file names absolute. UserError if missing or unreadable."""
    try:
        root = ET.parse(path).getroot()
    except (OSError, ET.ParseError) as error:
        raise UserError(f"{path}: cannot read MJCF ({error}); check that the asset folder is complete") from error
    for element in root.iterfind("./asset/*[@file]"):
        element.set("file", str((path.parent / element.get("file", "")).resolve()))
    _write_out_classes(root)
    return root


def _write_out_classes(root: ET.Element) -> None:
    """Replace class attributes by the class's values, since classes of merged models would clash.

    Defaults without a class and nested ones are dropped, as in robosuite, whose dynamics must be matched.
    """
    defaults = {d.get("class"): {child.tag: child.attrib for child in d} for d in root.iterfind("./default/*")}
    for element in root.iter():
        class_name = element.attrib.pop("class", None) if element.tag != "default" else None
        for key, value in defaults.get(class_name, {}).get(element.tag, {}).items() if class_name else ():
            element.attrib.setdefault(key, value)
    for default in root.findall("default"):
        root.remove(default)


def add_prefix(root: ET.Element, prefix: str) -> None:
    """Put `prefix` before every name in `root` and every reference to one."""
    for element in root.iter():
        for key in REFERENCES:
            if key in element.attrib:
                element.set(key, prefix + element.attrib[key])


def merge(base: ET.Element, other: ET.Element, body: str | None = None) -> None:
    """Add `other`'s bodies to `base`'s body named `body` (default: the world), and its assets and actuators."""
    parent = base.find("worldbody") if body is None else base.find(f".//body[@name='{body}']")
    parent.extend(other.find("worldbody"))
    merge_assets(base, other)
    for section in SECTIONS:
        _section(base, section).extend(other.find(section) or ())


def merge_assets(base: ET.Element, other: ET.Element) -> None:
    """Add `other`'s assets; of two with the same kind and name the first is kept, as in robosuite."""
    assets = _section(base, "asset")
    present = {(asset.tag, asset.get("name")) for asset in assets}
    for asset in other.findall("./asset/*"):
        if (asset.tag, asset.get("name")) not in present:
            present.add((asset.tag, asset.get("name")))
            assets.append(asset)


def is_visual(geom: ET.Element) -> bool:
    """Whether a geom is visual: it never collides, and group 1 does not contribute to inertia."""
    return geom.get("group") == "1" and geom.get("contype") == "0" and geom.get("conaffinity") == "0"


def drop_visuals(root: ET.Element) -> None:
    """Remove visual geoms, materials, textures, and unused meshes."""
    remove_geoms(root, is_visual)
    for element in root.iter():
        if element.tag in ("geom", "site"):
            element.attrib.pop("material", None)
    used = {geom.get("mesh") for geom in root.iter("geom")}
    assets = _section(root, "asset")
    for asset in list(assets):
        if asset.tag != "mesh" or asset.get("name") not in used:
            assets.remove(asset)


def remove_geoms(root: ET.Element, condition: Callable[[ET.Element], bool]) -> None:
    """Remove the geoms for which `condition(geom)` holds."""
    for parent in list(root.iter()):
        for geom in parent.findall("geom"):
            if condition(geom):
                parent.remove(geom)


def _section(root: ET.Element, tag: str) -> ET.Element:
    section = root.find(tag)
    return ET.SubElement(root, tag) if section is None else section
