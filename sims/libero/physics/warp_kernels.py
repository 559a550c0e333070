"""Kernels around mujoco_warp's physics: the OSC_POSE controller, LIBERO's goals, and freezing of finished worlds.

One thread per world. The controller computes in double precision what controller.py computes in numpy, from physics in
single precision. Where a task inertia is close to singular its pivots are bounded from below, instead of a
pseudo-inverse. W: worlds of one scene.
"""

from __future__ import annotations

import warp as wp

from sims.libero.physics.controller import KP, POSITION_SCALE, POSTURE_KP, ROTATION_SCALE
from sims.libero.scene.predicates import ABOVE_ON, BELOW_IN, BELOW_ON, NEAR
from sims.warp_capacity import OVERFLOW

wp.set_module_options({"enable_backward": False, "max_unroll": 4})

ARM = wp.constant(7)
real = wp.float64
vec3d = wp.vec3d
mat33d = wp.mat33d
vec6d = wp.types.vector(6, wp.float64)
vec7d = wp.types.vector(7, wp.float64)
mat66d = wp.types.matrix((6, 6), wp.float64)
mat67d = wp.types.matrix((6, 7), wp.float64)
mat77d = wp.types.matrix((7, 7), wp.float64)

KP_HAND = wp.constant(wp.float64(KP))
KD_HAND = wp.constant(wp.float64(2.0 * KP**0.5))
KP_REST = wp.constant(wp.float64(POSTURE_KP))
KD_REST = wp.constant(wp.float64(2.0 * POSTURE_KP**0.5))
TRANSLATION = wp.constant(wp.float64(POSITION_SCALE))
TURN = wp.constant(wp.float64(ROTATION_SCALE))
GRIP = wp.constant(wp.float64(0.01))  # change of the fingers' normalised commands per substep
SMALLEST = wp.constant(wp.float64(1e-10))  # pivot, relative to the largest diagonal element
LARGEST = wp.constant(1e10)  # mjMAXVAL: a larger state has diverged
IN, ON_OBJECT, ON_SITE, JOINT_ANY, JOINT_ALL = (wp.constant(kind) for kind in range(5))
NO_ROOM = wp.constant(OVERFLOW)
NEAR_M = wp.constant(NEAR)
BELOW_IN_M = wp.constant(BELOW_IN)
BELOW_ON_M = wp.constant(BELOW_ON)
ABOVE_ON_M = wp.constant(ABOVE_ON)


@wp.struct
class Arm:
    """Addresses of one scene's arm and gripper in mujoco_warp's arrays."""

    qpos: wp.array[int]  # [7]
    dof: wp.array[int]  # [7]
    actuator: wp.array[int]  # [7]
    fingers: wp.array[int]  # [2] actuators
    site: int  # the controlled point
    root: int  # body at the root of the arm's tree


@wp.struct
class Controller:
    """Memory of the controllers of W worlds; `start_*` are of the arm at rest in its posture, where episodes begin."""

    goal_position: wp.array[wp.vec3d]  # m, world frame
    goal_orientation: wp.array[wp.mat33d]
    posture: wp.array2d[wp.float64]  # [W, 7] rad
    gripper: wp.array2d[wp.float64]  # [W, 2] normalised commands in [-1, 1]
    fresh: wp.array[int]  # 1 until the episode's first substep
    start_position: wp.array[wp.vec3d]
    start_orientation: wp.array[wp.mat33d]
    start_jacobian: wp.array3d[wp.float64]  # [W, 6, 7]
    start_inertia: wp.array3d[wp.float64]  # [W, 7, 7]


@wp.struct
class Goal:
    """Propositions [P] of a scene's goal, fields as in predicates.Predicate; `addresses` [P, J] end with -1."""

    kind: wp.array[int]
    a: wp.array[int]
    b: wp.array[int]
    size: wp.array[wp.vec3]
    owner_a: wp.array[int]
    owner_b: wp.array[int]
    addresses: wp.array2d[int]
    sign: wp.array[float]
    threshold: wp.array[float]
    geom_owner: wp.array[int]  # [ngeom]


@wp.func
def cholesky6(a: mat66d, n: int) -> mat66d:
    """Lower factor of the leading [n, n] block; pivots are at least SMALLEST times the largest diagonal element."""
    l = mat66d()  # noqa: E741 - the factor's usual name
    largest = wp.float64(0.0)
    for i in range(n):
        largest = wp.max(largest, a[i, i])
    for i in range(n):
        for j in range(i + 1):
            rest = a[i, j]
            for k in range(j):
                rest -= l[i, k] * l[j, k]
            if i == j:
                l[i, i] = wp.sqrt(wp.max(rest, SMALLEST * largest))
            else:
                l[i, j] = rest / l[j, j]
    return l


@wp.func
def solve6(a: mat66d, x: vec6d, n: int) -> vec6d:
    """Solution of the leading [n, n] system, by forward and backward substitution."""
    # L y = x, then L' z = y, in place.
    l = cholesky6(a, n)  # noqa: E741
    y = x
    for i in range(n):
        for k in range(i):
            y[i] -= l[i, k] * y[k]
        y[i] /= l[i, i]
    for step in range(n):
        i = n - 1 - step
        for k in range(i + 1, n):
            y[i] -= l[k, i] * y[k]
        y[i] /= l[i, i]
    return y


@wp.func
def inverse_task_inertia(inertia: mat77d, jacobian: mat67d) -> mat66d:
    """J M^-1 J' by the Cholesky factor of M."""
    l = mat77d()  # noqa: E741
    half = mat67d()
    for i in range(ARM):
        for j in range(i + 1):
            rest = inertia[i, j]
            for k in range(j):
                rest -= l[i, k] * l[j, k]
            if i == j:
                l[i, i] = wp.sqrt(rest)
            else:
                l[i, j] = rest / l[j, j]
    # With M = L L' and H = J L^-T: J M^-1 J' = H H'.
    result = mat66d()
    for r in range(6):
        for i in range(ARM):
            rest = jacobian[r, i]
            for k in range(i):
                rest -= l[i, k] * half[r, k]
            half[r, i] = rest / l[i, i]
        for c in range(r + 1):
            dot = wp.float64(0.0)
            for i in range(ARM):
                dot += half[r, i] * half[c, i]
            result[r, c] = dot
            result[c, r] = dot
    return result


@wp.func
def torques(
    inertia: mat77d,
    jacobian: mat67d,
    position: vec3d,
    orientation: mat33d,
    goal_position: vec3d,
    goal_orientation: mat33d,
    posture_error: vec7d,
    velocity: vec7d,
) -> vec7d:
    """J'(F - Lambda J p) + M p, see controller.torques."""
    inverse = inverse_task_inertia(inertia, jacobian)
    twist = jacobian * velocity
    turn = vec3d()
    for axis in range(3):
        now = vec3d(orientation[0, axis], orientation[1, axis], orientation[2, axis])
        goal = vec3d(goal_orientation[0, axis], goal_orientation[1, axis], goal_orientation[2, axis])
        turn += wp.cross(now, goal)
    linear = vec6d()
    angular = vec6d()
    block_linear = mat66d()
    block_angular = mat66d()
    for i in range(3):
        linear[i] = KP_HAND * (goal_position[i] - position[i]) - KD_HAND * twist[i]
        angular[i] = KP_HAND * wp.float64(0.5) * turn[i] - KD_HAND * twist[3 + i]
        for j in range(3):
            block_linear[i, j] = inverse[i, j]
            block_angular[i, j] = inverse[3 + i, 3 + j]
    linear = solve6(block_linear, linear, 3)
    angular = solve6(block_angular, angular, 3)
    rest = KP_REST * posture_error - KD_REST * velocity
    leak = solve6(inverse, jacobian * rest, 6)
    wrench = vec6d()
    for i in range(3):
        wrench[i] = linear[i] - leak[i]
        wrench[3 + i] = angular[i] - leak[3 + i]
    return wp.transpose(jacobian) * wrench + inertia * rest


@wp.func
def turned(orientation: mat33d, axis_angle: vec3d) -> mat33d:
    """`orientation` rotated in the world frame by `axis_angle` rad, which is not zero."""
    angle = wp.length(axis_angle)
    q = wp.quat_from_axis_angle(axis_angle / angle, angle)
    return wp.quat_to_matrix(q) * orientation


@wp.kernel
def control(
    first: int,
    arm: Arm,
    memory: Controller,
    active: wp.array[int],
    action: wp.array2d[wp.float64],
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    site_xpos: wp.array2d[wp.vec3],
    site_xmat: wp.array2d[wp.mat33],
    subtree_com: wp.array2d[wp.vec3],
    cdof: wp.array2d[wp.spatial_vector],
    inertias: wp.array2d[float],
    rowadr: wp.array[int],
    rownnz: wp.array[int],
    colind: wp.array[int],
    qfrc_bias: wp.array2d[float],
    ctrlrange: wp.array2d[wp.vec2],
    ctrl: wp.array2d[float],
) -> None:
    """Write the commands [W, nu] of one substep of the active worlds; the goal is set at the control step's first."""
    w = wp.tid()
    if active[w] == 0:
        return
    first_step = memory.fresh[w]
    inertia = mat77d()
    jacobian = mat67d()
    velocity = vec7d()
    posture_error = vec7d()
    position = vec3d()
    orientation = mat33d()
    if first_step == 1:
        position += memory.start_position[w]
        orientation += memory.start_orientation[w]
        for i in range(ARM):
            for j in range(ARM):
                inertia[i, j] = memory.start_inertia[w, i, j]
            for r in range(6):
                jacobian[r, i] = memory.start_jacobian[w, r, i]
        memory.fresh[w] = 0
    else:
        site = site_xpos[w, arm.site]
        frame = site_xmat[w, arm.site]
        for r in range(3):
            position[r] = real(site[r])
            for c in range(3):
                orientation[r, c] = real(frame[r, c])
        lever = site - subtree_com[w, arm.root]
        for i in range(ARM):
            dof = arm.dof[i]
            velocity[i] = real(qvel[w, dof])
            posture_error[i] = memory.posture[w, i] - real(qpos[w, arm.qpos[i]])
            motion = cdof[w, dof]
            turn = wp.vec3(motion[0], motion[1], motion[2])
            linear = wp.vec3(motion[3], motion[4], motion[5]) + wp.cross(turn, lever)
            for k in range(3):
                jacobian[k, i] = real(linear[k])
                jacobian[3 + k, i] = real(turn[k])
            for k in range(rowadr[dof], rowadr[dof] + rownnz[dof]):
                for j in range(i + 1):
                    if arm.dof[j] == colind[k]:
                        inertia[i, j] = real(inertias[w, k])
                        inertia[j, i] = real(inertias[w, k])
    if first == 1:
        shift = vec3d()
        turn_by = vec3d()
        for i in range(3):
            shift[i] = TRANSLATION * wp.clamp(action[w, i], real(-1.0), real(1.0))
            turn_by[i] = TURN * wp.clamp(action[w, 3 + i], real(-1.0), real(1.0))
        memory.goal_position[w] = position + shift
        if turn_by[0] != real(0.0) or turn_by[1] != real(0.0) or turn_by[2] != real(0.0):
            memory.goal_orientation[w] = turned(orientation, turn_by)
    torque = torques(
        inertia,
        jacobian,
        position,
        orientation,
        memory.goal_position[w],
        memory.goal_orientation[w],
        posture_error,
        velocity,
    )
    shared = wp.min(w, ctrlrange.shape[0] - 1)
    for i in range(ARM):
        bounds = ctrlrange[shared, arm.actuator[i]]
        ctrl[w, arm.actuator[i]] = wp.clamp(float(torque[i]) + qfrc_bias[w, arm.dof[i]], bounds[0], bounds[1])
    closing = wp.sign(action[w, 6])
    if action[w, 6] == real(0.0):
        closing = real(0.0)
    for i in range(2):
        direction = real(2 * i - 1)
        command = wp.clamp(memory.gripper[w, i] + direction * GRIP * closing, real(-1.0), real(1.0))
        memory.gripper[w, i] = command
        bounds = ctrlrange[shared, arm.fingers[i]]
        ctrl[w, arm.fingers[i]] = 0.5 * (bounds[0] + bounds[1]) + 0.5 * (bounds[1] - bounds[0]) * float(command)


@wp.kernel
def find_touches(
    goal: Goal, nacon: wp.array[int], geoms: wp.array[wp.vec2i], worlds: wp.array[int], touches: wp.array2d[int]
) -> None:
    """Set touches [W, P] to 1 where a contact joins the owners that proposition p names."""
    c = wp.tid()
    if c >= nacon[0]:
        return
    pair = geoms[c]
    if pair[0] < 0 or pair[1] < 0:
        return
    first = goal.geom_owner[pair[0]]
    second = goal.geom_owner[pair[1]]
    for p in range(goal.kind.shape[0]):
        a = goal.owner_a[p]
        b = goal.owner_b[p]
        if a >= 0 and b >= 0 and ((first == a and second == b) or (first == b and second == a)):
            touches[worlds[c], p] = 1


@wp.func
def holds(
    goal: Goal,
    p: int,
    w: int,
    qpos: wp.array2d[float],
    xpos: wp.array2d[wp.vec3],
    site_xpos: wp.array2d[wp.vec3],
    site_xmat: wp.array2d[wp.mat33],
    touches: wp.array2d[int],
) -> bool:
    """Whether proposition p is true in world w, see predicates.holds."""
    kind = goal.kind[p]
    if kind == JOINT_ANY or kind == JOINT_ALL:  # noqa: SIM109 - warp has no membership
        any_true, all_true = bool(False), bool(True)  # noqa: UP018 - variables, not constants
        for j in range(goal.addresses.shape[1]):
            address = goal.addresses[p, j]
            if address >= 0:
                true = goal.sign[p] * (qpos[w, address] - goal.threshold[p]) > 0.0
                any_true = any_true or true
                all_true = all_true and true
        if kind == JOINT_ANY:
            return any_true
        return all_true
    position = xpos[w, goal.a[p]]
    if kind == ON_OBJECT:
        offset = position - xpos[w, goal.b[p]]
        near = offset[2] >= 0.0 and wp.sqrt(offset[0] * offset[0] + offset[1] * offset[1]) < NEAR_M
        return near and touches[w, p] == 1
    frame = site_xmat[w, goal.b[p]]
    offset = position - site_xpos[w, goal.b[p]]
    size = goal.size[p]
    if kind == IN:
        half = wp.vec3()
        rotated = frame * size
        for i in range(3):
            half[i] = wp.abs(rotated[i])
        inside = wp.abs(offset[0]) < half[0] and wp.abs(offset[1]) < half[1]
        return inside and offset[2] > -half[2] - BELOW_IN_M and offset[2] < half[2]
    local = frame * offset
    over = wp.abs(local[0]) < size[0] and wp.abs(local[1]) < size[1]
    over = over and local[2] > size[2] - BELOW_ON_M and local[2] < size[2] + ABOVE_ON_M
    return over and (goal.owner_b[p] < 0 or touches[w, p] == 1)


@wp.kernel
def judge(
    goal: Goal,
    stop_on_success: int,
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    xpos: wp.array2d[wp.vec3],
    site_xpos: wp.array2d[wp.vec3],
    site_xmat: wp.array2d[wp.mat33],
    touches: wp.array2d[int],
    overflow: wp.array[int],
    remaining_steps: wp.array[int],
    active: wp.array[int],
    executed: wp.array[int],
    success: wp.array[int],
    diverged: wp.array[int],
    achieved: wp.array2d[int],
) -> None:
    """End of a control step: sets which active worlds have diverged, are at their goal, or continue.

    `executed` counts the control steps of the chunk, of which a world runs `remaining_steps`; `achieved` [W, P] are the
    propositions that are true.
    """
    w = wp.tid()
    if active[w] == 0:
        return
    executed[w] = executed[w] + 1
    finite = (overflow[w] & NO_ROOM) == 0  # with more contacts than allocated a world's physics is wrong
    for i in range(qpos.shape[1]):
        finite = finite and wp.abs(qpos[w, i]) < LARGEST
    for i in range(qvel.shape[1]):
        finite = finite and wp.abs(qvel[w, i]) < LARGEST
    reached = finite
    for p in range(goal.kind.shape[0]):
        true = holds(goal, p, w, qpos, xpos, site_xpos, site_xmat, touches)
        achieved[w, p] = int(true)
        reached = reached and true
    success[w] = int(reached)
    diverged[w] = int(not finite)
    if not finite or (reached and stop_on_success == 1) or executed[w] >= remaining_steps[w]:
        active[w] = 0


@wp.kernel
def carry(active: wp.array[int], state: wp.array2d[float], saved: wp.array2d[float]) -> None:
    """Store the rows of active worlds in `saved`, and restore the rows of the others from it."""
    w, i = wp.tid()
    if active[w] == 1:
        saved[w, i] = state[w, i]
    else:
        state[w, i] = saved[w, i]
