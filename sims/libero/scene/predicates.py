"""Goal predicates as in LIBERO, with indices instead of names: the Python reference of the compiled ones.

Positions are from the last `mj_step1`/`mj_forward`, as in stock: after a control step this is the state before the
integration of the last physics step.
"""

import xml.etree.ElementTree as ET
from dataclasses import dataclass

import mujoco
import numpy as np

from embodied.errors import UserError
from sims.libero.catalogue import JOINT_GOALS
from sims.libero.scene.bddl import Atom, Problem

NEAR = 0.03  # m: largest horizontal distance of an object "on" another
BELOW_IN = 0.01  # m: how far below a region's box an object still counts as in it
# m: height window, around a region's top face, of an object on it
BELOW_ON = 0.005
ABOVE_ON = 0.10


@dataclass(frozen=True)
class Predicate:
    """One proposition of a goal; which fields are used depends on `kind`.

    - "in": body `a`'s position lies in the axis-aligned box with half sizes |R size| around site `b`; the lower z bound
      is relaxed by BELOW_IN.
    - "on_object": body `b` is not above body `a`, their horizontal distance is below NEAR, and their owners touch.
    - "on_site": with d = R (position of body `a` - position of site `b`), |d_xy| < size_xy and
      size_z - BELOW_ON < d_z < size_z + ABOVE_ON; and the owners touch unless `owner_b` is -1.
    - "joint": sign * (qpos[address] - threshold) > 0 for any of `addresses` if `any_joint`, else for all.

    R is the site's rotation matrix. Owners touch if some contact is between a geom with `geom_owner` == owner_a and
    one with owner_b. Positions in m, world frame.
    """

    kind: str
    a: int = -1
    b: int = -1
    size: tuple[float, float, float] = (0.0, 0.0, 0.0)
    owner_a: int = -1
    owner_b: int = -1
    addresses: tuple[int, ...] = ()
    sign: float = 1.0
    threshold: float = 0.0
    any_joint: bool = False


def holds(predicate: Predicate, geom_owner: np.ndarray, data: mujoco.MjData) -> bool:
    """Whether `predicate` is true in `data`; `geom_owner` [ngeom] is the scene's."""
    if predicate.kind == "joint":
        positions = data.qpos[list(predicate.addresses)]
        true = predicate.sign * (positions - predicate.threshold) > 0
        return bool(true.any() if predicate.any_joint else true.all())
    position = data.xpos[predicate.a]
    if predicate.kind == "on_object":
        offset = position - data.xpos[predicate.b]
        near = offset[2] >= 0 and np.hypot(offset[0], offset[1]) < NEAR
        return bool(near) and _touch(predicate, geom_owner, data)
    rotation = data.site_xmat[predicate.b].reshape(3, 3)
    offset = position - data.site_xpos[predicate.b]
    if predicate.kind == "in":
        half = np.abs(rotation @ predicate.size)
        return bool((np.abs(offset[:2]) < half[:2]).all() and -half[2] - BELOW_IN < offset[2] < half[2])
    local = rotation @ offset  # stock multiplies by the matrix, not by its transpose
    size = predicate.size
    over = (np.abs(local[:2]) < size[:2]).all() and size[2] - BELOW_ON < local[2] < size[2] + ABOVE_ON
    return bool(over) and (predicate.owner_b < 0 or _touch(predicate, geom_owner, data))


def _touch(predicate: Predicate, geom_owner: np.ndarray, data: mujoco.MjData) -> bool:
    owners = geom_owner[data.contact.geom]  # [ncon, 2]
    pair = (predicate.owner_a, predicate.owner_b)
    in_contact = ((owners == pair) | (owners == pair[::-1])).all(axis=1).any()
    return bool(in_contact) or (data.ntree_awake < data.model.ntree and _rest_together(pair, geom_owner, data))


def _rest_together(pair: tuple[int, int], geom_owner: np.ndarray, data: mujoco.MjData) -> bool:
    """Contact between two owners at rest, from distances: MuJoCo lists no contacts between sleeping bodies."""
    model = data.model
    still = data.body_awake[model.geom_bodyid] != mujoco.mjtSleepState.mjS_AWAKE
    first, second = (np.flatnonzero((geom_owner == owner) & still) for owner in pair)
    return any(_geoms_touch(model, data, i, j) for i in first for j in second)


def _geoms_touch(model: mujoco.MjModel, data: mujoco.MjData, i: int, j: int) -> bool:
    types = model.geom_contype
    affinities = model.geom_conaffinity
    if not (types[i] & affinities[j] or types[j] & affinities[i]):
        return False
    near = np.linalg.norm(data.geom_xpos[i] - data.geom_xpos[j]) <= model.geom_rbound[i] + model.geom_rbound[j]
    unbounded = model.geom_rbound[i] == 0 or model.geom_rbound[j] == 0  # planes
    return bool(near or unbounded) and mujoco.mj_geomDistance(model, data, i, j, 1e-3, None) < 0


class GoalCompiler:
    """Translates a goal's propositions to predicates on the compiled model.

    `instances` maps instance -> (category, its MJCF body element), in the order of owner ids.
    """

    def __init__(self, model: mujoco.MjModel, problem: Problem, instances: dict[str, tuple[str, ET.Element]]) -> None:
        self.model = model
        self.problem = problem
        self.instances = instances
        self.names = list(instances)

    def compile(self, atom: Atom) -> Predicate:
        """The predicate of `atom`; raises UserError for one that LIBERO lacks or a name that the scene lacks."""
        if atom[0] in ("open", "close", "turnon", "turnoff"):
            return self._joint(atom)
        if atom[0] in ("in", "on"):
            return self._place(atom)
        raise UserError(f"goal {atom}: unknown predicate; expected in, on, open, close, turnon or turnoff")

    def joints(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Category of the object or region `name`, and qpos addresses of the joints that open it or turn it on."""
        owner = self._owner_of(name)
        category, body = self.instances[owner]
        joints = [j.get("name") for j in body.iter("joint")] if owner == name else _region_joints(body, name)
        return category, tuple(int(self.model.jnt_qposadr[self._id(mujoco.mjtObj.mjOBJ_JOINT, j)]) for j in joints)

    def opening(self, region: str) -> Predicate | None:
        """Predicate that the drawer or door in front of `region` is open; None for a region that is always open."""
        for name in (region, self._owner_of(region)):
            category, addresses = self.joints(name)
            if addresses and ("open", category) in JOINT_GOALS:
                return self._joint(("open", name))
        return None

    def _joint(self, atom: Atom) -> Predicate:
        kind, name = atom
        category, addresses = self.joints(name)
        sign, threshold = JOINT_GOALS[kind, category]
        if kind == "turnon":  # the one comparison in stock that includes equality
            threshold = float(np.nextafter(threshold, -np.inf))
        any_joint = kind in ("open", "turnon")
        return Predicate("joint", addresses=addresses, sign=sign, threshold=threshold, any_joint=any_joint)

    def _place(self, atom: Atom) -> Predicate:
        kind, name, place = atom
        a = self._id(mujoco.mjtObj.mjOBJ_BODY, f"{name}_main")
        owner_a = self.names.index(name)
        if place in self.instances:
            if kind == "in":
                raise UserError(f"goal {atom}: expected a region, got the object {place}")
            b = self._id(mujoco.mjtObj.mjOBJ_BODY, f"{place}_main")
            return Predicate("on_object", a, b, owner_a=owner_a, owner_b=self.names.index(place))
        site = self._id(mujoco.mjtObj.mjOBJ_SITE, place)
        size = tuple(map(float, self.model.site_size[site]))
        if kind == "in":
            return Predicate("in", a, site, size)
        target = self.problem.regions[place].target
        owner_b = self.names.index(target) if target in self.instances else -1
        return Predicate("on_site", a, site, size, owner_a, owner_b)

    def _owner_of(self, name: str) -> str:
        if name in self.instances:
            return name
        if name in self.problem.regions and self.problem.regions[name].target in self.instances:
            return self.problem.regions[name].target
        raise UserError(f"{name}: no such object or region in the task {self.problem.language!r}")

    def _id(self, kind: mujoco.mjtObj, name: str) -> int:
        number = mujoco.mj_name2id(self.model, kind, name)
        if number < 0:
            raise UserError(f"{name}: not in the scene of {self.problem.language!r}; check the asset folder")
        return number


def _region_joints(body: ET.Element, site: str) -> list[str]:
    """Joints that move a region in stock: of the last body with the site, before the first body without sites."""
    joints: list[str] = []
    for part in body.iter("body"):
        sites = [s.get("name") for s in part.iter("site")]
        if part is not body and not sites:
            break
        if site in sites:
            joints = [joint.get("name") for joint in part.findall("joint")]
    return joints
