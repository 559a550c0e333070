"""Against robosuite's own loop: the same numbers; and episodes that depend on their number alone."""

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from embodied import seeding
from embodied.errors import UserError
from sims.robosuite.adapted import robosuite
from sims.robosuite.catalogue import CATALOGUE
from sims.robosuite.world import CONTROLLERS, Options, World


def chunk(world: World, seed: int, steps: int = 4) -> np.ndarray:
    low, high = world.env.action_spec
    return np.random.default_rng(seed).uniform(low, high, (steps, len(low)))


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def stock(options: Options, start: int, **more):
    """robosuite's own environment, its random numbers as those of a start."""
    env = robosuite().make(
        options.task,
        robots=list(options.robots),
        has_offscreen_renderer=False,
        use_camera_obs=False,
        reward_shaping=options.shaped,
        ignore_done=True,
        seed=0,
        **more,
    )
    drawn = np.random.default_rng(seeding.derive(start, "robosuite", options.task, "train"))
    env.rng.bit_generator.state = drawn.bit_generator.state
    return env


@pytest.mark.parametrize("task", ["Lift", "NutAssemblySquare", "TwoArmPegInHole"])
def test_observations_and_shaped_rewards_are_robosuites_own(task):
    world = World(options := Options(task, shaped=True))
    world.begin(task, "train", 3)
    env = stock(options, 3, hard_reset=False)
    theirs, mine = env.reset(), world.observe()
    assert set(mine) <= set(theirs)
    compared = {name for name in mine if "_to_robot0_" not in name}
    for action in chunk(world, 0, 12):
        assert all(np.array_equal(np.atleast_1d(theirs[name]), mine[name]) for name in compared)
        reward, success, _ = world.step(action)
        theirs, expected, *_ = env.step(action)
        assert (reward, success) == (expected, bool(env._check_success()))
        mine = world.observe()


def test_states_are_those_of_a_model_that_is_loaded_anew():
    world = World(options := Options("PickPlaceCan"))  # of which nothing is drawn but poses
    world.begin("PickPlaceCan", "train", 5)
    theirs = stock(options, 5, hard_reset=True).reset()
    mine = world.observe()
    assert all(np.array_equal(theirs[name], mine[name]) for name in mine if "_to_robot0_" not in name)


def test_poses_in_the_gripper_are_of_now():
    world = World(Options("NutAssemblySquare"))  # robosuite's own are zero at first, then made of two steps' readings
    world.begin("NutAssemblySquare", "train", 0)
    for action in chunk(world, 0, 3):
        seen = world.observe()
        gripper = Rotation.from_quat(seen["robot0_eef_quat"])
        wanted = gripper.inv().apply(seen["SquareNut_pos"] - seen["robot0_eef_pos"])
        np.testing.assert_allclose(seen["SquareNut_to_robot0_eef_pos"], wanted, atol=1e-6)
        turned = gripper * Rotation.from_quat(seen["SquareNut_to_robot0_eef_quat"])
        assert (turned.inv() * Rotation.from_quat(seen["SquareNut_quat"])).magnitude() < 1e-3
        world.step(action)


@pytest.mark.parametrize("task", CATALOGUE)
def test_a_start_is_the_same_after_other_episodes(task):
    world = World(Options(task, shaped=CATALOGUE[task].shaped))

    def episode(start: int) -> list:
        world.begin(task, "train", start)
        seen = [world.observe()]
        for action in chunk(world, start, 3):
            reward, success, blown = world.step(action)
            assert not success
            assert not blown
            seen.append(world.observe() | {"reward": np.array(reward)})
        return seen

    first, other, again = episode(7), episode(8), episode(7)
    assert all(map(same, first, again))
    assert not same(first[0], other[0])


def test_training_and_evaluation_start_apart():
    world = World(Options("Lift"))
    world.begin("Lift", "train", 0)
    first = world.observe()
    world.begin("Lift", "eval", 0)
    assert not same(first, world.observe())


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_saved_state_goes_on_in_another_world(controller):
    world, other = (World(Options("Lift", controller=controller)) for _ in range(2))
    world.begin("Lift", "train", 1)
    for action in chunk(world, 0, 5):
        world.step(action)
    other.begin("Lift", "train", 2)
    other.step(chunk(world, 1)[0])
    other.begin("Lift", "train", 1)
    other.restore(world.save())
    for action in chunk(world, 2, 5):
        assert world.step(action) == other.step(action)
        assert same(world.observe(), other.observe())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "Cook"}, "unknown robosuite task 'Cook'; expected one of Lift, "),
        ({"task": "TwoArmLift", "robots": ("Panda",)}, "TwoArmLift has 2 arms"),
        ({"task": "Lift", "controller": "IK_POSE"}, "expected task.controller as one of OSC_POSE"),
        ({"task": "TwoArmTransport", "shaped": True}, "robosuite has no shaped reward for TwoArmTransport"),
    ],
)
def test_what_there_is_not_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        Options(**options)


def test_unknown_robots_and_cameras_are_refused():
    with pytest.raises(UserError, match=r"unknown robots \['Marvin'\]; expected .*Panda"):
        World(Options("Lift", ("Marvin",)))
    with pytest.raises(UserError, match=r"unknown camera 'nose'; expected one of .*agentview"):
        World(Options("Lift")).picture("nose", 32)
