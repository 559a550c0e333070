"""Stepping: the compiled path against numpy, resets that leave nothing behind, exact continuation, frozen endings."""

import copy
import os
from dataclasses import replace

import mujoco
import numpy as np
import pytest

from sims.libero.assets import STAND_IN
from sims.libero.physics import controller, native
from sims.libero.physics.simulation import Simulation
from sims.libero.scene.predicates import Predicate
from sims.libero.scene.scene import build_scene, satisfied
from sims.libero.suite import initial_states, load_tasks

TASKS = load_tasks("libero_object", [0, 3])


@pytest.fixture(scope="module")
def scenes():
    return [build_scene(task, STAND_IN) for task in TASKS]


def start(simulation, i, state=0):
    scene = simulation.scenes[i]
    values = initial_states(scene.task)[state]
    simulation.write(i, values[1 : 1 + scene.model.nq], values[1 + scene.model.nq :])


def begun(scenes, **options):
    simulation = Simulation(scenes, **options)
    for i in range(simulation.num):
        start(simulation, i, state=i)
    return simulation


def chunks(n, steps, seed=0, scale=0.5):
    return np.random.default_rng(seed).uniform(-scale, scale, (n, steps, 7))


def state_of(simulation):
    return {name: values.copy() for name, values in simulation.state_dict().items()}


def assert_same(first, second):
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def drop_into_basket(simulation, i, height=0.12):
    """Put the task's object over the middle of the basket."""
    scene, qpos = simulation.scenes[i], simulation.data[i].qpos.copy()
    target, basket = (scene.object_qposadr[scene.objects.index(name)] for name in scene.task.problem.obj_of_interest)
    qpos[target : target + 2] = qpos[basket : basket + 2]
    qpos[target + 2] = qpos[basket + 2] + height
    simulation.write(i, qpos, np.zeros(scene.model.nv))


def test_contacts_are_those_of_mujoco_though_tests_of_geoms_that_are_apart_are_omitted(scenes):
    scene = scenes[0]
    simulation = begun([scene])
    data, model = simulation.data[0], simulation.models[0]
    qpos, hand = data.qpos.copy(), data.site_xpos[scene.grip_site]
    target = scene.object_qposadr[scene.objects.index(scene.task.problem.obj_of_interest[0])]
    qpos[target : target + 3] = hand - (0.0, 0.0, 0.02)  # between the fingers, which close
    simulation.write(0, qpos, np.zeros(model.nv))
    robot = model.body_rootid[scene.hand_body]
    touched = 0
    for action in chunks(1, 20)[0] + (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0):
        simulation.step([0], action[None, None], stop_on_success=False)
        expected = copy.copy(data)
        mujoco.mj_collision(model, expected)
        np.testing.assert_array_equal(data.contact.geom, expected.contact.geom)
        np.testing.assert_array_equal(data.contact.dist, expected.contact.dist)
        meshes = (model.geom_type[data.contact.geom] == mujoco.mjtGeom.mjGEOM_MESH).any(axis=1)
        touched += (meshes & (model.body_rootid[model.geom_bodyid[data.contact.geom]] == robot).any(axis=1)).sum()
    assert touched, "no mesh of the robot touches anything: this test tests nothing"


def test_the_library_may_be_loaded_twice(scenes):
    native.library.cache_clear()
    simulation = begun(scenes)  # endless where its collision tests stood in front of themselves
    simulation.step([0], chunks(1, 1))


def test_numpy_gives_the_numbers_of_the_compiled_path(scenes, monkeypatch):
    compiled = begun(scenes, sleep=False)
    monkeypatch.setattr(native, "library", lambda: None)
    reference = begun(scenes, sleep=False)
    actions = chunks(2, 4, scale=1.2)  # some beyond the limits, where both must clip
    actions[0, 2, 3:6] = 0.0  # no rotation: the old goal orientation is kept
    for simulation in (compiled, reference):
        simulation.step([0, 1], actions)
    for i in range(2):
        np.testing.assert_allclose(compiled.data[i].qpos, reference.data[i].qpos, atol=1e-9, rtol=0)
        np.testing.assert_allclose(compiled.data[i].qvel, reference.data[i].qvel, atol=1e-7, rtol=0)
    for name in native.CONTROLLER.names:
        np.testing.assert_allclose(compiled.memory[name], reference.memory[name], atol=1e-9, rtol=0)


@pytest.mark.parametrize("joints", [np.zeros(7), np.array([0, 0, 0, -0.07, 0, 1.6, 0.0])])
def test_stretched_arm_near_singularity_agrees_with_numpy(scenes, monkeypatch, joints):
    ends = []
    for _ in range(2):
        simulation = begun(scenes[:1])
        qpos = simulation.data[0].qpos.copy()
        qpos[scenes[0].arm_qposadr] = joints
        simulation.write(0, qpos, np.zeros(scenes[0].model.nv))
        simulation.step([0], np.full((1, 1, 7), 0.2))
        ends.append(simulation.data[0].qpos.copy())
        monkeypatch.setattr(native, "library", lambda: None)
    np.testing.assert_allclose(*ends, atol=1e-9, rtol=0)


def test_results_depend_neither_on_threads_nor_on_grouping(scenes):
    mixed = [scenes[0], scenes[1], scenes[0], scenes[1]]
    actions = chunks(4, 6)
    together, alone = begun(mixed, threads=3), begun(mixed, threads=1)
    together.step([3, 0, 2, 1], actions[[3, 0, 2, 1]])
    for i in range(4):
        alone.step([i], actions[i : i + 1, :2])
        alone.step([i], actions[i : i + 1, 2:])
    assert_same(together.state_dict(), alone.state_dict())


def test_write_leaves_nothing_of_the_episode_before(scenes):
    used = begun(scenes[:1])
    moved = used.models[0].body_pos.copy()
    moved[scenes[0].object_body[0]] += 0.1
    used.write(0, used.data[0].qpos, used.data[0].qvel, body_pos=moved, initial_joint=np.full(7, 0.3))
    used.step([0], chunks(1, 30, seed=3))
    start(used, 0, state=7)
    fresh = Simulation(scenes[:1])
    start(fresh, 0, state=7)
    for simulation in (used, fresh):
        simulation.step([0], chunks(1, 5, seed=4))
    assert_same(used.state_dict(), fresh.state_dict())


def test_state_dict_continues_bit_for_bit_also_when_objects_sleep(scenes):
    reference = begun(scenes)
    moved = scenes[1].model.body_pos.copy()
    moved[1] += 0.01
    state = initial_states(scenes[1].task)[4]
    nq = scenes[1].model.nq
    reference.write(1, state[1 : 1 + nq], state[1 + nq :], body_pos=moved)
    reference.step([0, 1], chunks(2, 30, seed=1, scale=0.2))
    assert (reference.state_dict()["asleep"] >= 0).any(), "nothing sleeps: this test tests nothing"
    saved = state_of(reference)
    reference.step([0, 1], chunks(2, 20, seed=2))
    for other in (Simulation(scenes), reference):
        expected = state_of(reference)
        other.load_state_dict(saved)
        assert_same(other.state_dict(), saved)
        other.step([0, 1], chunks(2, 20, seed=2))
        assert_same(other.state_dict(), expected)


def test_state_of_other_scenes_is_refused(scenes):
    with pytest.raises(ValueError, match=r"physics: expected \d+ rows"):
        Simulation(scenes[:1]).load_state_dict(Simulation(scenes).state_dict())


def test_success_freezes_and_nothing_else_moves_on(scenes):
    simulation = begun(scenes)
    drop_into_basket(simulation, 0, height=0.05)
    executed, success, _ = simulation.step([0, 1], np.zeros((2, 5, 7)))
    assert success.tolist() == [True, False]
    assert executed[1].all()
    first = int(executed[0].sum())
    assert 1 <= first < 5
    assert executed[0, :first].all()
    assert simulation.data[0].time == pytest.approx(0.05 * first)
    assert simulation.satisfied(0)


def test_success_does_not_stop_where_that_is_not_wanted(scenes):
    simulation = begun(scenes[:1])
    drop_into_basket(simulation, 0, height=0.05)
    executed, success, _ = simulation.step([0], np.zeros((1, 5, 7)), stop_on_success=False)
    assert executed.all()
    assert success.tolist() == [True]


def test_numpy_path_freezes_at_the_same_step(scenes, monkeypatch):
    results = []
    for _ in range(2):
        simulation = begun(scenes[:1])
        drop_into_basket(simulation, 0)
        results.append(simulation.step([0], np.zeros((1, 6, 7))))
        monkeypatch.setattr(native, "library", lambda: None)
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1].tolist() == results[1][1].tolist() == [True]


def goals(scene):
    """One of each kind of place goal, about the task's object and the basket or a site on it."""
    target, basket = scene.task.problem.obj_of_interest
    inside = scene.goal[0]
    owners = {"owner_a": scene.instances.index(target), "owner_b": scene.instances.index(basket)}
    size = (0.05, 0.08, 0.01)
    return {
        "in": inside,
        "on_site": replace(inside, kind="on_site", size=size),
        "on_site touching": replace(inside, kind="on_site", size=size, **owners),
        "on_object": resting_on(scene, target, basket),
    }


@pytest.mark.parametrize("kind", ["in", "on_site", "on_site touching", "on_object"])
def test_compiled_goals_agree_with_the_python_ones_everywhere(scenes, kind):
    scene = replace(scenes[0], goal=(goals(scenes[0])[kind],))
    simulation = begun([scene])
    target, basket = (scene.object_qposadr[scene.objects.index(n)] for n in scene.task.problem.obj_of_interest)
    qpos, rng, seen = simulation.data[0].qpos.copy(), np.random.default_rng(0), set()
    for _ in range(400):
        yaw = rng.uniform(0, 2 * np.pi)
        qpos[basket + 3 : basket + 7] = np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)
        reach = 0.04 if kind == "on_object" else 0.12
        qpos[target : target + 3] = qpos[basket : basket + 3] + rng.uniform(-reach, [reach, reach, 2 * reach])
        simulation.write(0, qpos, np.zeros(scene.model.nv))
        seen.add(simulation.satisfied(0))
        assert simulation.satisfied(0) == satisfied(scene, simulation.data[0])
    assert seen == {False, True}


@pytest.mark.parametrize("any_joint", [False, True])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_compiled_joint_goals_agree_with_the_python_ones(scenes, sign, any_joint):
    fingers = tuple(int(address) for address in scenes[0].gripper_qposadr)
    goal = Predicate("joint", addresses=fingers, sign=sign, threshold=0.003, any_joint=any_joint)
    scene = replace(scenes[0], goal=(goal,))
    simulation, rng, seen = begun([scene]), np.random.default_rng(0), set()
    for _ in range(50):
        qpos = simulation.data[0].qpos.copy()
        qpos[list(fingers)] = rng.uniform(-0.01, 0.01, 2)
        simulation.write(0, qpos, np.zeros(scene.model.nv))
        seen.add(simulation.satisfied(0))
        assert simulation.satisfied(0) == satisfied(scene, simulation.data[0])
    assert seen == {False, True}


def test_orientation_goals_are_rounded_alike(scenes):
    """A recording's goals come out to the last bit only with robosuite's mix of single and double precision."""
    simulation, rng = begun(scenes[:1]), np.random.default_rng(0)
    qpos = simulation.data[0].qpos.copy()
    for _ in range(150):
        action = rng.uniform(-1.5, 1.5, 7)
        simulation.write(0, qpos, np.zeros(scenes[0].model.nv))
        simulation.memory["fresh"] = 0.0  # set from the present pose, not from that of the reset
        expected = simulation.memory.copy()
        controller.set_goal(simulation.data[0], scenes[0], expected[0], action)
        simulation.step([0], action[None, None])
        difference = np.abs(simulation.memory["goal_orientation"] - expected["goal_orientation"]).max()
        assert difference < 1e-13


def resting_on(scene, upper, lower):
    """The goal that one object rests on another, as the scenes of other suites have it."""
    a, b = (scene.object_body[scene.objects.index(name)] for name in (upper, lower))
    owners = (scene.instances.index(upper), scene.instances.index(lower))
    return Predicate("on_object", int(a), int(b), owner_a=owners[0], owner_b=owners[1])


@pytest.mark.parametrize("compiled", [True, False])
def test_contact_counts_though_sleeping_bodies_list_none(scenes, monkeypatch, compiled):
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    scene = scenes[0]
    target, basket = scene.task.problem.obj_of_interest
    simulation = Simulation([replace(scene, goal=(resting_on(scene, target, basket),))])
    start(simulation, 0)
    drop_into_basket(simulation, 0)
    still = np.tile([0, 0, 0, 0, 0, 0, -1.0], (1, 40 if compiled else 25, 1))
    simulation.step([0], still, stop_on_success=False)
    data = simulation.data[0]
    assert data.ntree_awake == 1, "the objects are still awake: this test tests nothing"
    pairs = {tuple(sorted(pair)) for pair in scene.geom_owner[data.contact.geom].tolist()}
    assert tuple(sorted((scene.instances.index(target), scene.instances.index(basket)))) not in pairs
    assert simulation.satisfied(0)
    assert simulation.step([0], still[:, :1])[1].tolist() == [True]


@pytest.mark.parametrize("compiled", [True, False])
def test_what_diverges_is_put_back_and_ends_alone_and_writes_no_log(scenes, monkeypatch, tmp_path, compiled):
    monkeypatch.chdir(tmp_path)
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    simulation, alone = begun(scenes), begun(scenes)
    simulation.data[1].qvel[:7] = 1e9
    before = simulation.data[1].qpos.copy()
    executed, success, diverged = simulation.step([0, 1], np.zeros((2, 3, 7)))
    assert executed.tolist() == [[True] * 3, [True, False, False]]
    assert success.tolist() == [False, False]
    assert diverged.tolist() == [False, True]
    np.testing.assert_array_equal(simulation.data[1].qpos, before)
    assert all(np.isfinite(values).all() for values in simulation.state_dict().values())
    assert os.listdir(tmp_path) == []
    alone.step([0], np.zeros((1, 3, 7)))
    np.testing.assert_array_equal(simulation.data[0].qpos, alone.data[0].qpos)
    start(simulation, 1)
    assert not simulation.step([0, 1], np.zeros((2, 3, 7)))[2].any()  # a new episode


@pytest.mark.parametrize(
    ("ids", "actions", "message"),
    [
        ([0, 0], np.zeros((2, 1, 7)), "different ids"),
        ([2], np.zeros((1, 1, 7)), r"0\.\.1"),
        ([0], np.zeros((1, 7)), r"\[1, K, 7\]"),
        ([0], np.full((1, 1, 7), np.nan), "finite"),
    ],
)
def test_bad_input_is_reported_in_one_line(scenes, ids, actions, message):
    with pytest.raises(ValueError, match=message):
        Simulation(scenes).step(ids, actions)


def test_write_of_another_scenes_state_is_refused(scenes):
    with pytest.raises(ValueError, match=r"qpos \[58\]"):
        Simulation(scenes).write(0, np.zeros(3), np.zeros(scenes[0].model.nv))


@pytest.mark.parametrize("body", ["robot0_base", "robot0_link1"])
def test_a_placed_body_is_where_it_was_put_also_with_sleep_which_skips_what_is_fixed(scenes, body):
    scene, shift = scenes[0], np.array([0.0, 0.05, 0.0])
    simulation = begun([scene])
    simulation.step([0], np.zeros((1, 20, 7)))
    moved = scene.model.body_pos.copy()
    moved[scene.model.body(body).id] += shift
    before = simulation.data[0].site_xpos[scene.grip_site].copy()
    simulation.write(0, simulation.data[0].qpos, np.zeros(scene.model.nv), body_pos=moved)
    np.testing.assert_allclose(simulation.data[0].site_xpos[scene.grip_site] - before, shift, atol=1e-2)
    simulation.step([0], np.zeros((1, 2, 7)))
    np.testing.assert_allclose(simulation.data[0].site_xpos[scene.grip_site] - before, shift, atol=1e-2)
    assert not np.array_equal(scene.model.body_pos, moved), "the scene, which others share, was changed"


def test_closed_simulation_steps_on_in_numpy(scenes):
    simulation, other = begun(scenes[:1]), begun(scenes[:1])
    simulation.close()
    for s in (simulation, other):
        s.step([0], chunks(1, 1))
    np.testing.assert_allclose(simulation.data[0].qpos, other.data[0].qpos, atol=1e-9)
