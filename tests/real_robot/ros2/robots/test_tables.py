"""Robot tables: every row transmits its quantities, fits its policies and refuses others."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from embodied.contract import Contract, TensorSpec
from real_robot.ros2.messages import body_codecs
from real_robot.ros2.robots import quadrotors, registry
from real_robot.ros2.robots.registry import ROBOTS, robot_table
from real_robot.ros2.robots.tables import ACTION, Behaviour
from real_robot.safety.limits import ElementLimits, Kind, Limits
from sims.libero.observation import contract
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.vehicle.environment import VehicleEnvironment
from sims.vehicle.navigate import Navigate
from sims.vehicle.race import Race
from sims.vehicle.vehicles import F1TENTH, JACKAL
from tests.real_robot.ros2.messages.definitions import on_the_wire, types

XYZ = ("x", "y", "z")
JOINTS = tuple(f"joint{number}" for number in range(1, 8))
HOVER = QuadrotorEnvironment(1).contract
HISTORY = QuadrotorEnvironment(1, history=3).contract


def test_a_row_serves_a_policy_with_delay_without_its_action_prefix():
    policy = replace(HOVER, horizon=4).delayed(2)
    assert robot_table("simulation", policy, {}).served.delay == 0


def bounded(names: tuple[str, ...], unit: str, frame: str = "", low: float = -1.0, high: float = 1.0) -> TensorSpec:
    size = len(names)
    return TensorSpec((size,), unit=unit, frame=frame, names=names, low=(low,) * size, high=(high,) * size)


def arm(names: tuple[str, ...] = JOINTS, unit: str = "rad", **observation: TensorSpec) -> Contract:
    joints = bounded(names, "rad", low=-2.0, high=2.0)
    velocity = TensorSpec((len(names),), unit="rad/s", names=names)
    seen = {"joint_position": joints, "joint_velocity": velocity}
    return Contract(seen | observation, bounded(names, unit, low=-2.0, high=2.0), 0.02)


END_EFFECTOR = {
    "end_effector_position": body_codecs.QUANTITIES["position"][0],
    "end_effector_rotation": body_codecs.QUANTITIES["rotation.two_columns"][0],
}
OBJECTS = {"object_position": TensorSpec((-1, 3), unit="m", frame="world", names=XYZ)}
UR_JOINTS = tuple(
    f"{part}_joint" for part in ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
)
NAVIGATE = VehicleEnvironment(1, mdp=Navigate(), vehicle=JACKAL).contract
RACE = VehicleEnvironment(1, mdp=Race(), vehicle=F1TENTH).contract
LIBERO = contract(8, 4)
PICTURES = contract(8, 4, 16, joints=False)
SCENE = [key for key in LIBERO.observation if key.startswith(("object_", "instruction"))]
CAMERAS = {"agentview_image": "front/image_raw", "wrist_image": "wrist/image_raw/compressed"}
MOTION = {key: body_codecs.QUANTITIES[key][0] for key in ("position", "rotation", "velocity", "angular_velocity")}


def flying(action: TensorSpec) -> Contract:
    previous = {"previous_action": replace(action, low=(), high=())}
    return Contract(MOTION | previous, action, 0.01)


RATES = TensorSpec(
    (4,),
    unit="rad/s (rates), 1 (thrust)",
    frame="body",
    names=("roll_rate", "pitch_rate", "yaw_rate", "thrust"),
    low=(-3, -3, -3, 0),
    high=(3, 3, 3, 1),
)
ROWS = [
    ("simulation", HOVER, {}),
    ("simulation", arm(picture=TensorSpec((8, 8, 3), dtype="uint8"), **OBJECTS), {}),
    ("joint_trajectory", arm(**END_EFFECTOR), {"rate_hz": 50.0, "joints": JOINTS, "pose": ["pose", "base"]}),
    ("forward_position", arm(**OBJECTS), {"rate_hz": 50.0, "joints": JOINTS, "arrays": ["object_position"]}),
    ("ur", arm(UR_JOINTS), {"rate_hz": 50.0, "tf_prefix": "left_"}),
    ("fr3", arm(**END_EFFECTOR), {"rate_hz": 50.0}),
    ("cartesian", LIBERO, {"rate_hz": 20.0, "arrays": SCENE}),
    ("cartesian", PICTURES, {"rate_hz": 20.0, "arrays": ["instruction"], "cameras": CAMERAS}),
    ("px4_actuators", HOVER, {"rate_hz": 100.0}),
    ("px4_actuators", HISTORY, {"rate_hz": 100.0, "version": "1.15"}),
    ("px4_rates", flying(RATES), {"rate_hz": 100.0}),
    ("diff_drive", NAVIGATE, {"rate_hz": 10.0}),
    ("diff_drive", NAVIGATE, {"rate_hz": 10.0, "stamped": False, "arrays": ["goal_distance", "goal_direction"]}),
    ("ackermann", RACE, {"rate_hz": 20.0, "steering_joint": "steer"}),
    ("diff_drive", replace(NAVIGATE, observation=dict(NAVIGATE.observation) | body_codecs.IMU), {"rate_hz": 10.0}),
]
each_row = pytest.mark.parametrize(
    ("robot", "wanted", "options"), ROWS, ids=lambda value: value if isinstance(value, str) else ""
)


def test_every_robot_is_tested_and_documented():
    assert {robot for robot, _, _ in ROWS} == set(ROBOTS)
    readme = (Path(registry.__file__).parents[1] / "README.md").read_text()
    assert [robot for robot in ROBOTS if f"`{robot}`" not in readme] == []


@each_row
def test_a_row_serves_the_policy_it_is_for(robot, wanted, options):
    table = robot_table(robot, wanted, options)
    wanted.bind(table.served)
    keys = [key for topic in table.states for key in topic.codec.specs] + list(table.remembered)
    assert len(keys) == len(set(keys))  # no duplicates
    assert not any(topic.name.startswith("/") for topic in (*table.states, table.command))  # namespaces apply


@each_row
def test_commands_and_fixed_messages_survive_the_wire(robot, wanted, options):
    table = robot_table(robot, wanted, options)
    spec = table.command.codec.specs[ACTION]
    action = np.linspace(0.1, 0.4, spec.shape[0]).astype(np.float32)
    sent = on_the_wire(table.command.codec.encode({ACTION: action}, types, 1.0))
    np.testing.assert_allclose(table.command.codec.decode(sent)[ACTION], action, atol=1e-5)
    requests = [entry for request in (table.status.requests if table.status else ()) for entry in request.messages]
    fixed = [*requests, *table.hold.messages, *table.emergency.messages]
    for entry in [*fixed, *([table.heartbeat.message] if table.heartbeat else [])]:
        received = on_the_wire(entry.message(types, 2.0))
        for path, value in entry.fields.items():
            assert getattr(received, path) == value


@pytest.mark.parametrize(
    ("robot", "wanted", "options", "at_rest"),
    [
        ("joint_trajectory", arm(), {"rate_hz": 50.0, "joints": JOINTS}, np.full(7, np.nan)),
        ("diff_drive", NAVIGATE, {"rate_hz": 10.0}, np.zeros(2)),
        ("cartesian", LIBERO, {"rate_hz": 20.0, "arrays": SCENE}, np.zeros(7)),
    ],
)
def test_an_arm_rests_where_it_is_commanded_to_and_a_vehicle_at_zero(robot, wanted, options, at_rest):
    table = robot_table(robot, wanted, options)
    np.testing.assert_array_equal(table.at_rest, at_rest)
    assert table.hold == table.emergency == Behaviour()  # nothing but the stop


def test_limits_of_positions_bound_what_a_trajectory_commands():
    table = robot_table("joint_trajectory", arm(), {"rate_hz": 50.0, "joints": JOINTS})
    limits = Limits(
        {
            "joint1": ElementLimits(scale=2.0, low=-1.0, high=0.5),
            "joint2": ElementLimits(low=-9.0, high=9.0),
            "joint3": ElementLimits(Kind.VELOCITY, low=-0.1, high=0.1, measured="joint_position.joint3"),
        }
    )
    spec = table.within(limits).command.codec.specs[ACTION]
    assert spec.low == (-0.5, *[-2.0] * 6)
    assert spec.high == (0.25, *[2.0] * 6)
    free = table.command.codec.specs[ACTION]
    unbounded = replace(table.command.codec, specs={ACTION: replace(free, low=(), high=())})
    spec = replace(table, command=replace(table.command, codec=unbounded)).within(limits).command.codec.specs[ACTION]
    assert (spec.low[:3], spec.high[:3]) == ((-0.5, -9.0, -np.inf), (0.25, 9.0, np.inf))


@pytest.mark.parametrize(("rate_hz", "sign_s"), [(1000.0, 0.02), (20.0, 0.05), (5.0, 0.1)])
def test_signs_of_life_are_as_frequent_as_commands_within_bounds(rate_hz: float, sign_s: float):
    wanted = replace(NAVIGATE, control_dt_s=1.0 / rate_hz)
    assert robot_table("diff_drive", wanted, {"rate_hz": rate_hz}).sign_s == pytest.approx(sign_s)


def test_the_goal_is_computed_from_odometry_and_goal_pose():
    table = robot_table("diff_drive", NAVIGATE, {"rate_hz": 10.0})
    quarter_turn_left = np.array([0, -1, 0, 1, 0, 0, 0, 0, 1.0])
    seen = {"position": np.array([1.0, 1.0, 0.0]), "rotation": quarter_turn_left, "goal": np.array([4.0, 1.0, 9.0])}
    observation = table.observe(seen | {"velocity": np.zeros(2)})
    assert set(observation) == {"velocity", "goal_distance", "goal_direction"}
    np.testing.assert_allclose(observation["goal_distance"], [3.0])
    np.testing.assert_allclose(observation["goal_direction"], [0.0, -1.0], atol=1e-6)  # to the right
    lasting = {topic.name for topic in table.states if topic.lasting}
    assert lasting == {"goal_pose"}


@pytest.mark.parametrize("turn", [0.0, 2.5])
def test_a_simulated_vehicle_publishes_what_its_goal_is_computed_from(turn):
    table = robot_table("diff_drive", NAVIGATE, {"rate_hz": 10.0})
    seen = {
        "velocity": np.array([0.5, 0.1]),
        "goal_distance": np.array([3.0]),
        "goal_direction": np.array([np.cos(turn), np.sin(turn)]),
        "lidar": np.ones(NAVIGATE.observation["lidar"].shape),
    }
    arrays: dict[str, np.ndarray] = {}
    for topic in table.states:
        arrays |= topic.codec.decode(on_the_wire(topic.codec.encode(table.measured(seen), types, 1.0)))
    for key, values in table.observe(arrays).items():
        np.testing.assert_allclose(values, seen[key], atol=1e-6)


def test_liberos_displacements_are_checked_as_velocities_in_si_units():
    table = robot_table("cartesian", LIBERO, {"rate_hz": 20.0, "arrays": SCENE, "stops": ["gripper/stop"]})
    assert table.contract.action.unit == "m/s (x, y, z); rad/s (rotation); direction of travel (gripper)"
    assert table.served.action == LIBERO.action
    asked = SimpleNamespace(reset=lambda: None, observe=lambda reading: None, action=lambda now_s: np.ones(7))
    executor = table.translate(asked)
    for _ in range(50):
        action = executor.action(0.0)
    np.testing.assert_allclose(action, [0.2655] * 3 + [2.655] * 3 + [1.0], rtol=1e-3)
    assert (action <= np.array(table.contract.action.high)).all()
    assert table.emergency.services == ("gripper/stop",)


def test_velocities_of_a_hand_are_not_translated():
    unit = "m/s (x, y, z); rad/s (rotation); direction of travel (gripper)"
    wanted = replace(LIBERO, action=replace(LIBERO.action, unit=unit))
    table = robot_table("cartesian", wanted, {"rate_hz": 20.0, "arrays": SCENE})
    assert table.served.action == table.contract.action == wanted.action
    assert table.translate(wanted) is wanted


def test_lidars_are_read_where_the_simulators_beams_are():
    for row, wanted, options, env in (
        ("diff_drive", NAVIGATE, {"rate_hz": 10.0}, Navigate.LIDAR),
        ("ackermann", RACE, {"rate_hz": 20.0, "steering_joint": "steer"}, Race.LIDAR),
    ):
        (scan,) = (topic.codec for topic in robot_table(row, wanted, options).states if topic.name == "scan")
        np.testing.assert_allclose(scan.angles_rad, env.angles(), atol=1e-5)
        assert scan.range_m == env.range_m


def test_px4_holds_by_its_own_mode_and_stops_by_its_own_disarm():
    table = robot_table("px4_actuators", HOVER, {"rate_hz": 100.0})
    (hold,), (stop,) = table.hold.messages, table.emergency.messages
    assert [hold.fields[name] for name in ("command", "param1", "param2", "param3")] == [176, 1.0, 4.0, 3.0]
    assert [stop.fields[name] for name in ("command", "param1", "param2")] == [400, 0.0, 21196.0]
    assert table.heartbeat.message.fields == {"direct_actuator": True}
    assert table.heartbeat.rate_hz > 2.0
    assert table.status.name == "fmu/out/vehicle_status_v1"
    # nobody who comes later gets an old command
    assert (table.command.qos.reliability, table.command.qos.durability) == ("best_effort", "volatile")
    assert {entry.qos for entry in (table.heartbeat.message, hold, stop)} == {table.command.qos}
    assert table.pause.longest_s < 0.5
    assert table.initial == (-1.0,) * 4  # rotors stood still before the first command
    newest = robot_table("px4_actuators", HOVER, {"rate_hz": 100.0, "version": "1.18"})
    assert newest.status.name == "fmu/out/vehicle_status_v4"


@pytest.mark.parametrize(
    ("armed", "mode", "wanted", "failsafe", "condition"),
    [
        # follows, fault, stopped, asked for, may get the heartbeat
        (2, 14, 14, False, (True, "", False, None, True)),
        (2, 14, 14, True, (True, "", False, None, True)),  # a warning
        (1, 14, 14, False, (True, "disarmed", True, "arm", True)),
        (1, 4, 4, False, (False, "Hold mode, disarmed", True, "offboard", True)),
        (1, 2, 2, False, (False, "Position mode, disarmed", True, "offboard", True)),
        (2, 4, 4, False, (False, "Hold mode: somebody else", False, "offboard", True)),
        (2, 4, 14, True, (False, "Hold mode: its failsafe", False, None, False)),  # offboard mode lost its heartbeat
        (2, 2, 14, True, (False, "Position mode: its failsafe", False, None, False)),
        (2, 4, 3, True, (False, "Hold mode: its failsafe", False, None, True)),
        (2, 2, 2, False, (False, "Position mode: somebody else", False, None, True)),
        (2, 18, 18, False, (False, "Land mode: somebody else", False, None, True)),
        (1, 13, 13, True, (False, "Termination mode", True, None, True)),
        (2, 99, 99, False, (False, "nav_state 99 mode", False, None, True)),
    ],
)
def test_px4_is_asked_only_where_nobody_else_flies(armed, mode, wanted, failsafe, condition):
    message = types("px4_msgs/msg/VehicleStatus")()
    message.arming_state, message.nav_state, message.nav_state_user_intention = armed, mode, wanted
    message.failsafe = failsafe
    read = quadrotors.px4_condition(on_the_wire(message))
    follows, fault, stopped, request, beat = condition
    assert fault in read.fault
    assert bool(read.fault) == bool(fault)
    asked = {None: None, "arm": quadrotors.ARM, "offboard": quadrotors.TO_OFFBOARD}[request]
    assert (read.follows, read.stopped, read.request, read.beat) == (follows, stopped, asked, beat)


def test_the_controllers_order_of_joints_is_kept_and_limits_follow_their_names():
    names = ("a", "b")
    action = TensorSpec((2,), unit="rad", names=names, low=(-1.0, -2.0), high=(1.0, 2.0))
    wanted = Contract({"joint_position": TensorSpec((2,), unit="rad", names=names)}, action, 0.02)
    table = robot_table("forward_position", wanted, {"rate_hz": 50.0, "joints": ["b", "a"]})
    spec = table.command.codec.specs[ACTION]
    assert (spec.names, spec.low, spec.high) == (("b", "a"), (-2.0, -1.0), (2.0, 1.0))
    binding = wanted.bind(table.contract)
    np.testing.assert_array_equal(binding.action, [1, 0])
    np.testing.assert_array_equal(binding.observation["joint_position"], [1, 0])


@pytest.mark.parametrize(
    ("robot", "options", "wanted"),
    [
        ("px4", {}, "unknown robot 'px4'; expected one of ackermann, "),
        ("ackermann", {"rate": 1.0}, r"unknown options \['rate'\] of ackermann; expected some of rate_hz, "),
        ("px4_actuators", {"rate_hz": 50.0}, "control_dt_s: expected 0.01, got 0.02"),
        ("px4_rates", {"rate_hz": 100.0}, "action elements: policy commands"),
        ("px4_rates", {"rate_hz": 100.0, "version": 1.16}, "unknown version 1.16 of PX4; expected one of 1.15, 1.16"),
        ("joint_trajectory", {"rate_hz": 100.0, "joints": JOINTS}, "observation 'position': missing"),
        ("cartesian", {"rate_hz": 100.0}, "action unit: expected '1', got 'm/s"),
        ("cartesian", {"rate_hz": 100.0, "cameras": {"front": "image"}}, "camera 'front' is no observation"),
        ("px4_actuators", {"rate_hz": 100.0, "arrays": ["objects"]}, r"arrays \['objects'\] are no observations"),
    ],
)
def test_what_does_not_fit_is_reported(robot, options, wanted):
    with pytest.raises(ValueError, match=wanted):
        robot_table(robot, HOVER, options)
