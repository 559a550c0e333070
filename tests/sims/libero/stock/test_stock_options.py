"""What is known of stock LIBERO without it: its options, and how its models are mended."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from embodied.errors import UserError
from sims.libero.physics.backend import LiberoSim
from sims.libero.stock.adapted import without_missing_files
from sims.libero.task import LiberoTask
from sims.remote.task import RemoteTask, in_processes

OFFICIAL = ("articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects", "turbosquid_objects")


@pytest.fixture
def assets(tmp_path: Path) -> str:
    """A folder that looks like LIBERO's."""
    for name in OFFICIAL:
        (tmp_path / name).mkdir()
    return str(tmp_path)


def test_stock_needs_official_assets():
    with pytest.raises(UserError, match="stock LIBERO needs its official assets; get the official ones with"):
        in_processes(LiberoTask(sim=LiberoSim.stock, assets="stand-in"))


def test_stock_runs_under_the_interpreter_that_is_given(assets: str):
    task = in_processes(LiberoTask(sim=LiberoSim.stock, assets=assets, python="/opt/stock/bin/python", tasks=["1"]))
    assert isinstance(task, RemoteTask)
    assert (task.options.python, task.processes, task.options.max_envs) == ("/opt/stock/bin/python", 1, 1)
    assert task.distributions == ("official",)
    with pytest.raises(UserError, match=r"cannot start task\.python=/opt/stock/bin/python"):
        task.contract("official")


def test_nobody_trains_in_stock(assets: str):
    task = LiberoTask(sim=LiberoSim.stock, assets=assets, tasks=["0"])
    with pytest.raises(UserError, match=r"stock LIBERO only evaluates: evaluate\.py checkpoint=RUN sim=stock"):
        task.environment(1, "official", "train")


def test_evaluations_take_ten_official_starts_there_and_fifty_elsewhere(assets: str):
    stock, ours = LiberoTask(sim=LiberoSim.stock, assets=assets), LiberoTask(assets=assets)
    assert (stock.default_starts, ours.default_starts) == (10, 50)
    assert ours.max_envs is None
    assert ours.settled() is ours


def test_missing_files_become_points_and_nothing_else_changes(tmp_path: Path):
    (tmp_path / "there.stl").touch()
    there, gone = tmp_path / "there.stl", tmp_path / "gone"
    model = f"""<mujoco><size nconmax="5000"/><asset>
      <mesh name="a" file="{there}"/><mesh name="b" file="{gone}.stl"/><texture name="t" file="{gone}.png"/>
      <texture name="sky" builtin="flat"/><material name="m" texture="t"/><material name="n" texture="sky"/>
    </asset><worldbody><body><geom name="1" type="mesh" mesh="a"/><geom name="2" type="mesh" mesh="b" mass="1"/>
      <geom name="3" type="box" size="1 1 1"/></body></worldbody></mujoco>"""
    mended = ET.fromstring(without_missing_files(model))
    assert [mesh.get("name") for mesh in mended.iter("mesh")] == ["a"]
    assert [texture.get("name") for texture in mended.iter("texture")] == ["sky"]
    assert [material.get("texture") for material in mended.iter("material")] == [None, "sky"]
    geoms = {geom.get("name"): (geom.get("type"), geom.get("mesh"), geom.get("size")) for geom in mended.iter("geom")}
    assert geoms == {"1": ("mesh", "a", None), "2": ("sphere", None, "0.001"), "3": ("box", None, "1 1 1")}
    assert [size.attrib for size in mended.iter("size")] == [{"memory": "64M"}]
