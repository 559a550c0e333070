"""Endings, rewards, pictures and contracts of robosuite's environments."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from embodied.errors import UserError
from sims.robosuite.contract import contract
from sims.robosuite.environment import RobosuiteEnvironment
from sims.robosuite.world import Options, World

RAISED = np.array([0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0])


def lift(shaped: bool = False, **options) -> RobosuiteEnvironment:
    env = RobosuiteEnvironment(2, options=Options("Lift", shaped=shaped), horizon=3, executed=3, **options)
    env.reset()
    return env


def rest(env: RobosuiteEnvironment) -> torch.Tensor:
    return torch.zeros(env.num_envs, env.contract.executed, *env.contract.action.shape)


def raise_cube(env: RobosuiteEnvironment, index: int) -> None:
    env.worlds[index].env.sim.data.set_joint_qpos("cube_joint0", RAISED)


def test_success_ends_an_episode_of_the_sparse_reward_with_one():
    env = lift()
    raise_cube(env, 1)
    transition = env.step(rest(env))
    assert transition.reward.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert transition.executed.tolist() == [[True] * 3, [True, False, False]]
    assert transition.terminated.tolist() == transition.success.tolist() == [False, True]
    assert transition.observation["cube_pos"][1, 2] > 0.9


@pytest.mark.parametrize(("split", "ends"), [("train", False), ("eval", True)])
def test_with_shaped_rewards_success_ends_evaluations_alone(split, ends):
    env = lift(shaped=True, split=split)
    raise_cube(env, 0)
    transition = env.step(rest(env))
    assert transition.success.tolist() == [True, False]
    assert transition.terminated.tolist() == [ends, False]
    assert transition.reward[0].tolist() == ([1, 0, 0] if ends else [1, 1, 1])
    assert (transition.reward[1] > 0).all()
    assert (transition.reward[1] < 0.5).all()


def test_success_that_does_not_last_counts_until_the_limit():
    env = lift(shaped=True, step_limit=6)
    falling = np.array([0.2, 0.0, 0.87, 1.0, 0.0, 0.0, 0.0])  # 1 cm in the first control step, 5 cm in two
    env.worlds[0].env.sim.data.set_joint_qpos("cube_joint0", falling)
    first, last = env.step(rest(env)), env.step(rest(env))
    assert (first.reward[0] == 1.0).tolist() == [True, False, False]
    assert first.success.tolist() == last.success.tolist() == [True, False]
    assert not first.done.any()
    assert last.truncated.all()


def test_physics_that_blow_up_fail_and_leave_the_last_observation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log there
    env = lift()
    before = env.observe()
    env.worlds[0].env.sim.data.qvel[:] = 1e15
    transition = env.step(rest(env))
    assert transition.events["diverged"].tolist() == [True, False]
    assert transition.terminated.tolist() == [True, False]
    assert not transition.success.any()
    assert (transition.observation[0] == before[0]).all()
    assert torch.isfinite(env.reset()["cube_pos"]).all()


def test_actions_are_clipped():
    env, clipped = lift(), lift()
    first = env.step(rest(env) + 7.0)
    assert (first.observation == clipped.step(rest(env) + 1.0).observation).all()


def test_contracts_tell_units_frames_and_arms():
    one, two = contract(Options("PickPlaceCan")), contract(Options("TwoArmPegInHole"))
    assert one.control_dt_s == 0.05
    assert one.action.names[:3] == ("robot0_x", "robot0_y", "robot0_z")
    assert one.action.unit == "0.05 m (x, y, z); 0.5 rad (axis-angle, rotation); direction of travel (gripper)"
    assert (one.action.frame, one.action.low, one.action.high) == ("base", (-1.0,) * 7, (1.0,) * 7)
    assert one.observation["robot0_eef_quat"].unit == "1"
    assert one.observation["robot0_joint_vel"].unit == "rad/s"
    assert one.observation["robot0_gripper_qpos"].unit == "m"
    assert one.observation["Can_pos"].frame == "world"
    assert one.observation["Can_to_robot0_eef_pos"].frame == "robot0 end effector"
    assert len(two.action.names) == len(set(two.action.names)) == 12
    assert "robot1_eef_pos" in two.observation
    joints = contract(Options("Lift", controller="JOINT_POSITION")).action
    assert (joints.names[0], joints.shape, joints.frame) == ("robot0_joint1", (8,), "")
    assert joints.unit == "0.05 rad (joints); direction of travel (gripper)"


def pictured() -> World:
    world = World(Options("Lift"))
    world.begin("Lift", "train", 0)
    try:
        world.picture("frontview", 64)
    except UserError as error:
        pytest.skip(str(error))
    return world


def test_pictures_show_the_cube_rise():
    world = pictured()
    rows = []
    for height in (0.83, 1.03):
        world.env.sim.data.set_joint_qpos("cube_joint0", np.array([0.2, 0.0, height, 1.0, 0.0, 0.0, 0.0]))
        world.env.sim.forward()
        red, green, blue = np.moveaxis(world.picture("frontview", 64).astype(int), 2, 0)
        rows.append(np.nonzero((red > 2 * green) & (red > 2 * blue))[0].mean())
    assert rows[1] < rows[0] - 3  # the first row is the top


def test_with_pictures_what_the_simulator_alone_knows_is_privileged():
    pictured().env.close()
    cameras = ("agentview", "robot0_eye_in_hand")
    env = RobosuiteEnvironment(1, options=Options("Lift"), images=cameras, image_size=32)
    specs, seen = env.contract.observation, env.reset()
    assert [name for name, spec in specs.items() if spec.privileged] == ["cube_pos", "cube_quat", "gripper_to_cube_pos"]
    assert [specs[f"{camera}_image"].frame for camera in cameras] == ["world", "robot0 end effector"]
    assert seen["agentview_image"].shape == (1, 32, 32, 3)
    assert seen["agentview_image"].float().std() > 10
    moved = env.step(rest(env) + 1.0).observation
    assert (moved["agentview_image"] != seen["agentview_image"]).any()
    env.close()


def test_importing_it_says_nothing_and_leaves_the_process_its_renderer():
    code = "import os; from sims.robosuite.adapted import robosuite; robosuite(); print(os.environ.get('MUJOCO_GL'))"
    clean = {name: value for name, value in os.environ.items() if name != "MUJOCO_GL"}
    run = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("None\n", "")
