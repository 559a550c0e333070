import copy
import os

import mujoco
import numpy as np
import pytest

from embodied.environments.engine import STARTS_PER_SEED
from embodied.errors import UserError
from sims.libero.assets import find_assets
from sims.libero.scene import placement
from sims.libero.scene.geometry import rotation
from sims.libero.scene.placement import Placement
from sims.libero.scene.scene import build_scene, satisfied
from sims.libero.suite import initial_states, load_tasks

pytestmark = pytest.mark.assets
SCENE = build_scene(load_tasks("libero_object", [0])[0], find_assets(os.environ.get("LIBERO_ASSETS") or "stand-in"))
ARM = SCENE.arm_qposadr


@pytest.fixture(scope="module")
def states():
    wide = Placement(SCENE, "wide", "train")
    return np.stack([wide(index)[0] for index in range(200)])


def poses(states):
    """Positions [n, M, 3] and quaternions [n, M, 4] of the objects."""
    pose = states[:, SCENE.object_qposadr[:, None] + np.arange(7)]
    return pose[..., :3], pose[..., 3:]


def test_official_states_are_liberos_own_and_there_are_fifty():
    official = Placement(SCENE, "official", "eval")
    stored = initial_states(SCENE.task)
    for index in (0, 3, 49):
        qpos, qvel, *_ = official(index)
        np.testing.assert_array_equal(np.concatenate((qpos, qvel)), stored[index, 1:])
    with pytest.raises(UserError, match="initial state 53 does not exist: each task has 50, numbered 0 to 49"):
        official(53)


def test_a_state_is_a_function_of_its_number_and_split():
    train, again = (Placement(SCENE, "wide", "train") for _ in range(2))
    evaluation = Placement(SCENE, "wide", "eval")
    again(3)
    for index in (0, 7, 1 << 40):
        np.testing.assert_array_equal(train(index)[0], again(index)[0])
        assert not np.array_equal(train(index)[0], evaluation(index)[0])
    assert not np.array_equal(train(0)[0], train(1)[0])


def test_areas_are_those_of_the_description_and_objects_stand_as_in_liberos_states():
    areas = Placement(SCENE, "areas", "train")
    states = np.stack([areas(index)[0] for index in range(100)])
    position, turn = poses(states)
    stored = initial_states(SCENE.task)[:, 1:]
    official, official_turn = poses(stored)
    target = SCENE.objects.index("alphabet_soup_1")
    assert (position[:, target, :2] >= (-0.145, -0.265)).all()
    assert (position[:, target, :2] <= (-0.095, -0.215)).all()
    spread = np.ptp(position[..., :2], axis=0)
    assert (spread[: len(SCENE.objects)] > 0.015).all()
    assert (spread < 0.051).all()
    assert np.abs(np.median(position, 0) - np.median(official, 0))[:, :2].max() < 0.03
    assert np.abs((turn[0] * official_turn[0]).sum(-1)).min() > 1 - 1e-6
    assert 0.5 < states[:, ARM].std() / stored[:, ARM].std() < 2
    evaluation = Placement(SCENE, "areas", "eval")
    np.testing.assert_array_equal(areas(5)[0], states[5])
    assert not np.array_equal(evaluation(5)[0], states[5])


def test_a_share_of_wide_training_starts_is_of_areas_and_no_evaluation_start():
    mixed, wide = (Placement(SCENE, "wide", "train", areas_share=share) for share in (0.3, 0.0))
    stored = poses(initial_states(SCENE.task)[:, 1:])[0][..., :2]
    centre, states = np.median(stored, 0), np.stack([mixed(index)[0] for index in range(100)])
    others = np.stack([wide(index)[0] for index in range(20)])
    near, near_without = ((np.abs(poses(each)[0][..., :2] - centre) < 0.06).all((1, 2)) for each in (states, others))
    assert near[0]
    assert near.sum() == 30
    assert not near_without.any()
    later = np.stack([mixed(3 * STARTS_PER_SEED + index)[0] for index in range(2)])  # of another seed
    assert (np.abs(poses(later)[0][..., :2] - centre) < 0.06).all((1, 2)).tolist() == [True, False]
    np.testing.assert_array_equal(mixed(7)[0], states[7])
    held_out, before = (Placement(SCENE, "wide", "eval", areas_share=share) for share in (0.3, 0.0))
    for index in range(10):
        np.testing.assert_array_equal(held_out(index)[0], before(index)[0])


def test_tasks_have_states_of_their_own():
    other = build_scene(load_tasks("libero_object", [1])[0], SCENE.assets)
    first, second = (Placement(scene, "wide", "train")(0)[0] for scene in (SCENE, other))
    assert not np.allclose(first[ARM], second[ARM])


def test_objects_lie_anywhere_in_reach_and_far_wider_than_liberos(states):
    position, _ = poses(states)
    base = np.array([-0.6, 0.0])
    distance = np.linalg.norm(position[..., :2] - base, axis=-1)
    assert distance.min() > placement.REACH_RADIUS_M[0] - 1e-9
    assert distance.max() < placement.REACH_RADIUS_M[1] + 1e-9
    spread = position[..., :2].max(0) - position[..., :2].min(0)
    assert (spread > (0.36, 0.58)).all()
    official = initial_states(SCENE.task)[:, 1:][:, SCENE.object_qposadr[:, None] + np.arange(2)]
    assert (position[..., :2].std(0) > 5 * official.std(0)).all()


def test_no_object_touches_another_and_each_stands_on_the_floor(states):
    data = mujoco.MjData(SCENE.model)
    owner = SCENE.geom_owner
    for qpos in states:
        data.qpos[:] = qpos
        mujoco.mj_forward(SCENE.model, data)
        touching = owner[data.contact.geom]
        assert ((touching < 0).any(axis=1)).all()  # the floor and the robot have no owner
        robot = SCENE.model.body_rootid[SCENE.hand_body]
        assert not (SCENE.model.body_rootid[SCENE.model.geom_bodyid[data.contact.geom]] == robot).any()
        assert not satisfied(SCENE, data)
        assert np.abs(data.contact.dist).max(initial=0.0) < 1e-3


def test_objects_keep_standing_as_libero_has_them_at_any_yaw(states):
    _, quaternion = poses(states)
    matrices = rotation(quaternion)
    upright = rotation(initial_states(SCENE.task)[0, 1:][SCENE.object_qposadr[:, None] + np.arange(3, 7)])
    np.testing.assert_allclose(
        matrices[..., 2, :], np.broadcast_to(upright[:, 2], matrices[..., 2, :].shape), atol=1e-3
    )
    axis = np.argmin(np.abs(upright[0, 2]))
    yaw = np.arctan2(matrices[:, 0, 1, axis], matrices[:, 0, 0, axis])
    assert (np.histogram(yaw, bins=8, range=(-np.pi, np.pi))[0] > 8).all()


def test_the_goals_container_stays_along_the_worlds_axes(states):
    _, quaternion = poses(states)
    basket = rotation(quaternion[:, SCENE.objects.index("basket_1")])
    yaw = np.arctan2(basket[:, 1, 0], basket[:, 0, 0])
    off_axis = np.abs((yaw + np.pi / 4) % (np.pi / 2) - np.pi / 4)
    assert off_axis.max() <= placement.CONTAINER_YAW_RAD + 1e-6
    assert len(np.unique(np.round(yaw / (np.pi / 2)) % 4)) == 4


def test_an_episode_begins_neither_at_its_goal_nor_with_the_robot_in_touch(states):
    wide, data = Placement(SCENE, "wide", "train")._sampler, mujoco.MjData(SCENE.model)
    (goal,) = SCENE.goal
    wanted = SCENE.object_qposadr[list(SCENE.object_body).index(goal.a)]
    qpos = states[0].copy()
    assert wide._is_start(qpos)
    data.qpos[:] = qpos
    mujoco.mj_forward(SCENE.model, data)
    qpos[wanted : wanted + 3] = data.site_xpos[goal.b]
    assert not wide._is_start(qpos)
    qpos = states[0].copy()
    qpos[wanted : wanted + 3] = data.xpos[SCENE.hand_body]
    assert not wide._is_start(qpos)


def test_a_pose_moves_with_what_it_stands_on():
    pose = np.array([1.5, 0.0, 0.3, 1.0, 0.0, 0.0, 0.0])
    placement._move(pose, np.array([0.5, 0.0]), np.pi / 2, np.array([0.0, 2.0]))
    np.testing.assert_allclose(pose, [0.5, 3.0, 0.3, np.sqrt(0.5), 0.0, 0.0, np.sqrt(0.5)], atol=1e-12)


def test_robot_joints_are_perturbed_about_the_nominal_pose(states):
    away = states[:, ARM] - SCENE.initial_arm
    assert np.abs(away).max() <= placement.JOINT_NOISE_RAD
    assert (away.std(0) > 0.4 * placement.JOINT_NOISE_RAD).all()


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown distribution 'narrow'; expected one of official, wide"):
        Placement(SCENE, "narrow", "train")
    with pytest.raises(ValueError, match="unknown split 'validation'; expected one of train, eval"):
        Placement(SCENE, "wide", "validation")


@pytest.mark.skipif(not os.environ.get("LIBERO_ASSETS"), reason="needs LIBERO's official assets in LIBERO_ASSETS")
def test_what_stands_on_an_object_moves_with_it_and_fixtures_are_kept_clear():
    scene = build_scene(load_tasks("libero_spatial", [5])[0], SCENE.assets)  # a bowl on a ramekin, cabinet, stove
    wide = Placement(scene, "wide", "train")
    names = list(scene.objects)
    bowl, ramekin = (
        scene.object_qposadr[names.index(f"{n}_1")] for n in ("akita_black_bowl", "glazed_rim_porcelain_ramekin")
    )
    model, offsets = copy.copy(scene.model), []
    data = mujoco.MjData(model)
    for index in range(20):
        qpos, _, model.body_pos[:], model.body_quat[:], _ = wide(index)
        offsets.append(np.linalg.norm(qpos[bowl : bowl + 2] - qpos[ramekin : ramekin + 2]))
        data.qpos[:] = qpos
        mujoco.mj_forward(model, data)
        owners = np.sort(scene.geom_owner[data.contact.geom], axis=1)
        allowed = {(names.index("akita_black_bowl_1"), names.index("glazed_rim_porcelain_ramekin_1"))}
        movable = {tuple(pair) for pair in owners if 0 <= pair[0] < len(names) and pair[1] >= 0}
        assert movable <= allowed
    assert np.ptp(offsets) < 1e-6


@pytest.mark.skipif(not os.environ.get("LIBERO_ASSETS"), reason="needs LIBERO's official assets in LIBERO_ASSETS")
@pytest.mark.parametrize(
    ("task", "near"),
    [
        ("between_the_plate_and_the_ramekin", ["plate_1", "glazed_rim_porcelain_ramekin_1"]),
        ("next_to_the_ramekin", ["glazed_rim_porcelain_ramekin_1"]),
        ("next_to_the_cookie_box", ["cookies_1"]),
        ("next_to_the_plate", ["plate_1"]),
        ("from_table_center", []),
    ],
)
def test_what_instructions_say_of_places_stays_true(task, near):
    (found,) = [each for each in load_tasks("libero_spatial") if f"black_bowl_{task}_and" in each.name]
    scene = build_scene(found, SCENE.assets)
    wide, names, base = Placement(scene, "wide", "train"), list(scene.objects), scene.object_qposadr
    yaws, seen = [], []
    for index in range(20):
        qpos, _, body_pos, *_ = wide(index)
        where = {name: qpos[address : address + 2] for name, address in zip(names, base, strict=True)}
        where |= {fixture.name: body_pos[fixture.body, :2] for fixture in scene.fixtures}
        one, other = where["akita_black_bowl_1"], where["akita_black_bowl_2"]
        places = [where[landmark] for landmark in near] or [np.zeros(2)]
        away, other_away = ([np.linalg.norm(bowl - place) for place in places] for bowl in (one, other))
        assert sum(away) < sum(other_away)
        assert max(away) < 0.2
        seen.append(one)
        yaws.append(qpos[base[0] + 3 : base[0] + 7])
    assert (np.ptp(seen, axis=0) > 0.02).all()
    assert np.ptp(yaws, axis=0).max() > 1.0
