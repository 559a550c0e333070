"""Contract of robosuite's tasks: units, frames, names and limits of robosuite's own tensors."""

from __future__ import annotations

import functools
import re

import numpy as np

from embodied.contract import Contract, TensorSpec
from sims.robosuite.world import Options, World

XYZ = ("x", "y", "z")
XYZW = ("x", "y", "z", "w")
RGB = ("red", "green", "blue")
OSC = ("x", "y", "z", "rotation_x", "rotation_y", "rotation_z")
END_EFFECTOR = "robot{} end effector"


@functools.cache
def contract(
    options: Options, images: tuple[str, ...] = (), image_size: int = 128, horizon: int = 1, executed: int = 1
) -> Contract:
    """Contract with chunks of H actions of which K are executed, derived from the models of one world.

    With `images`, by camera, the observations of objects are privileged.
    """
    world = World(options)
    read = world.observe()
    specs = {name: _proprioception(name, len(read[name]), world) for name in world.proprioception}
    specs |= {name: _object(name, len(read[name]), bool(images)) for name in world.objects}
    for camera in images:
        world.picture(camera, image_size)
        moving = re.fullmatch(r"robot(\d)_eye_in_hand", camera)
        frame = END_EFFECTOR.format(moving[1]) if moving else "world"
        shape = (image_size, image_size, 3)
        specs[f"{camera}_image"] = TensorSpec(shape, "uint8", frame=frame, names=RGB, camera=camera)
    return Contract(specs, _action(world), 1.0 / world.env.control_freq, horizon, executed)


def _proprioception(name: str, size: int, world: World) -> TensorSpec:
    robot = world.env.robots[int(name.removeprefix("robot")[0])]
    if name.endswith("_eef_pos"):
        return TensorSpec((3,), unit="m", frame="world", names=XYZ)
    if name.endswith("_eef_quat"):
        return TensorSpec((4,), unit="1", frame="world", names=XYZW)
    joints = robot.robot_joints
    if "gripper" in name:
        joints = [joint for arm in robot.arms for joint in robot.gripper_joints[arm]]
    kinds = {world.env.sim.model.jnt_type[world.env.sim.model.joint_name2id(joint)] for joint in joints}
    unit = "m" if kinds == {2} else "rad"  # mjJNT_SLIDE; grippers with fingers turn them
    return TensorSpec((size,), unit=unit + ("/s" if name.endswith("vel") else ""), names=tuple(joints))


def _object(name: str, size: int, privileged: bool) -> TensorSpec:
    """Spec of an object's observation, in the world's axes unless the name says that it is in an end effector's."""
    match = re.search(r"_to_robot(\d)_.*eef_(pos|quat)$", name)
    frame = END_EFFECTOR.format(match[1]) if match else "world"
    if size == 3:
        return TensorSpec((3,), unit="m", frame=frame, names=XYZ, privileged=privileged)
    if size == 4:
        return TensorSpec((4,), unit="1", frame=frame, names=XYZW, privileged=privileged)
    unit = {"hinge_qpos": "rad", "handle_qpos": "rad", "t": "m", "d": "m", "angle": "cosine"}.get(name, "number")
    return TensorSpec((size,), unit=unit, privileged=privileged)


def _action(world: World) -> TensorSpec:
    """Spec of actions in the order of robosuite's controllers: an arm's displacement, then its gripper's direction."""
    names = []
    units = {}
    frames = set()
    for robot in world.env.robots:
        prefix = robot.robot_model.naming_prefix
        for part, (first, last) in robot.composite_controller._action_split_indexes.items():
            controller = robot.composite_controller.part_controllers[part]
            kind = type(controller).__name__
            if part.endswith("gripper"):
                elements = ("gripper",) if last - first == 1 else [f"gripper_{i}" for i in range(last - first)]
                units["direction of travel (gripper)"] = None
            elif kind == "OperationalSpaceController":
                elements = OSC[: last - first]
                frames.add(controller.input_ref_frame)
                units[_scale(controller.output_max[:3], "m", "x, y, z")] = None
                if last - first > 3:
                    units[_scale(controller.output_max[3:], "rad", "axis-angle, rotation")] = None
            else:
                elements = [name.removeprefix(prefix) for name in controller.joint_names]
                units[_scale(controller.output_max, "rad", "joints")] = None
            names += [prefix + element for element in elements]
    low, high = world.env.action_spec
    frame = ", ".join(sorted(frames))
    bounds = {"low": tuple(np.asarray(low).tolist()), "high": tuple(np.asarray(high).tolist())}
    return TensorSpec((len(names),), unit="; ".join(units), frame=frame, names=tuple(names), **bounds)


def _scale(most: np.ndarray, unit: str, what: str) -> str:
    return f"{float(np.max(most)):g} {unit} ({what})"
