"""Forward and inverse kinematics of an arm from its MuJoCo or URDF model; mink solves the inverse (extra `robot`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodied.errors import UserError
from embodied.extras import needs_extra
from real_robot.robots.robot import Array

ITERATIONS = 4
"""Gauss-Newton steps per solution: a period's motion is small, so the first step leaves an error of micrometres."""
POSTURE_COST = 1e-3
DAMPING = 1e-6
"""Weights relative to the hand's errors in m and rad."""


class Kinematics:
    """Kinematics of an arm's commanded joints; every other joint of the model stays at zero.

    Args:
        path: MJCF or URDF file.
        site: name of the point of the hand that is commanded: a site of the model, or else a body.
        joints: the model's names of the joints, in the order of all arrays here.
        velocity: limit of every joint's velocity, rad/s.

    Raises:
        UserError: for a model that cannot be read, or lacks one of the names; or without mujoco and mink.
    """

    def __init__(self, path: Path, site: str, joints: Sequence[str], velocity: float) -> None:
        with needs_extra("robot"):
            import mink
            import mujoco

        try:
            model = mujoco.MjModel.from_xml_path(str(path))
        except ValueError as error:
            raise UserError(f"{path}: {' '.join(str(error).split())}") from error
        kind = mujoco.mjtObj.mjOBJ_SITE if mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_SITE, site) >= 0 else None
        if kind is None and mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_BODY, site) < 0:
            raise UserError(f"{path} has neither a site nor a body {site!r}")
        names = [model.joint(index).name for index in range(model.njnt)]
        if missing := [name for name in joints if name not in names]:
            raise UserError(f"{path} has no joints {missing}; expected some of {names}")
        self._frame = site
        self._type = "site" if kind is not None else "body"
        self._qpos = np.array([model.joint(name).qposadr[0] for name in joints])
        self._dof = np.array([model.joint(name).dofadr[0] for name in joints])
        # limits [joints] in the order of `joints`, not of the model
        self.low, self.high = model.jnt_range[[model.joint(name).id for name in joints]].T
        self._mink = mink
        self._model = model
        self._at = mink.Configuration(model)
        self._hand = mink.FrameTask(site, self._type, position_cost=1.0, orientation_cost=1.0, lm_damping=DAMPING)
        self._posture = mink.PostureTask(model, cost=POSTURE_COST)
        frozen = [index for index in range(model.nv) if index not in self._dof]
        self._constraints = [mink.DofFreezingTask(model, frozen)] if frozen else None
        self._limits = [
            mink.ConfigurationLimit(model),
            mink.VelocityLimit(model, {name: np.array([velocity]) for name in joints}),
        ]

    def pose(self, joints: Array) -> tuple[Array, Array]:
        """Position [3] m and rotation [3, 3] of the hand in the model's frame at `joints` rad."""
        self._at.update(self._full(joints))
        pose = self._at.get_transform_frame_to_world(self._frame, self._type)
        return pose.translation(), pose.rotation().as_matrix()

    def toward(self, joints: Array, position: Array, rotation: Array, posture: Array, period_s: float) -> Array:
        """Joint positions, rad, that bring the hand from `joints` to the pose in `period_s`, as far as limits allow.

        Redundant joints tend to `posture`.

        Raises:
            UserError: if the solver finds no solution.
        """
        mink = self._mink
        goal = mink.SE3.from_rotation_and_translation(mink.SO3.from_matrix(rotation), position)
        self._hand.set_target(goal)
        self._posture.set_target(self._full(posture))
        self._at.update(self._full(np.clip(joints, self.low, self.high)))
        # Gauss-Newton: q <- q + dq, where dq minimises |J dq - e|^2 plus the weighted posture error, within limits
        for _ in range(ITERATIONS):
            try:
                velocity = mink.solve_ik(
                    self._at,
                    [self._hand, self._posture],
                    period_s / ITERATIONS,
                    "daqp",
                    limits=self._limits,
                    constraints=self._constraints,
                )
            except mink.NoSolutionFound as error:
                raise UserError(f"no joint positions lead to {position.round(3).tolist()}: {error}") from error
            self._at.integrate_inplace(velocity, period_s / ITERATIONS)
        return self._at.q[self._qpos].copy()

    def _full(self, joints: Array) -> Any:  # noqa: ANN401 - numpy's
        """All coordinates of the model, with the commanded joints at `joints` and the others at zero."""
        full = np.zeros(self._model.nq)
        full[self._qpos] = joints
        return full
