"""Scenes from stand-ins: state layout, robot and options as stock LIBERO's, objects at rest, goals."""

import mujoco
import numpy as np
import pytest

from sims.libero.assets import STAND_IN
from sims.libero.scene.scene import build_scene, satisfied
from sims.libero.suite import initial_states, load_tasks

TASKS = load_tasks("libero_object")
ARM_BODIES = [f"robot0_link{i}" for i in range(8)]


@pytest.fixture(scope="module")
def scenes():
    return {task.index: build_scene(task, STAND_IN) for task in TASKS}


@pytest.fixture(scope="module")
def scene(scenes):
    return scenes[0]


def names(model, kind, count):
    return [mujoco.mj_id2name(model, kind, i) for i in range(count)]


def start(scene, index=0):
    """Data at an official initial state, without velocity."""
    data = mujoco.MjData(scene.model)
    data.qpos[:] = initial_states(scene.task)[index, 1 : 1 + scene.model.nq]
    mujoco.mj_forward(scene.model, data)
    return data


def settle(scene, data, steps=1000):
    """Let go for 2 s, the arm held against gravity."""
    for _ in range(steps):
        mujoco.mj_step1(scene.model, data)
        data.ctrl[scene.arm_actuator] = data.qfrc_bias[scene.arm_dofadr] - 5 * data.qvel[scene.arm_dofadr]
        mujoco.mj_step2(scene.model, data)
    mujoco.mj_forward(scene.model, data)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: str(task.index))
def test_official_initial_states_fit_the_scene(scenes, task):
    model = scenes[task.index].model
    assert initial_states(task).shape[1] == 1 + model.nq + model.nv


def test_bodies_and_joints_are_named_and_ordered_as_in_stock(scene):
    model = scene.model
    hand = ["robot0_right_hand", "gripper0_right_gripper", "gripper0_eef", "gripper0_leftfinger"]
    hand += ["gripper0_finger_joint1_tip", "gripper0_rightfinger", "gripper0_finger_joint2_tip", "mount0_base"]
    objects = [f"{name}_main" for name in scene.task.problem.objects]
    expected = ["world", "floor", "robot0_base", *ARM_BODIES, *hand, *objects]
    assert names(model, mujoco.mjtObj.mjOBJ_BODY, model.nbody) == expected
    joints = [f"robot0_joint{i}" for i in range(1, 8)] + ["gripper0_finger_joint1", "gripper0_finger_joint2"]
    joints += [f"{name}_joint0" for name in scene.task.problem.objects]
    assert names(model, mujoco.mjtObj.mjOBJ_JOINT, model.njnt) == joints
    assert list(scene.object_qposadr) == [9 + 7 * i for i in range(7)]
    assert list(scene.arm_qposadr) == list(range(7))
    assert list(scene.gripper_qposadr) == [7, 8]


def test_robot_has_the_dynamics_of_robosuite_1_4(scene):
    model = scene.model
    assert model.dof_damping[:9] == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 100, 100])
    assert model.dof_armature[:9] == pytest.approx([5 / i for i in range(1, 8)] + [1, 1])
    assert model.dof_frictionloss[:9] == pytest.approx([0.1] * 7 + [1, 1])
    assert [model.body(name).mass[0] for name in ARM_BODIES] == [4, 3, 3, 2, 2, 2, 1.5, 0.5]
    assert model.actuator_ctrlrange[scene.arm_actuator, 1] == pytest.approx([80] * 5 + [12] * 2)
    assert model.actuator_ctrlrange[scene.gripper_actuator] == pytest.approx(np.array([[0, 0.04], [-0.04, 0]]))
    assert model.actuator_gainprm[scene.gripper_actuator, 0] == pytest.approx([1000, 1000])
    # robosuite 1.5 gives the last link a collision mesh, which 1.4 and LIBERO's recordings do not have.
    assert "robot0_link7_collision" not in names(model, mujoco.mjtObj.mjOBJ_GEOM, model.ngeom)
    assert model.body("robot0_base").pos == pytest.approx([-0.6, 0, 0])
    assert model.site(scene.grip_site).name == "gripper0_grip_site"


def test_options_are_stocks(scene):
    option = scene.model.opt
    assert (option.timestep, option.impratio, option.density, option.viscosity) == (0.002, 20, 1.2, 2e-5)
    assert option.cone == mujoco.mjtCone.mjCONE_ELLIPTIC
    assert option.integrator == mujoco.mjtIntegrator.mjINT_EULER
    assert not option.enableflags & mujoco.mjtEnableBit.mjENBL_SLEEP


def assert_same_physics(plain, pictured):
    """Every field the dynamics read is equal; visual geoms are skipped."""
    a, b = plain.model, pictured.model
    for field in ("nq", "nv", "nu", "nbody"):
        assert getattr(a, field) == getattr(b, field)
    prefixes = ("dof_", "jnt_", "actuator_")
    # dof_length, which grows with visual shapes too, is read by nothing but sleeping.
    fields = [field for field in dir(a) if field.startswith(prefixes) and field != "dof_length"]
    fields += ["body_pos", "body_quat", "body_mass", "body_inertia", "body_ipos", "body_iquat", "qpos0", "site_pos"]
    for field in fields:
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field), err_msg=field)
    collides = [np.flatnonzero((m.geom_contype != 0) | (m.geom_conaffinity != 0)) for m in (a, b)]
    for field in (
        "pos",
        "quat",
        "size",
        "friction",
        "solref",
        "solimp",
        "margin",
        "condim",
        "contype",
        "bodyid",
        "type",
    ):
        left, right = (getattr(m, f"geom_{field}")[ids] for m, ids in zip((a, b), collides, strict=True))
        np.testing.assert_array_equal(left, right, err_msg=field)
    owners = [s.geom_owner[ids] for s, ids in zip((plain, pictured), collides, strict=True)]
    np.testing.assert_array_equal(*owners)


def test_visuals_change_no_physics(scene):
    pictured = build_scene(scene.task, STAND_IN, visuals=True)
    assert pictured.model.ngeom > scene.model.ngeom
    assert_same_physics(scene, pictured)


def test_cameras_stand_where_stock_puts_them(scene):
    assert scene.model.camera("agentview").pos == pytest.approx([0.8965773716836134, 0, 0.65], abs=1e-6)
    assert scene.model.camera("robot0_eye_in_hand").fovy[0] == 75


@pytest.mark.parametrize("index", [0, 3])
def test_objects_rest_where_the_initial_states_put_them(scenes, index):
    scene = scenes[index]
    data = start(scene)
    before = data.xpos[scene.object_body].copy()
    upright = data.xquat[scene.object_body].copy()
    settle(scene, data)
    moved = data.xpos[scene.object_body] - before
    assert np.abs(moved[:, :2]).max() < 2e-3
    # The official states let objects start in the floor or above it; they come to rest on it, on the side they stood.
    assert (np.abs((data.xquat[scene.object_body] * upright).sum(axis=1)) > 0.9999).all()
    speed = max(np.abs(data.qvel[scene.model.joint(f"{name}_joint0").dofadr[0] :][:6]).max() for name in scene.objects)
    assert speed < 1e-2


def test_resting_heights_are_those_of_the_official_objects(scenes):
    """Heights of the body origin after settling, measured in stock LIBERO."""
    official = {"alphabet_soup_1": 0.0384, "basket_1": -0.0046, "salad_dressing_1": 0.0727, "cream_cheese_1": 0.0089}
    official |= {"milk_1": 0.0697, "tomato_sauce_1": 0.0384, "butter_1": 0.0087, "orange_juice_1": 0.0697}
    official |= {"ketchup_1": 0.0724, "bbq_sauce_1": 0.0546, "chocolate_pudding_1": 0.0131}
    checked = set()
    for index in (0, 3, 7):
        scene = scenes[index]
        data = start(scene)
        settle(scene, data)
        for name, body in zip(scene.objects, scene.object_body, strict=True):
            assert data.xpos[body, 2] == pytest.approx(official[name], abs=1e-3), name
            checked.add(name)
    assert checked == official.keys()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: str(task.index))
def test_goal_is_false_at_the_start_and_true_in_the_basket(scenes, task):
    scene = scenes[task.index]
    data = start(scene)
    assert not satisfied(scene, data)
    wanted = task.problem.goal[0][1]
    address = scene.object_qposadr[scene.objects.index(wanted)]
    basket = data.xpos[scene.object_body[scene.objects.index("basket_1")]].copy()
    data.qpos[address : address + 3] = np.add(basket, (0, 0, 0.08))
    mujoco.mj_forward(scene.model, data)
    assert satisfied(scene, data)
    data.qpos[address] += 0.07
    mujoco.mj_forward(scene.model, data)
    assert not satisfied(scene, data)


def test_another_object_in_the_basket_does_not_count(scene):
    data = start(scene)
    address = scene.object_qposadr[scene.objects.index("butter_1")]
    data.qpos[address : address + 3] = data.xpos[scene.object_body[scene.objects.index("basket_1")]] + (0, 0, 0.08)
    mujoco.mj_forward(scene.model, data)
    assert not satisfied(scene, data)


@pytest.mark.parametrize("suite", ["libero_spatial", "libero_goal", "libero_90", "libero_10"])
def test_other_suites_without_official_assets_say_how_to_get_them(suite):
    task = load_tasks(suite, [0])[0]
    with pytest.raises(ValueError, match=r"hf download lerobot/libero-assets.*LIBERO_ASSETS=DIR") as caught:
        build_scene(task, STAND_IN)
    assert "\n" not in str(caught.value)
