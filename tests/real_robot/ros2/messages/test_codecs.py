"""Codecs: messages by hand, round trips through serialised bytes, and refused messages."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as hypothesis_arrays

from embodied.contract import TensorSpec
from embodied.text import encode, encode_as, text_spec
from real_robot.ros2.messages import body_codecs, codecs, frames, quadrotor_codecs
from real_robot.ros2.messages.body_codecs import QUANTITIES
from tests.real_robot.ros2.messages.definitions import on_the_wire, types

HALF = np.sqrt(0.5)
QUARTER_TURN_LEFT = np.array([0, -1, 0, 1, 0, 0, 0, 0, 1], np.float32)  # the nose from x to y, row by row
MOTION = {key: key for key in ("position", "rotation", "velocity", "angular_velocity")}
JOINTS = codecs.JointState(
    {
        "joint_position": TensorSpec((2,), unit="rad", names=("shoulder", "elbow")),
        "joint_velocity": TensorSpec((2,), unit="rad/s", names=("shoulder", "elbow")),
    },
    ("arm_shoulder", "arm_elbow"),
    {"joint_position": "position", "joint_velocity": "velocity"},
)


def action(*names: str, low: float = -1.0, high: float = 1.0) -> dict[str, TensorSpec]:
    size = len(names)
    return {"action": TensorSpec((size,), names=names, low=(low,) * size, high=(high,) * size)}


def filled(kind: str, /, **fields):
    return codecs.fill(types(kind)(), {path.replace("__", "."): value for path, value in fields.items()})


LABELLED = codecs.LabelledArrays(
    {
        "object_position": TensorSpec((-1, 3), unit="m", frame="world", names=("x", "y", "z")),
        "object_names": text_spec(48, -1),
        "instruction": text_spec(64),
        "number": TensorSpec((2,), dtype="int64"),
        "object_mask": TensorSpec((-1,), dtype="bool"),
        "picture": TensorSpec((2, 2, 3), dtype="uint8"),
    }
)
ROTORS = ("front_right", "back_right", "back_left", "front_left")
CODECS = [
    LABELLED,
    codecs.Values(action("a", "b")),
    JOINTS,
    codecs.JointTrajectory(action("shoulder", "elbow"), ("arm_shoulder", "arm_elbow"), 0.1),
    body_codecs.Odometry(MOTION),
    body_codecs.Odometry(
        {"p": "position", "q": "rotation.quaternion", "v": "velocity.body", "w": "angular_velocity"}, "map"
    ),
    body_codecs.Odometry({"velocity": "velocity.drive"}),
    body_codecs.Odometry({"velocity": "velocity.base", "yaw_rate": "yaw_rate"}),
    body_codecs.Pose({"end_effector_position": "position", "end_effector_rotation": "rotation.two_columns"}, "base"),
    body_codecs.Imu(body_codecs.IMU),
    body_codecs.LaserScan(
        {"lidar": TensorSpec((8,), unit="m", low=(0.0,) * 8, high=(10.0,) * 8)},
        np.linspace(-np.pi, np.pi, 8, endpoint=False),
        10.0,
    ),
    body_codecs.Image({"wrist_image": TensorSpec((4, 6, 3), dtype="uint8")}),
    body_codecs.Fields(
        action("speed", "yaw_rate"),
        "geometry_msgs/msg/TwistStamped",
        {"speed": "twist.linear.x", "yaw_rate": "twist.angular.z"},
    ),
    body_codecs.Fields(
        action("speed", "steering_angle"),
        "ackermann_msgs/msg/AckermannDriveStamped",
        {"speed": "drive.speed", "steering_angle": "drive.steering_angle"},
    ),
    quadrotor_codecs.VehicleOdometry(MOTION),
    quadrotor_codecs.VehicleRatesSetpoint(action("roll_rate", "pitch_rate", "yaw_rate", "thrust")),
    quadrotor_codecs.ActuatorMotors(action(*ROTORS)),
    quadrotor_codecs.CmdVelLegacy(action("roll", "pitch", "yaw_rate", "thrust")),
    quadrotor_codecs.FullState(action("x", "y", "z", "vx", "vy", "vz", "ax", "ay", "az", "yaw", "yaw_rate")),
]


def sample(key: str, spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    shape = [3 if size == -1 else size for size in spec.shape]
    if spec.dtype != "float32":
        return rng.integers(0, 2 if spec.dtype == "bool" else 256, shape).astype(spec.dtype)
    name = next((name for name, (known, _) in QUANTITIES.items() if known.names == spec.names), "")
    if name.startswith("rotation"):
        quaternion = rng.normal(size=4)
        quaternion *= np.sign(quaternion[0]) / np.linalg.norm(quaternion)
        turned = body_codecs.Motion(np.zeros(3), frames.matrix(quaternion), np.zeros(3), np.zeros(3))
        return QUANTITIES[name][1](turned).astype(np.float32)
    low, high = (spec.low or (-5.0,))[0], (spec.high or (5.0,))[0]
    return rng.uniform(low, high, shape).astype(np.float32)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{type(codec).__name__}-{codec.message.split('/')[-1]}")
@given(seed=st.integers(0, 2**32 - 1))
def test_arrays_come_back_from_the_wire(codec, seed):
    rng = np.random.default_rng(seed)
    arrays = {key: sample(key, spec, rng) for key, spec in codec.specs.items()}
    back = codec.decode(on_the_wire(codec.encode(arrays, types, 1.5)))
    assert list(back) == list(arrays)
    for key, values in arrays.items():
        assert back[key].dtype == codec.specs[key].dtype
        if values.dtype == np.float32:
            np.testing.assert_allclose(back[key], values, atol=2e-5)
        else:
            np.testing.assert_array_equal(back[key], values)


@given(hypothesis_arrays(np.float32, (2, 3), elements=st.floats(width=32, allow_nan=False)))
def test_labelled_arrays_lose_no_bit(positions):
    arrays = {
        "object_position": positions,
        "object_names": encode_as(["milk", "lait"], (-1, 48)),
        "instruction": encode("nimm die Milch, 拿起牛奶, prends le lait glacé", 64),
        "number": np.array([2**53, -(2**40) - 1]),
        "object_mask": np.array([True, False]),
        "picture": np.full((2, 2, 3), 255, np.uint8),
    }
    message = on_the_wire(LABELLED.encode(arrays, types, 1700000000.123))
    assert codecs.stamp_s(message) == pytest.approx(1700000000.123, abs=1e-6)
    for key, values in LABELLED.decode(message).items():
        np.testing.assert_array_equal(values.view(np.uint8), arrays[key].view(np.uint8))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"names": ("y", "x", "z")}, "expected arrays"),
        ({"frame": "camera"}, "expected arrays"),
        ({"unit": "mm"}, "expected arrays"),
        ({"shape": (-1, 2), "names": ("x", "y")}, "expected arrays"),
    ],
)
def test_labelled_arrays_of_another_meaning_are_refused(change, wanted):
    fields = {"shape": (-1, 3), "unit": "m", "frame": "world", "names": ("x", "y", "z")}
    ours, theirs = (codecs.LabelledArrays({"p": TensorSpec(**given)}) for given in (fields, fields | change))
    message = theirs.encode({"p": np.zeros((2, theirs.specs["p"].shape[1]))}, types, 0.0)
    with pytest.raises(ValueError, match=wanted):
        ours.decode(message)


def test_labelled_arrays_cut_short_are_refused():
    codec = codecs.LabelledArrays({"p": TensorSpec((3,))})
    message = codec.encode({"p": np.arange(3.0)}, types, 0.0)
    message.data = message.data[:-1]
    with pytest.raises(ValueError, match="expected 4 numbers, got 3"):
        codec.decode(message)


def test_joints_are_found_by_name():
    message = filled(
        "sensor_msgs/msg/JointState",
        name=["gripper", "arm_elbow", "arm_shoulder"],
        position=np.array([9.0, 2.0, 1.0]),
        velocity=np.array([9.0, 4.0, 3.0]),
    )
    arrays = JOINTS.decode(message)
    np.testing.assert_array_equal(arrays["joint_position"], [1.0, 2.0])
    np.testing.assert_array_equal(arrays["joint_velocity"], [3.0, 4.0])


@pytest.mark.parametrize(
    ("names", "velocity", "wanted"),
    [
        (["arm_shoulder", "other"], [1.0, 2.0], r"without joints \['arm_elbow'\]"),
        (["arm_shoulder", "arm_elbow"], [], "expected 2 elements of velocity, got 0"),
    ],
)
def test_missing_joints_and_fields_are_refused(names, velocity, wanted):
    message = filled(
        "sensor_msgs/msg/JointState", name=names, position=np.array([1.0, 2.0]), velocity=np.array(velocity)
    )
    with pytest.raises(ValueError, match=wanted):
        JOINTS.decode(message)


def test_a_trajectory_is_one_point_from_now():
    codec = codecs.JointTrajectory(action("shoulder", "elbow"), ("arm_shoulder", "arm_elbow"), 0.25)
    message = on_the_wire(codec.encode({"action": np.array([0.5, -0.5])}, types, 100.0))
    assert message.joint_names == ["arm_shoulder", "arm_elbow"]
    assert codecs.stamp_s(message) is None  # zero: now, on the controller's clock
    (point,) = message.points
    np.testing.assert_array_equal(point.positions, [0.5, -0.5])
    assert (point.time_from_start.sec, point.time_from_start.nanosec) == (0, 250_000_000)


def test_odometry_by_hand():
    message = filled(
        "nav_msgs/msg/Odometry",
        header__frame_id="odom",
        pose__pose__position__x=1.0,
        pose__pose__orientation__z=HALF,
        pose__pose__orientation__w=HALF,
        twist__twist__linear__x=2.0,
        twist__twist__angular__z=0.5,
    )
    arrays = body_codecs.Odometry(MOTION).decode(message)
    np.testing.assert_array_equal(arrays["position"], [1, 0, 0])
    np.testing.assert_allclose(arrays["rotation"], QUARTER_TURN_LEFT, atol=1e-7)
    np.testing.assert_allclose(arrays["velocity"], [0, 2, 0], atol=1e-6)  # forward is +y after a quarter turn
    np.testing.assert_array_equal(arrays["angular_velocity"], [0, 0, 0.5])


def test_a_stamp_is_the_time_of_a_nodes_clock_to_the_last_bit():
    message = types("nav_msgs/msg/Odometry")()
    for nanoseconds in range(10_000_000, 20_000_000_000, 10_000_000):
        codecs.set_stamp(message, nanoseconds / 1e9)
        assert codecs.stamp_s(message) == nanoseconds / 1e9


def test_odometry_that_was_not_filled_in_is_refused():
    with pytest.raises(ValueError, match="expected unit quaternions"):
        body_codecs.Odometry(MOTION, "").decode(types("nav_msgs/msg/Odometry")())


def test_odometry_of_another_frame_is_refused():
    message = body_codecs.Odometry(MOTION, "map").encode(
        {key: np.eye(3).reshape(9) if key == "rotation" else np.zeros(3) for key in MOTION}, types, 0.0
    )
    with pytest.raises(ValueError, match="in frame 'odom', got 'map'"):
        body_codecs.Odometry(MOTION).decode(message)


def test_px4_odometry_by_hand():
    message = filled(
        "px4_msgs/msg/VehicleOdometry",
        pose_frame=1,
        velocity_frame=1,
        position=np.array([1.0, 2.0, -3.0]),  # 1 m north, 2 m east, 3 m up
        q=np.array([1.0, 0.0, 0.0, 0.0]),  # nose north
        velocity=np.array([4.0, 5.0, -6.0]),
        angular_velocity=np.array([0.1, 0.2, 0.3]),
    )
    arrays = quadrotor_codecs.VehicleOdometry(MOTION).decode(message)
    np.testing.assert_allclose(arrays["position"], [2, 1, 3])
    np.testing.assert_allclose(arrays["rotation"], QUARTER_TURN_LEFT, atol=1e-6)  # nose along y, which is north
    np.testing.assert_allclose(arrays["velocity"], [5, 4, 6])
    np.testing.assert_allclose(arrays["angular_velocity"], [0.1, -0.2, -0.3], rtol=1e-6)
    message.velocity_frame, message.velocity = 3, np.array([4.0, 0.0, 0.0])  # forward, in body axes
    np.testing.assert_allclose(
        quadrotor_codecs.VehicleOdometry(MOTION).decode(message)["velocity"], [0, 4, 0], atol=1e-6
    )


@pytest.mark.parametrize(("pose_frame", "velocity_frame"), [(0, 1), (1, 0), (1, 2)])
def test_px4_odometry_in_unknown_frames_is_refused(pose_frame, velocity_frame):
    message = filled("px4_msgs/msg/VehicleOdometry", pose_frame=pose_frame, velocity_frame=velocity_frame)
    with pytest.raises(ValueError, match="unknown frames"):
        quadrotor_codecs.VehicleOdometry(MOTION).decode(message)


def test_px4_rates_are_frd_and_thrust_points_down_negative():
    codec = quadrotor_codecs.VehicleRatesSetpoint(action("roll_rate", "pitch_rate", "yaw_rate", "thrust"))
    message = codec.encode({"action": np.array([0.1, 0.2, 0.3, 0.6])}, types, 2.5)
    np.testing.assert_allclose([message.roll, message.pitch, message.yaw], [0.1, -0.2, -0.3], rtol=1e-6)
    np.testing.assert_allclose(message.thrust_body, [0, 0, -0.6], rtol=1e-6)
    assert message.timestamp == 2_500_000


def test_px4_motors_are_in_px4s_order_and_others_off():
    codec = quadrotor_codecs.ActuatorMotors(action(*ROTORS))
    control = codec.encode({"action": np.array([-1.0, 0.0, 0.5, 1.0])}, types, 0.0).control
    # motors 1 to 4: front right, back left, front left, back right
    np.testing.assert_allclose(control[:4], [0.0, 0.75**2, 1.0, 0.25])
    assert np.isnan(control[4:]).all()


@pytest.mark.parametrize(
    ("nav_state", "failsafe", "fault"), [(14, False, None), (14, True, "failsafe"), (2, False, "not in offboard")]
)
def test_px4_says_when_it_does_not_obey(nav_state, failsafe, fault):
    message = filled("px4_msgs/msg/VehicleStatus", nav_state=nav_state, failsafe=failsafe)
    wanted = quadrotor_codecs.px4_fault(message)
    assert wanted is None if fault is None else fault in str(wanted)


def test_crazyflie_takes_degrees_clockwise_and_sixteen_bits():
    codec = quadrotor_codecs.CmdVelLegacy(action("roll", "pitch", "yaw_rate", "thrust"))
    message = codec.encode({"action": np.array([math.pi / 18, math.pi / 6, math.pi / 2, 0.5])}, types, 0.0)
    given = (message.linear.y, message.linear.x, message.angular.z, message.linear.z)
    np.testing.assert_allclose(given, (10.0, 30.0, -90.0, 30000.0), rtol=1e-6)


@pytest.mark.parametrize("kind", ["geometry_msgs/msg/Twist", "geometry_msgs/msg/TwistStamped"])
def test_twists_of_both_generations(kind):
    start = "twist." if kind.endswith("Stamped") else ""
    paths = {"speed": f"{start}linear.x", "yaw_rate": f"{start}angular.z"}
    message = body_codecs.Fields(action("yaw_rate", "speed"), kind, paths).encode(
        {"action": np.array([0.25, 0.5])}, types, 7.25
    )
    twist = message.twist if start else message
    assert (twist.linear.x, twist.angular.z) == (0.5, 0.25)
    assert codecs.stamp_s(message) == (7.25 if start else None)


def scan(angle_min: float, step: float, ranges: list[float]):
    return filled(
        "sensor_msgs/msg/LaserScan", angle_min=angle_min, angle_increment=step, ranges=np.array(ranges, np.float32)
    )


LIDAR = body_codecs.LaserScan(
    {"lidar": TensorSpec((4,), unit="m")},
    np.linspace(-np.pi, np.pi, 4, endpoint=False),
    5.0,
)


def test_a_scan_is_read_at_the_angles_asked_for():
    # rays every 45 degrees from 0 to 315: behind is ray 4, right 6, ahead 0, left 2
    message = scan(0.0, np.pi / 4, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5])
    np.testing.assert_allclose(LIDAR.decode(message)["lidar"], [3.0, 4.0, 1.0, 2.0])
    # the same room, counted clockwise from behind
    message = scan(np.pi, -np.pi / 4, [3.0, 2.5, 2.0, 1.5, 1.0, 4.5, 4.0, 3.5])
    np.testing.assert_allclose(LIDAR.decode(message)["lidar"], [3.0, 4.0, 1.0, 2.0])


def test_no_return_is_far_and_too_near_is_near():
    message = scan(-np.pi, np.pi / 2, [math.inf, -math.inf, 7.0, 0.0])
    np.testing.assert_allclose(LIDAR.decode(message)["lidar"], [5.0, 0.0, 5.0, 0.0])


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (scan(-np.pi / 2, np.pi / 8, [1.0] * 8), "misses some of"),
        (scan(-np.pi, np.pi / 2, [1.0, math.nan, 1.0, 1.0]), "NaN"),
        (scan(0.0, 0.0, []), "expected some"),
    ],
)
def test_a_scan_that_cannot_be_read_is_refused(message, wanted):
    with pytest.raises(ValueError, match=wanted):
        LIDAR.decode(message)


def test_a_blue_green_red_picture_with_padded_rows():
    codec = body_codecs.Image({"image": TensorSpec((1, 2, 3), dtype="uint8")})
    message = filled(
        "sensor_msgs/msg/Image", height=1, width=2, step=8, encoding="bgr8",
        data=np.array([1, 2, 3, 4, 5, 6, 99, 99], np.uint8),
    )  # fmt: skip
    np.testing.assert_array_equal(codec.decode(message)["image"], [[[3, 2, 1], [6, 5, 4]]])
    message.encoding = "mono8"
    with pytest.raises(ValueError, match="rgb8 or bgr8"):
        codec.decode(message)


def test_another_length_is_refused():
    with pytest.raises(ValueError, match=r"action: expected shape \(2,\), got \(3,\)"):
        codecs.Values(action("a", "b")).encode({"action": np.zeros(3)}, types, 0.0)


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(ValueError, match="install no_such_msgs, or build it"):
        codecs.installed("no_such_msgs/msg/Thing")
