"""cartesian_node: converts velocities of an arm's hand, as sent by safety_node, to commands of the arm's controller.

It also publishes measurements: joints, hand and gripper in one message for policy_node and safety_node. Without
commands it is silent, and its last command ends at rest, so that other programs may command the arm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation

from embodied.configuration import Configuration, FiniteFloat, NonNegativeFloat, PositiveFloat
from embodied.contract import TensorSpec
from embodied.errors import UserError
from real_robot.firmware.record import read_contract
from real_robot.robots.displacement import AXES
from real_robot.robots.kinematics import Kinematics
from real_robot.robots.servo import Servo
from real_robot.ros2.messages.body_codecs import Fields, check_frame, read_pose, write_pose
from real_robot.ros2.messages.codecs import BEFORE, JointTrajectory, read, set_stamp, stamp_s
from real_robot.ros2.messages.frames import two_columns
from real_robot.ros2.messages.grippers import Gripper
from real_robot.ros2.messages.transforms import Transform
from real_robot.ros2.nodes.fingers import Fingers
from real_robot.ros2.nodes.listener import Listener
from real_robot.ros2.nodes.managed import ERROR, WARN, ManagedNode, Report
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.robots.tables import ACTION, COMMAND, STATE, Qos
from real_robot.ros2.topics import publisher, subscribe, types

JOINT_STATES = Qos(depth=10, reliability="best_effort")
"""Deep, because the joints of the arm and of the gripper may arrive in separate messages."""


class Output(Enum):
    """Input of the arm's controller.

    trajectory: joint_trajectory_controller, by inverse kinematics. pose: a Cartesian impedance controller's target.
    twist: MoveIt Servo.
    """

    trajectory = "trajectory"
    pose = "pose"
    twist = "twist"


OUTPUTS = {
    Output.trajectory: ("joint_trajectory_controller/joint_trajectory", "trajectory_msgs/msg/JointTrajectory"),
    Output.pose: ("target_pose", "geometry_msgs/msg/PoseStamped"),
    Output.twist: ("servo_node/delta_twist_cmds", "geometry_msgs/msg/TwistStamped"),
}
"""Default topic and message type of each output."""
TWIST = dict(zip(AXES, (f"twist.{part}.{axis}" for part in ("linear", "angular") for axis in "xyz"), strict=True))


@dataclass
class CartesianSettings(Configuration):
    """Parameters of cartesian_node.

    Attributes:
        checkpoint, robot, options: see policy_node; the robot is `cartesian`. output, topic: input of the arm's
        controller and its topic; "": the default topic. joints: names in joint_states, in the policy's order. model,
        site, model_joints: MJCF or URDF file of the arm, the commanded point of the hand in it, and its names of
            the joints if they differ. `trajectory` needs a model; without one, `measured_pose` or `hand_frame` measures
            the hand.
        measured_pose: topic of the hand's PoseStamped in `base_frame`.
        hand_frame: frame of the hand on /tf.
        base_frame: frame_id of poses and twists, and on /tf.
        world_frame: frame of the policy's world on /tf; "": `base` is used.
        base: pose of the arm's base in the policy's world, x, y, z m and quaternion x, y, z, w.
        gripper: see `Gripper`; finger_signs convert positions of joint_states to the policy's gripper_position.
        leash_m, leash_rad: see `Servo`.
        lag_s: delay of the arm behind commanded poses, which lead by the same time. A critically damped Cartesian
            impedance controller lags by 2 sqrt(mass / stiffness).
        joint_velocity: limit of every joint's velocity, rad/s.
        measurement_timeout_s: largest age of the measurement at which commands are accepted.
        command_timeout_s: time without commands after which the hand's target is dropped.
    """

    checkpoint: str = ""
    robot: str = "cartesian"
    options: dict[str, Any] = field(default_factory=dict)
    output: Output = Output.trajectory
    topic: str = ""
    joints: list[str] = field(default_factory=list)
    model: str = ""
    site: str = ""
    model_joints: list[str] = field(default_factory=list)
    measured_pose: str = ""
    hand_frame: str = ""
    base_frame: str = "base"
    world_frame: str = ""
    base: list[FiniteFloat] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    gripper: Gripper = field(default_factory=Gripper)
    finger_signs: list[FiniteFloat] = field(default_factory=lambda: [1.0, -1.0])
    leash_m: PositiveFloat = 0.02
    leash_rad: PositiveFloat = 0.1
    lag_s: NonNegativeFloat = 0.0
    joint_velocity: PositiveFloat = 2.0
    measurement_timeout_s: PositiveFloat = 0.1
    command_timeout_s: PositiveFloat = 0.2

    def __post_init__(self) -> None:
        """Raise UserError for parameters that contradict each other."""
        super().__post_init__()
        if self.output is Output.trajectory and not self.model:
            raise UserError("expected model, the arm's MJCF or URDF file: trajectories need inverse kinematics")
        if sum(map(bool, (self.model, self.measured_pose, self.hand_frame))) != 1:
            raise UserError("expected one of model, measured_pose and hand_frame, to know where the hand is")
        if not self.joints or len(self.model_joints or self.joints) != len(self.joints):
            raise UserError(f"expected joints, and as many model_joints if any, got {self.joints}, {self.model_joints}")
        if len(self.base) != 7 or not any(self.base[3:]):
            raise UserError(f"expected base as x, y, z and a quaternion x, y, z, w, got {self.base}")


class CartesianNode(ManagedNode[CartesianSettings]):
    """Moves an arm's hand at the velocities that are commanded on the table's topic."""

    def __init__(self) -> None:
        super().__init__("cartesian_node", CartesianSettings)
        self._active = False
        self._commanded_s = -np.inf
        self._servo: Servo | None = None
        self._fingers: Fingers | None = None

    def configure(self) -> None:
        """Read the model, subscribe and advertise."""
        settings = self.settings
        self._table = table = robot_table(settings.robot, read_contract(settings.checkpoint), settings.options)
        self._period_s = table.control_dt_s
        names = settings.model_joints or settings.joints
        path = Path(settings.model)
        self._arm = Kinematics(path, settings.site, names, settings.joint_velocity) if settings.model else None
        self._servo, self._fingers = Servo(settings.leash_m, settings.leash_rad), Fingers(self, settings.gripper)
        self._joint_states: dict[str, tuple[float, float, float]] = {}
        """Position, velocity and stamp in s of each joint."""
        self._base = self._placed(settings.base)
        self._hand = None
        self._measured_s = -np.inf
        self._gripping = 0.0
        self._joints: np.ndarray | None = None
        self._commands = self._refused = 0
        self._refusal = ""
        self.on_jump.append(self._jumped_back)
        self._state = table.states[0]
        self._measurement = publisher(self, self._state.name, self._state.codec.message, self._state.qos)
        topic, message = OUTPUTS[settings.output]
        self._out = publisher(self, settings.topic or topic, message, COMMAND)
        self._trajectory = self._joint_codec()
        spec = TensorSpec((6,), names=AXES)
        self._twist = Fields({ACTION: spec}, "geometry_msgs/msg/TwistStamped", TWIST)
        self._listen()

    def activate(self) -> None:
        """Start following commands."""
        self._active = True

    def deactivate(self) -> None:
        """Stop following commands."""
        self._active = False
        self._rest()
        if self._fingers:
            self._fingers.abandon()

    def cleanup(self) -> None:
        """Free the action clients."""
        fingers = self._fingers
        self._fingers = None
        if fingers:
            fingers.close()

    def _listen(self) -> None:
        settings = self.settings
        command = self._table.command
        if settings.measured_pose:
            subscribe(self, settings.measured_pose, "geometry_msgs/msg/PoseStamped", STATE, self._see_hand)
        if settings.hand_frame or settings.world_frame:
            self._frames = Listener(self)
        subscribe(self, "joint_states", "sensor_msgs/msg/JointState", JOINT_STATES, self._see)
        subscribe(self, command.name, command.codec.message, command.qos, self._follow)
        self.own(self.create_timer(settings.command_timeout_s / 2.0, self._watch))
        self.reports["arm"] = self._report

    def _joint_codec(self) -> JointTrajectory:
        low, high = (tuple(self._arm.low), tuple(self._arm.high)) if self._arm else ((), ())
        names = tuple(self.settings.joints)
        spec = TensorSpec((len(names),), "float64", "rad", names=names, low=low, high=high)
        return JointTrajectory({ACTION: spec}, names, self._period_s)

    def _see(self, message: Any) -> None:  # noqa: ANN401 - a ROS message
        """Store joints of the arm and the gripper, which may arrive in separate messages; publish when complete."""
        count = len(message.name)
        if len(message.position) != count:
            self._complain(f"joint_states: expected {count} positions, got {len(message.position)}")
            return
        rates = message.velocity if len(message.velocity) == count else [np.nan] * count
        at_s = stamp_s(message) or self._now_s()
        self._joint_states |= dict(
            zip(message.name, zip(message.position, rates, [at_s] * count, strict=True), strict=True)
        )
        fingers = self.settings.gripper.fingers
        if set(self.settings.joints) <= set(message.name) and set(fingers) <= set(self._joint_states):
            try:
                self._measure()
            except UserError as error:
                self._hand = None
                self._complain(str(error))

    def _see_hand(self, message: Any) -> None:  # noqa: ANN401 - a ROS message
        try:
            check_frame(message, self.settings.base_frame)
            hand = Transform(*read_pose(message.pose), stamp_s(message) or self._now_s())
            self._hand = _finite(hand, "the hand's pose")
        except UserError as error:
            self._hand = None
            self._complain(f"{self.settings.measured_pose}: {error}")

    def _measure(self) -> None:
        """Publish joints, hand and gripper, with the oldest of their stamps; nothing while the gripper has a fault."""
        settings = self.settings
        positions, rates, stamps = np.array([self._joint_states[name] for name in settings.joints]).T
        if not np.isfinite(positions).all():
            raise UserError(f"joint_states: the positions {positions.tolist()} are not finite")
        if self._arm:
            self._hand = Transform(*self._arm.pose(positions))
        elif settings.hand_frame:
            self._hand = self._frames.pose(settings.base_frame, settings.hand_frame)
        if settings.world_frame:
            self._base = self._frames.pose(settings.world_frame, settings.base_frame)
        if self._hand is None:
            return
        hand = _finite(self._base.then(self._hand), "the hand's pose in the world")
        fingers, fingers_s = (
            np.array([self._joint_states[name][::2] for name in settings.gripper.fingers]).reshape(-1, 2).T
        )
        self._measured_s = min(hand.stamp_s, *stamps, *fingers_s)
        if self._fingers and (fault := self._fingers.fault):
            self._complain(fault)
            return
        if len(fingers) and not np.isfinite(self._commanded_s):
            self._gripping = settings.gripper.command_at(fingers.mean())
        values = {
            "joint_position": positions,
            "joint_velocity": rates,
            "end_effector_position": hand.position,
            "end_effector_rotation": two_columns(hand.rotation),
            "gripper_position": fingers * settings.finger_signs[: len(fingers)],
            "gripper_command": np.array([self._gripping]),
        }
        codec = self._state.codec
        self._measurement.publish(codec.encode({key: values[key] for key in codec.specs}, types, self._measured_s))

    def _follow(self, message: Any) -> None:  # noqa: ANN401 - a ROS message
        """Execute a command, or refuse one that is unreadable, late or not finite, or without a measurement."""
        if not self._active:
            return
        try:
            arrays, decided_s = read(self._table.command.codec, message)
            action = arrays[ACTION].astype(np.float64)
        except UserError as error:
            self._refuse(f"a command cannot be read: {error}")
            return
        late_s = self._now_s() - (math.nan if decided_s is None else decided_s)
        if not late_s <= self.settings.command_timeout_s:
            self._refuse(f"a command is {late_s:.3f} s late")
            return
        age_s = self._now_s() - self._measured_s
        if self._hand is None or not (age_s <= self.settings.measurement_timeout_s and np.isfinite(action).all()):
            self._refuse(f"command {action.round(3).tolist()}; the arm was last measured {age_s:.3f} s ago")
            return
        self._watch()  # rest if there was a pause before this command
        self._commanded_s = self._now_s()
        self._commands += 1
        self._gripping = self.settings.gripper.command_after(self._gripping, action[6], self._period_s)
        assert self._fingers is not None
        self._fingers.travel(float(action[6]))
        try:
            # velocities are commanded in the world's axes: v_base = R_base^T v_world
            self._move(np.concatenate([self._base.rotation.T @ part for part in (action[:3], action[3:6])]))
            self._refusal = ""
        except UserError as error:
            self._refuse(str(error))

    def _move(self, velocity: np.ndarray) -> None:
        """Send `velocity` [6], in the base's axes, to the arm's controller, in the form of `output`."""
        settings = self.settings
        if settings.output is Output.twist:
            self._send_twist(velocity)
            return
        assert self._hand is not None
        assert self._servo is not None
        measured_pose = self._hand.position, self._hand.rotation
        position, rotation = self._servo.advance(velocity, self._period_s, measured_pose)
        if settings.output is Output.pose:
            # the target leads by velocity * lag, so that a controller that lags by as much is at the target pose
            ahead = velocity * settings.lag_s
            message = types("geometry_msgs/msg/PoseStamped")()
            set_stamp(message, self._now_s(), settings.base_frame)
            leading_rotation = Rotation.from_rotvec(ahead[3:]).as_matrix() @ rotation
            write_pose(message.pose, position + ahead[:3], leading_rotation)
            self._out.publish(message)
            return
        assert self._arm is not None
        if self._joints is None:
            self._joints = self._posture = np.array([self._joint_states[name][0] for name in settings.joints])
        previous = self._joints
        period_s = self._period_s
        self._joints = self._arm.toward(previous, position, rotation, self._posture, period_s)
        arrays = {ACTION: self._joints, BEFORE: previous}
        self._out.publish(self._trajectory.encode(arrays, types, self._now_s()))

    def _send_twist(self, velocity: np.ndarray) -> None:
        message = self._twist.encode({ACTION: velocity}, types, self._now_s())
        message.header.frame_id = self.settings.base_frame
        self._out.publish(message)

    def _rest(self) -> None:
        """Drop the hand's target; MoveIt Servo gets a zero twist."""
        if np.isfinite(self._commanded_s) and self.settings.output is Output.twist:
            self._send_twist(np.zeros(6))
        self._joints = None
        self._commanded_s = -np.inf
        if self._servo:
            self._servo.stop()
        if self._fingers:
            self._fingers.forget()

    def _watch(self) -> None:
        """Rest without commands; the clock may have been set back since the last one."""
        if self._fingers:
            self._fingers.watch()
        silent_s = self._now_s() - self._commanded_s
        if np.isfinite(silent_s) and not 0.0 <= silent_s <= self.settings.command_timeout_s:
            self._rest()

    def _jumped_back(self, back_s: float) -> None:
        """Drop all measurements and targets, because a simulator that has been reset has moved the arm."""
        self._measured_s = -np.inf
        self._hand = None
        self._joint_states = {}
        self._rest()
        if self._fingers:
            self._fingers.abandon()

    def _refuse(self, reason: str) -> None:
        self._refused += 1
        self._refusal = f"nothing is commanded: {reason}"
        self._complain(self._refusal)

    def _complain(self, what: str) -> None:
        self.get_logger().error(what, throttle_duration_sec=1.0)

    def _now_s(self) -> float:
        now_s = self.get_clock().now().nanoseconds / 1e9
        # a simulator's clock may arrive after the measurement of the same time
        return max(now_s, self._measured_s) if self.get_parameter("use_sim_time").value else now_s

    def _report(self) -> Report:
        aborted = self._fingers.aborted if self._fingers else 0
        values = {"commands": self._commands, "refused": self._refused, "goals_given_up_by_the_gripper": aborted}
        missing = [name for name in self.settings.joints if name not in self._joint_states]
        missing += [name for name in self.settings.gripper.fingers if name not in self._joint_states]
        if missing or self._hand is None:
            return Report(f"not measured: {', '.join(missing) or 'the hand'}", WARN, values)
        oldest = min(
            [*self.settings.joints, *self.settings.gripper.fingers], key=lambda name: self._joint_states[name][2]
        )
        silent_s = self._now_s() - self._joint_states[oldest][2]
        if silent_s > self.settings.measurement_timeout_s:
            problem = f"{oldest} was measured {silent_s:.1f} s ago: has its driver ended? Start it again"
            return Report(problem, ERROR, values)
        if self._fingers and self._fingers.fault:
            return Report(self._fingers.fault, ERROR, values)
        if self._refusal:
            return Report(self._refusal, WARN, values)
        return Report("follows" if np.isfinite(self._commanded_s) else "rests", values=values)

    @staticmethod
    def _placed(pose: list[float]) -> Transform:
        return Transform(np.array(pose[:3]), Rotation.from_quat(pose[3:]).as_matrix())


def _finite(pose: Transform, what: str) -> Transform:
    """Return the measured `pose` unchanged.

    Raises:
        UserError: if it is not finite, as motion capture reports for a lost body.
    """
    if not (np.isfinite(pose.position).all() and np.isfinite(pose.rotation).all()):
        raise UserError(f"{what} is not finite")
    return pose
