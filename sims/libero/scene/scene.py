"""A LIBERO task as one MuJoCo model: arena, Panda, objects and fixtures, with stock's names, order and physics."""

import xml.etree.ElementTree as ET
from dataclasses import dataclass

import mujoco
import numpy as np

from embodied.errors import UserError
from sims.libero.assets import HOW_TO_GET, Assets
from sims.libero.catalogue import INITIAL_JOINT, model_file
from sims.libero.perturbed.plus import initial_joints
from sims.libero.scene import mjcf
from sims.libero.scene.arena import finish_arena, is_workspace_region, official_arena, workspace_of
from sims.libero.scene.predicates import GoalCompiler, Predicate, holds
from sims.libero.scene.robot import INITIAL_ARM, panda
from sims.libero.scene.stand_ins import STAND_INS, floor_arena, stand_in_model
from sims.libero.scene.visuals import repair_visuals
from sims.libero.suite import Task

# robosuite 1.4's base.xml: only the collision geoms (group 0) have inertia.
BASE = """<mujoco model="libero">
  <compiler angle="radian" inertiagrouprange="0 0"/>
  <option timestep="0.002" impratio="20" cone="elliptic" density="1.2" viscosity="0.00002"/>
  <visual><map znear="0.001"/><global offwidth="1280" offheight="960"/></visual>
  <asset/><worldbody/>
</mujoco>"""


@dataclass(frozen=True)
class Fixture:
    """A fixture that stock places at random at every reset.

    `ranges` [R, 4] are (x0, y0, x1, y1) in m, world frame: one is chosen at random, then a point in it; `height` is
    the body's z, m; `yaw` (low, high) rad.
    """

    name: str
    body: int
    ranges: np.ndarray
    height: float
    yaw: tuple[float, float]


@dataclass(frozen=True)
class InitialJoint:
    """A fixture joint that stock draws uniformly from [low, high] (rad or m) at reset."""

    qposadr: int
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Scene:
    """A compiled task and its addresses; `objects` are the M movable ones, in BDDL order.

    `geom_owner` [ngeom] is the index into `instances` (objects, then fixtures) of the geom's instance if stock counts
    its contacts, else -1. `grip_site` is the point OSC controls. `initial_arm` [7] rad. `openings` has, by
    site of a region of the goal, the predicate that the drawer or door in front of it is open.
    """

    task: Task
    assets: Assets
    model: mujoco.MjModel
    spec: mujoco.MjSpec
    instances: tuple[str, ...]
    objects: tuple[str, ...]
    object_body: np.ndarray
    object_qposadr: np.ndarray
    arm_qposadr: np.ndarray
    arm_dofadr: np.ndarray
    arm_actuator: np.ndarray
    gripper_qposadr: np.ndarray
    gripper_actuator: np.ndarray
    grip_site: int
    hand_body: int
    initial_arm: np.ndarray
    fixtures: tuple[Fixture, ...]
    initial_joints: tuple[InitialJoint, ...]
    geom_owner: np.ndarray
    goal: tuple[Predicate, ...]
    openings: dict[int, Predicate]

    @property
    def look(self) -> tuple[object, ...]:
        """Key of scenes with the same geoms, lights and cameras, whose poses may differ."""
        problem = self.task.problem
        return self.assets, problem.name, tuple(problem.objects.items()), tuple(problem.fixtures.items())


def build_scene(task: Task, assets: Assets, visuals: bool = False) -> Scene:
    """Compose and compile `task`; without `visuals` visual geoms are omitted, and the physics is the same.

    Step the model without visuals: MuJoCo's threshold for putting a body to sleep (dof_length) includes visual geoms.

    Raises UserError if `assets` lack files of the task.
    """
    problem = task.problem
    workspace = workspace_of(problem)
    arena, models = _models(task, assets)
    finish_arena(arena, workspace, problem, task.perturbation)
    root = ET.fromstring(BASE)
    mjcf.merge(root, arena)
    mjcf.merge(root, panda(workspace.base, workspace.pedestal))
    bodies = {}
    bottoms = {}
    categories = _categories(task)
    for name, model in models.items():
        bodies[name], bottoms[name] = _add_instance(root, name, model, movable=name in problem.objects)
    if visuals:
        repair_visuals(root, {name: categories[name] for name in bodies})
    else:
        mjcf.drop_visuals(root)
    _place_fixtures(task, bodies, bottoms)
    spec = mujoco.MjSpec.from_string(ET.tostring(root, encoding="unicode"))
    instances = {name: (categories[name], body) for name, body in bodies.items()}
    return _describe(task, assets, spec, instances, bottoms)


def satisfied(scene: Scene, data: mujoco.MjData) -> bool:
    """Whether the task's goal holds in `data` (positions and contacts as of the last forward pass)."""
    return all(holds(predicate, scene.geom_owner, data) for predicate in scene.goal)


def _models(task: Task, assets: Assets) -> tuple[ET.Element, dict[str, ET.Element]]:
    """The arena and one model per instance, objects before fixtures: the order of stock's body ids."""
    workspace = workspace_of(task.problem)
    categories = _categories(task)
    if assets.root is not None:
        models = {name: mjcf.load(model_file(assets, category)) for name, category in categories.items()}
        return official_arena(workspace, assets), models
    if workspace.category != "floor" or not set(categories.values()) <= STAND_INS.keys():
        raise UserError(f"{task.suite} needs LIBERO's official assets (stand-ins: libero_object only); {HOW_TO_GET}")
    return floor_arena(), {name: stand_in_model(category) for name, category in categories.items()}


def _categories(task: Task) -> dict[str, str]:
    """Instance -> category of all objects, then all fixtures but the workspace itself."""
    problem = task.problem
    workspace = workspace_of(problem).category
    return problem.objects | {name: category for name, category in problem.fixtures.items() if category != workspace}


def _add_instance(root: ET.Element, name: str, model: ET.Element, movable: bool) -> tuple[ET.Element, float]:
    """Add an object's or fixture's model under `name`; returns its body and the height of its bottom, m."""
    outer = model.find("worldbody/body")
    body = outer.find("body[@name='object']")
    body.set("name", "main")
    for i, geom in enumerate(body.iter("geom")):
        geom.attrib.setdefault("name", f"g{i}")
    mjcf.remove_geoms(body, lambda geom: geom.get("group") not in ("0", "1"))
    if movable:
        ET.SubElement(body, "joint", {"name": "joint0", "type": "free", "damping": "0.0005"})
    bottom = float(outer.find("site[@name='bottom_site']").get("pos").split()[2])
    mjcf.add_prefix(model, f"{name}_")
    mjcf.merge_assets(root, model)
    root.find("worldbody").append(body)
    return body, bottom


def _place_fixtures(task: Task, bodies: dict[str, ET.Element], bottoms: dict[str, float]) -> None:
    """Place every fixture in the middle of the area from which stock draws its position."""
    for name, (ranges, height, yaw) in _fixture_areas(task, bottoms).items():
        x0, y0, x1, y1 = ranges[0]
        angle = sum(yaw) / 2
        bodies[name].set("pos", mjcf.numbers(((x0 + x1) / 2, (y0 + y1) / 2, height)))
        bodies[name].set("quat", mjcf.numbers((np.cos(angle / 2), 0.0, 0.0, np.sin(angle / 2))))


def _fixture_areas(task: Task, bottoms: dict[str, float]) -> dict[str, tuple[np.ndarray, float, tuple[float, float]]]:
    """Fixture -> (ranges [R, 4] m, body height m, yaw range rad), world frame."""
    problem = task.problem
    workspace = workspace_of(problem)
    x, y, z = workspace.origin
    areas = {}
    for predicate, name, *place in problem.init:
        region = problem.regions.get(place[0]) if predicate == "on" and name in problem.fixtures else None
        if region is not None and is_workspace_region(region, problem):
            ranges = np.array(region.ranges) + np.array((x, y, x, y))
            areas[name] = (ranges, z + workspace.fixture_lift - bottoms[name], region.yaw)
    return areas


def _describe(
    task: Task,
    assets: Assets,
    spec: mujoco.MjSpec,
    instances: dict[str, tuple[str, ET.Element]],
    bottoms: dict[str, float],
) -> Scene:
    """Compile `spec` and look up every address once."""
    model = spec.compile()
    goal = GoalCompiler(model, task.problem, instances)
    arm = [model.joint(f"robot0_joint{i}") for i in range(1, 8)]
    fingers = [model.joint(f"gripper0_finger_joint{i}") for i in (1, 2)]
    objects = tuple(task.problem.objects)
    areas = _fixture_areas(task, bottoms)
    return Scene(
        task=task,
        assets=assets,
        model=model,
        spec=spec,
        instances=tuple(instances),
        objects=objects,
        object_body=np.array([model.body(f"{name}_main").id for name in objects]),
        object_qposadr=np.array([model.joint(f"{name}_joint0").qposadr[0] for name in objects]),
        arm_qposadr=np.array([joint.qposadr[0] for joint in arm]),
        arm_dofadr=np.array([joint.dofadr[0] for joint in arm]),
        arm_actuator=np.array([model.actuator(f"robot0_torq_j{i}").id for i in range(1, 8)]),
        gripper_qposadr=np.array([joint.qposadr[0] for joint in fingers]),
        gripper_actuator=np.array([model.actuator(f"gripper0_gripper_finger_joint{i}").id for i in (1, 2)]),
        grip_site=model.site("gripper0_grip_site").id,
        hand_body=model.body("robot0_right_hand").id,
        initial_arm=_initial_arm(task),
        fixtures=tuple(Fixture(name, model.body(f"{name}_main").id, *area) for name, area in areas.items()),
        initial_joints=tuple(_initial_joints(task, goal)),
        geom_owner=_geom_owner(model, tuple(instances)),
        goal=tuple(goal.compile(atom) for atom in task.problem.goal),
        openings=_openings(task, goal),
    )


def _initial_arm(task: Task) -> np.ndarray:
    """Joint angles [7], rad, to which a reset moves the arm.

    Initial states are written after the reset: another pose acts through the controller alone, whose posture and first
    goals are of the reset (`Simulation.write`).
    """
    number = task.perturbation.robot if task.perturbation else 0
    return initial_joints(number) if number else INITIAL_ARM.copy()


def _initial_joints(task: Task, goal: GoalCompiler) -> list[InitialJoint]:
    joints = []
    for kind, name, *_ in task.problem.init:
        if kind in ("open", "close", "turnon", "turnoff"):
            category, addresses = goal.joints(name)
            joints += [InitialJoint(address, *INITIAL_JOINT[kind, category]) for address in addresses]
    return joints


def _openings(task: Task, goal: GoalCompiler) -> dict[int, Predicate]:
    openings = {goal.compile(atom).b: goal.opening(atom[2]) for atom in task.problem.goal if atom[0] == "in"}
    return {site: opening for site, opening in openings.items() if opening is not None}


def _geom_owner(model: mujoco.MjModel, instances: tuple[str, ...]) -> np.ndarray:
    """Index [ngeom] of the instance to which a collision geom (group 0) belongs, else -1."""
    owner_of_root = np.full(model.nbody, -1, dtype=np.int32)
    owner_of_root[[model.body(f"{name}_main").id for name in instances]] = np.arange(len(instances))
    owner = owner_of_root[model.body_rootid[model.geom_bodyid]]
    return np.where(model.geom_group == 0, owner, -1).astype(np.int32)
