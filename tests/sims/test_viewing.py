"""What simulators offer to the viewer: geometry that stands for the state, and pushes that change it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from embodied.scene.viewable import View
from sims.libero.assets import find_assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.physics.backend import LiberoSim
from sims.libero.suite import load_tasks
from sims.mjcf.task import MjcfTask
from sims.quadrotor.task import HoverTask, RaceTask, RecoverTask, TrackTask
from sims.swarm.task import SwarmTask
from sims.vehicle.task import NavigateTask
from sims.vehicle.task import RaceTask as VehicleRaceTask


def libero(sim: LiberoSim = LiberoSim.mujoco) -> LiberoEnvironment:
    tasks = load_tasks("libero_object", [0, 1])
    return LiberoEnvironment(tasks, 2, assets=find_assets("stand-in"), seed=0, threads=1, sim=sim)


def made(task: object) -> Callable:
    return lambda: task.environment(8 if isinstance(task, SwarmTask) else 2, task.distributions[0], "eval")


ENVIRONMENTS = {
    "libero": libero,
    "hover": made(HoverTask()),
    "track": made(TrackTask()),
    "race": made(RaceTask()),
    "recover": made(RecoverTask()),
    "swarm": made(SwarmTask()),
    "navigate": made(NavigateTask()),
    "vehicle_race": made(VehicleRaceTask()),
    **{name: made(MjcfTask(mdp=name)) for name in ("cartpole", "reacher", "lift", "quadruped", "in_hand")},
}


@pytest.fixture(params=ENVIRONMENTS, scope="module")
def env(request):
    made = ENVIRONMENTS[request.param]()
    made.reset()
    yield made
    made.close()


def still(env) -> torch.Tensor:
    low, high = torch.tensor(env.contract.action.low), torch.tensor(env.contract.action.high)
    return (0.5 * (low + high)).expand(env.num_envs, env.contract.executed, -1)


def test_a_scene_has_a_pose_for_each_body(env):
    view = env.view()
    assert isinstance(view, View)
    for row in range(env.num_envs):
        scene, poses = view.scene(row), view.poses(row)
        assert poses.shape == (len(scene.bodies), 7)
        assert np.linalg.norm(poses[:, 3:], axis=1) == pytest.approx(1.0, abs=1e-4)
        names = [body.name for body in scene.bodies]
        assert len(set(names)) == len(names)
        assert set(scene.pushable) <= set(names)
        assert scene.pushable
        for body in scene.bodies:
            mesh = body.mesh
            assert mesh.faces.max() < len(mesh.vertices) == len(mesh.normals) == len(mesh.colours)
            assert np.isfinite(mesh.vertices).all()
            assert 0.0 <= mesh.colours.min() <= mesh.colours.max() <= 1.0
        seen = np.array(scene.target) - np.array(scene.eye)
        moving = [number for number, name in enumerate(names) if name in scene.pushable]
        ahead = (poses[moving, :3] - np.array(scene.eye)) @ seen
        assert (ahead > 0.0).all()  # the camera looks at what there is


def test_looking_changes_nothing(env):
    before, view = env.state_dict(), env.view()
    view.scene(0), view.poses(0)
    assert same(before, env.state_dict())


def test_a_push_moves_the_body_there_and_only_in_its_world(env):
    view = env.view()
    start = env.state_dict()
    scene = view.scene(0)
    number = [body.name for body in scene.bodies].index(scene.pushable[0])
    env.step(still(env))
    apart, alone = view.poses(0)[number], view.poses(env.num_envs - 1) if env.group == 1 else None
    env.load_state_dict(start)
    change = 2.0 * heading(env) if hasattr(env, "vehicle") else np.array([0.4, 0.3, 0.0])
    view.push(0, scene.pushable[0], change)
    env.step(still(env))
    moved = view.poses(0)[number] - apart
    assert np.abs(moved).max() > 0.0
    assert moved[:3] @ change >= 0.0
    if alone is not None:
        assert (view.poses(env.num_envs - 1) == alone).all()


def heading(env) -> np.ndarray:
    yaw = float(env.now.state[0, 2])
    return np.array([np.cos(yaw), np.sin(yaw), 0.0])


def same(one: object, other: object) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return bool((torch.as_tensor(one) == torch.as_tensor(other)).all()) if hasattr(one, "shape") else one == other


def test_a_drone_is_pushed_by_what_was_asked_for():
    env = HoverTask().environment(2, "disturbed", "eval")
    env.reset()
    before = env._state.clone()
    env.view().push(1, "drone", np.array([0.5, -0.25, 0.125]))
    assert (env._state - before)[7:10, 1].tolist() == pytest.approx([0.5, -0.25, 0.125])
    assert (env._state[:, 0] == before[:, 0]).all()


def test_a_robot_that_begins_elsewhere_is_looked_at_there():
    env = MjcfTask(mdp="quadruped").environment(2, "own", "eval")
    env.reset()
    view = env.view()
    for row in range(2):
        scene, poses = view.scene(row), view.poses(row)
        torso = [body.name for body in scene.bodies].index("torso")
        assert np.array(scene.target) == pytest.approx(poses[torso, :3], abs=0.2)


def test_a_free_object_of_libero_takes_the_whole_change():
    env = libero()
    env.reset()
    scene, data = env.scenes[0], env.simulation.data[0]
    view, before = env.view(), data.qvel.copy()
    view.push(0, "alphabet_soup_1_main", np.array([0.3, 0.0, 0.1]))
    assert scene.objects[0] == "alphabet_soup_1"
    changed = (data.qvel - before)[data.model.joint("alphabet_soup_1_joint0").dofadr[0] :][:3]
    assert changed == pytest.approx([0.3, 0.0, 0.1], abs=0.02)
    env.close()
