"""A robot without ROS: Eclipse Cyclone DDS, another vendor than rclpy's here, communicates with our nodes.

`python dds_robot.py DOMAIN ROW LOG` measures at 50 Hz, follows commands at once, and writes one JSON line for every
message: what it sent, what it received, and as which type and with which QoS the sender offered it.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from typing import Any

from cyclonedds.builtin import BuiltinDataReader, BuiltinTopicDcpsPublication
from cyclonedds.core import Policy, Qos
from cyclonedds.domain import Domain, DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import array, float64, int32, sequence, uint32
from cyclonedds.pub import DataWriter
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic
from cyclonedds.util import duration

PERIOD_S = 0.02
LOOPBACK = """<CycloneDDS><Domain><General><AllowMulticast>false</AllowMulticast>
<Interfaces><NetworkInterface address="127.0.0.1"/></Interfaces></General>
<Discovery><ParticipantIndex>auto</ParticipantIndex><MaxAutoParticipantIndex>60</MaxAutoParticipantIndex>
<Peers><Peer address="127.0.0.1"/></Peers></Discovery></Domain></CycloneDDS>"""
QOS = Qos(Policy.Reliability.Reliable(duration(seconds=1)), Policy.History.KeepLast(1))


@dataclass
class Time(IdlStruct, typename="builtin_interfaces::msg::dds_::Time_"):
    sec: int32 = 0
    nanosec: uint32 = 0


@dataclass
class Header(IdlStruct, typename="std_msgs::msg::dds_::Header_"):
    stamp: Time
    frame_id: str = ""


@dataclass
class JointState(IdlStruct, typename="sensor_msgs::msg::dds_::JointState_"):
    header: Header
    name: sequence[str]
    position: sequence[float64]
    velocity: sequence[float64]
    effort: sequence[float64]


@dataclass
class Duration(IdlStruct, typename="builtin_interfaces::msg::dds_::Duration_"):
    sec: int32
    nanosec: uint32


@dataclass
class JointTrajectoryPoint(IdlStruct, typename="trajectory_msgs::msg::dds_::JointTrajectoryPoint_"):
    positions: sequence[float64]
    velocities: sequence[float64]
    accelerations: sequence[float64]
    effort: sequence[float64]
    time_from_start: Duration


@dataclass
class JointTrajectory(IdlStruct, typename="trajectory_msgs::msg::dds_::JointTrajectory_"):
    header: Header
    joint_names: sequence[str]
    points: sequence[JointTrajectoryPoint]


@dataclass
class MultiArrayDimension(IdlStruct, typename="std_msgs::msg::dds_::MultiArrayDimension_"):
    label: str
    size: uint32
    stride: uint32


@dataclass
class MultiArrayLayout(IdlStruct, typename="std_msgs::msg::dds_::MultiArrayLayout_"):
    dim: sequence[MultiArrayDimension]
    data_offset: uint32


@dataclass
class Float64MultiArray(IdlStruct, typename="std_msgs::msg::dds_::Float64MultiArray_"):
    layout: MultiArrayLayout
    data: sequence[float64]


@dataclass
class Vector3(IdlStruct, typename="geometry_msgs::msg::dds_::Vector3_"):
    x: float64 = 0.0
    y: float64 = 0.0
    z: float64 = 0.0


@dataclass
class Point(IdlStruct, typename="geometry_msgs::msg::dds_::Point_"):
    x: float64 = 0.0
    y: float64 = 0.0
    z: float64 = 0.0


@dataclass
class Quaternion(IdlStruct, typename="geometry_msgs::msg::dds_::Quaternion_"):
    x: float64 = 0.0
    y: float64 = 0.0
    z: float64 = 0.0
    w: float64 = 1.0


@dataclass
class Twist(IdlStruct, typename="geometry_msgs::msg::dds_::Twist_"):
    linear: Vector3
    angular: Vector3


@dataclass
class TwistStamped(IdlStruct, typename="geometry_msgs::msg::dds_::TwistStamped_"):
    header: Header
    twist: Twist


@dataclass
class Pose(IdlStruct, typename="geometry_msgs::msg::dds_::Pose_"):
    position: Point
    orientation: Quaternion


@dataclass
class PoseWithCovariance(IdlStruct, typename="geometry_msgs::msg::dds_::PoseWithCovariance_"):
    pose: Pose
    covariance: array[float64, 36]


@dataclass
class TwistWithCovariance(IdlStruct, typename="geometry_msgs::msg::dds_::TwistWithCovariance_"):
    twist: Twist
    covariance: array[float64, 36]


@dataclass
class Odometry(IdlStruct, typename="nav_msgs::msg::dds_::Odometry_"):
    header: Header
    child_frame_id: str
    pose: PoseWithCovariance
    twist: TwistWithCovariance


def now() -> Time:
    nanoseconds = time.time_ns()
    return Time(nanoseconds // 10**9, nanoseconds % 10**9)


def push() -> float:
    """A motion that makes every state of the robot different."""
    return 0.3 * math.sin(3.0 * time.monotonic())


class Arm:
    """Two joints, sent in another order than the policy's and among others."""

    state = ("joint_states", JointState)

    def __init__(self, topic: str, kind: type[IdlStruct]) -> None:
        self.command = (topic, kind)
        self.position = {"elbow": 0.3, "finger": 9.0, "shoulder": -0.2}

    def measure(self) -> tuple[list[float], IdlStruct]:
        measured = self.position | {"shoulder": self.position["shoulder"] + push()}
        sent = JointState(Header(now()), list(measured), list(measured.values()), [], [])
        return [measured["shoulder"], measured["elbow"]], sent

    def follow(self, message: Any) -> dict[str, Any]:
        trajectory = isinstance(message, JointTrajectory)
        names = list(message.joint_names) if trajectory else ["shoulder", "elbow"]
        values = list(message.points[0].positions if trajectory else message.data)
        self.position |= dict(zip(names, values, strict=True))
        fields = {"names": names, "action": values}
        if trajectory:
            fields["time_from_start_s"] = [point.time_from_start.nanosec * 1e-9 for point in message.points]
            fields["speeds"] = [list(point.velocities) for point in message.points]
        return fields


class Base:
    """A differential drive that moves at the commanded speed."""

    state = ("odom", Odometry)
    command = ("cmd_vel", TwistStamped)

    def __init__(self) -> None:
        self.speed, self.yaw_rate = 0.1, 0.0

    def measure(self) -> tuple[list[float], IdlStruct]:
        yaw_rate = self.yaw_rate + push()
        twist = Twist(Vector3(x=self.speed), Vector3(z=yaw_rate))
        pose = PoseWithCovariance(Pose(Point(), Quaternion()), [0.0] * 36)
        sent = Odometry(Header(now(), "odom"), "base_link", pose, TwistWithCovariance(twist, [0.0] * 36))
        return [self.speed, yaw_rate], sent

    def follow(self, message: TwistStamped) -> dict[str, Any]:
        twist, stamp = message.twist, message.header.stamp
        self.speed, self.yaw_rate = twist.linear.x, twist.angular.z
        age_s = time.time() - (stamp.sec + 1e-9 * stamp.nanosec)
        return {"names": ["speed", "yaw_rate"], "action": [self.speed, self.yaw_rate], "age_s": age_s}


ROBOTS: dict[str, Any] = {
    "joint_trajectory": lambda: Arm("joint_trajectory_controller/joint_trajectory", JointTrajectory),
    "forward_position": lambda: Arm("forward_position_controller/commands", Float64MultiArray),
    "diff_drive": Base,
}


def main(domain: int, row: str, log: str) -> None:
    """Run until it is ended."""
    robot = ROBOTS[row]()
    _configured = Domain(domain, LOOPBACK)  # lives as long as it is named
    participant = DomainParticipant(domain)
    offered = BuiltinDataReader(participant, BuiltinTopicDcpsPublication)
    writer = DataWriter(participant, Topic(participant, f"rt/{robot.state[0]}", robot.state[1]), qos=xcdr1(QOS))
    reader = DataReader(participant, Topic(participant, f"rt/{robot.command[0]}", robot.command[1]), qos=xcdr1(QOS))
    with open(log, "w", buffering=1) as lines:
        while True:
            for entry in offered.take(100):
                if entry.topic_name == f"rt/{robot.command[0]}":
                    fields = {"type": entry.type_name, "qos": [str(policy) for policy in entry.qos or ()]}
                    lines.write(json.dumps({"offered": fields}) + "\n")
            for message in reader.take(10):
                lines.write(json.dumps({"received": robot.follow(message)}) + "\n")
            values, message = robot.measure()
            lines.write(json.dumps({"sent": values}) + "\n")
            writer.write(message)
            time.sleep(PERIOD_S)


def xcdr1(qos: Qos) -> Qos:
    """ROS's encoding: without it Cyclone writes XCDR2, which rclpy's middleware does not read."""
    return qos + Qos(Policy.DataRepresentation(use_cdrv0_representation=True))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
