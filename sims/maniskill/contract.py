"""Contract of the library's scenes: elements with names, units, frames and limits.

Actions are in physical units here. The library's own actions are shares of their limits in [-1, 1], and rotations have
the opposite sign, because the library multiplies them by their lower limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError

if TYPE_CHECKING:
    from mani_skill.envs.sapien_env import BaseEnv

XYZ = ("x", "y", "z")
RGB = ("red", "green", "blue")
POSE = (*XYZ, "qw", "qx", "qy", "qz")
TURN = ("rotation_x", "rotation_y", "rotation_z")
POSE_UNITS = ("m",) * 3 + ("quaternion",) * 4
LENGTHS = ("size", "radius", "length", "width", "dist", "height")
RGB_SUFFIX = "_rgb"


@dataclass(frozen=True)
class Scale:
    """Conversion of the contract's actions a [N, A] to the library's: `gain` (a - centre), with a clipped first."""

    low: Tensor  # [A]
    high: Tensor
    centre: Tensor
    gain: Tensor

    def __call__(self, actions: Tensor) -> Tensor:
        """The library's actions, float32."""
        return (actions.float().clamp(self.low, self.high) - self.centre) * self.gain


def flat(observation: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors [N, ...] of the library's nested observation by the contract's names, without camera parameters."""
    for key, value in observation.items():
        if key == "sensor_param":
            continue
        if key == "sensor_data":
            yield from ((camera + RGB_SUFFIX, data["rgb"]) for camera, data in value.items())
        elif isinstance(value, dict):
            yield from flat(value, "" if key in ("agent", "extra") else f"{prefix}{key}_")
        else:
            value = value.float()
            yield prefix + key, value if value.dim() > 1 else value.unsqueeze(1)


def describe(env: BaseEnv, executed: int = 1) -> tuple[Contract, Scale]:
    """Contract of `env`, with chunks of K actions, and the conversion to the library's actions.

    Raises:
        UserError: for a task with several robots, or none.
    """
    if env.agent is None or not hasattr(env.agent, "robot"):
        raise UserError(f"{type(env).__name__} has no robot, or several; only tasks of one robot are supported")
    parts = list(_parts(env))
    names, units, frames, lows, highs, centres, gains = (sum((part[k] for part in parts), ()) for k in range(7))
    frame = "base" if "base" in frames else ""
    action = TensorSpec((len(names),), unit=_unit(names, units), frame=frame, names=names, low=lows, high=highs)
    tensors = (torch.tensor(each, device=env.device) for each in (lows, highs, centres, gains))
    contract = Contract(_observed(env), action, env.control_timestep, horizon=executed, executed=executed)
    return contract, Scale(*tensors)


def _observed(env: BaseEnv) -> dict[str, TensorSpec]:
    measured = _measured(env)
    return {
        name: _spec(env, name, tensor, privileged=name not in measured)
        for name, tensor in flat(env.get_obs(unflattened=True))
    }


def _measured(env: BaseEnv) -> set[str]:
    """Names of unprivileged observations: with cameras, those of the library's mode "rgb"; otherwise all."""
    before = env._obs_mode, env.obs_mode_struct
    if env.obs_mode_struct.visual.rgb:
        from mani_skill.envs.utils.observations import parse_obs_mode_to_struct

        env._obs_mode, env.obs_mode_struct = "rgb", parse_obs_mode_to_struct("rgb")
    try:
        return {name for name, _ in flat(env.get_obs(unflattened=True))}
    finally:
        env._obs_mode, env.obs_mode_struct = before


def _spec(env: BaseEnv, name: str, tensor: Tensor, *, privileged: bool) -> TensorSpec:
    shape = tuple(tensor.shape[1:])
    if name.endswith(RGB_SUFFIX):
        camera = name.removesuffix(RGB_SUFFIX)
        link = env._sensor_configs[camera].entity_uid
        return TensorSpec(shape, "uint8", frame=link or "world", names=RGB, camera=camera)
    names = ()
    units = ()
    frame = ""
    if name in ("qpos", "qvel"):
        names = tuple(joint.name for joint in env.agent.robot.get_active_joints())
        per = "/s" if name == "qvel" else ""
        units = tuple(_joint_unit(joint) + per for joint in env.agent.robot.get_active_joints())
    elif name.endswith("pose") and shape == (7,):
        names = POSE
        units = POSE_UNITS
        frame = "base" if "target_pose" in name else "world"
    elif name.endswith("pos") and shape == (3,):
        names = XYZ
        units = ("m",) * 3
        frame = "world"
    elif any(word in name for word in LENGTHS):
        return TensorSpec(shape, unit="m", privileged=privileged)
    elif name.startswith("is_"):
        return TensorSpec(shape, unit="0 or 1", privileged=privileged)
    return TensorSpec(shape, unit=_unit(names, units), frame=frame, names=names, privileged=privileged)


def _parts(env: BaseEnv) -> Iterator[tuple[tuple, ...]]:
    """Names, units, frames, low, high, centre and gain of the elements of each controller."""
    controller = env.agent.controller
    for part, each in getattr(controller, "controllers", {"": controller}).items():
        scaled = each._normalize_action
        space = each._original_single_action_space if scaled else each.single_action_space
        low, high = (limit.astype(float).round(7) for limit in (space.low, space.high))
        centre = (high + low) / 2 * scaled
        gain = 2 / (high - low) if scaled else 0 * low + 1
        kind = type(each).__name__
        if scaled and kind == "PDEEPoseController":
            gain[3:] = 1 / low[3:]
        names, units, frame = _elements(kind, part, each, len(low))
        yield names, units, (frame,), *(tuple(values.tolist()) for values in (low, high, centre, gain))


def _elements(kind: str, part: str, controller: Any, size: int) -> tuple[tuple[str, ...], tuple[str, ...], str]:  # noqa: ANN401
    joints = [joint.name for joint in controller.joints]
    units = [_joint_unit(joint) for joint in controller.joints]
    if kind == "PDEEPosController":
        return XYZ, ("m",) * 3, "base"
    if kind == "PDEEPoseController":
        return XYZ + TURN, ("m",) * 3 + ("rad, Euler XYZ",) * 3, "base"
    if kind == "PDJointPosMimicController" and size == 1:
        return (part,), (units[0],), ""
    if kind == "PDJointPosVelController":
        velocities = [f"{joint}_velocity" for joint in joints]
        return (*joints, *velocities), (*units, *(f"{unit}/s" for unit in units)), ""
    if size == len(joints):
        return tuple(joints), tuple(unit + "/s" * (kind == "PDJointVelController") for unit in units), ""
    return tuple(f"{part}_{number}" for number in range(size)), ("",) * size, ""


def _joint_unit(joint: Any) -> str:  # noqa: ANN401 - the library's
    return "m" if "prismatic" in joint.type else "rad"


def _unit(names: tuple[str, ...], units: tuple[str, ...]) -> str:
    """The common unit of all elements, or each unit with its elements."""
    if len(set(units)) <= 1:
        return units[0] if units else ""
    runs = groupby(zip(names, units, strict=True), key=lambda pair: pair[1])
    return "; ".join(f"{unit} ({', '.join(name for name, _ in run)})" for unit, run in runs)
