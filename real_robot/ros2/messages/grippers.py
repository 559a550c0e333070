"""Commands of grippers: goals of their action servers, or trajectories of their fingers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from embodied.configuration import Configuration, FiniteFloat, PositiveFloat
from embodied.contract import TensorSpec
from embodied.errors import UserError
from real_robot.ros2.messages.codecs import JointTrajectory


class GripperKind(Enum):
    """none; command: control_msgs/GripperCommand; franka: franka_msgs/Move and Grasp; trajectory: JointTrajectory."""

    none = "none"
    command = "command"
    franka = "franka"
    trajectory = "trajectory"


@dataclass(frozen=True)
class Goal:
    """A goal of an action server: the server's name, its type, and the goal's fields by path."""

    name: str
    type: str
    fields: Mapping[str, Any]


@dataclass
class Gripper(Configuration):
    """A gripper with two fingers that move symmetrically.

    Attributes:
        kind: interface of the gripper.
        name: name of the action server; for franka, of the node with the servers; for trajectory, of the topic.
        fingers: names of the fingers' joints in joint_states.
        open_m, closed_m: positions of a finger, m.
        travel_s: time from open to closed, s.
        force_n: largest force, N.
    """

    kind: GripperKind = GripperKind.none
    name: str = ""
    fingers: list[str] = field(default_factory=list)
    open_m: FiniteFloat = 0.04
    closed_m: FiniteFloat = 0.0
    travel_s: PositiveFloat = 0.4
    force_n: PositiveFloat = 40.0

    def __post_init__(self) -> None:
        """Raise UserError for a gripper that cannot move or be reached."""
        super().__post_init__()
        if self.open_m == self.closed_m:
            raise UserError(f"expected open_m and closed_m to differ, got {self}")
        if self.kind is not GripperKind.none and not self.name:
            raise UserError("expected gripper.name, the gripper's action server or topic")
        if self.kind is GripperKind.trajectory and not self.fingers:
            raise UserError("expected gripper.fingers, the joints of a trajectory")

    def finger_m(self, closing: bool) -> float:
        """Target position of a finger."""
        return self.closed_m if closing else self.open_m

    def goal(self, closing: bool) -> Goal:
        """The goal that closes or opens the gripper, for kinds with an action server."""
        finger_m = self.finger_m(closing)
        if self.kind is GripperKind.command:
            fields = {"command.position": finger_m, "command.max_effort": self.force_n}
            return Goal(self.name, "control_msgs/action/GripperCommand", fields)
        fields = {"width": 2.0 * finger_m, "speed": 2.0 * abs(self.open_m - self.closed_m) / self.travel_s}
        if not closing:
            return Goal(f"{self.name}/move", "franka_msgs/action/Move", fields)
        # any width counts as grasped, because the policy has to observe whether it holds an object
        grasp = {"epsilon.inner": 2.0 * self.open_m, "epsilon.outer": 2.0 * self.open_m, "force": self.force_n}
        return Goal(f"{self.name}/grasp", "franka_msgs/action/Grasp", fields | grasp)

    def codec(self, key: str) -> JointTrajectory:
        """Codec of the fingers' positions `key` [fingers], for the kind trajectory."""
        spec = TensorSpec((len(self.fingers),), unit="m", names=tuple(self.fingers))
        return JointTrajectory({key: spec}, tuple(self.fingers), self.travel_s)

    def command_at(self, finger_m: float) -> float:
        """The command, -1 (open) to 1 (closed), that corresponds to a finger at `finger_m`."""
        # linear: open_m -> -1, closed_m -> 1
        share = (finger_m - self.open_m) / (self.closed_m - self.open_m)
        return float(np.clip(2.0 * share - 1.0, -1.0, 1.0))

    def command_after(self, command: float, direction: float, period_s: float) -> float:
        """The command after a period in `direction`, whose sign counts; its speed is constant, as in robosuite."""
        step = math.copysign(2.0 * period_s / self.travel_s, direction) if direction else 0.0
        return float(np.clip(command + step, -1.0, 1.0))
