import xml.etree.ElementTree as ET

import pytest

from sims.libero.scene import mjcf

MODEL = """<mujoco>
  <default><default class="thick"><geom margin="0.001" group="0"/></default><geom friction="9 9 9"/></default>
  <asset><texture name="t" file="t.png"/><material name="m" texture="t"/><mesh name="seen" file="a.stl"/></asset>
  <worldbody><body name="b">
    <joint name="j"/>
    <geom class="thick" size="1"/>
    <geom class="thick" margin="0.5" size="1" material="m"/>
    <geom type="mesh" mesh="seen" group="1" contype="0" conaffinity="0" material="m"/>
    <geom size="2" group="1"/>
  </body></worldbody>
  <actuator><motor name="a" joint="j"/></actuator>
</mujoco>"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.xml").write_text(MODEL)
    return mjcf.load(tmp_path / "model.xml")


def test_classes_are_written_out_and_defaults_without_class_dropped(model):
    geoms = list(model.iter("geom"))
    assert geoms[0].attrib == {"margin": "0.001", "group": "0", "size": "1"}
    assert geoms[1].get("margin") == "0.5"
    assert geoms[3].get("friction") is None
    assert model.find("default") is None


def test_files_become_absolute(model, tmp_path):
    assert model.find("asset/mesh").get("file") == str(tmp_path / "a.stl")


def test_prefix_reaches_names_and_references(model):
    mjcf.add_prefix(model, "milk_1_")
    assert model.find("worldbody/body").get("name") == "milk_1_b"
    assert model.find("actuator/motor").attrib == {"name": "milk_1_a", "joint": "milk_1_j"}
    assert model.find("asset/material").attrib == {"name": "milk_1_m", "texture": "milk_1_t"}
    assert list(model.iter("geom"))[2].get("mesh") == "milk_1_seen"


def test_merging_keeps_the_first_of_two_assets_with_one_name(model):
    base = ET.fromstring("<mujoco><asset><mesh name='seen' file='first.stl'/></asset><worldbody/></mujoco>")
    mjcf.merge(base, model)
    assert [mesh.get("file") for mesh in base.iterfind("asset/mesh")] == ["first.stl"]
    assert base.find("worldbody/body").get("name") == "b"
    assert base.find("actuator/motor") is not None


def test_dropping_visuals_keeps_everything_that_collides(model):
    mjcf.drop_visuals(model)
    assert [geom.get("size") for geom in model.iter("geom")] == ["1", "1", "2"]
    assert not list(model.find("asset"))
    assert not any("material" in geom.attrib for geom in model.iter("geom"))


def test_a_missing_file_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.xml: cannot read MJCF"):
        mjcf.load(tmp_path / "nothing.xml")
