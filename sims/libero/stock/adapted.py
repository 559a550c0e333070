"""Stock LIBERO (robosuite 1.4.0, hf-libero) on today's MuJoCo and NumPy; its files stay as they are.

This runs under the interpreter of stock's own virtual environment and imports nothing else of this repository.
"""

from __future__ import annotations

import os
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SMALL = "64M"
"""Memory of a simulation: robosuite requests memory for 5000 contacts, which is 1.3 GB in today's MuJoCo."""


def adapt(assets: str | Path) -> None:
    """Prepare stock LIBERO for import, with its objects and scenes in the folder `assets`.

    Stock calls input() unless it finds a configuration; an empty one suffices, because all of its paths are passed
    explicitly.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.yaml").write_text("{}\n", encoding="utf-8")
        os.environ["LIBERO_CONFIG_PATH"] = folder
        os.environ.setdefault("MUJOCO_GL", "disable")  # physics alone needs no OpenGL
        import libero.libero
    libero.libero._assets_path_cache = str(assets)
    _adapt_robosuite()


def make(bddl: str, cameras: bool = False) -> Any:  # noqa: ANN401 - stock's
    """Stock's environment of a task, as in its evaluation; needs `adapt` before."""
    from libero.libero.envs.env_wrapper import ControlEnv

    return ControlEnv(bddl_file_name=bddl, use_camera_obs=cameras, has_offscreen_renderer=cameras)


def place(model: Any, fixtures: Mapping[str, Any]) -> None:  # noqa: ANN401 - robosuite's
    """Set the poses of fixtures, which stock places at random at every reset: (position, quaternion) by body."""
    for name, (position, quaternion) in fixtures.items():
        body = model.body_name2id(name)
        model.body_pos[body] = position
        model.body_quat[body] = quaternion


def without_missing_files(xml: str) -> str:
    """The model with missing meshes replaced by points, and without missing textures: only pictures differ.

    The memory that it requests is reduced to `SMALL`.
    """
    root = ET.fromstring(xml)
    for size in root.iter("size"):
        size.attrib.clear()
        size.set("memory", SMALL)
    asset = root.find("asset")
    missing = set()
    assert asset is not None
    for element in [*asset.findall("mesh"), *asset.findall("texture")]:
        files = [path for key, path in element.attrib.items() if key.startswith("file")]
        if not all(map(os.path.exists, files)):
            missing.add((element.tag, element.get("name")))
            asset.remove(element)
    for material in asset.findall("material"):
        if ("texture", material.get("texture")) in missing:
            del material.attrib["texture"]
    for geom in root.iter("geom"):
        if ("mesh", geom.get("mesh")) in missing:
            del geom.attrib["mesh"]
            geom.set("type", "sphere")
            geom.set("size", "0.001")
    return ET.tostring(root, encoding="unicode")


def _adapt_robosuite() -> None:
    import mujoco

    mujoco.MjData.qM = property(lambda data: data)  # the inertia matrix is called M now, and mj_fullM takes the data
    full = mujoco.mj_fullM
    mujoco.mj_fullM = lambda model, target, data: full(model, data, target)

    from robosuite.utils import binding_utils

    # NumPy's integers are not accepted as mjtJoint any more.
    binding_utils.MjModel.get_joint_qpos_addr = _address("jnt_qposadr", 7, 4)
    binding_utils.MjModel.get_joint_qvel_addr = _address("jnt_dofadr", 6, 3)
    load = binding_utils.MjSim.from_xml_string.__func__
    binding_utils.MjSim.from_xml_string = classmethod(lambda cls, xml: load(cls, without_missing_files(xml)))


def _address(table: str, free: int, ball: int) -> Callable[[Any, str], int | tuple[int, int]]:
    def find(model: Any, name: str) -> int | tuple[int, int]:  # noqa: ANN401 - robosuite's
        joint = model.joint_name2id(name)
        start = getattr(model, table)[joint]
        size = {0: free, 1: ball}.get(int(model.jnt_type[joint]), 1)
        return start if size == 1 else (start, start + size)

    return find
