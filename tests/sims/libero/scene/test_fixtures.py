"""Fixtures stand where stock could put them, and everything follows: only where LIBERO_ASSETS names its own objects."""

import os
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

from embodied.text import decode
from sims.libero.assets import find_assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.parity import Recording
from sims.libero.scene.geometry import rotation
from sims.libero.scene.placement import Placement
from sims.libero.scene.scene import build_scene
from sims.libero.suite import load_tasks

ASSETS = os.environ.get("LIBERO_ASSETS")
pytestmark = [pytest.mark.assets, pytest.mark.skipif(not ASSETS, reason="LIBERO_ASSETS is not set")]


def make(suite="libero_goal", index=1, **options):
    options = {"distribution": "official", "executed": 4, "threads": 1} | options
    return LiberoEnvironment(load_tasks(suite, [index]), 3, assets=find_assets(), **options)


def fixtures(env):
    """Positions [N, fixtures, 3] that the observation shows."""
    first, count = len(env.scenes[0].objects), len(env.scenes[0].fixtures)
    return env._observer.observe()["object_position"][:, first : first + count]


def test_a_start_has_its_own_fixture_poses_the_same_in_every_run():
    env, other = make(), make(seed=4)
    env.reset(starts=torch.tensor([0, 1, 2]))
    other.reset()
    other.reset(starts=torch.tensor([2, 0, 5]))
    ours, theirs = fixtures(env), fixtures(other)
    assert torch.equal(ours[[2, 0]], theirs[[0, 1]])
    assert ours.shape[1] == 3
    assert ((ours[0] - ours[1]).norm(dim=1) > 1e-4).all()
    assert (ours.amax(0) - ours.amin(0)).max() < 0.02 + 1e-6


def test_observation_goal_and_physics_follow_and_a_restored_environment_knows():
    env, other = make(index=5), make(index=5, seed=1)
    for each in (env, other):
        each.reset()
    for i, (model, data) in enumerate(zip(env.simulation.models, env.simulation.data, strict=True)):
        for row, fixture in enumerate(env.scenes[0].fixtures):
            np.testing.assert_array_equal(data.xpos[fixture.body], model.body_pos[fixture.body])
            np.testing.assert_allclose(fixtures(env)[i, row].numpy(), data.xpos[fixture.body], atol=1e-6)
    assert torch.equal(
        other.load_state_dict(env.state_dict())["object_position"], env._observer.observe()["object_position"]
    )


@pytest.mark.parametrize(("suite", "index"), [("libero_goal", 0), ("libero_10", 3), ("libero_10", 9)])
def test_drawers_doors_and_knobs_are_observed_where_they_are(suite, index):
    env, rng = make(suite, index), np.random.default_rng(0)
    env.reset()
    scene, first = env.scenes[0], len(env.scenes[0].objects) + len(env.scenes[0].fixtures)
    roots = {fixture.body for fixture in scene.fixtures}
    joints = [joint for joint, body in enumerate(scene.model.jnt_bodyid) if scene.model.body_rootid[body] in roots]
    assert joints
    for model, data in zip(env.simulation.models, env.simulation.data, strict=True):
        for joint in joints:
            data.qpos[model.jnt_qposadr[joint]] = rng.uniform(*model.jnt_range[joint])
        mujoco.mj_forward(model, data)
    seen = env._observer.observe()
    names = [decode(name) for name in seen["object_names"][0, first : first + len(joints)]]
    assert names == [scene.model.body(scene.model.jnt_bodyid[joint]).name for joint in joints]
    for i, data in enumerate(env.simulation.data):
        for row, joint in enumerate(joints, first):
            body = scene.model.jnt_bodyid[joint]
            np.testing.assert_allclose(seen["object_position"][i, row], data.xipos[body], atol=1e-6)
            turned = data.xmat[body].reshape(3, 3)[:, :2].T.ravel()
            np.testing.assert_allclose(seen["object_rotation"][i, row], turned, atol=1e-6)
    assert bool(seen["object_mask"][:, : first + len(joints)].all())


def test_a_region_of_a_fixture_moves_with_it():
    env = make(index=1)  # put the bowl on the stove
    env.reset()
    (goal,), (stove,) = env.scenes[0].goal, [each for each in env.scenes[0].fixtures if "stove" in each.name]
    offsets = [data.site_xpos[goal.b] - data.xpos[stove.body] for data in env.simulation.data]
    np.testing.assert_allclose(offsets[1:], [offsets[0]] * 2, atol=1e-12)
    places = np.array([data.site_xpos[goal.b] for data in env.simulation.data])
    assert np.ptp(places, axis=0)[:2].min() > 1e-3


@pytest.mark.parametrize("name", ["libero_spatial_0", "random_libero_90_33", "random_libero_goal_0"])
def test_stock_puts_fixtures_where_we_could(name):
    path = Path(ASSETS).parent / "libero_traces" / f"{name}.npz"
    if not path.exists():
        pytest.skip("needs stock's recordings beside LIBERO_ASSETS")
    trace = Recording(path, find_assets())
    placed = set()
    for fixture in trace.scene.fixtures:
        ((x0, y0, x1, y1),) = fixture.ranges
        for position, quaternion in zip(
            trace.arrays["body_pos"][:, fixture.body], trace.arrays["body_quat"][:, fixture.body], strict=True
        ):
            assert x0 <= position[0] <= x1
            assert y0 <= position[1] <= y1
            assert position[2] == pytest.approx(fixture.height, abs=1e-12)
            yaw = 2 * np.arctan2(quaternion[3], quaternion[0])
            assert fixture.yaw[0] - 1e-9 <= yaw <= fixture.yaw[1] + 1e-9
        placed.add(fixture.body)
    moved = np.abs(trace.arrays["body_pos"] - trace.scene.model.body_pos).max((0, 2))
    assert set(np.flatnonzero(moved > 1e-9)) == placed  # and nothing else


def test_what_begins_in_a_drawer_stays_in_it_in_the_wide_distribution():
    scene = build_scene(load_tasks("libero_spatial", [4])[0], find_assets())  # a bowl in a cabinet's drawer
    wide, (cabinet,) = (
        Placement(scene, "wide", "train"),
        [each.body for each in scene.fixtures if "cabinet" in each.name],
    )
    bowl = scene.object_qposadr[scene.objects.index(scene.task.problem.goal[0][1])]
    seen = []
    for index in range(8):
        qpos, _, position, quaternion, _ = wide(index)
        seen.append(rotation(quaternion[cabinet]).T @ (qpos[bowl : bowl + 3] - position[cabinet]))
    np.testing.assert_allclose(seen[1:], [seen[0]] * 7, atol=1e-9)
    assert len({tuple(wide(index).body_pos[cabinet]) for index in range(8)}) == 8
