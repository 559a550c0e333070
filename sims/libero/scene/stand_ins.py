"""Generated objects for libero_object, for use without LIBERO's assets.

They are primitives with LIBERO's dimensions and inertia; pictures and success rates on them are not the benchmark's.
Every shape is described upright, z up, around the point that LIBERO's initial states give the pose of.
"""

import xml.etree.ElementTree as ET
from dataclasses import dataclass

import mujoco
import numpy as np

from sims.libero.scene import mjcf

SURFACE = {"friction": "0.95 0.3 0.1", "solref": "0.001 1", "solimp": "0.998 0.998 0.001"}
UPRIGHT = {"z": (1.0, 0.0, 0.0, 0.0), "y": (0.5**0.5, -(0.5**0.5), 0.0, 0.0)}
"""Quaternion from the upright frame to the body's, by the body axis that points up in LIBERO's initial states."""
OCTAGON = ((0.0, 0.0), (np.pi / 4, 5e-4), (np.pi / 2, 0.0), (3 * np.pi / 4, 5e-4))
"""Yaw, rad, of the boxes that make a can, and their inset at both ends, m: only a cross of two touches the floor, so
that a can at rest has 8 contacts, not 16."""


@dataclass(frozen=True)
class Box:
    """Upright box: half widths `x`, `y` and heights `low` to `high`, m, centred at `at`, tilted about x and y, rad."""

    x: float
    y: float
    low: float
    high: float
    colour: str
    at: tuple[float, float] = (0.0, 0.0)
    tilt: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Can:
    """Upright cylinder of `radius` between heights `low` and `high`, m, centred at `at`.

    It collides as an octagon of four boxes: flat faces give the fingers an area to hold, a curved one a single point.
    """

    radius: float
    low: float
    high: float
    colour: str
    at: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class StandIn:
    """One object: the body axis that is `up`, parts that collide, and parts that are only visible."""

    up: str
    parts: tuple[Box | Can, ...]
    visible: tuple[Box | Can, ...] = ()


TIN = "0.75 0.76 0.78 1"
PAPER = "0.96 0.95 0.92 1"
CREAM = "0.98 0.93 0.72 1"
RED = "0.80 0.13 0.12 1"
DARK_RED = "0.55 0.07 0.08 1"
ORANGE = "0.95 0.55 0.13 1"
YELLOW = "0.97 0.82 0.27 1"
BLUE = "0.15 0.36 0.70 1"
GREEN = "0.36 0.58 0.22 1"
BROWN = "0.33 0.19 0.11 1"
WICKER = "0.74 0.55 0.32 1"
WICKER_DARK = "0.58 0.40 0.21 1"


def _tin_can(radius: float, at: tuple[float, float], label: str, band: str) -> StandIn:
    can = Can(radius, -0.0385, 0.0376, TIN, at)
    labels = Can(radius + 0.0005, -0.034, 0.033, label, at), Can(radius + 0.0008, -0.008, 0.012, band, at)
    return StandIn("y", (can,), labels)


def _carton(label: str, cap: str) -> StandIn:
    body = Box(0.0263, 0.0263, -0.0698, 0.0398, PAPER)
    gable = (Box(0.0262, 0.0190, 0.0398, 0.0480, PAPER), Box(0.0262, 0.0105, 0.0480, 0.0555, PAPER))
    ridge = Box(0.0262, 0.0034, 0.0555, 0.0614, PAPER)
    label_band = Box(0.0266, 0.0266, -0.052, 0.012, label)
    return StandIn("y", (body, *gable, ridge), (label_band, Can(0.0085, 0.0475, 0.0590, cap)))


def _block(x: float, y: float, low: float, high: float, colour: str, band: str, at: float = 0.0) -> StandIn:
    label = Box(x * 0.55, y + 0.0004, low - 0.0002, high + 0.0004, band, (at, 0.0))
    return StandIn("z", (Box(x, y, low, high, colour, (at, 0.0)),), (label,))


def _basket() -> StandIn:
    lean = 0.07  # rad: the walls open upwards
    base = Box(0.0766, 0.0724, 0.0042, 0.0220, WICKER_DARK)
    places = [(sign, (0.0005 + sign * 0.0737, 0.0)) for sign in (-1, 1)]
    sides = [Box(0.0067, 0.0724, 0.0130, 0.1410, WICKER, at, (0.0, sign * lean)) for sign, at in places]
    ends = [Box(0.0724, 0.0067, 0.0180, 0.1458, WICKER, (0.0, sign * 0.0680), (-sign * lean, 0.0)) for sign in (-1, 1)]
    return StandIn("z", (base, *sides, *ends))


STAND_INS: dict[str, StandIn] = {
    "alphabet_soup": _tin_can(0.0312, (0.0, 0.0037), RED, PAPER),
    "tomato_sauce": _tin_can(0.0310, (0.0, 0.0033), DARK_RED, GREEN),
    "milk": _carton(BLUE, BLUE),
    "orange_juice": _carton(ORANGE, GREEN),
    "butter": _block(0.0381, 0.0198, -0.0087, 0.0087, YELLOW, PAPER),
    "cream_cheese": _block(0.0406, 0.0213, -0.0089, 0.0089, PAPER, BLUE),
    "chocolate_pudding": _block(0.0401, 0.0232, -0.0131, 0.0143, BROWN, CREAM, at=-0.0005),
    "salad_dressing": StandIn(
        "y",
        (
            Box(0.0264, 0.0177, -0.0727, 0.0, GREEN, (-0.001, 0.0)),
            Box(0.0205, 0.0172, 0.0, 0.011, GREEN),
            Can(0.0168, 0.011, 0.0728, PAPER),
        ),
        (Box(0.0267, 0.0180, -0.055, -0.012, CREAM, (-0.001, 0.0)),),
    ),
    "ketchup": StandIn(
        "y",
        (
            Box(0.0280, 0.0170, -0.0724, -0.006, RED, (0.0005, -0.0008)),
            Box(0.0238, 0.0183, -0.006, 0.022, RED, (0.0005, -0.0008)),
            Can(0.0170, 0.022, 0.0731, RED),
        ),
        (Box(0.0283, 0.0173, -0.052, -0.016, PAPER, (0.0005, -0.0008)), Can(0.0173, 0.052, 0.0733, PAPER)),
    ),
    "bbq_sauce": StandIn(
        "z",
        (
            Box(0.0235, 0.0145, -0.0546, -0.001, BROWN),
            Box(0.018, 0.0143, -0.001, 0.0269, BROWN),
            Box(0.014, 0.014, 0.0269, 0.0525, DARK_RED),
        ),
        (Box(0.0238, 0.0148, -0.044, -0.012, YELLOW),),
    ),
    "basket": _basket(),
}
"""Category -> stand-in; dimensions as in LIBERO, measured on its collision geometry."""

INERTIA: dict[str, tuple[float, tuple[float, float, float], tuple[float, ...]]] = {
    "alphabet_soup": (0.02585, (0.00003, -0.00080, -0.00267), (18.2, 13.36, 18.68, -0.012, 0, 0)),
    "tomato_sauce": (0.02663, (0.00057, -0.00079, -0.00235), (18.79, 13.93, 19.39, -0.017, -0.047, -0.003)),
    "milk": (0.03167, (0.00035, -0.01198, 0.0), (43.29, 14.49, 43.36, 0.029, 0, -0.004)),
    "orange_juice": (0.03167, (-0.00035, -0.01198, 0.0), (43.29, 14.49, 43.36, -0.029, 0, 0.004)),
    "butter": (0.005247, (0.0, 0.0, 0.0), (0.8163, 2.67, 3.221, 0, 0, 0)),
    "cream_cheese": (0.006194, (0.0, 0.0, 0.0), (1.105, 3.569, 4.344, 0, 0, 0)),
    "chocolate_pudding": (0.01019, (-0.00050, 0.0, 0.00063), (2.459, 6.098, 7.281, 0, 0, 0)),
    "salad_dressing": (0.02178, (-0.00046, -0.00563, 0.00021), (33.97, 5.193, 35.19, -0.376, 0, 0.023)),
    "ketchup": (0.02322, (0.00042, -0.00898, 0.00078), (37.93, 6.991, 40.33, 0.046, -0.003, 0.015)),
    "bbq_sauce": (0.01218, (0.0, 0.0, -0.00760), (11.16, 12.11, 2.603, 0, 0, 0)),
    "basket": (0.1361, (0.00127, 0.00010, 0.06086), (639.0, 684.3, 816.8, 0.765, 3.738, -0.278)),
}
"""Category -> mass, kg, centre of mass, m, and moments xx, yy, zz, xy, xz, yz about it, 1e-6 kg m2, in the body frame;
measured on LIBERO's models."""

BASKET_REGION = {"name": "contain_region", "type": "box", "rgba": "0 0 0 0"}
BASKET_REGION |= {"pos": "0 0 0.07185", "size": "0.06108 0.06108 0.06949"}

FLOOR_ARENA = """<mujoco model="floor">
  <asset>
    <texture type="skybox" builtin="gradient" rgb1="0.92 0.94 0.97" rgb2="0.55 0.62 0.70" width="64" height="64"/>
    <texture name="tiles" type="2d" builtin="checker" mark="edge" rgb1="0.78 0.77 0.74" rgb2="0.74 0.73 0.70"
      markrgb="0.62 0.61 0.59" width="256" height="256"/>
    <material name="tiles" texture="tiles" texrepeat="3 3" texuniform="true" specular="0" shininess="0"/>
    <material name="plaster" rgba="0.88 0.87 0.84 1" specular="0.1" shininess="0.1"/>
  </asset>
  <worldbody>
    <body name="floor">
      <geom name="floor" type="plane" size="3 3 0.125" condim="3" group="1" material="tiles"/>
    </body>
    <geom type="box" pos="-2 0 1.5" size="0.01 3 1.5" contype="0" conaffinity="0" group="1" material="plaster"/>
    <geom type="box" pos="0.5 3 1.5" size="2.5 0.01 1.5" contype="0" conaffinity="0" group="1" material="plaster"/>
    <geom type="box" pos="0.5 -3 1.5" size="2.5 0.01 1.5" contype="0" conaffinity="0" group="1" material="plaster"/>
    <light name="light1" pos="1 1 4" dir="0 -0.15 -1" diffuse=".55 .55 .55" specular=".3 .3 .3" castshadow="false"/>
    <light name="light2" pos="-3 -3 4" dir="0 -0.15 -1" diffuse=".55 .55 .55" specular=".3 .3 .3" castshadow="false"/>
    <light name="fill" directional="true" dir="-0.8 0.4 -0.4" diffuse=".25 .25 .25" ambient=".15 .15 .15"
      specular="0 0 0" castshadow="false"/>
    <camera name="frontview" pos="1 0 0.65" quat="0.56 0.43 0.43 0.56"/>
    <camera name="agentview"/>
  </worldbody>
</mujoco>"""


def stand_in_model(category: str) -> ET.Element:
    """MJCF of `category`'s stand-in, structured like an official object file."""
    stand_in = STAND_INS[category]
    root = ET.fromstring("<mujoco><asset/><worldbody><body><body name='object'/></body></worldbody></mujoco>")
    outer = root.find("worldbody/body")
    body = outer.find("body")
    mass, centre, moments = INERTIA[category]
    inertia = {"mass": repr(mass), "pos": mjcf.numbers(centre), "fullinertia": mjcf.numbers(1e-6 * np.array(moments))}
    ET.SubElement(body, "inertial", inertia)
    for geom in (geom for part in stand_in.parts for geom in _collision(part)):
        attributes = SURFACE | {"type": "box", "size": mjcf.numbers(geom["half"]), "group": "0"}
        ET.SubElement(body, "geom", attributes | _pose(geom, stand_in.up))
    for part in (*stand_in.parts, *stand_in.visible):
        ET.SubElement(body, "geom", _attributes(part, stand_in.up))
    if category == "basket":
        ET.SubElement(body, "site", BASKET_REGION)
    ET.SubElement(outer, "site", {"name": "bottom_site", "pos": f"0 0 {min(part.low for part in stand_in.parts)}"})
    return root


def floor_arena() -> ET.Element:
    """MJCF of the floor, with the official floor's contact properties."""
    return ET.fromstring(FLOOR_ARENA)


def _collision(part: Box | Can) -> list[dict]:
    """Collision boxes in the upright frame: position, quaternion and half sizes."""
    middle = (part.low + part.high) / 2
    half_height = (part.high - part.low) / 2
    if isinstance(part, Box):
        return [{"pos": (*part.at, middle), "quat": _tilted(*part.tilt), "half": (part.x, part.y, half_height)}]
    side = part.radius * np.tan(np.pi / 8)
    return [
        {
            "pos": (*part.at, middle),
            "quat": (np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)),
            "half": (part.radius, side, half_height - inset),
        }
        for yaw, inset in OCTAGON
    ]


def _attributes(part: Box | Can, up: str) -> dict[str, str]:
    """The visual geom of a part."""
    attributes = {"contype": "0", "conaffinity": "0", "group": "1", "rgba": part.colour}
    if isinstance(part, Box):
        (box,) = _collision(part)
        return attributes | {"type": "box", "size": mjcf.numbers(box["half"])} | _pose(box, up)
    middle = (part.low + part.high) / 2
    half_height = (part.high - part.low) / 2
    pose = _pose({"pos": (*part.at, middle), "quat": UPRIGHT["z"]}, up)
    return attributes | {"type": "cylinder", "size": mjcf.numbers((part.radius, half_height))} | pose


def _tilted(about_x: float, about_y: float) -> tuple[float, ...]:
    return _product((np.cos(about_x / 2), np.sin(about_x / 2), 0, 0), (np.cos(about_y / 2), 0, np.sin(about_y / 2), 0))


def _pose(shape: dict, up: str) -> dict[str, str]:
    """Position and quaternion attributes, in the body frame, of a shape given in the upright frame."""
    position = np.zeros(3)
    mujoco.mju_rotVecQuat(position, np.array(shape["pos"], dtype=float), np.array(UPRIGHT[up]))
    return {"pos": mjcf.numbers(position), "quat": mjcf.numbers(_product(UPRIGHT[up], shape["quat"]))}


def _product(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    result = np.zeros(4)
    mujoco.mju_mulQuat(result, np.array(left, dtype=float), np.array(right, dtype=float))
    return tuple(result)
