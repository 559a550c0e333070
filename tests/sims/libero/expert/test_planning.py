import mujoco
import numpy as np
import pytest

from sims.libero.assets import STAND_IN
from sims.libero.expert.planning import (
    BEYOND,
    CORRIDOR_M,
    Joint,
    Planner,
    _axis_yaw,
    _closing,
    _highest,
    _near,
    _pointing,
    _wrist_middle,
    target_position,
)
from sims.libero.scene.placement import Placement
from sims.libero.scene.predicates import Predicate
from sims.libero.scene.scene import build_scene
from sims.libero.suite import load_tasks

SCENE = build_scene(load_tasks("libero_object", [1])[0], STAND_IN)  # the flat cream cheese
PLANNER = Planner(SCENE)
NAMES = list(SCENE.objects)
CHEESE, BASKET, MILK = (NAMES.index(f"{name}_1") for name in ("cream_cheese", "basket", "milk"))


def state(**places):
    """Kinematics with the named objects at (x, y), everything else out of the way."""
    data = mujoco.MjData(SCENE.model)
    data.qpos[:] = Placement(SCENE, "wide", "train")(0)[0]
    for index, name in enumerate(NAMES):
        place = places.get(name.removesuffix("_1"), (2.0, index))
        data.qpos[SCENE.object_qposadr[index] : SCENE.object_qposadr[index] + 2] = place
    mujoco.mj_kinematics(SCENE.model, data)
    return data


def test_an_object_is_let_go_inside_the_rim_and_above_the_bottom():
    data = state(cream_cheese=(0.0, -0.2), basket=(0.0, 0.2))
    plan = PLANNER.plan(data, SCENE.goal[0])
    np.testing.assert_allclose(plan.grasp[:2], 0.0, atol=0.005)
    assert plan.hover > data.xpos[SCENE.object_body[CHEESE], 2] + plan.grasp[2]
    assert 0.10 < plan.release < 0.14  # the basket's rim is at 0.14 m
    assert plan.carry > 0.14 + 0.02


def on(name):
    """The goal of having the cream cheese on another object."""
    return Predicate("on_object", int(SCENE.object_body[CHEESE]), int(SCENE.object_body[NAMES.index(f"{name}_1")]))


def test_heights_clear_everything_loose_and_do_not_depend_on_where_it_stands():
    ends = {"cream_cheese": (0.0, -0.2), "butter": (0.0, 0.2)}
    between, beside = (PLANNER.plan(state(**ends, milk=(x, 0.0)), on("butter")) for x in (0.0, -0.2))
    assert between.carry > 0.13 + 0.02  # the carton's top is at 0.13 m
    assert between.hover > 0.13 + 0.02
    assert (beside.carry, beside.hover) == pytest.approx((between.carry, between.hover), abs=1e-3)


def test_on_an_object_it_is_let_go_just_above_its_top():
    data = state(cream_cheese=(0.0, -0.2), milk=(0.0, 0.2))
    plan = PLANNER.plan(data, on("milk"))
    top = data.xpos[SCENE.object_body[MILK], 2] + 0.0614
    below = plan.grasp[2] + 0.009
    assert plan.release == pytest.approx(top + below + 0.008, abs=0.003)
    assert target_position(data, on("milk"))[1] == pytest.approx(0.2)


def test_the_wrist_stays_within_its_limits_wherever_the_object_lies():
    placement = Placement(SCENE, "wide", "train")
    data = mujoco.MjData(SCENE.model)
    for index in range(30):
        data.qpos[:] = placement(index)[0]
        mujoco.mj_kinematics(SCENE.model, data)
        plan = PLANNER.plan(data, SCENE.goal[0])
        for body in (CHEESE, BASKET):
            place = data.xpos[SCENE.object_body[body], :2] - (-0.6, 0.0)
            last_joint = 0.75 * np.pi + np.arctan2(place[1], place[0]) - np.arctan2(*plan.matrix[1::-1, 0])
            assert abs((last_joint + np.pi) % (2 * np.pi) - np.pi) < 2.8


def test_what_stands_in_the_corridor_counts_and_what_stands_beside_or_beyond_it_does_not():
    start, end = np.array([0.2, 0.1, 0.0]), np.array([0.2, 0.5, 0.0])
    points = np.array([[0.2, 0.4, 0.1], [0.2 + 0.9 * CORRIDOR_M, 0.3, 0.2], [0.2, 0.1, 0.15]])
    outside = np.array([[0.2 - 1.1 * CORRIDOR_M, 0.3, 0.9], [0.2, 0.5 + 1.1 * CORRIDOR_M, 0.9]])
    assert _highest(np.concatenate((points, outside)), start, end) == 0.2
    assert _highest(points[:1], start, end) == 0.1
    assert _highest(outside, start, end) == -np.inf


def test_a_joint_has_moved_when_it_is_near_its_end():
    model = mujoco.MjModel.from_xml_string(
        """<mujoco><worldbody><body><geom size="0.1"/>
        <joint type="slide" limited="true" range="-0.1 0.3"/></body></worldbody></mujoco>"""
    )
    data = mujoco.MjData(model)
    joint = Joint(0, 0, 0.0, 0.2, np.zeros(3), np.eye(3))
    near = 0.5 * BEYOND * 0.4  # half of the margin, as a share of the range
    for position, expected in ((0.2, True), (0.2 - 0.9 * near, True), (0.2 - 1.1 * near, False), (-0.2, False)):
        data.qpos[0] = position
        assert bool(joint.moved(data)) is expected


def test_directions_of_the_hand():
    down = np.diag([1.0, -1.0, -1.0])  # points down and closes along x
    np.testing.assert_allclose(_pointing(np.array([0.0, 0.0, 1.0]), np.array([1.0, 0.0, 0.0])), down)
    # pointing against x instead, it has turned by a quarter about -y, and closes downwards
    np.testing.assert_allclose(_closing(down, np.array([1.0, 0.0, 0.0])), [0.0, 0.0, -1.0], atol=1e-9)
    np.testing.assert_allclose(_closing(down, np.array([0.0, 1.0, 0.0])), [1.0, 0.0, 0.0], atol=1e-9)
    np.testing.assert_allclose(_closing(down, np.array([0.0, 0.0, 1.0])), [1.0, 0.0, 0.0], atol=1e-9)
    turned = np.array([[0.0, 0.0, 1.0], [0.8, -0.6, 0.0], [0.6, 0.8, 0.0]])  # its z axis is the most horizontal
    assert _axis_yaw(turned) == 0.0
    assert _axis_yaw(np.array([[0.8, 0.0, 0.6], [-0.6, 0.0, 0.8], [0.0, -1.0, 0.0]])) == pytest.approx(
        np.arctan2(-0.6, 0.8)
    )
    base, start, target = np.array([1.0, 1.0, 0.0]), np.array([2.0, 1.0, 9.0]), np.array([1.0, 2.0, 0.0])
    assert _wrist_middle(base, start, target) == pytest.approx(np.pi / 2 + np.pi / 4 + 0.4)
    for yaw, nearest in ((0.5, 0.5), (0.5 + np.pi, 0.5), (0.5 - 2.0 * np.pi, 0.5), (1.3, 1.2), (-1.3, -1.2)):
        assert _near(yaw + 0.1, 0.1) == pytest.approx(nearest + 0.1)
