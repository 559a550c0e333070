"""Arms under ros2_control: trajectories and forwarded positions; Universal Robots, Franka FR3.

Forwarded velocities are not served: that controller has no time-out, so that nothing would stop the arm if safety_node
ended. Policies that command velocities drive a hand, behind `cartesian_node`.

All accept `pose`: topic and frame_id of a PoseStamped of the end effector, for policies that observe a pose. The frame
must be the policy's world. Trajectories and forwarded positions accept `cameras`: topics of images by observation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from embodied.contract import Contract, TensorSpec
from real_robot.ros2.messages.body_codecs import Pose
from real_robot.ros2.messages.codecs import JointState, JointTrajectory, Message, Values
from real_robot.ros2.robots.tables import (
    ACTION,
    COMMAND,
    LATCHED,
    STATE,
    Behaviour,
    Mode,
    Table,
    Topic,
    action_spec,
    camera_topics,
    make_table,
)


def forward_position(
    contract: Contract,
    rate_hz: float,
    joints: Sequence[str],
    ros_joints: Sequence[str] = (),
    controller: str = "forward_position_controller",
    pose: Sequence[str] = (),
    arrays: Sequence[str] = (),
    cameras: Mapping[str, str] | None = None,
) -> Table:
    """ros2_control's forward_command_controller of joint positions, rad, whose commands have no stamp.

    `joints` are the contract's names in the controller's order, `ros_joints` the names in /joint_states if they differ.
    """
    action = action_spec(contract, joints, "rad")
    command = Topic(f"{controller}/commands", Values({ACTION: action}), COMMAND)
    table = _arm("forward_position", contract, rate_hz, command, joints, ros_joints or joints, pose, arrays, cameras)
    return replace(table, stamped=False)


def joint_trajectory(
    contract: Contract,
    rate_hz: float,
    joints: Sequence[str],
    ros_joints: Sequence[str] = (),
    controller: str = "joint_trajectory_controller",
    pose: Sequence[str] = (),
    arrays: Sequence[str] = (),
    cameras: Mapping[str, str] | None = None,
) -> Table:
    """ros2_control's joint_trajectory_controller: each trajectory is a command followed by a stop."""
    action = action_spec(contract, joints, "rad")
    names = tuple(ros_joints or joints)
    codec = JointTrajectory({ACTION: action}, names, 1.0 / rate_hz)
    command = Topic(f"{controller}/joint_trajectory", codec, COMMAND)
    return _arm("joint_trajectory", contract, rate_hz, command, joints, names, pose, arrays, cameras)


def ur(
    contract: Contract,
    rate_hz: float,
    joints: Sequence[str] = (
        "shoulder_pan_joint",
        "shoulder_lift_joint",
        "elbow_joint",
        "wrist_1_joint",
        "wrist_2_joint",
        "wrist_3_joint",
    ),
    controller: str = "scaled_joint_trajectory_controller",
    tf_prefix: str = "",
    pose: Sequence[str] = ("tcp_pose_broadcaster/pose", "base"),
    arrays: Sequence[str] = (),
    driver_status: bool = True,
) -> Table:
    """Universal Robots' driver; the scaled controller slows down with the speed slider and for protective stops.

    From Lyrical on, `controller` is joint_trajectory_controller. Without `driver_status` (mock hardware) the arm is
    commanded regardless of the driver's status.
    """
    names = tuple(f"{tf_prefix}{joint}" for joint in joints)
    table = joint_trajectory(contract, rate_hz, joints, names, controller, pose, arrays)
    stop = Behaviour(services=("dashboard_client/stop",))
    modes = (
        Mode("io_and_status_controller/safety_mode", "ur_dashboard_msgs/msg/SafetyMode", LATCHED, ur_unsafe),
        Mode("io_and_status_controller/robot_program_running", "std_msgs/msg/Bool", LATCHED, ur_idle),
    )
    return replace(table, name="ur", emergency=stop, modes=modes if driver_status else ())


UR_SAFETY = {
    3: "protective stop",
    4: "recovery",
    5: "safeguard stop",
    6: "system emergency stop",
    7: "robot emergency stop",
    8: "violation",
    9: "fault",
    10: "validating a joint",
    11: "undefined",
    12: "safeguard stop in automatic mode",
    13: "three-position enabling stop",
}
"""Modes of ur_dashboard_msgs/SafetyMode in which the arm does not move; in normal (1) and reduced (2) mode it does."""
FR3_STATE_TIMEOUT_S = 0.5
"""franka_robot_state_broadcaster publishes at 30 Hz or faster."""
FR3_MODES = {0: "other", 1: "idle", 3: "guiding", 4: "reflex", 5: "user stopped", 6: "automatic error recovery"}
"""robot_mode of franka_msgs/FrankaRobotState while the arm does not follow its controller; in mode 2, move, it does."""


def ur_unsafe(message: Message) -> str:
    """Reason for a UR's standstill by its ur_dashboard_msgs/SafetyMode; "" if it moves."""
    mode = UR_SAFETY.get(message.mode, "" if message.mode in (1, 2) else f"{message.mode}, which is unknown")
    return f"the UR's safety mode is {mode}: see the teach pendant" if mode else ""


def ur_idle(message: Message) -> str:
    """Reason for a UR's standstill by a std_msgs/Bool, whether its program runs; "" if it does."""
    return "" if message.data else "the UR's program (External Control) does not run: start it on the teach pendant"


def fr3_stopped(message: Message) -> str:
    """Reason for an FR3's standstill by its franka_msgs/FrankaRobotState; "" if it moves."""
    mode = message.robot_mode
    return "" if mode == 2 else f"the FR3 is in mode {FR3_MODES.get(mode, mode)}, not move: see Desk"


def fr3(
    contract: Contract,
    rate_hz: float,
    arm_id: str = "fr3",
    joints: Sequence[str] = ("joint1", "joint2", "joint3", "joint4", "joint5", "joint6", "joint7"),
    controller: str = "fr3_arm_controller",
    arrays: Sequence[str] = (),
    driver_status: bool = True,
) -> Table:
    """franka_ros2's FR3 under its joint trajectory controller; the emergency also stops the gripper.

    The FR3's own limits and reflexes stay active; its user stop is the emergency stop. For `driver_status`, see `ur`.
    """
    names = tuple(f"{arm_id}_{joint}" for joint in joints)
    pose = ("franka_robot_state_broadcaster/current_pose", "base")
    table = joint_trajectory(contract, rate_hz, joints, names, controller, pose, arrays)
    stop = Behaviour(services=("franka_gripper/stop",))
    state = "franka_robot_state_broadcaster/robot_state"
    mode = Mode(state, "franka_msgs/msg/FrankaRobotState", STATE, fr3_stopped, FR3_STATE_TIMEOUT_S)
    return replace(table, name="fr3", emergency=stop, modes=(mode,) if driver_status else ())


def _arm(
    name: str,
    contract: Contract,
    rate_hz: float,
    command: Topic,
    joints: Sequence[str],
    ros_joints: Sequence[str],
    pose: Sequence[str],
    arrays: Sequence[str],
    cameras: Mapping[str, str] | None,
) -> Table:
    fields = {"joint_position": "position", "joint_velocity": "velocity", "joint_effort": "effort"}
    units = {"joint_position": "rad", "joint_velocity": "rad/s", "joint_effort": "N m"}
    observed = {key: fields[key] for key in fields if key in contract.observation or key == "joint_position"}
    limits = contract.observation.get("joint_position", TensorSpec((len(joints),), names=tuple(joints)))
    specs = {key: TensorSpec((len(joints),), unit=units[key], names=tuple(joints)) for key in observed}
    specs["joint_position"] = replace(specs["joint_position"], low=limits.low, high=limits.high)
    states = [Topic("joint_states", JointState(specs, tuple(ros_joints), observed), STATE)]
    ends = {"end_effector_position": "position", "end_effector_rotation": "rotation.two_columns"}
    if pose and (quantities := {key: name for key, name in ends.items() if key in contract.observation}):
        topic, frame_id = pose
        states.append(Topic(topic, Pose(quantities, frame_id), STATE))
    states += camera_topics(contract, cameras or {})
    still = (math.nan,) * len(joints)
    return make_table(name, contract, rate_hz, states, command, arrays, stops_after_s=None, at_rest=still)
