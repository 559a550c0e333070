"""ROS message classes without ROS: made from .msg text by rosbags, which also puts them on the wire as CDR."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from rosbags.interfaces import Nodetype
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

# Messages that no package on PyPI has: fields of px4_msgs 1.16, ackermann_msgs and others; of statuses only
# those that are read, in the published order.
DEFINITIONS = {
    "px4_msgs/msg/VehicleOdometry": """
        uint64 timestamp
        uint64 timestamp_sample
        uint8 pose_frame
        float32[3] position
        float32[4] q
        uint8 velocity_frame
        float32[3] velocity
        float32[3] angular_velocity
        float32[3] position_variance
        float32[3] orientation_variance
        float32[3] velocity_variance
        uint8 reset_counter
        int8 quality""",
    "px4_msgs/msg/VehicleRatesSetpoint": """
        uint64 timestamp
        float32 roll
        float32 pitch
        float32 yaw
        float32[3] thrust_body
        bool reset_integral""",
    "px4_msgs/msg/ActuatorMotors": """
        uint64 timestamp
        uint64 timestamp_sample
        uint16 reversible_flags
        float32[12] control""",
    "px4_msgs/msg/OffboardControlMode": """
        uint64 timestamp
        bool position
        bool velocity
        bool acceleration
        bool attitude
        bool body_rate
        bool thrust_and_torque
        bool direct_actuator""",
    "px4_msgs/msg/VehicleCommand": """
        uint64 timestamp
        float32 param1
        float32 param2
        float32 param3
        float32 param4
        float64 param5
        float64 param6
        float32 param7
        uint32 command
        uint8 target_system
        uint8 target_component
        uint8 source_system
        uint16 source_component
        uint8 confirmation
        bool from_external""",
    "px4_msgs/msg/VehicleStatus": """
        uint64 timestamp
        uint8 arming_state
        uint8 nav_state_user_intention
        uint8 nav_state
        bool failsafe""",
    "px4_msgs/msg/VehicleCommandAck": """
        uint64 timestamp
        uint32 command
        uint8 result
        uint8 result_param1
        int32 result_param2
        uint8 target_system
        uint16 target_component
        bool from_external""",
    "ackermann_msgs/msg/AckermannDrive": """
        float32 steering_angle
        float32 steering_angle_velocity
        float32 speed
        float32 acceleration
        float32 jerk""",
    "ackermann_msgs/msg/AckermannDriveStamped": """
        std_msgs/Header header
        ackermann_msgs/AckermannDrive drive""",
    "vision_msgs/msg/ObjectHypothesis": """
        string class_id
        float64 score""",
    "vision_msgs/msg/ObjectHypothesisWithPose": """
        vision_msgs/ObjectHypothesis hypothesis
        geometry_msgs/PoseWithCovariance pose""",
    "vision_msgs/msg/BoundingBox3D": """
        geometry_msgs/Pose center
        geometry_msgs/Vector3 size""",
    "vision_msgs/msg/Detection3D": """
        std_msgs/Header header
        vision_msgs/ObjectHypothesisWithPose[] results
        vision_msgs/BoundingBox3D bbox
        string id""",
    "vision_msgs/msg/Detection3DArray": """
        std_msgs/Header header
        vision_msgs/Detection3D[] detections""",
    "control_msgs/msg/GripperCommand": """
        float64 position
        float64 max_effort""",
    "control_msgs/msg/GripperCommand_Goal": "control_msgs/GripperCommand command",
    "ur_dashboard_msgs/msg/SafetyMode": "uint8 mode",
    "franka_msgs/msg/FrankaRobotState": "uint8 robot_mode",
    "franka_msgs/msg/GraspEpsilon": """
        float64 inner
        float64 outer""",
    "franka_msgs/msg/Grasp_Goal": """
        float64 width
        franka_msgs/GraspEpsilon epsilon
        float64 speed
        float64 force""",
    "franka_msgs/msg/Move_Goal": """
        float64 width
        float64 speed""",
}


@cache
def store() -> Any:
    made = get_typestore(Stores.ROS2_JAZZY)
    for name, text in DEFINITIONS.items():
        made.register(get_types_from_msg("\n".join(line.strip() for line in text.splitlines()), name))
    return made


def types(name: str) -> Callable[[], Any]:
    """Replaces ROS's `installed`: a class whose instances have all fields set to zero."""
    return lambda: _zero((Nodetype.NAME, name))


def on_the_wire(message: Any) -> Any:
    """The message as its receiver gets it: through CDR bytes of its type."""
    name = message.__msgtype__
    return store().deserialize_cdr(store().serialize_cdr(_plain(message, (Nodetype.NAME, name)), name), name)


def _zero(kind: tuple[Any, Any]) -> Any:
    node, detail = kind
    if node is Nodetype.NAME:
        fields = {field: _zero(inner) for field, inner in store().fielddefs[detail][1]}
        return store().types[detail](**fields)
    if node is Nodetype.BASE:
        return {"string": "", "bool": False}.get(detail[0], 0.0 if detail[0].startswith("float") else 0)
    inner, length = detail
    count = length if node is Nodetype.ARRAY else 0
    if inner[0] is Nodetype.BASE and inner[1][0] != "string":
        return np.zeros(count, inner[1][0])
    return [_zero(inner) for _ in range(count)]


def _plain(value: Any, kind: tuple[Any, Any]) -> Any:
    """rosbags writes numpy arrays alone; rclpy also takes lists and arrays of the standard library."""
    node, detail = kind
    if node is Nodetype.NAME:
        fields = {field: _plain(getattr(value, field), inner) for field, inner in store().fielddefs[detail][1]}
        return store().types[detail](**fields)
    if node is Nodetype.BASE:
        return value
    inner, _ = detail
    if inner[0] is Nodetype.BASE and inner[1][0] != "string":
        return np.asarray(value, inner[1][0])
    return [_plain(entry, inner) for entry in value]
