"""Target poses of an arm's hand, integrated from commanded velocities."""

from __future__ import annotations

import numpy as np
from scipy.spatial.transform import Rotation

from real_robot.robots.robot import Array

Pose = tuple[Array, Array]
"""Position [3] m and rotation [3, 3]."""


class Servo:
    """Integrates velocities of the hand to target poses, which never lead the measured one by more than a leash.

    Without the leash the target of a blocked hand would move on, and the hand would jump to it once it is free; it also
    bounds how hard a stiff arm presses. All poses and velocities are in one frame.

    Args:
        leash_m: largest distance between target and measurement, m.
        leash_rad: largest angle between them, rad.
    """

    def __init__(self, leash_m: float, leash_rad: float) -> None:
        self._leash_m = leash_m
        self._leash_rad = leash_rad
        self._target: Pose | None = None

    def stop(self) -> None:
        """Forget the target: the next one starts from the measurement."""
        self._target = None

    def advance(self, velocity: Array, period_s: float, measured: Pose) -> Pose:
        """The target after `period_s` of `velocity` [6], m/s and rad/s, given the `measured` pose."""
        position, rotation = self._target or measured
        measured_position, measured_rotation = measured
        # target = measured + min(1, leash / |lead|) lead, for the position and for the rotation vector
        lead = _shortened(position + velocity[:3] * period_s - measured_position, self._leash_m)
        # rotations are applied in the fixed frame: R_target = exp(omega dt) R
        ahead = Rotation.from_rotvec(velocity[3:] * period_s) * Rotation.from_matrix(rotation)
        turn = _shortened((ahead * Rotation.from_matrix(measured_rotation).inv()).as_rotvec(), self._leash_rad)
        self._target = (
            measured_position + lead,
            (Rotation.from_rotvec(turn) * Rotation.from_matrix(measured_rotation)).as_matrix(),
        )
        return self._target


def _shortened(vector: Array, longest: float) -> Array:
    return vector * min(1.0, longest / max(float(np.linalg.norm(vector)), 1e-12))
