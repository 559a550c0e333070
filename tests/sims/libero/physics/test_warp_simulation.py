"""mujoco_warp's simulations against MuJoCo's: free motion, grasps, goals, freezing, continuation."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.libero.assets import STAND_IN
from sims.libero.expert.expert import Expert, Phase
from sims.libero.physics import warp_simulation
from sims.libero.physics.simulation import Simulation
from sims.libero.physics.warp_simulation import WarpSimulation
from sims.libero.scene.placement import Placement
from sims.libero.scene.predicates import Predicate
from sims.libero.scene.scene import build_scene
from sims.libero.suite import load_tasks
from sims.warp_capacity import Capacity

BOTH = np.arange(2)
OPEN = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])


@pytest.fixture(scope="module")
def scene():
    return build_scene(load_tasks("libero_object", [0])[0], STAND_IN)


@pytest.fixture(scope="module")
def warp(scene):
    return WarpSimulation([scene] * 2, device="cpu")


@pytest.fixture
def pair(scene, warp):
    """Two worlds in MuJoCo and the same two in mujoco_warp, at the same starts."""
    simulation, placement = Simulation([scene] * 2, threads=1, sleep=False), Placement(scene, "wide", "train")
    for i in BOTH:
        start(simulation, warp, i, **placement(int(i))._asdict())
    return simulation, warp


def start(simulation, warp, i, **state):
    simulation.write(i, **state)
    warp.write(i, **state)


def copy_state(simulation, warp):
    """Continue in mujoco_warp from where MuJoCo is, controllers included."""
    state = warp.state_dict()
    state |= {f"0.{name}": np.stack([getattr(data, name) for data in simulation.data]) for name in ("qpos", "qvel")}
    state["0.qacc_warmstart"] = np.stack([data.qacc_warmstart for data in simulation.data])
    state |= {f"0.{name}": simulation.memory[name] for name in ("goal_orientation", "posture", "gripper", "fresh")}
    warp.load_state_dict(state)


def error(simulation, warp):
    return np.abs(simulation.qpos(BOTH) - warp.qpos(BOTH)).max()


def test_the_arm_moves_as_in_mujoco(pair):
    simulation, warp = pair
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (2, 4, 7))
    for k in range(4):
        executed, success, diverged = warp.step(BOTH, actions[:, k : k + 1])
        simulation.step(BOTH, actions[:, k : k + 1])
        assert executed.all()
        assert not success.any()
        assert not diverged.any()
        assert error(simulation, warp) < 1e-5  # single precision: 1.5e-6 measured
        np.testing.assert_allclose(warp.gripper(), simulation.gripper(), atol=1e-12)


def test_a_grasp_lifts_as_in_mujoco(pair):
    simulation, warp = pair
    expert = Expert(simulation)
    expert.reset()
    for _ in range(150):
        if (expert.phase == Phase.CLOSE).any():
            break
        simulation.step(BOTH, expert.act()[:, None])
    copy_state(simulation, warp)
    lifted = int(np.flatnonzero(expert.phase == Phase.CLOSE)[0])
    height = simulation.qpos(BOTH)[lifted, address(simulation)]
    for _ in range(18):
        actions = expert.act()[:, None]
        simulation.step(BOTH, actions)
        warp.step(BOTH, actions)
    assert simulation.qpos(BOTH)[lifted, address(simulation)] > height + 0.02
    assert abs(simulation.qpos(BOTH) - warp.qpos(BOTH))[lifted, address(simulation)] < 2e-3
    assert error(simulation, warp) < 2e-2


def address(simulation):
    """Of the height of the object to pick."""
    scene = simulation.scenes[0]
    return scene.object_qposadr[scene.objects.index(scene.task.problem.obj_of_interest[0])] + 2


def test_a_world_at_its_goal_freezes_and_the_others_go_on(pair):
    simulation, warp = pair
    scene = simulation.scenes[0]
    target, basket = (scene.object_qposadr[scene.objects.index(name)] for name in scene.task.problem.obj_of_interest)
    qpos = simulation.qpos(BOTH)[1]
    qpos[target : target + 2], qpos[target + 2] = qpos[basket : basket + 2], qpos[basket + 2] + 0.12
    start(simulation, warp, 1, qpos=qpos, qvel=np.zeros(scene.model.nv))
    chunk = np.tile(OPEN, (2, 12, 1))
    expected, got = simulation.step(BOTH, chunk), warp.step(BOTH, chunk)
    assert expected[1].tolist() == [False, True]
    assert not expected[0][1].all()
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert error(simulation, warp) < 1e-3  # it landed on the basket


def test_worlds_that_are_not_stepped_stay(pair):
    _, warp = pair
    warp.step(BOTH, np.tile(OPEN, (2, 1, 1)))
    before = warp.state_dict()
    warp.step([1], np.full((1, 2, 7), 0.5))
    after = warp.state_dict()
    for name, values in before.items():
        np.testing.assert_array_equal(after[name][0], values[0], err_msg=name)
    assert not np.array_equal(after["0.qpos"][1], before["0.qpos"][1])


def test_each_world_runs_its_own_part_of_a_chunk_as_in_mujoco(pair):
    chunk = torch.from_numpy(np.random.default_rng(2).uniform(-1.0, 1.0, (2, 3, 7)))
    remaining_steps = torch.tensor([1, 3])
    for ours, theirs in zip(*(each.run(chunk, remaining_steps) for each in pair), strict=True):
        assert torch.equal(ours, theirs)
    assert error(*pair) < 1e-5


def test_a_start_is_computed_once_and_then_copied(pair):
    simulation, warp = pair
    placement, asked = Placement(simulation.scenes[0], "wide", "train"), []

    def initial(i, number):
        asked.append(number)
        return placement(number)

    for ids, numbers in (([0, 1], [7, 8]), ([0], [8]), ([1, 0], [7, 9]), ([0, 1], [7, 7])):
        starts = torch.tensor(ids), torch.tensor(numbers)
        warp.begin(*starts, initial)
        simulation.begin(*starts, lambda i, number: placement(number))
        begun = starts[0].numpy()
        np.testing.assert_allclose(warp.qpos(begun), simulation.qpos(begun), rtol=0, atol=1e-6)  # single precision
        still = np.zeros((len(ids), 1, 7))  # the controllers are of the start too
        warp.step(begun, still), simulation.step(begun, still)
        np.testing.assert_allclose(warp.qpos(begun), simulation.qpos(begun), rtol=0, atol=1e-5)
    assert asked == [7, 8, 9]


def test_no_more_starts_are_kept_than_there_is_room_for(pair, monkeypatch):
    simulation, warp = pair
    monkeypatch.setattr(warp_simulation, "CACHED_STARTS", 1)
    placement = Placement(simulation.scenes[0], "wide", "train")
    for numbers in ([3, 4], [4, 3], [5, 5]):
        warp.begin(torch.arange(2), torch.tensor(numbers), lambda i, number: placement(number))
        np.testing.assert_allclose(warp.qpos(BOTH), [placement(number).qpos for number in numbers], atol=1e-6)


def test_what_blows_up_is_told_and_put_back_at_rest(pair):
    _, warp = pair
    qpos = warp.qpos(BOTH)
    velocity = np.zeros(warp.scenes[0].model.nv)
    velocity[0] = 1e9
    warp.write(0, qpos[0], velocity)
    _, success, diverged = warp.step(BOTH, np.tile(OPEN, (2, 1, 1)))
    assert diverged.tolist() == [True, False]
    assert not success.any()
    np.testing.assert_allclose(warp.qpos(BOTH)[0], qpos[0], atol=1e-6)
    assert (warp.qvel(BOTH)[0] == 0).all()
    assert warp.step(BOTH, np.tile(OPEN, (2, 1, 1)))[2].tolist() == [False, False]


def test_a_saved_state_continues_with_the_same_numbers(pair):
    _, warp = pair
    actions = np.random.default_rng(1).uniform(-1.0, 1.0, (2, 3, 7))
    warp.step(BOTH, actions[:, :1])
    state = warp.state_dict()
    warp.step(BOTH, actions[:, 1:])
    after = warp.state_dict()
    warp.load_state_dict(state)
    warp.step(BOTH, actions[:, 1:])
    for name, values in warp.state_dict().items():
        np.testing.assert_array_equal(values, after[name], err_msg=name)
    with pytest.raises(ValueError, match=r"0\.qpos: expected \[2, 58\] for these scenes, got \[1, 58\]"):
        warp.load_state_dict(state | {"0.qpos": state["0.qpos"][:1]})


@pytest.mark.parametrize("kind", ["in", "on_site", "on_site touching", "on_object", "joint", "any joint"])
def test_goals_hold_where_mujocos_do(scene, kind):
    """In worlds whose object is, or lands, anywhere near its basket and whose joints are either side of a threshold."""
    target, holder = (scene.objects.index(name) for name in scene.task.problem.obj_of_interest)
    goal, worlds, rng = _goal(scene, kind, target, holder), 24, np.random.default_rng(0)
    judged = replace(scene, goal=(goal,))
    simulations = Simulation([judged] * worlds, threads=1, sleep=False), WarpSimulation([judged] * worlds, device="cpu")
    placement, reach = Placement(scene, "wide", "train"), 0.04 if kind == "on_object" else 0.12
    for i in range(worlds):
        state = placement(i)._asdict()
        qpos, (first, second) = state["qpos"], scene.object_qposadr[[target, holder]]
        qpos[first : first + 3] = qpos[second : second + 3] + rng.uniform(-reach, [reach, reach, 2 * reach])
        qpos[scene.arm_qposadr[[0, 2]]] = rng.uniform(-0.1, 0.1, 2)
        start(*simulations, i, **state)
    chunk = np.zeros((worlds, 5 if "touching" in kind else 1, 7))
    expected, got = (each.step(np.arange(worlds), chunk)[1] for each in simulations)
    assert set(expected.tolist()) == {False, True}
    assert got.tolist() == expected.tolist()


def _goal(scene, kind, target, holder):
    if kind in ("joint", "any joint"):
        addresses = tuple(int(address) for address in scene.arm_qposadr[[0, 2]])
        return Predicate("joint", addresses=addresses, sign=-1.0, threshold=0.0, any_joint=kind == "any joint")
    body, other = (int(scene.object_body[index]) for index in (target, holder))
    site = scene.goal[0].b
    size = (0.05, 0.08, 0.01)
    return {
        "in": scene.goal[0],
        "on_site": Predicate("on_site", body, site, size),
        "on_site touching": Predicate("on_site", body, site, size, target, holder),
        "on_object": Predicate("on_object", body, other, owner_a=target, owner_b=holder),
    }[kind]


def test_a_world_without_room_for_its_contacts_diverges(scene, monkeypatch):
    monkeypatch.setattr(warp_simulation, "capacity", lambda *_: Capacity(256, 16))
    warp = WarpSimulation([scene], device="cpu")
    warp.write(0, **Placement(scene, "wide", "train")(0)._asdict())
    assert warp.step([0], np.tile(OPEN, (1, 1, 1)))[2].all()
    assert warp.overflow.all()
