"""Convention of LIBERO's published LeRobot datasets (`lerobot/libero` and similar), and of policies trained on them.

The state [8] has the position of the grip site in m, the hand's rotation as axis times angle, and two finger joints.
Actions have our meaning, at 20 Hz although the metadata has 10; zero actions were left out. The hand's frame is turned
by a quarter about its z axis relative to our end effector's. Pictures are those of stock LIBERO, which are upside down,
turned by half a turn: upright, with left and right exchanged. Joint angles are in some datasets only. Sources:
github.com/huggingface/lerobot (docs/source/libero.mdx, issue 3830, envs/libero.py),
github.com/Physical-Intelligence/openpi (examples/libero/main.py), github.com/moojink/openvla-oft.

The axis times angle is robosuite's (`quat2axisangle`) of MuJoCo's quaternion of the hand, whose sign is not normalised:
angles go up to 2 pi. A hand that points down has angles on both sides of pi, so that the other sign, whose axis is the
opposite one, would exchange the sign of the state in the middle of an episode.
Differs from MuJoCo: of the two quaternions of a rotation, the one with a positive x is taken, and not the one that
follows from the product over the joints. Both are the same until the hand is more than half a turn away from its pose
at the beginning of an episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract, TensorSpec
from embodied.errors import UserError
from embodied.task import Convention
from sims.libero.language import paraphrases
from sims.libero.physics.controller import GRIPPER_SPEED, SUBSTEPS
from sims.libero.scene.geometry import Array
from sims.libero.suite import Task

STATE = "observation.state"
ACTION = "action"
JOINTS = "observation.states.joint_state"
IMAGES = "observation.images."
PUBLISHED_STATE = "state"
"""Name of the published state among our observations."""
STATE_NAMES = (
    *("x", "y", "z"),
    *("axis_angle_x", "axis_angle_y", "axis_angle_z"),
    *("finger_left", "finger_right"),
)
MIRRORED = "_mirrored"
"""End of the names of cameras whose pictures have left and right exchanged."""
SETTLING_STEPS = 10
"""Actions that open the gripper before the first observation, in the evaluations of openpi, LeRobot and OpenVLA-OFT."""
END_EFFECTOR_IN_HAND = np.array([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])


@dataclass(frozen=True)
class Published(Convention):
    """The convention for a run's `tasks`; pictures are not `mirrored` in a run with published observations."""

    tasks: Sequence[Task] = ()
    mirrored: bool = True

    rates_hz = (10.0, 20.0)
    settling_steps = SETTLING_STEPS
    features = (JOINTS,)
    cameras = {  # noqa: RUF012 - never written
        "agentview_image": (f"{IMAGES}image", f"{IMAGES}agentview"),
        "wrist_image": (f"{IMAGES}image2", f"{IMAGES}wrist_image", f"{IMAGES}wrist"),
    }

    absent = {  # noqa: RUF012
        "joint_position": "task.joints=false leaves joints to critics",
        "object_position": "task.images=[agentview,robot0_eye_in_hand] leaves objects to critics",
    }

    @property
    def names(self) -> list[str]:
        """Names of the tasks."""
        return [task.name for task in self.tasks]

    def task_index(self, text: str) -> int | None:
        """The task with this name or wording, or one of its paraphrases."""
        return self._numbers.get(_plain(text))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Tasks by all of their texts; a task's own wordings come before paraphrases of others."""
        wordings = [(task.name, task.language, task.problem.language) for task in self.tasks]
        variants = [(*paraphrases(task, "training"), *paraphrases(task, "held_out")) for task in self.tasks]
        numbers: dict[str, int] = {}
        for texts in (wordings, variants):
            for index, group in enumerate(texts):
                for text in group:
                    numbers.setdefault(_plain(text), index)
        return numbers

    def convert(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """The robot's observations and actions from those of a dataset.

        Raises:
            UserError: for another number of elements, or another sign of the gripper.
        """
        state = columns[STATE]
        actions = columns[ACTION]
        for name, values, size in ((STATE, state, 8), (ACTION, actions, 7)):
            if values.ndim != 2 or values.shape[1] != size:
                raise UserError(f"{name}: expected {size} elements as in lerobot/libero, got {values.shape[1:]}")
        if actions[:, 6].min() >= 0.0:
            raise UserError("action: expected a gripper from -1 (open) to 1 (closed), got none below 0: it never opens")
        converted = {
            "end_effector_position": state[:, :3],
            "end_effector_rotation": _two_columns(rotation(state[:, 3:6]) @ END_EFFECTOR_IN_HAND),
            "gripper_position": state[:, 6:],
            "gripper_command": gripper_commands(actions[:, 6]),
            PUBLISHED_STATE: state,
            ACTION: actions.clip(-1.0, 1.0),
        }
        return converted | ({"joint_position": columns[JOINTS]} if JOINTS in columns else {})

    def contract(self, own: Contract) -> Contract:
        """The contract `own` with the published state and mirrored pictures; only critics read our own poses."""
        unit = "m; rad, axis times angle; m"
        state = TensorSpec((8,), unit=unit, frame="world", names=STATE_NAMES)
        observed = {
            key: replace(spec, camera=spec.camera + MIRRORED) if spec.is_picture else replace(spec, privileged=True)
            for key, spec in own.observation.items()
            if not spec.is_text
        }
        texts = {key: spec for key, spec in own.observation.items() if spec.is_text}
        return replace(own, observation={**observed, PUBLISHED_STATE: state, **texts})

    def observation(self, own: TensorDict) -> TensorDict:
        """Our observations `own` [N] with the published state [N, 8] and mirrored pictures."""
        columns = own["end_effector_rotation"].double()
        first, second = columns[..., :3], columns[..., 3:]
        matrix = torch.stack((first, second, torch.linalg.cross(first, second)), -1)
        turn = axis_angle(matrix @ torch.from_numpy(END_EFFECTOR_IN_HAND.T).to(matrix))
        state = torch.cat((own["end_effector_position"], turn.float(), own["gripper_position"]), -1)
        return own.copy().update({**self.pictures(own), PUBLISHED_STATE: state})

    def pictures(self, own: TensorDict | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The pictures [N, height, width, 3] among `own`, mirrored."""
        return {key: own[key].flip(-2) for key in self.cameras if key in own.keys()}  # noqa: SIM118 - a TensorDict, too


def axis_angle(matrix: Tensor) -> Tensor:
    """Axis times angle [N, 3], rad, up to 2 pi, of rotation matrices [N, 3, 3] by the quaternion of positive x."""
    m = matrix
    trace = m[:, 0, 0] + m[:, 1, 1] + m[:, 2, 2]
    # four times the products of the elements (w, x, y, z) of the quaternion, of which each row is a multiple
    sums, differences = m + m.mT, m - m.mT
    wx, wy, wz = differences[:, 2, 1], differences[:, 0, 2], differences[:, 1, 0]
    xy, xz, yz = sums[:, 0, 1], sums[:, 0, 2], sums[:, 1, 2]
    ww, xx, yy, zz = (1.0 + trace, *(1.0 + 2.0 * m[:, i, i] - trace for i in range(3)))
    rows = [(ww, wx, wy, wz), (wx, xx, xy, xz), (wy, xy, yy, yz), (wz, xz, yz, zz)]
    products = torch.stack([torch.stack(row, -1) for row in rows], -2)
    largest = products.diagonal(dim1=-2, dim2=-1).argmax(-1)
    quaternion = products[torch.arange(len(m), device=m.device), largest]
    quaternion = torch.where(quaternion[:, 1:2] < 0.0, -quaternion, quaternion)
    # 2 acos(w) = 2 atan2(|v|, w) along v / |v|, with the vector part v
    length = quaternion[:, 1:].norm(dim=-1, keepdim=True)
    angle = 2.0 * torch.atan2(length, quaternion[:, :1])
    return quaternion[:, 1:] / length.clamp_min(1e-12) * angle


def rotation(vectors: Array) -> Array:
    """Rotation matrices [L, 3, 3] about axes by angles in rad, whose product is `vectors` [L, 3] (Rodrigues)."""
    # R = I + sin(angle) K + (1 - cos(angle)) K^2 with the cross product matrix K of the axis.
    angle = np.linalg.norm(vectors, axis=1)[:, None, None]
    x, y, z = (vectors / np.maximum(angle[:, 0], 1e-12)).T
    zero = np.zeros_like(x)
    cross = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], 1).reshape(-1, 3, 3)
    return np.eye(3) + np.sin(angle) * cross + (1.0 - np.cos(angle)) * cross @ cross


def gripper_commands(actions: Array) -> Array:
    """The gripper's command [L, 1] before each of its `actions` [L], after a warm-up that opened it."""
    command = -1.0
    commands = []
    for action in actions:
        commands.append(command)
        command = float(np.clip(command + SUBSTEPS * GRIPPER_SPEED[1] * np.sign(action), -1.0, 1.0))
    return np.array(commands)[:, None]


def _two_columns(matrices: Array) -> Array:
    return np.concatenate((matrices[..., 0], matrices[..., 1]), -1)


def _plain(text: str) -> str:
    return " ".join(text.replace("_", " ").lower().split())
