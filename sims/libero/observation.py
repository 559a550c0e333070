"""Observations of LIBERO: poses of the robot and all objects, object names and the instruction, as a TensorDict.

Letters in shape comments: N environments, M objects (the largest number of any task).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.text import encode, text_spec
from sims.libero.language import INSTRUCTION_BYTES
from sims.libero.perturbed.noise import corrupted
from sims.libero.physics.backend import Physics
from sims.libero.published import Published
from sims.libero.rendering.cameras import AGENT_VIEW, WRIST, cameras_of
from sims.libero.scene.geometry import ArmKinematics, rotation
from sims.libero.scene.parts import Parts
from sims.libero.scene.robot import ARM_RANGES_RAD
from sims.libero.scene.scene import Scene

CONTROL_DT_S = 0.05
NAME_BYTES = 48
"""Bytes; the longest object name in LIBERO has 30."""

XYZ = ("x", "y", "z")
RGB = ("red", "green", "blue")
IMAGES = {"agentview_image": AGENT_VIEW, "wrist_image": WRIST}
"""Observation -> camera."""
CAMERAS = tuple(IMAGES.values())
FIXED_TO = {AGENT_VIEW: "world", WRIST: "end_effector"}
TWO_COLUMNS = ("r11", "r21", "r31", "r12", "r22", "r32")


def contract(
    horizon: int,
    executed: int,
    image_size: int | None = None,
    images: Sequence[str] = CAMERAS,
    joints: bool = True,
    convention: Published | None = None,
) -> Contract:
    """The contract of every LIBERO task: H actions are predicted, K executed; in the `convention` if there is one.

    Positions are in the world frame, rotations are the first two columns of a matrix. The cameras `images` are observed
    if `image_size`, pixels, is given; poses and names of objects are then privileged. Joint angles are privileged
    without `joints`. Names of objects come from the BDDL file; drawers, doors and knobs, which are objects too, have
    the names of their bodies.

    Raises:
        UserError: for an unknown camera, or one that is named twice.
    """
    if unknown := [camera for camera in images if camera not in CAMERAS]:
        raise UserError(f"unknown images: {', '.join(unknown)}; expected some of {', '.join(CAMERAS)}")
    if len(set(images)) < len(images):
        raise UserError(f"task.images=[{','.join(images)}] names a camera twice")
    observed = _observation_specs(image_size, images)
    if not joints:
        observed["joint_position"] = replace(observed["joint_position"], privileged=True)
    own = Contract(observed, action_spec(), CONTROL_DT_S, horizon=horizon, executed=executed)
    return convention.contract(own) if convention else own


def _observation_specs(image_size: int | None, cameras: Sequence[str]) -> dict[str, TensorSpec]:
    low, high = zip(*ARM_RANGES_RAD, strict=True)
    joints = tuple(f"joint{number}" for number in range(1, 8))
    unit = {"low": (-1.0,) * 6, "high": (1.0,) * 6}
    images = {
        name: TensorSpec((image_size, image_size, 3), "uint8", frame=FIXED_TO[camera], names=RGB, camera=camera)
        for name, camera in IMAGES.items()
        if image_size and camera in cameras
    }
    specs = images | {
        "joint_position": TensorSpec((7,), unit="rad", names=joints, low=low, high=high),
        "end_effector_position": TensorSpec((3,), unit="m", frame="world", names=XYZ),
        "end_effector_rotation": TensorSpec((6,), frame="world", names=TWO_COLUMNS, **unit),
        "gripper_position": TensorSpec((2,), unit="m", names=("left", "right"), low=(0.0, -0.04), high=(0.04, 0.0)),
        "gripper_command": TensorSpec((1,), unit="-1 open, 1 closed", names=("command",), low=(-1.0,), high=(1.0,)),
        "object_position": TensorSpec((-1, 3), unit="m", frame="world", names=XYZ),
        "object_rotation": TensorSpec((-1, 6), frame="world", names=TWO_COLUMNS, **unit),
        "object_names": text_spec(NAME_BYTES, -1),
        "object_mask": TensorSpec((-1,), dtype="bool"),
        "instruction": text_spec(INSTRUCTION_BYTES),
    }
    objects = [name for name in specs if images and name.startswith("object_")]
    return specs | {name: replace(specs[name], privileged=True) for name in objects}


def action_spec() -> TensorSpec:
    """LIBERO's action: end-effector displacement (OSC) and the gripper's command, -1 opens and 1 closes."""
    names = ("x", "y", "z", "rotation_x", "rotation_y", "rotation_z", "gripper")
    unit = "0.05 m (x, y, z); 0.5 rad, axis-angle (rotation); direction of travel (gripper)"
    return TensorSpec((7,), unit=unit, frame="world", names=names, low=(-1.0,) * 7, high=(1.0,) * 7)


@dataclass(frozen=True)
class _Group:
    """Environments of one scene, on the device, and the addresses into their qpos."""

    ids: np.ndarray
    rows: Tensor  # the same numbers, as a tensor
    scene: Scene
    pose_address: Tensor  # [objects, 7]
    bodies: list[int]  # of the fixtures
    parts: Parts
    names: list[str]  # of objects, fixtures and parts


class Observer:
    """Reads observations of all environments of a simulation, vectorised over environments with the same scene.

    Observations are on the simulation's device. There are up to `most` objects in a task: the movable ones, then the
    fixtures that tasks name, then the moving parts of these fixtures. With `image_size`, pixels, there are pictures of
    the cameras `images`. Observations are in the `convention` if there is one.
    """

    def __init__(
        self,
        simulation: Physics,
        image_size: int | None = None,
        images: Sequence[str] = CAMERAS,
        convention: Published | None = None,
    ) -> None:
        self.num = simulation.num
        self._simulation = simulation
        self._convention = convention
        self._groups = _groups(simulation)
        self._device = simulation.torch_device
        self._arm = ArmKinematics(simulation.scenes, self._device)
        self.most = max(len(group.names) for group in self._groups)
        self._texts = self._instructions()
        nowhere = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64, device=self._device)
        self._nowhere = nowhere.repeat(self.num, self.most, 1)
        self._picture_names = [name for name, camera in IMAGES.items() if camera in images]
        cameras = [IMAGES[name] for name in self._picture_names]
        self._cameras = cameras_of(simulation, cameras, image_size) if image_size and cameras else None
        self._pictures: Tensor | None = None
        perturbations = {env: scene.task.perturbation for env, scene in enumerate(simulation.scenes)}
        self._noisy = {env: each.noise for env, each in perturbations.items() if each and each.noise}

    def observe(self, moved: Tensor | None = None) -> TensorDict:
        """Present observations of all environments, batch [N]; the caller owns the tensors.

        Only the environments `moved` [N] are rendered; the others have not changed since the last call.
        """
        places = self._nowhere[..., :3].clone()
        turns = self._nowhere[..., 3:].clone()
        commands = self._nowhere.new_empty(self.num, 2)
        joints = self._nowhere.new_empty(self.num, 7)
        gripper = self._nowhere.new_empty(self.num, 2)
        for group in self._groups:
            qpos, fixture_poses, commands[group.rows] = self._simulation.observed_state(group.ids, group.bodies)
            poses = torch.cat((qpos[:, group.pose_address], fixture_poses), 1)
            centres, part_rotations = group.parts.where(fixture_poses, qpos)
            places[group.rows, : len(group.names)] = torch.cat((poses[..., :3], centres), 1)
            turns[group.rows, : len(group.names)] = two_columns(
                torch.cat((rotation(poses[..., 3:]), part_rotations), 1)
            )
            joints[group.rows] = qpos[:, group.scene.arm_qposadr]
            gripper[group.rows] = qpos[:, group.scene.gripper_qposadr]
        position, matrix = self._arm.end_effector(joints)
        values = {
            "joint_position": joints,
            "end_effector_position": position,
            "end_effector_rotation": two_columns(matrix),
            "gripper_position": gripper,
            # the controller's ramp sets the grip force on contact, which positions do not show
            "gripper_command": commands[:, 1:],
            "object_position": places,
            "object_rotation": turns,
        }
        poses_now = {key: value.float() for key, value in values.items()}
        texts = {key: value.clone() for key, value in self._texts.items()}
        observation = TensorDict(poses_now | texts | self._images(moved), batch_size=[self.num])
        return self._convention.observation(observation) if self._convention else observation

    def instruct(self, ids: Tensor, instructions: Sequence[str]) -> None:
        """Set the instructions of environments `ids` [M] from now on."""
        texts = np.stack([encode(instruction, INSTRUCTION_BYTES) for instruction in instructions])
        self._texts["instruction"][ids] = torch.from_numpy(texts).to(self._device)

    def _images(self, moved: Tensor | None) -> dict[str, Tensor]:
        if self._cameras is None:
            return {}
        if self._pictures is None or moved is None:
            self._pictures = self._rendered(torch.arange(self.num, device=self._device))
        elif bool(moved.any()):
            ids = moved.nonzero().squeeze(1)
            self._pictures[ids] = self._rendered(ids)
        return self._named(self._pictures.clone())

    def pictures(self, ids: Tensor) -> dict[str, Tensor]:
        """Present pictures of environments `ids` [M], by name [M, height, width, 3]; {} without cameras."""
        own = self._named(self._rendered(ids)) if self._cameras and len(ids) else {}
        return self._convention.pictures(own) if self._convention else own

    def _rendered(self, ids: Tensor) -> Tensor:
        """Present pictures [M, cameras, height, width, 3] of environments `ids` [M], with the noise of their tasks."""
        assert self._cameras is not None
        pictures = self._cameras.pictures(ids)
        for row, env in enumerate(ids.tolist() if self._noisy else ()):
            if env in self._noisy:
                picture = pictures[row, self._picture_names.index("agentview_image")]
                noisy = corrupted(picture.cpu().numpy(), self._noisy[env], self._simulation.scenes[env].task.name)
                picture.copy_(torch.from_numpy(noisy))
        return pictures

    def _named(self, pictures: Tensor) -> dict[str, Tensor]:
        return {name: pictures[:, camera] for camera, name in enumerate(self._picture_names)}

    def _instructions(self) -> dict[str, Tensor]:
        names = torch.zeros(self.num, self.most, NAME_BYTES, dtype=torch.uint8)
        for group in self._groups:
            for row, name in enumerate(group.names):
                names[group.ids, row] = torch.from_numpy(encode(name, NAME_BYTES))
        instruction = torch.zeros(self.num, INSTRUCTION_BYTES, dtype=torch.uint8)
        texts = {"object_names": names, "object_mask": names[..., 0] != 0, "instruction": instruction}
        return {name: values.to(self._device) for name, values in texts.items()}


def two_columns(matrices: Tensor) -> Tensor:
    """First two columns [..., 6] of rotation matrices [..., 3, 3], one after the other."""
    return torch.cat((matrices[..., 0], matrices[..., 1]), -1)


def _groups(simulation: Physics) -> list[_Group]:
    groups = []
    for scene in dict.fromkeys(simulation.scenes):
        ids = np.array([env for env, other in enumerate(simulation.scenes) if other is scene])
        rows = torch.from_numpy(ids)
        device = simulation.torch_device
        address = torch.from_numpy(scene.object_qposadr[:, None] + np.arange(7))
        bodies = [fixture.body for fixture in scene.fixtures]
        parts = Parts(scene, device)
        names = [*scene.objects, *(fixture.name for fixture in scene.fixtures), *parts.names]
        groups.append(_Group(ids, rows.to(device), scene, address.to(device), bodies, parts, names))
    return groups
