"""LIBERO's published LeRobot datasets (`lerobot/libero`, `HuggingFaceVLA/libero` and similar) in our conventions.

`observation.state` [8]: position of the grip site in m, the hand's rotation as axis times angle, two finger joints.
Actions have our meaning, at 20 Hz although the metadata has 10; zero actions were left out. The hand's frame is turned
by a quarter about its z axis relative to our end effector's. Pictures are those of stock LIBERO, which are upside down,
turned by half a turn: upright, with left and right exchanged. Joint angles are in some datasets only. Sources:
github.com/huggingface/lerobot (docs/source/libero.mdx, issue 3830), github.com/Physical-Intelligence/openpi.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

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
END_EFFECTOR_IN_HAND = np.array([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])


@dataclass(frozen=True)
class Published(Convention):
    """The convention for a run's `tasks`."""

    tasks: Sequence[Task]

    rates_hz = (10.0, 20.0)
    mirrored = True
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
            ACTION: actions.clip(-1.0, 1.0),
        }
        return converted | ({"joint_position": columns[JOINTS]} if JOINTS in columns else {})


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
