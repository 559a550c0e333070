"""All 130 tasks with LIBERO's own assets; skipped without LIBERO_ASSETS."""

import json
import os
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

from sims.libero.assets import Assets, find_assets
from sims.libero.catalogue import model_file
from sims.libero.environment import LiberoEnvironment
from sims.libero.physics.simulation import Simulation
from sims.libero.scene import mjcf
from sims.libero.scene.geometry import Cloud, rotation
from sims.libero.scene.scene import BASE, build_scene, satisfied
from sims.libero.scene.stand_ins import STAND_INS, stand_in_model
from sims.libero.suite import SUITES, initial_states, load_tasks
from tests.sims.libero.scene.test_scene import assert_same_physics

pytestmark = [
    pytest.mark.assets,
    pytest.mark.skipif(not os.environ.get("LIBERO_ASSETS"), reason="LIBERO_ASSETS is not set"),
]


@pytest.fixture(scope="module")
def official() -> Assets:
    return find_assets()


@pytest.mark.parametrize("suite", SUITES)
def test_states_fit_and_no_goal_holds_at_the_start(official, suite):
    for task in load_tasks(suite):
        scene = build_scene(task, official)
        states = initial_states(task)
        assert states.shape[1] == 1 + scene.model.nq + scene.model.nv, task.name
        data = mujoco.MjData(scene.model)
        for state in states[::10]:
            data.qpos[:] = state[1 : 1 + scene.model.nq]
            mujoco.mj_forward(scene.model, data)
            assert not satisfied(scene, data), task.name


@pytest.mark.parametrize("suite", SUITES)
def test_models_equal_stocks(official, suite):
    """Checksums of the fields the dynamics read, against models that stock LIBERO (robosuite 1.4.0) composed.

    stock_models.json holds them for every task: sum of value * cos(place), visual geoms left out.
    """
    stock = json.loads((Path(__file__).parent / "stock_models.json").read_text())
    for task in load_tasks(suite):
        model = build_scene(task, official).model
        values = [np.asarray(getattr(model, field), dtype=float).ravel() for field in stock["fields"]]
        ours = [value @ np.cos(np.arange(value.size)) for value in values]
        for field, mine, theirs in zip(stock["fields"], ours, stock[suite][task.index], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-9), (task.name, field)


@pytest.mark.parametrize(("suite", "index"), [("libero_object", 0), ("libero_goal", 0), ("libero_10", 9)])
def test_visuals_and_missing_visual_files_change_no_physics(official, suite, index):
    task = load_tasks(suite, [index])[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an incomplete tree warns
        pictured = build_scene(task, official, visuals=True)
    assert_same_physics(build_scene(task, official), pictured)


def joint_scene(official, name, suite="libero_90"):
    scene = build_scene(next(task for task in load_tasks(suite) if task.name.endswith(name)), official)
    data = mujoco.MjData(scene.model)
    data.qpos[:] = initial_states(scene.task)[0, 1 : 1 + scene.model.nq]
    return scene, data


@pytest.mark.parametrize(
    ("name", "joint", "before", "beyond"),
    [
        ("close_the_microwave", "microwave_1_microjoint", -0.006, -0.004),
        ("open_the_microwave", "microwave_1_microjoint", -1.299, -1.301),
        ("open_the_bottom_drawer_of_the_cabinet", "wooden_cabinet_1_bottom_level", -0.139, -0.141),
        ("SCENE10_close_the_top_drawer_of_the_cabinet", "wooden_cabinet_1_top_level", 0.0, 0.001),
        ("close_the_bottom_drawer_of_the_cabinet", "white_cabinet_1_bottom_level", 0.0, 0.001),
        ("SCENE3_turn_on_the_stove", "flat_stove_1_button", 0.499, 0.5),
        ("turn_off_the_stove", "flat_stove_1_button", 0.0, -0.001),
    ],
)
def test_joint_goals(official, name, joint, before, beyond):
    scene, data = joint_scene(official, name)
    mujoco.mj_forward(scene.model, data)
    assert not satisfied(scene, data)
    simulation = Simulation([scene])
    for position, expected in ((before, False), (beyond, True), (before, False)):
        data.qpos[scene.model.joint(joint).qposadr[0]] = position
        mujoco.mj_forward(scene.model, data)
        assert satisfied(scene, data) == expected
        simulation.write(0, data.qpos, np.zeros(scene.model.nv))
        assert simulation.satisfied(0) == expected


@pytest.mark.parametrize(("open_m", "closed_m", "expected"), [(-0.141, 0.001, 1), (-0.139, 0.001, 0), (-0.141, 0.0, 0)])
def test_one_drawer_opens_and_another_closes(official, open_m, closed_m, expected):
    scene, data = joint_scene(official, "close_the_bottom_drawer_of_the_cabinet_and_open_the_top_drawer")
    data.qpos[scene.model.joint("white_cabinet_1_top_level").qposadr[0]] = open_m
    data.qpos[scene.model.joint("white_cabinet_1_bottom_level").qposadr[0]] = closed_m
    mujoco.mj_forward(scene.model, data)
    assert satisfied(scene, data) == expected


@pytest.mark.parametrize(
    ("task", "joint", "before", "beyond"),
    [(0, "wooden_cabinet_1_middle_level", -0.12, -0.15), (7, "flat_stove_1_button", 0.45, 0.55)],
)
def test_a_joint_beyond_its_goal_earns_the_reward_and_ends_the_episode(official, task, joint, before, beyond):
    env = LiberoEnvironment(
        load_tasks("libero_goal", [task]), 2, distribution="official", horizon=1, executed=1, assets=official, threads=1
    )
    env.reset(starts=torch.tensor([0, 1]))
    for data, position in zip(env.simulation.data, (before, beyond), strict=True):
        data.qpos[env.scenes[0].model.joint(joint).qposadr[0]] = position
    transition = env.step(torch.tensor([0.0, 0, 0, 0, 0, 0, -1]).expand(2, 1, 7))
    assert transition.reward[:, 0].tolist() == [0.0, 1.0]
    assert transition.success.tolist() == transition.terminated.tolist() == [False, True]


def test_a_drawer_that_is_not_the_goals_does_not_count(official):
    scene, data = joint_scene(official, "open_the_bottom_drawer_of_the_cabinet")
    data.qpos[scene.model.joint("wooden_cabinet_1_top_level").qposadr[0]] = -0.15
    mujoco.mj_forward(scene.model, data)
    assert not satisfied(scene, data)


def test_initial_states_open_what_the_task_says(official):
    """Joint ranges that stock draws from hold the stored states, give or take what settling moves."""
    for task in load_tasks("libero_90"):
        scene = build_scene(task, official)
        for joint in scene.initial_joints:
            stored = initial_states(task)[:, 1 + joint.qposadr]
            assert ((stored > joint.low - 0.1) & (stored < joint.high + 0.1)).all(), task.name


def traces():
    folder = Path(os.environ.get("LIBERO_ASSETS", "")).parent / "libero_traces"
    return sorted(folder.glob("*.npz")) if os.environ.get("LIBERO_ASSETS") else []


@pytest.mark.parametrize("path", traces(), ids=lambda path: path.stem)
def test_recordings_of_stock_fit(official, path):
    """Ids, names and places equal those recorded; the goal becomes true when it did, one physics step apart at most."""
    recording = np.load(path)
    name = str(recording["bddl"]).removesuffix(".bddl")
    task = next(t for s in SUITES if s in path.stem for t in load_tasks(s) if t.name == name)
    scene = build_scene(task, official)
    model = scene.model
    assert [model.body(i).name for i in range(model.nbody)] == list(recording["body_names"])
    assert [model.joint(i).name for i in range(model.njnt)] == list(recording["joint_names"])
    np.testing.assert_array_equal(model.jnt_qposadr, recording["jnt_qposadr"])
    fixtures = {fixture.body: fixture for fixture in scene.fixtures}
    for body in range(model.nbody):
        place = recording["body_pos"][:, body]
        if body in fixtures:
            x0, y0, x1, y1 = fixtures[body].ranges[0]
            assert ((place[:, :2] >= (x0, y0)) & (place[:, :2] <= (x1, y1))).all()
            assert place[:, 2] == pytest.approx(fixtures[body].height, abs=1e-9)
            low, high = fixtures[body].yaw
            yaw = 2 * np.arctan2(recording["body_quat"][:, body, 3], recording["body_quat"][:, body, 0])
            assert ((yaw >= low - 1e-9) & (yaw <= high + 1e-9)).all()
        else:
            np.testing.assert_allclose(place, np.broadcast_to(model.body_pos[body], place.shape), atol=1e-12)
    for episode in range(len(recording["success"])):
        model.body_pos[:] = recording["body_pos"][episode]
        model.body_quat[:] = recording["body_quat"][episode]
        agree = goals(scene, recording["qpos"][episode]) == recording["success"][episode]
        assert agree.sum() >= len(agree) - 1


def goals(scene, positions):
    data = mujoco.MjData(scene.model)
    reached = []
    for qpos in positions:
        data.qpos[:] = qpos
        mujoco.mj_forward(scene.model, data)
        reached.append(satisfied(scene, data))
    return np.array(reached)


@pytest.mark.parametrize("category", STAND_INS)
def test_stand_ins_weigh_turn_and_measure_what_the_official_objects_do(official, category):
    """Mass and moments within 0.5%, the centre of mass within 0.05 mm, the faces of what collides within 1 mm."""
    models = [mjcf.load(model_file(official, category)), stand_in_model(category)]
    theirs, ours = (_object(model.find("worldbody/body/body[@name='object']")) for model in models)
    assert ours.body_mass[1] == pytest.approx(theirs.body_mass[1], rel=5e-3)
    np.testing.assert_allclose(ours.body_ipos[1], theirs.body_ipos[1], atol=5e-5)
    expected = _moments(theirs)
    np.testing.assert_allclose(_moments(ours), expected, atol=5e-3 * np.trace(expected) / 3, rtol=5e-3)
    np.testing.assert_allclose(_extent(ours), _extent(theirs), atol=1e-3)


def _object(body: ET.Element) -> mujoco.MjModel:
    """A model of one object without visual geoms; inertia as in a scene."""
    root = ET.fromstring(BASE)
    root.find("worldbody").append(body)
    mjcf.drop_visuals(root)
    return mujoco.MjModel.from_xml_string(ET.tostring(root, encoding="unicode"))


def _moments(model: mujoco.MjModel) -> np.ndarray:
    """Inertia [3, 3] about the centre of mass, in the body frame."""
    axes = rotation(model.body_iquat[1])
    return axes @ np.diag(model.body_inertia[1]) @ axes.T


def _extent(model: mujoco.MjModel) -> np.ndarray:
    """Lowest and highest coordinates [2, 3] of what collides, in the body frame."""
    points = Cloud(model, 0.1).points
    return np.stack([points.min(0), points.max(0)])
