"""One function for each robot that ROS users have: options in, `tables.Table` out.

All take the contract that a policy wants, to observe no more than that, and these options: `rate_hz` of commands;
`arrays`, keys of observations that no topic of this robot carries and a node of yours publishes as labelled arrays on
`observation` (object poses, an instruction). Limits default to the policy's own where the robot's are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from embodied.contract import Contract, TensorSpec
from real_robot.ros2.body_codecs import QUANTITIES, Fields, Image, LaserScan, Odometry, Pose
from real_robot.ros2.codecs import Arrays, Codec, JointState, JointTrajectory, LabelledArrays, Values
from real_robot.ros2.quadrotor_codecs import (
    PX4_ROTORS,
    ActuatorMotors,
    CmdVelLegacy,
    FullState,
    VehicleOdometry,
    VehicleRatesSetpoint,
    px4_fault,
)
from real_robot.ros2.tables import (
    ACTION,
    COMMAND,
    IMAGES,
    PX4,
    STATE,
    Behaviour,
    Call,
    Fixed,
    Heartbeat,
    Status,
    Table,
    Topic,
    remembered,
)

DO_SET_MODE, ARM_DISARM = 176, 400
CUSTOM_MODE, AUTO, LOITER, OFFBOARD = 1.0, 4.0, 3.0, 6.0
FORCE = 21196.0
"""Makes PX4 disarm in the air: motors off."""
LOOK_AHEAD = 2.0
"""Periods in which a trajectory's point is to be reached: one could pass before the next point arrives."""


def simulation(wanted: Contract) -> Table:
    """A simulator (`sim_node`) or any robot behind labelled arrays: carries every contract.

    All but pictures on `observation`, pictures as sensor_msgs/Image on `observation/<key>`, the action on `action`;
    hold and emergency are the services `hold` and `emergency`.
    """
    seen = {key: spec for key, spec in wanted.observation.items() if not spec.privileged}
    pictures = {key: spec for key, spec in seen.items() if spec.dtype == "uint8" and len(spec.shape) == 3}
    others = {key: spec for key, spec in seen.items() if key not in pictures}
    states = [Topic("observation", LabelledArrays(others), replace(COMMAND, depth=2))]
    states += [Topic(f"observation/{key}", Image({key: spec}), IMAGES) for key, spec in pictures.items()]
    return Table(
        "simulation",
        tuple(states),
        Topic("action", LabelledArrays({ACTION: wanted.action}), COMMAND),
        wanted.control_dt_s,
        hold=Behaviour(calls=(Call("hold", "std_srvs/srv/Trigger"),)),
        emergency=Behaviour(calls=(Call("emergency", "std_srvs/srv/Trigger"),)),
    )


def forward_position(
    wanted: Contract,
    rate_hz: float,
    joints: Sequence[str],
    ros_joints: Sequence[str] = (),
    controller: str = "forward_position_controller",
    pose_topic: str = "",
    arrays: Sequence[str] = (),
) -> Table:
    """ros2_control's forward_command_controller of joint positions, rad.

    `joints` are the contract's names in the controller's order, `ros_joints` those of /joint_states where they differ.
    """
    action = _action(wanted, joints, "rad")
    command = Topic(f"{controller}/commands", Values({ACTION: action}), COMMAND)
    return _arm("forward_position", wanted, rate_hz, command, joints, ros_joints or joints, pose_topic, arrays, _stay)


def forward_velocity(
    wanted: Contract,
    rate_hz: float,
    joints: Sequence[str],
    ros_joints: Sequence[str] = (),
    controller: str = "forward_velocity_controller",
    pose_topic: str = "",
    arrays: Sequence[str] = (),
) -> Table:
    """ros2_control's forward_command_controller of joint velocities, rad/s; holds with zeros."""
    action = _action(wanted, joints, "rad/s")
    command = Topic(f"{controller}/commands", Values({ACTION: action}), COMMAND)
    return _arm("forward_velocity", wanted, rate_hz, command, joints, ros_joints or joints, pose_topic, arrays, _zeros)


def joint_trajectory(
    wanted: Contract,
    rate_hz: float,
    joints: Sequence[str],
    ros_joints: Sequence[str] = (),
    controller: str = "joint_trajectory_controller",
    pose_topic: str = "",
    arrays: Sequence[str] = (),
) -> Table:
    """ros2_control's joint_trajectory_controller, one point at a time; holds where it is when holding begins."""
    action, names = _action(wanted, joints, "rad"), tuple(ros_joints or joints)
    codec = JointTrajectory({ACTION: action}, names, LOOK_AHEAD / rate_hz)
    command = Topic(f"{controller}/joint_trajectory", codec, COMMAND)
    return _arm("joint_trajectory", wanted, rate_hz, command, joints, names, pose_topic, arrays, _stay)


def ur(
    wanted: Contract,
    rate_hz: float,
    joints: Sequence[str] = (
        "shoulder_pan_joint", "shoulder_lift_joint", "elbow_joint", "wrist_1_joint", "wrist_2_joint", "wrist_3_joint",
    ),
    controller: str = "scaled_joint_trajectory_controller",
    tf_prefix: str = "",
    pose_topic: str = "tcp_pose_broadcaster/pose",
    arrays: Sequence[str] = (),
) -> Table:  # fmt: skip
    """Universal Robots' driver; the scaled controller slows down with the speed slider and for protective stops.

    From Lyrical on, `controller` is joint_trajectory_controller.
    """
    names = tuple(f"{tf_prefix}{joint}" for joint in joints)
    table = joint_trajectory(wanted, rate_hz, joints, names, controller, pose_topic, arrays)
    stop = Call("dashboard_client/stop", "std_srvs/srv/Trigger")
    return replace(table, name="ur", emergency=replace(table.emergency, calls=(stop,)))


def fr3(
    wanted: Contract,
    rate_hz: float,
    arm_id: str = "fr3",
    joints: Sequence[str] = ("joint1", "joint2", "joint3", "joint4", "joint5", "joint6", "joint7"),
    controller: str = "fr3_arm_controller",
    arrays: Sequence[str] = (),
) -> Table:
    """franka_ros2's FR3 under its joint trajectory controller; the emergency also stops the gripper.

    The FR3's own limits and reflexes stay in force; its user stop is the emergency stop.
    """
    names = tuple(f"{arm_id}_{joint}" for joint in joints)
    pose = "franka_robot_state_broadcaster/current_pose"
    table = joint_trajectory(wanted, rate_hz, joints, names, controller, pose, arrays)
    stop = Call("franka_gripper/stop", "std_srvs/srv/Trigger")
    return replace(table, name="fr3", emergency=replace(table.emergency, calls=(stop,)))


def px4_actuators(wanted: Contract, rate_hz: float, version: str = "1.16", arrays: Sequence[str] = ()) -> Table:
    """PX4 by rotor set-points, -1 to 1, linear in speed: what our quadrotor policies command."""
    order = wanted.action.names if set(wanted.action.names) == set(PX4_ROTORS) else PX4_ROTORS
    codec = ActuatorMotors({ACTION: TensorSpec((4,), unit="1", names=order, low=(-1.0,) * 4, high=(1.0,) * 4)})
    return _px4("px4_actuators", wanted, rate_hz, "actuator_motors", codec, "direct_actuator", version, arrays)


def px4_rates(
    wanted: Contract, rate_hz: float, rate_max_rad_s: float = 3.0, version: str = "1.16", arrays: Sequence[str] = ()
) -> Table:
    """PX4 by body rates (rad/s, FLU) and collective thrust (fraction of the most there is)."""
    high = (rate_max_rad_s,) * 3
    low = tuple(-rate for rate in high)
    names = ("roll_rate", "pitch_rate", "yaw_rate", "thrust")
    spec = TensorSpec((4,), unit=RATES, frame="body", names=names, low=(*low, 0.0), high=(*high, 1.0))
    codec = VehicleRatesSetpoint({ACTION: spec})
    return _px4("px4_rates", wanted, rate_hz, "vehicle_rates_setpoint", codec, "body_rate", version, arrays)


RATES = "rad/s (rates), 1 (thrust)"


def crazyswarm2(
    wanted: Contract, rate_hz: float, tilt_max_rad: float = 0.5, yaw_rate_max_rad_s: float = 3.5,
    arrays: Sequence[str] = (),
) -> Table:  # fmt: skip
    """Crazyswarm2 by attitude, yaw rate and thrust (`cmd_vel_legacy`); use namespace:=/cf1.

    Holding hands over to the Crazyflie's high-level commander, which lands where it is.
    """
    high = (tilt_max_rad, tilt_max_rad, yaw_rate_max_rad_s, 1.0)
    low = (*(-limit for limit in high[:3]), 0.0)
    unit = "rad (roll, pitch), rad/s (yaw rate), 1 (thrust)"
    spec = TensorSpec((4,), unit=unit, frame="body", names=("roll", "pitch", "yaw_rate", "thrust"), low=low, high=high)
    command = Topic("cmd_vel_legacy", CmdVelLegacy({ACTION: spec}), COMMAND)
    # the firmware starts no motor before it has seen a thrust of zero
    unlock = Fixed("cmd_vel_legacy", "geometry_msgs/msg/Twist", {})
    return _crazyswarm2("crazyswarm2", wanted, rate_hz, command, (unlock,), arrays)


def crazyswarm2_full_state(
    wanted: Contract, rate_hz: float, position_max_m: float = 2.0, speed_max_m_s: float = 2.0,
    acceleration_max_m_s2: float = 5.0, arrays: Sequence[str] = (),
) -> Table:  # fmt: skip
    """Crazyswarm2 by full states to follow (`cmd_full_state`): position, velocity, acceleration, yaw, yaw rate."""
    bounds = (position_max_m, speed_max_m_s, acceleration_max_m_s2)
    high = (*(bound for bound in bounds for _ in range(3)), np.pi, np.pi)
    names = ("x", "y", "z", "vx", "vy", "vz", "ax", "ay", "az", "yaw", "yaw_rate")
    low = tuple(-bound for bound in high)
    unit = "m, m/s, m/s^2, rad, rad/s"
    spec = TensorSpec((11,), unit=unit, frame="world", names=names, low=low, high=high)
    command = Topic("cmd_full_state", FullState({ACTION: spec}), COMMAND)
    return _crazyswarm2("crazyswarm2_full_state", wanted, rate_hz, command, (), arrays)


def diff_drive(
    wanted: Contract, rate_hz: float, stamped: bool = True, topic: str = "cmd_vel", arrays: Sequence[str] = ()
) -> Table:
    """Differential drives and Nav2 bases: `cmd_vel` as TwistStamped (Jazzy and newer), Twist with stamped: false."""
    names = ("speed", "yaw_rate")
    message = "geometry_msgs/msg/TwistStamped" if stamped else "geometry_msgs/msg/Twist"
    start = "twist." if stamped else ""
    paths = {"speed": f"{start}linear.x", "yaw_rate": f"{start}angular.z"}
    return _vehicle("diff_drive", wanted, rate_hz, topic, message, names, paths, arrays)


def ackermann(wanted: Contract, rate_hz: float, topic: str = "drive", arrays: Sequence[str] = ()) -> Table:
    """F1TENTH and other Ackermann vehicles: `drive` as AckermannDriveStamped."""
    names = ("speed", "steering_angle")
    paths = {name: f"drive.{name}" for name in names}
    message = "ackermann_msgs/msg/AckermannDriveStamped"
    return _vehicle("ackermann", wanted, rate_hz, topic, message, names, paths, arrays)


ROBOTS: dict[str, Callable[..., Table]] = {
    build.__name__: build
    for build in (
        simulation, joint_trajectory, forward_position, forward_velocity, ur, fr3, px4_actuators, px4_rates,
        crazyswarm2, crazyswarm2_full_state, diff_drive, ackermann,
    )
}  # fmt: skip


def _action(wanted: Contract, names: Sequence[str], unit: str, frame: str = "") -> TensorSpec:
    """An action of the elements `names` in this order, with the policy's limits where it commands the same ones."""
    spec = TensorSpec((len(names),), unit=unit, frame=frame, names=tuple(names))
    if not wanted.action.low or set(names) != set(wanted.action.names):
        return spec
    order = [wanted.action.names.index(name) for name in names]
    low, high = ([values[place] for place in order] for values in (wanted.action.low, wanted.action.high))
    return replace(spec, low=tuple(low), high=tuple(high))


def _stay(arrays: Arrays) -> np.ndarray:
    return arrays["joint_position"]


def _zeros(arrays: Arrays) -> np.ndarray:
    return np.zeros_like(arrays["joint_position"])


def _arm(
    name: str, wanted: Contract, rate_hz: float, command: Topic, joints: Sequence[str], ros_joints: Sequence[str],
    pose_topic: str, arrays: Sequence[str], hold: Callable[[Arrays], np.ndarray],
) -> Table:  # fmt: skip
    fields = {"joint_position": "position", "joint_velocity": "velocity", "joint_effort": "effort"}
    units = {"joint_position": "rad", "joint_velocity": "rad/s", "joint_effort": "N m"}
    seen = {key: fields[key] for key in fields if key in wanted.observation or key == "joint_position"}
    limits = wanted.observation.get("joint_position", TensorSpec((len(joints),), names=tuple(joints)))
    specs = {key: TensorSpec((len(joints),), unit=units[key], names=tuple(joints)) for key in seen}
    specs["joint_position"] = replace(specs["joint_position"], low=limits.low, high=limits.high)
    states = [Topic("joint_states", JointState(specs, tuple(ros_joints), seen), STATE)]
    pose = {"end_effector_position": "position", "end_effector_rotation": "two_columns"}
    if pose_topic and (found := {key: name for key, name in pose.items() if key in wanted.observation}):
        states.append(Topic(pose_topic, Pose(found), STATE))
    return _table(name, wanted, rate_hz, states, command, arrays, Behaviour(hold), Behaviour(hold))


def _px4(
    name: str, wanted: Contract, rate_hz: float, topic: str, codec: Codec, mode: str, version: str,
    arrays: Sequence[str],
) -> Table:  # fmt: skip
    # from 1.16 on, topics of messages that have changed say so: vehicle_status is at version 1
    suffix = "_v1" if tuple(int(part) for part in version.split(".")) >= (1, 16) else ""
    alive = Fixed("fmu/in/offboard_control_mode", "px4_msgs/msg/OffboardControlMode", {mode: True}, PX4)
    states = [Topic("fmu/out/vehicle_odometry", VehicleOdometry(_quantities(wanted)), PX4)]
    return _table(
        name,
        wanted,
        rate_hz,
        states,
        Topic(f"fmu/in/{topic}", codec, PX4),
        arrays,
        hold=Behaviour(messages=(_px4_command(DO_SET_MODE, CUSTOM_MODE, AUTO, LOITER),)),
        emergency=Behaviour(messages=(_px4_command(ARM_DISARM, 0.0, FORCE),)),
        engage=Behaviour(messages=(_px4_command(DO_SET_MODE, CUSTOM_MODE, OFFBOARD), _px4_command(ARM_DISARM, 1.0))),
        heartbeat=Heartbeat(alive, rate_hz=10.0, before_s=1.0),
        status=Status(f"fmu/out/vehicle_status{suffix}", "px4_msgs/msg/VehicleStatus", PX4, px4_fault),
    )


def _px4_command(command: int, *parameters: float) -> Fixed:
    fields = {f"param{number}": value for number, value in enumerate(parameters, 1)}
    address = {"target_system": 1, "target_component": 1, "source_system": 1, "source_component": 1}
    fields |= {"command": command, **address, "from_external": True}
    return Fixed("fmu/in/vehicle_command", "px4_msgs/msg/VehicleCommand", fields, PX4)


def _crazyswarm2(
    name: str, wanted: Contract, rate_hz: float, command: Topic, first: tuple[Fixed, ...], arrays: Sequence[str]
) -> Table:
    states = [Topic("odom", Odometry(_quantities(wanted)), STATE)]
    released = Call("notify_setpoints_stop", "crazyflie_interfaces/srv/NotifySetpointsStop")
    land = Call("land", "crazyflie_interfaces/srv/Land", {"height": 0.04, "duration.sec": 3})
    return _table(
        name,
        wanted,
        rate_hz,
        states,
        command,
        arrays,
        hold=Behaviour(calls=(released, land)),
        emergency=Behaviour(calls=(Call("emergency", "std_srvs/srv/Empty"),)),
        engage=Behaviour(calls=(Call("arm", "crazyflie_interfaces/srv/Arm", {"arm": True}),), messages=first),
    )


def _vehicle(
    name: str, wanted: Contract, rate_hz: float, topic: str, message: str, names: tuple[str, ...],
    paths: dict[str, str], arrays: Sequence[str],
) -> Table:  # fmt: skip
    unit = "m/s, rad/s" if "yaw_rate" in names else "m/s, rad"
    codec = Fields({ACTION: _action(wanted, names, unit)}, message, paths)
    states = [Topic("odom", Odometry(_quantities(wanted)), STATE)]
    if "lidar" in wanted.observation:
        spec = wanted.observation["lidar"]
        angles = np.linspace(-np.pi, np.pi, spec.shape[0], endpoint=False)
        states.append(Topic("scan", LaserScan({"lidar": spec}, angles), STATE))
    stop = Behaviour(lambda _: np.zeros(len(names)))
    return _table(name, wanted, rate_hz, states, Topic(topic, codec, COMMAND), arrays, stop, stop)


def _quantities(wanted: Contract) -> dict[str, str]:
    return {key: key for key in QUANTITIES if key in wanted.observation}


def _table(
    name: str, wanted: Contract, rate_hz: float, states: Sequence[Topic], command: Topic, arrays: Sequence[str],
    hold: Behaviour, emergency: Behaviour, **others: Any,  # noqa: ANN401 - the fields of Table
) -> Table:  # fmt: skip
    if missing := [key for key in arrays if key not in wanted.observation]:
        raise ValueError(f"arrays {missing} are no observations of the policy; it reads {list(wanted.observation)}")
    specs = {key: wanted.observation[key] for key in arrays}
    labelled = (Topic("observation", LabelledArrays(specs), COMMAND),) if specs else ()
    action = command.codec.specs[ACTION]
    initial = action.low if "rotor" in name or name == "px4_actuators" else (0.0,) * len(action.names)
    return Table(
        name, (*states, *labelled), command, 1.0 / rate_hz, hold, emergency,
        remembered=remembered(wanted, action), initial=initial, **others,
    )  # fmt: skip
