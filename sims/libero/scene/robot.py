"""The Panda arm with its gripper and mount, from robosuite's MJCF, with robosuite 1.4's dynamics."""

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np

from sims.libero.scene import mjcf
from sims.libero.suite import installed_folder

INITIAL_ARM = np.array([0.0, -0.161037389, 0.0, -2.44459747, 0.0, 2.22675220, np.pi / 4])
"""Joint positions, rad, to which LIBERO resets the arm, and the target in the null space."""
ARM_RANGES_RAD = (
    *((-2.8973, 2.8973), (-1.7628, 1.7628), (-2.8973, 2.8973), (-3.0718, -0.0698)),
    *((-2.8973, 2.8973), (-0.0175, 3.7525), (-2.8973, 2.8973)),
)
"""Lowest and highest position of each joint, rad, as in the model."""
DAMPING = (0.1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01)
FRICTION_LOSS = 0.1
ARMATURE = tuple(5.0 / joint for joint in range(1, 8))
MOUNT_TOP = -0.01  # m: the pedestal's top face below its frame
PEDESTAL_HEIGHT = 0.922  # m: from the floor to the pedestal's frame


def panda(base: tuple[float, float, float], pedestal: bool) -> ET.Element:
    """The robot at `base`, m in the world frame: at the foot of a pedestal, or without one."""
    folder = installed_folder("robosuite") / "models" / "assets"
    arm = _model(folder / "robots" / "panda" / "robot.xml", "robot0_")
    _as_robosuite_1_4(arm)
    gripper = _model(folder / "grippers" / "panda_gripper.xml", "gripper0_")
    mounts = next(path for name in ("bases", "mounts") if (path := folder / name).is_dir())  # the latter in 1.4
    mount = _model(mounts / ("rethink_mount.xml" if pedestal else "null_mount.xml"), "mount0_")
    lift = PEDESTAL_HEIGHT + MOUNT_TOP if pedestal else 0.0
    arm.find("worldbody/body").set("pos", mjcf.numbers((base[0], base[1], base[2] + lift)))
    mount.find("worldbody/body").set("pos", mjcf.numbers((0.0, 0.0, -MOUNT_TOP if pedestal else 0.0)))
    # In this order joint and body ids equal stock's.
    mjcf.merge(arm, gripper, body="robot0_right_hand")
    mjcf.merge(arm, mount, body="robot0_base")
    return arm


def _model(path: Path, prefix: str) -> ET.Element:
    root = mjcf.load(path)
    mjcf.add_prefix(root, prefix)
    return root


def _as_robosuite_1_4(arm: ET.Element) -> None:
    """Revert changes of robosuite 1.5, and apply what 1.4 and LIBERO set in Python instead of the file."""
    # 1.5 gave the last link a collision mesh; in 1.4, and so in every LIBERO recording, it has none.
    mjcf.remove_geoms(arm, lambda geom: geom.get("name") == "robot0_link7_collision")
    # 1.5 added a site for its composite controllers.
    for body in arm.iter("body"):
        for site in body.findall("site[@name='robot0_right_center']"):
            body.remove(site)
    for joint, damping, armature in zip(arm.iter("joint"), DAMPING, ARMATURE, strict=True):
        joint.set("damping", mjcf.numbers([damping]))
        joint.set("frictionloss", mjcf.numbers([FRICTION_LOSS]))
        joint.set("armature", mjcf.numbers([armature]))
