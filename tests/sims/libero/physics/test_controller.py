"""The controller against numbers worked out by hand; the compiled one is held to this one in test_simulation.py."""

import mujoco
import numpy as np
import pytest

from sims.libero.assets import STAND_IN
from sims.libero.physics import controller, native
from sims.libero.physics.simulation import Simulation
from sims.libero.scene.scene import build_scene
from sims.libero.suite import initial_states, load_tasks


@pytest.fixture(scope="module")
def scene():
    return build_scene(load_tasks("libero_object", [0])[0], STAND_IN)


@pytest.fixture
def simulation(scene):
    simulation = Simulation([scene])
    state = initial_states(scene.task)[0]
    simulation.write(0, state[1 : 1 + scene.model.nq], state[1 + scene.model.nq :])
    return simulation


def hand(simulation):
    data, site = simulation.data[0], simulation.scenes[0].grip_site
    return data.site_xpos[site].copy(), data.site_xmat[site].reshape(3, 3).copy()


def test_a_quarter_turn_about_z():
    turned = controller.rotation_matrix(np.array([0.0, 0.0, np.pi / 2]))
    np.testing.assert_allclose(turned, [[0, -1, 0], [1, 0, 0], [0, 0, 1]], atol=1e-6)


def test_rotations_are_rounded_to_single_precision_as_robosuite_rounds_them():
    turned = controller.rotation_matrix(np.array([0.1, -0.2, 0.3]))
    assert turned[0, 1] == np.float32(turned[0, 1])
    np.testing.assert_allclose(turned @ turned.T, np.eye(3), atol=1e-6)


def test_goal_is_the_present_pose_plus_the_clipped_scaled_action(scene, simulation):
    position, orientation = hand(simulation)
    action = np.array([1.0, -3.0, 0.5, 0.0, 0.0, -2.0, 0.0])
    goal = controller.set_goal(simulation.data[0], scene, simulation.memory[0], action)
    np.testing.assert_allclose(goal - position, [0.05, -0.05, 0.025], atol=1e-15)
    turn = simulation.memory["goal_orientation"][0] @ orientation.T
    assert np.arctan2(turn[1, 0], turn[0, 0]) == pytest.approx(-0.5, abs=1e-6)


def test_orientation_goal_is_kept_without_rotation_and_starts_at_the_nominal_arm(scene, simulation):
    data = mujoco.MjData(scene.model)
    data.qpos[scene.arm_qposadr] = scene.initial_arm
    mujoco.mj_kinematics(scene.model, data)
    nominal = data.site_xmat[scene.grip_site].reshape(3, 3)
    controller.set_goal(simulation.data[0], scene, simulation.memory[0], np.array([1.0, 0, 0, 0, 0, 0, 1]))
    np.testing.assert_array_equal(simulation.memory["goal_orientation"][0], nominal)


def test_fingers_creep_a_hundredth_per_substep_and_stop_at_the_ends(scene, simulation):
    memory = simulation.memory[0]
    ctrl = controller.grip(scene.model, scene, memory, 0.3)
    np.testing.assert_allclose(memory["gripper"], [-0.01, 0.01])
    np.testing.assert_allclose(ctrl, [0.02 - 0.02 * 0.01, -0.02 + 0.02 * 0.01])  # ranges [0, 0.04] and [-0.04, 0]
    for _ in range(150):
        ctrl = controller.grip(scene.model, scene, memory, 1.0)
    np.testing.assert_allclose(memory["gripper"], [-1.0, 1.0])
    np.testing.assert_allclose(ctrl, [0.0, 0.0], atol=1e-15)
    np.testing.assert_allclose(controller.grip(scene.model, scene, memory, 0.0), [0.0, 0.0], atol=1e-15)


def test_torques_at_rest_hold_against_gravity_alone(scene, simulation):
    data = simulation.data[0]
    data.qpos[scene.arm_qposadr] = scene.initial_arm
    data.qvel[:] = 0.0
    mujoco.mj_forward(scene.model, data)
    here = data.site_xpos[scene.grip_site].copy()
    torques = controller.torques(scene.model, data, scene, simulation.memory[0], here)
    np.testing.assert_allclose(torques, np.zeros(7), atol=1e-9)
    torques = controller.compensated(scene.model, data, scene, torques)
    np.testing.assert_allclose(torques, data.qfrc_bias[scene.arm_dofadr], atol=1e-9)


def test_position_error_accelerates_the_hand_by_kp_times_it(scene, simulation):
    """Uncoupled OSC: the force Lambda_pos kp error gives J_pos M^-1 J_pos' Lambda_pos kp error = kp error."""
    model, data = scene.model, simulation.data[0]
    data.qpos[scene.arm_qposadr] = scene.initial_arm
    data.qvel[:] = 0.0
    mujoco.mj_forward(model, data)
    error = np.array([0.01, -0.02, 0.005])
    goal = data.site_xpos[scene.grip_site] + error
    torques = controller.torques(model, data, scene, simulation.memory[0], goal)
    jacobian, inertia = controller.arm_matrices(model, data, scene)
    np.testing.assert_allclose(jacobian[:3] @ np.linalg.solve(inertia, torques), controller.KP * error, rtol=1e-6)


def test_the_hand_is_damped_critically_and_the_posture_leaves_it_alone(scene, simulation):
    model, data, memory = scene.model, simulation.data[0], simulation.memory[0]
    data.qpos[scene.arm_qposadr] = scene.initial_arm + 0.1 * np.array([1, -1, 1, 1, -1, 1, -1])  # not its posture
    mujoco.mj_forward(model, data)
    memory["goal_orientation"] = hand(simulation)[1]
    jacobian, inertia = controller.arm_matrices(model, data, scene)
    speed, error = np.array([0.1, 0.2, -0.1]), np.array([0.01, -0.02, 0.005])
    for velocity in (np.zeros(3), speed):
        data.qvel[scene.arm_dofadr] = np.linalg.pinv(jacobian) @ [*velocity, 0.0, 0.0, 0.0]
        mujoco.mj_forward(model, data)
        torques = controller.torques(model, data, scene, memory, hand(simulation)[0] + error)
        expected = controller.KP * error - 2.0 * np.sqrt(controller.KP) * velocity
        np.testing.assert_allclose(jacobian[:3] @ np.linalg.solve(inertia, torques), expected, rtol=1e-6)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_first_action_starts_where_the_reset_left_the_hand(scene, monkeypatch, compiled):
    """Stock writes an initial state after its controller looked at the arm: a first action of zeros is a pull back."""
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    simulation = Simulation([scene] * 2)
    data, state = simulation.data[0], initial_states(scene.task)[0]
    data.qpos[scene.arm_qposadr] = scene.initial_arm
    mujoco.mj_kinematics(scene.model, data)
    nominal, _ = hand(simulation)
    for i in range(2):
        simulation.write(i, state[1 : 1 + scene.model.nq], np.zeros(scene.model.nv))
    before, _ = hand(simulation)
    simulation.memory["fresh"][1] = 0.0  # that one reads the state now, its goal is there
    simulation.step([0, 1], np.array([[[0.0] * 7], [[*(nominal - before) / controller.POSITION_SCALE, 0, 0, 0, 0]]]))
    assert np.linalg.norm(nominal - before) > 5e-3
    moved, commanded = (simulation.data[i].site_xpos[scene.grip_site] - before for i in range(2))
    assert moved @ (nominal - before) > 0.1 * np.linalg.norm(nominal - before) ** 2
    np.testing.assert_allclose(
        moved, commanded, atol=0.15 * np.linalg.norm(commanded)
    )  # but for the first of 25 substeps
    assert simulation.memory["fresh"][0] == 0.0


def test_the_first_substep_pushes_as_the_reset_pose_would_and_leaves_the_state_alone(scene, simulation):
    model, data, memory = scene.model, simulation.data[0], simulation.memory[0]
    state = data.qpos.copy(), data.qvel.copy()
    action = np.array([0.2, -0.1, 0.3, 0.1, 0.0, -0.2, -1.0])
    goal, push = controller._recalled(model, data, scene, memory, action)
    np.testing.assert_array_equal(data.qpos, state[0])
    np.testing.assert_array_equal(data.qvel, state[1])
    there = Simulation([scene])  # at the nominal arm, at rest
    data = there.data[0]
    data.qpos[:], data.qvel[:] = state[0], 0.0
    data.qpos[scene.arm_qposadr] = scene.initial_arm
    mujoco.mj_forward(model, data)
    np.testing.assert_allclose(goal, controller.set_goal(data, scene, there.memory[0], action), atol=1e-12)
    np.testing.assert_allclose(push, controller.torques(model, data, scene, there.memory[0], goal), atol=1e-8)


def test_the_hand_follows_commands(simulation):
    position, orientation = hand(simulation)
    simulation.step([0], np.tile([0.0, 0.0, 0.5, 0, 0, 0, -1], (1, 10, 1)))
    moved, turned = hand(simulation)
    assert moved[2] - position[2] > 0.05
    assert np.linalg.norm(moved[:2] - position[:2]) < 0.02
    assert np.trace(orientation.T @ turned) > 2.99


def test_torques_stay_within_the_motors_limits(scene, simulation):
    far = np.array([5.0, 5.0, 5.0])
    torques = controller.torques(scene.model, simulation.data[0], scene, simulation.memory[0], far)
    torques = controller.compensated(scene.model, simulation.data[0], scene, torques)
    limits = scene.model.actuator_ctrlrange[scene.arm_actuator]
    assert (torques >= limits[:, 0]).all()
    assert (torques <= limits[:, 1]).all()
    assert (torques == limits[:, 0]).any() or (torques == limits[:, 1]).any()
