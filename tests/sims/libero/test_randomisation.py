"""Domain randomisation: what it draws, that the physics and the pictures have it, and that it is off by default."""

import mujoco
import numpy as np
import pytest
import torch

from sims.libero.assets import STAND_IN
from sims.libero.environment import LiberoEnvironment
from sims.libero.physics.backend import LiberoSim
from sims.libero.physics.simulation import Simulation
from sims.libero.physics.warp_simulation import WarpSimulation
from sims.libero.randomisation import Draws, Randomisation
from sims.libero.scene.placement import Placement
from sims.libero.scene.scene import build_scene
from sims.libero.suite import load_tasks
from sims.libero.task import LiberoTask

TASKS = load_tasks("libero_object", [0, 3])
PHYSICS = Randomisation(friction=[0.5, 2.0], mass=[0.5, 2.0])
PICTURES = Randomisation(light=[0.4, 0.8], light_m=0.5, light_colour=0.2, camera_m=0.05, camera_rad=0.1)
STILL = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
FACTORS = (1.0, 0.5, 2.0)


@pytest.fixture(scope="module")
def scene():
    return build_scene(TASKS[0], STAND_IN)


def exactly(factor, option):
    return Randomisation(**{option: [factor, factor]})


def both(scene, option):
    """A world of each back end for each of FACTORS; they begin at the same start."""
    varied = exactly(2.0, option).fields()
    state, count = Placement(scene, "wide", "train")(0), len(FACTORS)
    simulations = (
        Simulation([scene] * count, threads=1, varied=varied),
        WarpSimulation([scene] * count, device="cpu", varied=varied),
    )
    drawn = [Draws(scene, exactly(factor, option), "train")(0) for factor in FACTORS]
    return simulations, [state._replace(model_fields=each) for each in drawn]


def test_what_is_pushed_slides_the_farther_the_less_friction_there_is(scene):
    simulations, states = both(scene, "friction")
    target = scene.objects.index("cream_cheese_1")  # flat
    address, speed = scene.object_qposadr[target], 0.5
    slid = []
    for simulation in simulations:
        for i, state in enumerate(states):
            moving = np.zeros(scene.model.nv)
            moving[scene.model.body_dofadr[scene.object_body[target]] + 1] = speed  # m/s along y
            simulation.write(i, **state._replace(qvel=moving)._asdict())
        ids = np.arange(len(states))
        before = simulation.qpos(ids)[:, address + 1]
        simulation.step(ids, np.tile(STILL, (len(ids), 3, 1)), stop_on_success=False)
        slid.append(simulation.qpos(ids)[:, address + 1] - before)
    nominal, less, more = slid[0]
    assert 1.5 * nominal < less < 3 * nominal  # 1.25 cm by Coulomb's law, and inversely to the coefficient
    assert nominal / 3 < more < nominal / 1.5
    np.testing.assert_allclose(slid[1], slid[0], atol=5e-4)


def test_the_floor_bears_the_weight_that_is_drawn(scene):
    simulations, states = both(scene, "mass")
    dofs = scene.model.body_dofadr[scene.object_body] + 2
    weights = scene.model.body_mass[scene.object_body] * -scene.model.opt.gravity[2]
    ids = np.arange(len(states))
    for simulation in simulations:
        for i, state in enumerate(states):
            simulation.write(i, **state._asdict())
        simulation.step(ids, np.tile(STILL, (len(ids), 6, 1)), stop_on_success=False)
    mujocos, warps = simulations
    for i, factor in enumerate(FACTORS):
        forward = mujoco.MjData(mujocos.models[i])
        forward.qpos[:] = mujocos.data[i].qpos
        forward.qvel[:] = mujocos.data[i].qvel
        mujoco.mj_forward(mujocos.models[i], forward)
        borne = forward.qfrc_constraint[dofs], warps.groups[0].data.qfrc_constraint.numpy()[i, dofs]
        for forces in borne:
            np.testing.assert_allclose(forces, factor * weights, rtol=0.05)


def test_derived_quantities_are_those_that_mujoco_derives(scene):
    drawn, model = Draws(scene, PHYSICS, "train")(7), mujoco.MjModel.__copy__(scene.model)
    model.body_mass[:], model.body_inertia[:] = drawn["body_mass"], drawn["body_inertia"]
    mujoco.mj_setConst(model, mujoco.MjData(model))
    factors = drawn["body_mass"][scene.object_body] / scene.model.body_mass[scene.object_body]
    assert len(set(factors.round(6))) == len(factors)
    assert ((factors > 0.5) & (factors < 2.0)).all()
    for name in ("body_subtreemass", "body_invweight0", "dof_invweight0"):
        np.testing.assert_allclose(drawn[name], getattr(model, name), rtol=1e-9, err_msg=name)


def test_a_start_draws_the_same_wherever_on_both_back_ends_and_whatever_else_is_drawn(scene):
    starts = torch.tensor([5, 6, 7, 8])

    def drawn(numbers, **options):
        env = LiberoEnvironment(
            TASKS, len(numbers), assets=STAND_IN, randomisation=PHYSICS, threads=1, executed=1, **options
        )
        env.simulation.begin(torch.arange(len(numbers)), numbers, env.initial_state)
        of_each = [env.simulation.varied_fields(np.array([i])) for i in range(len(numbers))]
        env.close()
        return of_each

    here, apart, warps = drawn(starts), drawn(starts[2:], seed=3), drawn(starts, sim=LiberoSim.mjwarp)
    for name in PHYSICS.fields():
        for i in range(4):
            np.testing.assert_allclose(warps[i][name], here[i][name], rtol=1e-6, err_msg=name)
        for i in (2, 3):
            np.testing.assert_array_equal(apart[i - 2][name], here[i][name])
        assert not np.array_equal(here[0][name], here[2][name])
    more = Draws(scene, Randomisation(**vars(PHYSICS) | {"camera_m": 0.1, "light": [0.5, 1.0]}), "train")(5)
    np.testing.assert_array_equal(more["body_mass"], here[0]["body_mass"][0])
    assert not np.array_equal(
        Draws(scene, PHYSICS, "train")(5)["body_mass"], Draws(scene, PHYSICS, "train")(6)["body_mass"]
    )


def test_it_is_off_by_default_and_in_evaluations(scene):
    assert Draws(scene, Randomisation(), "train")(3) == {} == Draws(scene, PHYSICS, "eval")(3)
    for split, options in (("train", None), ("train", Randomisation()), ("eval", PHYSICS)):
        env = LiberoEnvironment(
            TASKS[:1], 3, assets=STAND_IN, split=split, randomisation=options, threads=1, executed=1
        )
        env.reset()
        assert len({id(model) for model in env.simulation.models}) == 1, "worlds share the scene's model"
        env.close()
    asked = Randomisation(mass=[0.5, 2.0], evaluation=True)
    held_out, training = (Draws(scene, asked, split)(3)["body_mass"] for split in ("eval", "train"))
    assert not np.array_equal(held_out, training)


def test_lights_and_cameras_differ_within_their_limits(scene):
    model = scene.model
    all_drawn = [Draws(scene, PICTURES, "train")(start) for start in range(40)]
    moved = np.array([drawn["cam_pos"] - model.cam_pos for drawn in all_drawn])
    assert 0.04 < np.abs(moved).max() <= 0.05
    angles = np.array(
        [
            [2 * np.arccos(min(1.0, abs(a @ b))) for a, b in zip(drawn["cam_quat"], model.cam_quat, strict=True)]
            for drawn in all_drawn
        ]
    )
    assert 0.1 < angles.max() <= 0.1 * 3**0.5 + 1e-6
    shades = np.array([drawn["light_diffuse"] / model.light_diffuse for drawn in all_drawn])
    assert 0.4 * 0.8 <= shades.min() < 0.4
    assert 0.8 < shades.max() <= 0.8 * 1.2
    assert (np.ptp(shades, axis=-1) > 0).all(), "a colour"
    assert 0.4 < np.abs([drawn["light_pos"] - model.light_pos for drawn in all_drawn]).max() <= 0.5


@pytest.mark.parametrize("option", [{"light": [0.4, 0.6]}, {"camera_m": 0.05}, {"camera_rad": 0.1}])
def test_pictures_show_the_draws_and_repeat_with_the_start(option):
    def pictures(starts, options):
        env = LiberoEnvironment(
            TASKS[:1], len(starts), assets=STAND_IN, image_size=24, randomisation=options, threads=1, executed=1
        )
        seen = env.reset(starts=torch.tensor(starts))
        env.close()
        return torch.stack((seen["agentview_image"], seen["wrist_image"]), 1).int()

    varied = Randomisation(**option)
    first, again, plain = pictures([4, 5], varied), pictures([5, 4], varied), pictures([4, 5], None)
    assert torch.equal(first, again.flip(0))
    changed = (first - plain).abs().sum(-1).flatten(2) > 6
    assert (changed.float().mean(-1) > 0.05).all(), "both cameras of both starts"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"friction": [2.0, 0.5]}, r"randomisation\.friction=\[low,high\] with low <= high, got \[2\.0, 0\.5\]"),
        ({"mass": [0.0, 1.0]}, r"mass=\[0,1\]: expected a number above 0 in place of 0"),
        ({"light": [1.0]}, r"randomisation\.light=\[low,high\]"),
        ({"camera_m": -0.1}, r"camera_m=-0\.1: expected a number of at least 0"),
        ({"light_colour": 1.5}, r"light_colour=1\.5: expected a number of at least 0 and of at most 1"),
    ],
)
def test_impossible_ranges_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Randomisation(**options)


def test_a_task_randomises_training_alone():
    task = LiberoTask(tasks=["0"], assets="stand-in", randomisation=PHYSICS)
    for split, shared in (("train", False), ("eval", True)):
        env = task.environment(2, "wide", split)
        env.reset()
        assert (env.simulation.models[0] is env.simulation.models[1]) == shared
        env.close()
