"""robosuite 1.4's OSC_POSE controller in numpy: the reference for native.c, and its replacement without a compiler.

Operational-space control (Khatib 1987) with position and orientation uncoupled: see `torques`.
"""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sims.libero.scene.scene import Scene

Array = NDArray[np.float64]

SUBSTEPS = 25  # of 2 ms: 20 Hz control
# m and rad for an action of 1
POSITION_SCALE = 0.05
ROTATION_SCALE = 0.5
# 1/s^2, both critically damped
KP = 150.0
POSTURE_KP = 10.0
GRIPPER_SPEED = np.array([-0.01, 0.01])  # change of the fingers' normalised commands per substep while closing


def control_step(model: mujoco.MjModel, data: mujoco.MjData, scene: Scene, memory: np.void, action: Array) -> bool:
    """One control step of `action` [7]; `memory` is a record of native.CONTROLLER. False if the simulation diverges."""
    for substep in range(SUBSTEPS):
        first_step = bool(memory["fresh"])
        if first_step:
            goal_position, torque = _recalled(model, data, scene, memory, action)
            memory["fresh"] = 0.0
        mujoco.mj_fwdPosition(model, data)
        mujoco.mj_fwdVelocity(model, data)
        if not first_step:
            goal_position = set_goal(data, scene, memory, action) if substep == 0 else goal_position
            torque = torques(model, data, scene, memory, goal_position)
        data.ctrl[scene.arm_actuator] = compensated(model, data, scene, torque)
        data.ctrl[scene.gripper_actuator] = grip(model, scene, memory, action[6])
        mujoco.mj_fwdActuation(model, data)
        mujoco.mj_fwdAcceleration(model, data)
        mujoco.mj_fwdConstraint(model, data)
        if not _finite(data.qacc):
            return False
        mujoco.mj_Euler(model, data)
    return _finite(data.qpos) and _finite(data.qvel)


def set_goal(data: mujoco.MjData, scene: Scene, memory: np.void, action: Array) -> Array:
    """Goal position [3] m; also sets the goal orientation in `memory`, unless no rotation is commanded."""
    clipped = np.clip(action, -1.0, 1.0)
    rotation = ROTATION_SCALE * clipped[3:6]
    if rotation.any():
        memory["goal_orientation"] = rotation_matrix(rotation) @ data.site_xmat[scene.grip_site].reshape(3, 3)
    return data.site_xpos[scene.grip_site] + POSITION_SCALE * clipped[:3]


def rotation_matrix(axis_angle: Array) -> Array:
    """Rotation [3, 3] by `axis_angle` [3] rad (not zero), rounded to single precision as robosuite rounds it."""
    angle = np.sqrt((axis_angle**2).sum())
    q = np.array([np.cos(angle / 2), *(axis_angle / angle * np.sin(angle / 2))], dtype=np.float32)
    norm = np.float32(sum(np.float64(x * x) for x in q))  # as BLAS sums single precision
    w, x, y, z = (q * np.sqrt(2.0 / np.float64(norm))).astype(np.float32)
    one = np.float64(1.0)
    return np.array(
        [
            [one - y * y - z * z, x * y - z * w, x * z + y * w],
            [x * y + z * w, one - x * x - z * z, y * z - x * w],
            [x * z - y * w, y * z + x * w, one - x * x - y * y],
        ],
        dtype=np.float64,
    )


def torques(model: mujoco.MjModel, data: mujoco.MjData, scene: Scene, memory: np.void, goal_position: Array) -> Array:
    """Joint torques [7], N m, without gravity and Coriolis compensation: tau = J'(F - Lambda J p) + M p.

    F = (Lambda_pos a_pos, Lambda_rot a_rot) with accelerations a = kp * error - kd * velocity that bring the hand to
    its goal and p = kp (posture - q) - kd qd that bring the joints to their posture; Lambda = pinv(J M^-1 J').
    """
    velocity = data.qvel[scene.arm_dofadr]
    jacobian, inertia = arm_matrices(model, data, scene)
    # Lambda^-1 = J M^-1 J'
    inverse = jacobian @ np.linalg.solve(inertia, jacobian.T)
    desired = KP * _pose_error(data, scene, memory, goal_position) - 2 * np.sqrt(KP) * (jacobian @ velocity)
    posture = POSTURE_KP * (memory["posture"] - data.qpos[scene.arm_qposadr]) - 2 * np.sqrt(POSTURE_KP) * velocity
    # F = (Lambda_pos a_pos, Lambda_rot a_rot), uncoupled
    wrench = np.concatenate([_pinv(inverse[:3, :3]) @ desired[:3], _pinv(inverse[3:, 3:]) @ desired[3:]])
    # F - Lambda J p removes the posture task's effect on the hand
    wrench -= _pinv(inverse) @ (jacobian @ posture)
    return jacobian.T @ wrench + inertia @ posture


def compensated(model: mujoco.MjModel, data: mujoco.MjData, scene: Scene, push: Array) -> Array:
    """Commanded torques [7], N m: with gravity and Coriolis compensation, clipped to the actuators' range."""
    return np.clip(push + data.qfrc_bias[scene.arm_dofadr], *model.actuator_ctrlrange[scene.arm_actuator].T)


def grip(model: mujoco.MjModel, scene: Scene, memory: np.void, action: float) -> Array:
    """Commanded finger positions [2], m, after one substep towards closed (action > 0) or open."""
    memory["gripper"] = np.clip(memory["gripper"] + GRIPPER_SPEED * np.sign(action), -1.0, 1.0)
    low, high = model.actuator_ctrlrange[scene.gripper_actuator].T
    return 0.5 * (high + low) + 0.5 * (high - low) * memory["gripper"]


def _recalled(
    model: mujoco.MjModel, data: mujoco.MjData, scene: Scene, memory: np.void, action: Array
) -> tuple[Array, Array]:
    """Goal position [3] and torques [7] of an episode's first substep.

    Stock's controller reads the arm's state when a reset creates it, and next at the second substep, independently
    of states written in between: the first substep therefore uses the arm at rest in its posture.
    """
    arm_qpos = data.qpos[scene.arm_qposadr]
    arm_qvel = data.qvel[scene.arm_dofadr]
    data.qpos[scene.arm_qposadr] = memory["posture"]
    data.qvel[scene.arm_dofadr] = 0.0
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)
    mujoco.mj_makeM(model, data)
    goal_position = set_goal(data, scene, memory, action)
    torque = torques(model, data, scene, memory, goal_position)
    data.qpos[scene.arm_qposadr] = arm_qpos
    data.qvel[scene.arm_dofadr] = arm_qvel
    return goal_position, torque


def arm_matrices(model: mujoco.MjModel, data: mujoco.MjData, scene: Scene) -> tuple[Array, Array]:
    """Jacobian [6, 7] of the grip site (linear, then angular) and inertia [7, 7] of the arm."""
    jacobian = np.zeros((6, model.nv))
    inertia = np.zeros((model.nv, model.nv))
    mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], scene.grip_site)
    mujoco.mj_fullM(model, data, inertia)
    return jacobian[:, scene.arm_dofadr], inertia[np.ix_(scene.arm_dofadr, scene.arm_dofadr)]


def _pose_error(data: mujoco.MjData, scene: Scene, memory: np.void, goal_position: Array) -> Array:
    """Position error m, then half the sum of the cross products of the frames' axes: [6]."""
    now = data.site_xmat[scene.grip_site].reshape(3, 3)
    turn = 0.5 * np.cross(now, memory["goal_orientation"], axis=0).sum(axis=1)
    return np.concatenate([goal_position - data.site_xpos[scene.grip_site], turn])


def _pinv(matrix: Array) -> Array:
    return np.linalg.pinv(matrix, rcond=1e-15)


def _finite(values: Array) -> bool:
    return bool((np.abs(values) < mujoco.mjMAXVAL).all())  # False for NaN
