"""Codecs: messages by hand, round trips through serialised bytes, and refused messages."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as hypothesis_arrays
from scipy.interpolate import CubicHermiteSpline

from embodied.contract import TensorSpec
from embodied.errors import UserError
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
    body_codecs.Imu(body_codecs.IMU, "imu_link"),
    body_codecs.LaserScan(
        {"lidar": TensorSpec((8,), unit="m", low=(0.0,) * 8, high=(10.0,) * 8)},
        np.linspace(-np.pi, np.pi, 8, endpoint=False),
        10.0,
        "laser",
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
    ("names", "velocity", "error", "wanted"),
    [
        (["arm_shoulder", "other"], [1.0, 2.0], codecs.ForeignError, r"without joints \['arm_elbow'\]"),
        (["arm_shoulder", "arm_elbow"], [], UserError, "expected 2 elements of velocity, got 0"),
    ],
)
def test_missing_joints_are_others_and_missing_fields_are_refused(names, velocity, error, wanted):
    message = filled(
        "sensor_msgs/msg/JointState", name=names, position=np.array([1.0, 2.0]), velocity=np.array(velocity)
    )
    with pytest.raises(UserError, match=wanted) as raised:
        JOINTS.decode(message)
    assert type(raised.value) is error


TRAJECTORY = codecs.JointTrajectory(action("shoulder", "elbow"), ("arm_shoulder", "arm_elbow"), 0.25)


def test_a_trajectory_is_a_point_in_motion_and_a_stop():
    arrays = {"action": np.array([0.5, -0.5]), codecs.BEFORE: np.array([0.25, -0.5])}
    message = on_the_wire(TRAJECTORY.encode(arrays, types, 100.0))
    assert message.joint_names == ["arm_shoulder", "arm_elbow"]
    assert codecs.stamp_s(message) is None  # zero: now, on the controller's clock
    point, stop = message.points
    np.testing.assert_array_equal(point.positions, [0.5, -0.5])
    np.testing.assert_allclose(point.velocities, [1.0, 0.0])  # 0.25 rad in 0.25 s
    assert (point.time_from_start.sec, point.time_from_start.nanosec) == (0, 250_000_000)
    np.testing.assert_allclose(stop.positions, [0.6, -0.5])  # 1 rad/s to rest within 0.2 s: half of 0.2 rad
    np.testing.assert_array_equal(stop.velocities, [0.0, 0.0])
    assert (stop.time_from_start.sec, stop.time_from_start.nanosec) == (0, 450_000_000)
    first, _ = TRAJECTORY.encode({"action": np.array([0.5, -0.5])}, types, 100.0).points
    np.testing.assert_array_equal(first.velocities, [0.0, 0.0])
    np.testing.assert_array_equal(TRAJECTORY.decode(message)["action"], [0.5, -0.5])


def test_a_trajectorys_stop_is_within_the_limits():
    arrays = {"action": np.array([0.95, -1.0]), codecs.BEFORE: np.array([0.45, -0.5])}
    point, stop = TRAJECTORY.encode(arrays, types, 0.0).points
    np.testing.assert_allclose(stop.positions, [1.0, -1.0])
    np.testing.assert_allclose(point.velocities, [0.5, 0.0], atol=1e-6)  # 0.05 rad to rest within 0.2 s


@dataclass
class TrajectoryController:
    """joint_trajectory_controller: cubic splines from the state at which a message arrives, then rest."""

    position: float = 0.0
    velocity: float = 0.0
    knots: tuple[tuple[float, float, float], ...] = ()
    elapsed_s: float = 0.0

    def receive(self, message) -> None:
        points = [
            (1e-9 * p.time_from_start.nanosec, p.positions[0], p.velocities[0] if len(p.velocities) else None)
            for p in message.points
        ]
        assert points[-1][2] in (0.0, None), "refused by default: it ends in motion"
        self.knots, self.elapsed_s = ((0.0, self.position, self.velocity), *points), 0.0

    def step(self, seconds: float) -> None:
        self.elapsed_s += seconds
        for (t0, q0, v0), (t1, q1, v1) in itertools.pairwise(self.knots):
            if self.elapsed_s <= t1 + 1e-9:
                if v1 is None:  # without velocities: straight lines
                    self.position += (q1 - q0) / (t1 - t0) * seconds
                    self.velocity = (q1 - q0) / (t1 - t0)
                else:
                    spline = CubicHermiteSpline([t0, t1], [q0, q1], [v0, v1])
                    self.position, self.velocity = float(spline(self.elapsed_s)), float(spline(self.elapsed_s, 1))
                return
        self.position, self.velocity = self.knots[-1][1], 0.0


def test_an_arm_keeps_up_with_the_commands_outlives_a_late_one_and_stops_by_itself():
    dt_s, speed = 0.05, 0.5
    codec = codecs.JointTrajectory(action("joint"), ("joint",), dt_s)
    arm, before = TrajectoryController(), None
    speeds = []
    for period in range(1, 21):
        command = np.array([speed * dt_s * period])
        arm.receive(codec.encode({"action": command} | ({} if before is None else {codecs.BEFORE: before}), types, 0.0))
        before = command
        for _ in range(5 if period != 10 else 8):  # one command comes three fifths of a period late
            arm.step(dt_s / 5)
            speeds.append(arm.velocity)
        if period != 10:
            assert arm.position == pytest.approx(command[0], abs=1e-6)  # the whole way, not half of it
    late = speeds[9 * 5 : 10 * 5 + 3]
    assert min(late) > 0.8 * speed - 0.5 * speed  # it slows down, and does not stop for it
    arm.step(1.0)  # no further command
    assert (arm.position, arm.velocity) == (pytest.approx(1.0 * speed + 0.5 * codecs.STOP_S * speed), 0.0)


SHORT = filled("trajectory_msgs/msg/JointTrajectoryPoint", positions=np.zeros(1))
PICTURE = {"encoding": "rgb8", "height": 3, "step": 7, "width": 2**31, "data": np.zeros(5, np.uint8)}


@pytest.mark.parametrize(
    ("codec", "fields", "wanted"),
    [
        (TRAJECTORY, {"joint_names": list(TRAJECTORY.ros_joints), "points": [SHORT]}, "expected 2 positions, got 1"),
        (JOINTS, {}, "without joints"),
        (LABELLED, {}, "expected arrays"),
        (body_codecs.Image({"image": TensorSpec((1, 2, 3), dtype="uint8")}), PICTURE, "cannot be read: ValueError"),
    ],
    ids=["trajectory", "joints", "arrays", "image"],
)
def test_no_message_can_raise_anything_but_a_users_error(codec, fields, wanted):
    with pytest.raises(UserError, match=wanted):
        codecs.read(codec, filled(codec.message, **fields))


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


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_neither_a_time_nor_an_integer(wrong: float):
    codec = codecs.LabelledArrays({"mask": TensorSpec((2,), "bool"), "x": TensorSpec((1,))})
    for place, words in ((0, "expected a stamp in s"), (1, "mask: expected bool")):
        message = codec.encode({"mask": np.ones(2, bool), "x": np.zeros(1)}, types, 1.0)
        message.data[place] = wrong
        with pytest.raises(UserError, match=words):
            codecs.read(codec, message)


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


def test_px4_odometry_of_an_estimator_that_has_failed_is_refused():
    message = filled("px4_msgs/msg/VehicleOdometry", pose_frame=1, velocity_frame=1, quality=-1)
    with pytest.raises(ValueError, match="estimate has failed"):
        quadrotor_codecs.VehicleOdometry(MOTION).decode(message)


@pytest.mark.parametrize(
    ("change", "jump"),
    [
        ({}, ""),
        ({"position": [0.06, 0.0, 0.0]}, ""),  # 1 m/s for 0.02 s explains a part
        ({"position": [0.1, 0.0, 0.0]}, "0.1 m"),
        ({"velocity": [1.6, 0.0, 0.0]}, ""),
        ({"velocity": [2.0, 0.0, 0.0]}, "1 m/s"),
        ({"q": [np.cos(0.02), 0.0, 0.0, np.sin(0.02)]}, ""),
        ({"q": [-np.cos(0.02), 0.0, 0.0, -np.sin(0.02)]}, ""),  # the same attitude
        ({"q": [np.cos(0.1), 0.0, 0.0, np.sin(0.1)]}, "0.2 rad"),
        ({"position": [np.nan, 0.0, 0.0]}, "nan m"),
        ({"position": [0.1, 0.0, 0.0], "timestamp_sample": 100_000}, ""),
        ({"position": [0.5, 0.0, 0.0], "timestamp_sample": 9_000_000}, "0.5 m"),  # a gap explains no jump
        ({"position": [9.0, 0.0, 0.0], "reset_counter": 3}, ""),  # fast, but PX4 knows of no reset
        ({"pose_frame": 2, "reset_counter": 3}, "frame NED"),
    ],
)
def test_px4_tells_jumps_of_its_estimate(change, jump):
    common = {"pose_frame": 1, "velocity": np.array([1.0, 0.0, 0.0]), "q": np.array([1.0, 0.0, 0.0, 0.0])}
    before = filled("px4_msgs/msg/VehicleOdometry", reset_counter=3, **common)
    changed = {"timestamp_sample": 20_000, "reset_counter": 4} | common
    changed |= {name: np.array(value) if isinstance(value, list) else value for name, value in change.items()}
    told = quadrotor_codecs.px4_jump(before, filled("px4_msgs/msg/VehicleOdometry", **changed))
    assert jump in told
    assert bool(told) == bool(jump)


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


def scan(angle_min: float, step: float, ranges: list[float], **fields):
    given = {"header__frame_id": "laser", "range_min": 0.1, "range_max": 8.0} | fields
    values = np.array(ranges, np.float32)
    return filled("sensor_msgs/msg/LaserScan", angle_min=angle_min, angle_increment=step, ranges=values, **given)


LIDAR = body_codecs.LaserScan(
    {"lidar": TensorSpec((4,), unit="m")},
    np.linspace(-np.pi, np.pi, 4, endpoint=False),
    5.0,
    "laser",
)


def test_a_scan_is_read_at_the_angles_asked_for():
    # rays every 45 degrees from 0 to 315: behind is ray 4, right 6, ahead 0, left 2
    message = scan(0.0, np.pi / 4, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5])
    np.testing.assert_allclose(LIDAR.decode(message)["lidar"], [3.0, 4.0, 1.0, 2.0])
    # the same room, counted clockwise from behind
    message = scan(np.pi, -np.pi / 4, [3.0, 2.5, 2.0, 1.5, 1.0, 4.5, 4.0, 3.5])
    np.testing.assert_allclose(LIDAR.decode(message)["lidar"], [3.0, 4.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("ranges", "fields", "read"),
    [
        ([math.inf, -math.inf, 7.0, 3.0], {}, [5.0, 0.0, 5.0, 3.0]),  # REP 117: nothing, too close
        ([0.0, 0.05, 0.1, 9.0], {}, [5.0, 0.05, 0.1, 5.0]),  # a driver's 0 for nothing; in the blind zone; beyond
        ([0.0, 3.6, 3.5, 1.0], {"range_max": 3.5}, [5.0, 5.0, 3.5, 1.0]),  # a shorter lidar's maximum and more
        ([0.0, 1.0, 1.0, 1.0], {"range_min": 0.0}, [0.0, 1.0, 1.0, 1.0]),  # it measures 0, and says so
        ([4.0, 1.0, 1.0, 1.0], {"range_max": 0.0}, [4.0, 1.0, 1.0, 1.0]),  # not filled in
    ],
)
def test_ranges_that_are_no_measurements_are_read_on_the_safe_side(ranges, fields, read):
    np.testing.assert_allclose(LIDAR.decode(scan(-np.pi, np.pi / 2, ranges, **fields))["lidar"], read)


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (scan(-np.pi / 2, np.pi / 8, [1.0] * 8), "misses some of"),
        (scan(-np.pi, np.pi / 2, [1.0, math.nan, 1.0, 1.0]), "NaN"),
        (scan(0.0, 0.0, []), "expected some"),
        (scan(0.0, 1e-30, [1.0] * 4), "expected some"),
        (scan(0.0, math.nan, [1.0] * 4), "expected some"),
        (scan(math.inf, np.pi / 2, [1.0] * 4), "expected some"),
        (scan(-np.pi, np.pi / 2, [1.0] * 4, header__frame_id="base_scan"), "in frame 'laser', got 'base_scan'"),
    ],
)
def test_a_scan_that_cannot_be_read_is_refused(message, wanted):
    with pytest.raises(ValueError, match=wanted):
        LIDAR.decode(message)


def test_an_inertial_unit_of_another_frame_or_without_the_quantity_is_refused():
    codec = body_codecs.Imu(body_codecs.IMU, "imu_link")
    arrays = {"angular_velocity": np.arange(3.0), "linear_acceleration": np.zeros(3)}
    message = codec.encode(arrays, types, 0.0)
    np.testing.assert_array_equal(codec.decode(on_the_wire(message))["angular_velocity"], [0.0, 1.0, 2.0])
    message.linear_acceleration_covariance[0] = -1.0  # REP 145
    with pytest.raises(UserError, match="does not measure linear_acceleration"):
        codec.decode(message)
    message.header.frame_id = "imu_link_upside_down"
    with pytest.raises(UserError, match="in frame 'imu_link', got 'imu_link_upside_down'"):
        codec.decode(message)


def test_a_blue_green_red_picture_with_padded_rows():
    codec = body_codecs.Image({"image": TensorSpec((1, 2, 3), dtype="uint8")})
    message = filled(
        "sensor_msgs/msg/Image",
        height=1,
        width=2,
        step=8,
        encoding="bgr8",
        data=np.array([1, 2, 3, 4, 5, 6, 99, 99], np.uint8),
    )
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
