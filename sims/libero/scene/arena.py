"""LIBERO's workspaces with their cameras: floor, table, kitchen, living room and study."""

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embodied.errors import UserError
from sims.libero.assets import Assets
from sims.libero.perturbed.plus import Perturbation, turned_camera
from sims.libero.scene import mjcf
from sims.libero.scene.bddl import Problem, Region

Vector = tuple[float, float, float]

TABLE_SIZE: Vector = (1.0, 1.2, 0.05)  # m, of the arenas "table" and "kitchen"; its top is at Workspace.origin
REGION_HALF_HEIGHT = 0.007  # m, of the sites that mark areas of a workspace
LOOKING_DOWN = (0.6380177736282349, 0.3048497438430786, 0.30484986305236816, 0.6380177736282349)
LOOKING_ACROSS = (0.6182166934013367, 0.3432307541370392, 0.3432314395904541, 0.6182177066802979)


@dataclass(frozen=True)
class Workspace:
    """Constants of one problem class; positions in m, world frame.

    `category` is the BDDL category of the workspace itself, `body` the arena body that carries its regions, offset by
    `region_offset`; objects are placed relative to `origin`, fixtures `fixture_lift` above it.
    """

    category: str
    body: str
    file: str
    base: Vector
    pedestal: bool
    origin: Vector
    fixture_lift: float
    region_offset: Vector
    camera_position: Vector
    camera_quaternion: tuple[float, float, float, float]
    table_friction: Vector | None = None
    floor: str = "light-gray-floor-tile.png"
    wall: str = "light-gray-plaster.png"


WORKSPACES = {
    "libero_floor_manipulation": Workspace(
        category="floor",
        body="floor",
        file="libero_floor_base_style.xml",
        base=(-0.6, 0.0, 0.0),
        pedestal=False,
        origin=(0.0, 0.0, -0.035),
        fixture_lift=-0.025,
        region_offset=(0.0, 0.0, 0.02),
        camera_position=(0.8965773716836134, 5.216182733499864e-07, 0.65),
        camera_quaternion=LOOKING_ACROSS,
    ),
    "libero_tabletop_manipulation": Workspace(
        category="table",
        body="table",
        file="libero_tabletop_base_style.xml",
        base=(-0.66, 0.0, 0.0),
        pedestal=True,
        origin=(0.0, 0.0, 0.9),
        fixture_lift=0.01 - 0.05,
        region_offset=(0.0, 0.0, 0.02),
        camera_position=(0.6586131746834771, 0.0, 1.6103500240372423),
        camera_quaternion=LOOKING_DOWN,
        table_friction=(0.6, 0.005, 0.0001),
    ),
    "libero_kitchen_tabletop_manipulation": Workspace(
        category="kitchen_table",
        body="table",
        file="libero_kitchen_tabletop_base_style.xml",
        base=(-0.66, 0.0, 0.0),
        pedestal=True,
        origin=(0.0, 0.0, 0.9),
        fixture_lift=0.01 - 0.05,
        region_offset=(0.0, 0.0, 0.0),
        camera_position=(0.6586131746834771, 0.0, 1.6103500240372423),
        camera_quaternion=LOOKING_DOWN,
        table_friction=(1.0, 0.005, 0.0001),
        floor="gray_ceramic_tile.png",
        wall="yellow_linen_wall_texture.png",
    ),
    "libero_living_room_tabletop_manipulation": Workspace(
        category="living_room_table",
        body="living_room_table",
        file="libero_living_room_tabletop_base_style.xml",
        base=(-0.51, 0.0, 0.42),
        pedestal=False,
        origin=(0.0, 0.0, 0.41),
        fixture_lift=0.01 - 0.024,
        region_offset=(0.0, 0.0, 0.41),
        camera_position=(0.6065773716836134, 0.0, 0.96),
        camera_quaternion=LOOKING_ACROSS,
        floor="seamless_wood_planks_floor.png",
    ),
    "libero_study_tabletop_manipulation": Workspace(
        category="study_table",
        body="study_table",
        file="libero_study_base_style.xml",
        base=(-0.75, 0.0, 0.0),
        pedestal=True,
        origin=(-0.2, 0.0, 0.867),
        fixture_lift=0.01 - 0.05,
        region_offset=(-0.2, 0.0, 0.867),
        camera_position=(0.4586131746834771, 0.0, 1.6103500240372423),
        camera_quaternion=LOOKING_DOWN,
    ),
}
"""Problem class -> its workspace."""


def workspace_of(problem: Problem) -> Workspace:
    """The workspace of `problem`; raises UserError for a problem class that LIBERO's 130 tasks do not use."""
    if problem.name not in WORKSPACES:
        raise UserError(f"unknown LIBERO problem class {problem.name!r}; expected one of {', '.join(WORKSPACES)}")
    return WORKSPACES[problem.name]


def official_arena(workspace: Workspace, assets: Assets) -> ET.Element:
    """The arena's MJCF from the official assets, with the size and textures of the problem class."""
    root = mjcf.load(assets.root / "scenes" / workspace.file)
    if workspace.table_friction is not None:
        _size_table(root, workspace)
    for name, file in (("texplane", workspace.floor), ("tex-wall", workspace.wall)):
        texture = root.find(f"./asset/texture[@name='{name}']")
        styled = Path(texture.get("file")).with_name(file)
        if styled.exists():  # otherwise keep the arena's own texture
            texture.set("file", str(styled))
    return root


def finish_arena(
    root: ET.Element, workspace: Workspace, problem: Problem, perturbation: Perturbation | None = None
) -> None:
    """Place the agent camera, in the view of a `perturbation`, and add a site for every region of the workspace."""
    camera = root.find(".//camera[@name='agentview']")
    pose = np.array(workspace.camera_position), np.array(workspace.camera_quaternion)
    position, quaternion = turned_camera(*pose, perturbation.view) if perturbation else pose
    camera.set("pos", mjcf.numbers(position))
    camera.set("quat", mjcf.numbers(quaternion))
    body = root.find(f".//body[@name='{workspace.body}']")
    for region in problem.regions.values():
        if is_workspace_region(region, problem):
            body.append(_region_site(region, workspace))


def is_workspace_region(region: Region, problem: Problem) -> bool:
    """Whether `region` is an area of the floor or table itself, not of an object or fixture."""
    return problem.fixtures.get(region.target) == workspace_of(problem).category


def _size_table(root: ET.Element, workspace: Workspace) -> None:
    half = [size / 2 for size in TABLE_SIZE]
    top = workspace.origin[2]
    table = root.find(".//body[@name='table']")
    table.set("pos", mjcf.numbers((0.0, 0.0, top - half[2])))
    collision = table.find("geom[@name='table_collision']")
    collision.set("size", mjcf.numbers(half))
    collision.set("friction", mjcf.numbers(workspace.table_friction))
    table.find("geom[@name='table_visual']").set("size", mjcf.numbers(half))
    table.find("site[@name='table_top']").set("pos", mjcf.numbers((0.0, 0.0, half[2])))
    leg_half = (top - half[2]) / 2
    for leg, (x, y) in zip((1, 2, 3, 4), ((1, 1), (-1, 1), (-1, -1), (1, -1)), strict=True):
        geom = table.find(f"geom[@name='table_leg{leg}_visual']")
        geom.set("pos", mjcf.numbers((x * (half[0] - 0.1), y * (half[1] - 0.1), -leg_half)))
        geom.set("size", mjcf.numbers((0.025, leg_half)))


def _region_site(region: Region, workspace: Workspace) -> ET.Element:
    x0, y0, x1, y1 = region.ranges[0]
    offset = workspace.region_offset
    position = ((x0 + x1) / 2 + offset[0], (y0 + y1) / 2 + offset[1], offset[2])
    size = ((x1 - x0) / 2, (y1 - y0) / 2, REGION_HALF_HEIGHT)
    attributes = {"type": "box", "pos": mjcf.numbers(position), "size": mjcf.numbers(size), "rgba": "0 0 1 0"}
    return ET.Element("site", {"name": region.name, **attributes})
