"""Goal predicates against positions set by hand in a small model."""

import xml.etree.ElementTree as ET

import mujoco
import numpy as np
import pytest

from sims.libero.scene.predicates import GoalCompiler, Predicate, holds
from sims.libero.suite import load_tasks

MODEL = """<mujoco><worldbody>
  <body name="shelf" pos="1 0 0"><geom type="box" size="0.2 0.2 0.1" group="0"/>
    <site name="turned" type="box" size="0.3 0.2 0.1" pos="0 0 0.5" euler="0 0 90"/>
    <site name="askew" type="box" size="0.3 0.05 0.1" pos="0 0 0.8" euler="0 0 30"/>
    <site name="top" type="box" size="0.2 0.2 0.01" pos="0 0 0.1"/>
    <body name="drawer"><joint name="slide" type="slide" axis="1 0 0"/><geom size="0.01" pos="0 0 -5" mass="1"/></body>
    <body name="other"><joint name="slide2" type="slide" axis="1 0 0"/><geom size="0.01" pos="0 0 -6" mass="1"/></body>
  </body>
  <body name="plate"><freejoint/><geom type="box" size="0.1 0.1 0.01"/></body>
  <body name="bowl" pos="0 0 2"><freejoint/><geom type="box" size="0.02 0.02 0.02"/></body>
</worldbody></mujoco>"""

OWNER_SHELF, OWNER_PLATE, OWNER_BOWL = 0, 1, 2


@pytest.fixture(scope="module")
def model():
    return mujoco.MjModel.from_xml_string(MODEL)


@pytest.fixture(scope="module")
def owner(model):
    owners = {"shelf": OWNER_SHELF, "plate": OWNER_PLATE, "bowl": OWNER_BOWL}
    return np.array([owners.get(model.body(body).name, -1) for body in model.geom_bodyid], dtype=np.int32)


def data_with(model, bowl=(0, 0, 2), plate=(0, 0, 0), slide=0.0, slide2=0.0):
    data = mujoco.MjData(model)
    data.qpos[:] = [slide, slide2, *plate, 1, 0, 0, 0, *bowl, 1, 0, 0, 0]
    mujoco.mj_forward(model, data)
    return data


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        ((0, 0, 0), True),
        ((0.19, 0, 0), True),  # the site is turned by 90 degrees: its half size along world x is 0.2 m
        ((0.21, 0, 0), False),
        ((0, 0.29, 0), True),
        ((0, 0.31, 0), False),
        ((0, 0, 0.099), True),
        ((0, 0, 0.101), False),
        ((0, 0, -0.109), True),  # 1 cm more room below
        ((0, 0, -0.111), False),
    ],
)
def test_in_is_the_sites_box_turned_into_the_world_and_deeper_by_a_centimetre(model, owner, offset, expected):
    site = model.site("turned").id
    predicate = Predicate("in", model.body("bowl").id, site, tuple(model.site_size[site]))
    data = data_with(model, bowl=np.array([1, 0, 0.5]) + offset)
    assert holds(predicate, owner, data) is expected


@pytest.mark.parametrize(
    ("bowl", "expected"),
    [
        ((0, 0, 0.0295), True),
        ((0.029, 0, 0.0295), True),
        ((0.031, 0, 0.0295), False),  # touches, but 3.1 cm off
        ((0, 0, 0.035), False),  # above, but does not touch
        ((0, 0, -0.0295), False),  # touches from below
    ],
)
def test_on_an_object_needs_contact_height_and_centring(model, owner, bowl, expected):
    predicate = Predicate(
        "on_object", model.body("bowl").id, model.body("plate").id, owner_a=OWNER_BOWL, owner_b=OWNER_PLATE
    )
    assert holds(predicate, owner, data_with(model, bowl=bowl)) is expected


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        ((0, 0, 0.0195), True),
        ((0.19, 0.19, 0.0195), True),
        ((0.201, 0, 0.0195), False),
        ((0, 0, 0.025), False),  # over the region, but it does not touch the shelf
    ],
)
def test_on_a_region_of_a_fixture_needs_contact_with_it(model, owner, offset, expected):
    site = model.site("top").id
    size = tuple(model.site_size[site])
    predicate = Predicate("on_site", model.body("bowl").id, site, size, OWNER_BOWL, OWNER_SHELF)
    data = data_with(model, bowl=np.array([1, 0, 0.1]) + offset)
    assert holds(predicate, owner, data) is expected


@pytest.mark.parametrize(("height", "expected"), [(0.004, False), (0.006, True), (0.109, True), (0.111, False)])
def test_on_a_region_of_the_workspace_is_a_window_of_heights(model, owner, height, expected):
    site = model.site("top").id
    predicate = Predicate("on_site", model.body("bowl").id, site, tuple(model.site_size[site]), OWNER_BOWL, -1)
    data = data_with(model, bowl=np.array([1, 0, 0.1 + height]))
    assert holds(predicate, owner, data) is expected


@pytest.mark.parametrize(
    ("kind", "category", "any_joint"),
    [
        ("open", "wooden_cabinet", True),
        ("close", "wooden_cabinet", False),
        ("turnon", "flat_stove", True),
        ("turnoff", "flat_stove", False),
    ],
)
def test_one_joint_opens_or_turns_on_and_all_close_or_turn_off(model, kind, category, any_joint):
    shelf = ET.fromstring(MODEL).find("worldbody/body[@name='shelf']")
    goal = GoalCompiler(model, load_tasks("libero_object", [0])[0].problem, {"shelf": (category, shelf)})
    predicate = goal.compile((kind, "shelf"))
    assert predicate.any_joint is any_joint
    assert predicate.addresses == (0, 1)


@pytest.mark.parametrize(("degrees", "expected"), [(-30, True), (30, False)])
def test_an_offset_from_a_region_is_turned_by_its_rotation_and_not_back_as_in_stock(model, owner, degrees, expected):
    site, angle = model.site("askew").id, np.radians(degrees)
    predicate = Predicate("on_site", model.body("bowl").id, site, tuple(model.site_size[site]), OWNER_BOWL, -1)
    data = data_with(model, bowl=(1 + 0.25 * np.cos(angle), 0.25 * np.sin(angle), 0.8 + 0.15))
    assert holds(predicate, owner, data) is expected


@pytest.mark.parametrize(
    ("slides", "any_joint", "expected"),
    [
        ((-0.15, 0.0), True, True),
        ((-0.13, 0.0), True, False),
        ((-0.15, 0.0), False, False),
        ((-0.15, -0.2), False, True),
    ],
)
def test_joints_beyond_a_threshold(model, owner, slides, any_joint, expected):
    predicate = Predicate("joint", addresses=(0, 1), sign=-1.0, threshold=-0.14, any_joint=any_joint)
    data = data_with(model, slide=slides[0], slide2=slides[1])
    assert holds(predicate, owner, data) is expected
