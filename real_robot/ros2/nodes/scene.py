"""scene_node: publishes a policy's observations of objects, from /tf or detections, and its instruction.

The labelled arrays in the robot's option `arrays` are published once a period, with the stamp of the oldest pose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from embodied.configuration import Configuration
from embodied.errors import UserError
from real_robot.firmware.record import read_contract
from real_robot.ros2.messages.body_codecs import check_frame
from real_robot.ros2.messages.cartesian_codecs import SCENE, detected, scene_arrays
from real_robot.ros2.messages.codecs import LabelledArrays
from real_robot.ros2.messages.transforms import Transform
from real_robot.ros2.nodes.listener import Listener
from real_robot.ros2.nodes.managed import OK, WARN, ManagedNode, Report
from real_robot.ros2.robots.tables import COMMAND, STATE
from real_robot.ros2.topics import publisher, subscribe, types

DETECTIONS = "vision_msgs/msg/Detection3DArray"
OLD = 3.0
"""Age in control periods above which poses are reported: with arm_cartesian_limits.yaml the robot then holds."""


@dataclass
class SceneSettings(Configuration):
    """Parameters of scene_node.

    Attributes:
        checkpoint, robot, options: see policy_node.
        world_frame: frame of the policy's world, on /tf or of the detections.
        objects: the policy's names of all objects, in its order.
        frames: frame of each object on /tf; alternatively, `detections` are used.
        detections: topic of Detection3DArray.
        classes: name of each object in detections, its best class or id; the names of `objects` if empty.
        instruction: the policy's instruction; a std_msgs/String on `~/instruction` replaces it.
    """

    checkpoint: str = ""
    robot: str = "cartesian"
    options: dict[str, Any] = field(default_factory=dict)
    world_frame: str = "world"
    objects: list[str] = field(default_factory=list)
    frames: list[str] = field(default_factory=list)
    detections: str = ""
    classes: list[str] = field(default_factory=list)
    instruction: str = ""

    def __post_init__(self) -> None:
        """Raise UserError for lists that contradict each other."""
        super().__post_init__()
        if self.frames and self.detections:
            raise UserError("expected frames or detections, not both, to know where the objects are")
        if len(self.sources) != len(self.objects):
            raise UserError(f"expected one of frames, or of classes, for each of {self.objects}, got {self.sources}")

    @property
    def sources(self) -> list[str]:
        """The objects' names on /tf or in detections."""
        return (self.classes or self.objects) if self.detections else self.frames


class SceneNode(ManagedNode[SceneSettings]):
    """Publishes objects' poses and the instruction as the policy's observations."""

    def __init__(self) -> None:
        super().__init__("scene_node", SceneSettings)
        self._active = False

    def configure(self) -> None:
        """Subscribe and advertise."""
        settings = self.settings
        contract = read_contract(settings.checkpoint)
        arrays = settings.options.get("arrays", [])
        if unknown := [key for key in arrays if key not in SCENE or key not in contract.observation]:
            raise UserError(f"scene_node has no {unknown}; expected arrays among {list(SCENE)} that the policy reads")
        self._codec = LabelledArrays({key: contract.observation[key] for key in arrays})
        self._detected: dict[str, Transform] = {}
        self._instruction = settings.instruction
        self._missing = ""
        self._period_s = contract.control_dt_s
        self._oldest = (math.inf, "")
        self._out = publisher(self, "observation", self._codec.message, COMMAND)
        if settings.detections:
            subscribe(self, settings.detections, DETECTIONS, STATE, self._detect)
        elif settings.frames:
            self._frames = Listener(self)
        subscribe(self, "~/instruction", "std_msgs/msg/String", COMMAND, self._instruct)
        self.own(self.create_timer(self._period_s, self._publish))
        self.on_jump.append(lambda _: self._detected.clear())
        self.reports["scene"] = self._report

    def activate(self) -> None:
        """Start publishing."""
        self._active = True

    def deactivate(self) -> None:
        """Stop publishing, so that the robot holds for lack of measurements."""
        self._active = False

    def _instruct(self, message: Any) -> None:  # noqa: ANN401 - a ROS message
        self._instruction = message.data

    def _detect(self, message: Any) -> None:  # noqa: ANN401 - a ROS message
        try:
            check_frame(message, self.settings.world_frame)
            self._detected |= detected(message, self._now_s())
        except UserError as error:
            self.get_logger().error(f"{self.settings.detections}: {error}", throttle_duration_sec=1.0)

    def _poses(self) -> list[Transform]:
        names = self.settings.sources
        if self.settings.frames:
            return [self._frames.pose(self.settings.world_frame, frame) for frame in names]
        if missing := [name for name in names if name not in self._detected]:
            raise UserError(f"not detected yet: {', '.join(missing)}")
        return [self._detected[name] for name in names]

    def _publish(self) -> None:
        if not self._active:
            return
        try:
            poses = self._poses()
            arrays = scene_arrays(self._codec.specs, self.settings.objects, poses, self._instruction)
        except UserError as error:
            self._missing = str(error)
            self.get_logger().error(self._missing, throttle_duration_sec=1.0)
            return
        self._missing = ""
        stamps = [(pose.stamp_s, name) for pose, name in zip(poses, self.settings.objects, strict=True)]
        self._oldest = min(stamps, default=(math.inf, ""))
        self._out.publish(self._codec.encode(arrays, types, min(self._now_s(), self._oldest[0])))

    def _now_s(self) -> float:
        return self.get_clock().now().nanoseconds / 1e9

    def _report(self) -> Report:
        values = {"objects": len(self.settings.objects), "instruction": self._instruction}
        stamp_s, name = self._oldest
        age_s = self._now_s() - stamp_s
        problem = self._missing
        if self._active and not problem and age_s > OLD * self._period_s:
            problem = f"the oldest pose, of {name}, is {age_s:.3g} s old"
        return Report(problem or "sees", WARN if problem else OK, values)
