"""Partners that are silent, late or in the way: what safety_node reports of them, and that the robot is held."""

from typing import Any

import numpy as np
import pytest

from embodied.contract import Contract
from embodied.errors import UserError
from real_robot.ros2 import ros_robot, topics
from real_robot.ros2.nodes.managed import OK
from real_robot.ros2.partners import LOOK_S
from real_robot.ros2.robots.arms import FR3_STATE_TIMEOUT_S
from real_robot.ros2.robots.registry import robot_table
from real_robot.safety.safety import State
from tests.real_robot.ros2.in_process import Graph, heartbeat, interfaces
from tests.real_robot.ros2.robots.test_tables import HOVER, NAVIGATE, RATES, arm, flying
from tests.real_robot.ros2.test_holding import (
    ARM_LIMITS,
    JOINTS,
    PERIOD_S,
    SPEED,
    VEHICLE_LIMITS,
    Arm,
    driving,
    moving,
)
from tests.real_robot.ros2.test_px4 import World

STOPPING_S = 0.2
"""Longest certified stop of these arms: 0.2 m/s at 2 m/s^2, and two periods."""


@pytest.fixture(autouse=True)
def without_ros(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ros_robot, topics):
        monkeypatch.setattr(module, "types", interfaces)


def assert_stopped(robot: Arm, cause: str) -> None:
    """The robot is stopped for this cause, until an operator resets it."""
    assert robot.state is State.STOPPED
    for report in ("robot", "safety"):
        assert cause in robot.node.reports[report]().message
    assert robot.run(1.0) == 0


def test_another_publisher_of_the_robots_commands_stops_the_arm_and_is_named(tmp_path):
    robot = moving(tmp_path)
    robot.graph.publishers["forward_position_controller/commands"].add(("/", "teleop"))
    robot.run(LOOK_S + STOPPING_S)
    assert_stopped(robot, "/teleop publishes on forward_position_controller/commands, too: end it")
    robot.graph.publishers["forward_position_controller/commands"].remove(("/", "teleop"))
    robot.wanted = robot.position.copy()
    robot.graph.call("safety_node/reset")
    robot.run(LOOK_S)
    assert robot.run(0.2) > 5


def test_an_arm_is_not_begun_with_while_another_node_commands_it(tmp_path):
    robot = Arm(tmp_path, "forward_position", arm(), ARM_LIMITS, 1.0 / PERIOD_S)
    robot.graph.publishers["forward_position_controller/commands"].add(("/", "teleop"))
    robot.graph.tick(LOOK_S)
    robot.node.activate()
    assert robot.run(1.0) == 0
    assert "/teleop publishes" in robot.node.reports["safety"]().message


def test_an_fr3_whose_state_broadcaster_has_died_is_stopped(tmp_path):
    robot = moving(tmp_path, "fr3")
    robot.said.clear()  # joint states go on
    robot.run(FR3_STATE_TIMEOUT_S + STOPPING_S)
    assert_stopped(robot, "nothing heard on franka_robot_state_broadcaster/robot_state for")
    assert "Start it again" in robot.node.reports["robot"]().message


def test_a_ur_whose_driver_no_longer_publishes_its_modes_is_stopped(tmp_path):
    robot = moving(tmp_path, "ur")
    topic = "io_and_status_controller/safety_mode"
    del robot.graph.publishers[topic]  # it spoke once, and has ended
    robot.run(LOOK_S + STOPPING_S)
    assert_stopped(robot, f"nobody publishes on {topic}")


def test_an_emergency_service_that_never_answers_is_called_again_and_reported(tmp_path):
    robot, called = moving(tmp_path, "ur"), []
    robot.graph.services["dashboard_client/stop"] = lambda request, response: called.append(robot.graph.now_s)
    robot.graph.call("safety_node/emergency_stop")
    robot.run(0.5)
    assert robot.node.reports["robot"]().level == OK
    robot.run(3.0)
    assert len(called) == 4  # it was one
    report = robot.node.reports["robot"]()
    assert report.level == ros_robot.ERROR
    assert report.message.startswith("dashboard_client/stop has not answered for 1 s")


ROWS: list[tuple[str, Contract, str, dict[str, object]]] = [
    ("forward_position", arm(), ARM_LIMITS, {}),
    ("joint_trajectory", arm(), ARM_LIMITS, {}),
    ("diff_drive", NAVIGATE, VEHICLE_LIMITS, {"stamped": False}),
    ("diff_drive", NAVIGATE, VEHICLE_LIMITS, {}),
]


@pytest.mark.parametrize(("row", "contract", "limits", "options"), ROWS)
@pytest.mark.parametrize("late", ["commands and heartbeats", "heartbeats without a stamp"])
def test_commands_that_come_late_are_not_carried_out(tmp_path, row, contract, limits, options, late):
    rate_hz = round(1.0 / contract.control_dt_s)
    robot = Arm(tmp_path, row, contract, limits, rate_hz, **options)
    stamped = robot.table.stamped and row != "joint_trajectory"  # a policy of somebody else's may not stamp those
    robot.node.activate()
    sent = 0
    for _ in range(200):
        robot.graph.tick(contract.control_dt_s)
        robot.measure_all()
        late_s = 2.0 if "commands" in late else 0.0
        made_s = robot.graph.ros_s - 2.0 if late_s else 0.0
        robot.graph.send("policy/heartbeat", heartbeat(made_s))
        robot.ask(robot.position * 0.0 + 0.1, robot.graph.ros_s - 2.0)
        sent += 1
    assert robot.sent == [], f"{len(robot.sent)} of {sent}"
    reason = robot.node.reports["safety"]().message
    assert ("stale command: 2 s old" if late_s or stamped else "command without a time") in reason
    robot.wanted = robot.position.copy()
    for _ in range(50):
        robot.graph.tick(contract.control_dt_s)
        robot.measure_all()
        robot.beat()
        robot.ask(robot.position * 0.0 + 0.001)
    assert len(robot.sent) > 20
    assert (
        robot.node.reports["safety"]().values["age_of_commands"].startswith("their" if robot.table.stamped else "the")
    )


def test_commands_to_safety_node_carry_the_time_of_their_decision_where_the_message_has_a_place(tmp_path):
    robot = moving(tmp_path, "joint_trajectory")
    policy = ros_robot.RosRobot(robot.node, robot.table, "policy/")
    heard = []
    robot.graph.heard["policy/joint_trajectory_controller/joint_trajectory"].append(heard.append)
    policy.write(np.zeros(7))
    assert ros_robot.stamp_s(heard[-1]) == pytest.approx(robot.graph.ros_s)
    assert ros_robot.stamp_s(robot.messages[-1]) is None  # now, to the robot


def test_after_a_reset_nothing_that_was_decided_before_moves_the_arm(tmp_path):
    robot = moving(tmp_path)
    robot.graph.call("safety_node/emergency_stop")
    robot.run(0.6)
    at = robot.position.copy()
    robot.policy = False
    robot.graph.call("safety_node/reset")
    reset_s = robot.graph.ros_s
    for _ in range(50):  # a chunk that was decided before goes on coming
        robot.run(PERIOD_S)
        robot.graph.send("policy/heartbeat", heartbeat(reset_s - 0.001))
        robot.ask(at + 0.3)
    np.testing.assert_array_equal(robot.position, at)
    robot.policy, robot.wanted = True, at.copy()
    robot.run(0.5)
    assert (robot.position > at + 0.3 * SPEED * 0.5).all()


def test_an_emergency_stop_or_a_silent_policy_ends_every_motion_within_the_certified_distance(tmp_path):
    robot = driving(tmp_path)
    robot.graph.call("safety_node/emergency_stop")
    way = 0.0
    for _ in range(40):
        robot.graph.tick(0.1)
        robot.beat()
        robot.ask(np.array([0.4, 0.2]))
        way += 0.1 * robot.sent[-1][0]
    assert robot.sent[-1][0] == 0.0
    assert way <= 0.4**2 / (2 * 1.0) + 2 * 0.4 * 0.1


class LateGraph(Graph):
    """A graph in which PX4's clock is behind."""

    behind_s = 0.04

    def send(self, topic: str, message: Any) -> bool:
        if topic == "fmu/out/vehicle_odometry":
            message.timestamp = message.timestamp_sample = message.timestamp - round(1e6 * self.behind_s)
        return super().send(topic, message)


@pytest.mark.parametrize("row", ["px4_actuators", "px4_rates"])
def test_px4_whose_stamps_leave_too_little_time_is_not_engaged_and_it_is_told(tmp_path, monkeypatch, row):
    monkeypatch.setattr("tests.real_robot.ros2.test_px4.Graph", LateGraph)
    world = World(tmp_path, row, HOVER if row == "px4_actuators" else flying(RATES))
    world.run(5.0)
    assert world.px4.setpoints == []
    assert world.px4.commands == []
    assert "measurements are 0.04 s old, at most 0.025 is enough to begin" in world.report[1]
    assert "UXRCE_DDS_SYNCT" in world.report[1]
    monkeypatch.setattr(LateGraph, "behind_s", 0.005)
    world.fly()


def test_px4_is_asked_to_follow_only_after_an_unbroken_row_of_valid_commands(tmp_path):
    world = World(tmp_path, "px4_actuators", HOVER)
    for _ in range(10):
        world.run(0.5)
        world.command(np.full(4, np.nan))  # one in fifty
    assert world.px4.commands == []
    world.fly()


def numbers(row: str) -> list[tuple[str, object]]:
    names = {
        "diff_drive": ["rate_hz", "lidar_field_deg", "lidar_range_m", "stops_after_s"],
        "px4_rates": ["rate_max_rad_s"],
    }
    return [(name, bad) for name in names[row] for bad in (np.nan, np.inf, -1.0, 0.0, "fast", True)]


@pytest.mark.parametrize(
    ("row", "option", "bad"), [(row, *each) for row in ("diff_drive", "px4_rates") for each in numbers(row)]
)
def test_a_number_of_an_option_that_is_not_finite_or_out_of_range_is_refused(row, option, bad):
    contract = NAVIGATE if row == "diff_drive" else flying(RATES)
    with pytest.raises(UserError, match=rf"option {option} of {row}: expected a number above 0"):
        robot_table(row, contract, {"rate_hz": 10.0, option: bad})


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0])
def test_a_number_of_a_guard_that_is_not_finite_or_out_of_range_is_refused(bad):
    guard = dict.fromkeys(("length_m", "width_m", "acceleration_m_s2", "deceleration_m_s2"), 1.0)
    guard |= {"yaw_acceleration_rad_s2": 1.0, "lag_s": bad}
    with pytest.raises(UserError, match=r"option guard of diff_drive\.lag_s: expected a number above 0"):
        robot_table("diff_drive", NAVIGATE, {"rate_hz": 10.0, "guard": guard})


def test_every_row_declares_when_its_robot_stops_by_itself():
    for row, contract, options, stops_after_s in (
        ("diff_drive", NAVIGATE, {"rate_hz": 10.0}, 0.5),
        ("diff_drive", NAVIGATE, {"rate_hz": 10.0, "stops_after_s": 0.25}, 0.25),
        ("forward_position", arm(), {"rate_hz": 50.0, "joints": JOINTS}, None),
    ):
        assert robot_table(row, contract, options).stops_after_s == stops_after_s


def test_a_lidar_of_more_than_a_turn_is_refused():
    with pytest.raises(UserError, match="at most 360"):
        robot_table("diff_drive", NAVIGATE, {"rate_hz": 10.0, "lidar_field_deg": 400.0})
