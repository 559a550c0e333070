"""Domain randomisation: differences of each world from LIBERO's scenes, drawn at every start.

Letters in shape comments: M movable objects, L lights, C cameras.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from embodied.configuration import Configuration, Fraction, NonNegativeFloat, PositiveFloat
from embodied.errors import UserError

if TYPE_CHECKING:
    from sims.libero.scene.scene import Scene

Array = NDArray[np.float64]
FACTORS = ("friction", "mass", "light")
WIDTHS = ("light_m", "light_colour", "camera_m", "camera_rad")
FIELDS = {
    "friction": ("geom_friction",),
    "mass": ("body_mass", "body_inertia", "body_subtreemass", "body_invweight0", "dof_invweight0"),
    "light": ("light_diffuse", "light_specular"),
    "light_m": ("light_pos",),
    "light_colour": ("light_diffuse", "light_specular"),
    "camera_m": ("cam_pos",),
    "camera_rad": ("cam_quat",),
}
"""Fields of MuJoCo's model that each option changes."""
PURPOSE = 2
"""Purpose of these random numbers, different from those of `placement`."""


def _same() -> list[float]:
    return [1.0, 1.0]


@dataclass
class Randomisation(Configuration):
    """Variations of training; none by default.

    Ranges [low, high] are of factors, drawn uniformly in their logarithm. `friction` scales the sliding friction of all
    contacts of a world. MuJoCo takes the larger of two geoms' coefficients, so that a factor of one object would
    have no effect on a rougher table. `mass` scales each movable object's mass and inertia, `light` each light's
    intensity. `light_colour` is the share by which each channel of a light's colour varies, `light_m` how far it is
    displaced along each axis. `camera_m` is how far cameras are displaced along each axis of the frame that carries
    them (the world, or the hand), `camera_rad` how far they are turned about each of their own axes. `evaluation`
    randomises evaluations too.

    Raises:
        UserError: for a range that is not [low, high] with 0 < low <= high, or a negative width.
    """

    friction: list[PositiveFloat] = field(default_factory=_same)
    mass: list[PositiveFloat] = field(default_factory=_same)
    light: list[PositiveFloat] = field(default_factory=_same)
    light_m: NonNegativeFloat = 0.0
    light_colour: Fraction = 0.0
    camera_m: NonNegativeFloat = 0.0
    camera_rad: NonNegativeFloat = 0.0
    evaluation: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in FACTORS:
            factors = getattr(self, name)
            if len(factors) != 2 or factors[0] > factors[1]:
                raise UserError(f"expected randomisation.{name}=[low,high] with low <= high, got {list(factors)}")

    def fields(self, split: str = "train") -> tuple[str, ...]:
        """Fields of MuJoCo's model that differ between worlds of `split`."""
        if split == "eval" and not self.evaluation:
            return ()
        active = [name for name in FACTORS if list(getattr(self, name)) != _same()]
        active += [name for name in WIDTHS if getattr(self, name) > 0.0]
        return tuple(dict.fromkeys(changed for name in active for changed in FIELDS[name]))


class Draws:
    """The drawn fields of one scene's model by number of a start: a fixed function of (task, split, number).

    The draws of one option do not depend on the other options.
    """

    def __init__(self, scene: Scene, options: Randomisation, split: str) -> None:
        self.scene = scene
        self.options = options
        self.names = options.fields(split)
        self._key = (zlib.crc32(f"{scene.task.suite}/{scene.task.name}".encode()), int(split == "eval"))
        roots = scene.model.body_rootid
        self._bodies = [np.flatnonzero(roots == body) for body in scene.object_body]
        self._dofs = [np.flatnonzero(np.isin(scene.model.dof_bodyid, bodies)) for bodies in self._bodies]

    def __call__(self, start: int) -> dict[str, Array]:
        """Drawn fields of the model by MuJoCo's name, for initial state number `start` >= 0."""
        if not self.names:
            return {}
        model = self.scene.model
        options = self.options
        draw = np.random.default_rng((*self._key, start, PURPOSE)).uniform
        friction = _factors(options.friction, draw(size=()))
        mass = _factors(options.mass, draw(size=len(self._bodies)))
        shade = _factors(options.light, draw(size=model.nlight))[:, None]
        shade = shade * (1.0 + options.light_colour * draw(-1.0, 1.0, size=(model.nlight, 3)))
        fields = self._weighed(mass) | {
            "geom_friction": model.geom_friction * (friction, 1.0, 1.0),
            "light_diffuse": model.light_diffuse * shade,
            "light_specular": model.light_specular * shade,
            "light_pos": model.light_pos + options.light_m * draw(-1.0, 1.0, size=(model.nlight, 3)),
            "cam_pos": model.cam_pos + options.camera_m * draw(-1.0, 1.0, size=(model.ncam, 3)),
            "cam_quat": _turned(model.cam_quat, options.camera_rad * draw(-1.0, 1.0, size=(model.ncam, 3))),
        }
        return {name: fields[name] for name in self.names}

    def _weighed(self, factors: Array) -> dict[str, Array]:
        """Masses and inertias of objects times `factors` [M], and derived fields, which are exact for free bodies."""
        model = self.scene.model
        result = {name: getattr(model, name).copy() for name in FIELDS["mass"]}
        for factor, bodies, dofs in zip(factors, self._bodies, self._dofs, strict=True):
            for name in ("body_mass", "body_inertia", "body_subtreemass"):
                result[name][bodies] *= factor
            result["body_invweight0"][bodies] /= factor
            result["dof_invweight0"][dofs] /= factor
        result["body_subtreemass"][0] = result["body_mass"].sum()
        return result


def _factors(limits: Sequence[float], shares: Array) -> Array:
    low, high = np.log(limits)
    return np.exp(low + (high - low) * shares)


def _turned(quaternions: Array, turns: Array) -> Array:
    """`quaternions` [C, 4] turned about their own axes by the rotation vectors `turns` [C, 3], rad."""
    # q * (cos(angle / 2), sin(angle / 2) axis)
    angle = np.linalg.norm(turns, axis=-1, keepdims=True)
    w = np.cos(angle / 2)
    v = 0.5 * turns * np.sinc(angle / (2 * np.pi))
    a = quaternions[:, :1]
    u = quaternions[:, 1:]
    return np.hstack((a * w - (u * v).sum(-1, keepdims=True), a * v + w * u + np.cross(u, v)))
