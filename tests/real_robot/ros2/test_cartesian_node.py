"""cartesian_node and scene_node over real messages within one process, which is also the arm and the safety node."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import rclpy
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.executors import SingleThreadedExecutor
from rclpy.task import Future
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray, String
from trajectory_msgs.msg import JointTrajectory

from real_robot.ros2.messages.codecs import LabelledArrays, set_stamp, stamp_s
from real_robot.ros2.nodes import fingers as fingers_module
from real_robot.ros2.nodes.cartesian import CartesianNode
from real_robot.ros2.nodes.managed import ERROR, ManagedNode
from real_robot.ros2.nodes.scene import SceneNode
from real_robot.ros2.processes import claim_domain
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.robots.tables import ACTION
from real_robot.ros2.topics import types
from sims.libero.observation import contract
from tests.real_robot.robots.test_kinematics import BENT, JOINTS, arm_file

LIBERO = contract(8, 4)
SCENE = [key for key in LIBERO.observation if key.startswith(("object_", "instruction"))]
ROW = {"rate_hz": 20.0, "arrays": SCENE}
TABLE = robot_table("cartesian", LIBERO, ROW)
NAMES = [f"panda_{name}" for name in JOINTS]
FINGERS = ["left_finger", "right_finger"]
QUARTER_LEFT = [1.0, 2.0, 0.0, 0.0, 0.0, float(np.sqrt(0.5)), float(np.sqrt(0.5))]


def given(prefix: str, values: dict[str, Any]) -> list[str]:
    parts = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        parts += given(f"{name}.", value) if isinstance(value, dict) else ["-p", f"{name}:={json.dumps(value)}"]
    return parts


def stamped(message: Any, seconds: float) -> Any:
    set_stamp(message, seconds)
    return message


class World:
    """A node, configured and active, and a partner with everything else."""

    patience_s = 20.0

    def __init__(self, worlds: list[Any], make: Any, settings: dict[str, Any]) -> None:
        rclpy.init(args=["--ros-args", *given("", settings)], domain_id=claim_domain()[1])
        worlds.append(self)
        self.node: ManagedNode[Any] = make()
        self.partner = rclpy.create_node("partner", use_global_arguments=False)
        self.heard: dict[str, list[Any]] = {}
        self.executor = SingleThreadedExecutor()
        for node in (self.node, self.partner):
            self.executor.add_node(node)

    def close(self) -> None:
        self.node.trigger_shutdown()
        self.executor.shutdown()
        self.node.destroy_node()
        self.partner.destroy_node()

    def start(self) -> None:
        assert self.node.trigger_configure().name == "SUCCESS"
        self.node.trigger_activate()

    def listen(self, kind: Any, topic: str) -> list[Any]:
        heard = self.heard[topic] = []
        self.partner.create_subscription(kind, topic, heard.append, 100)
        self.until(lambda: self.node.count_subscribers(topic) > 0)
        return heard

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline:
            if condition():
                return
            self.executor.spin_once(timeout_sec=0.05)
        raise AssertionError("waited in vain")

    def in_vain(self, wait: Any) -> None:
        """Check that `wait` does not end within a second."""
        self.patience_s = 1.0
        with pytest.raises(AssertionError, match="in vain"):
            wait()
        self.patience_s = 20.0

    def now_s(self) -> float:
        return self.partner.get_clock().now().nanoseconds / 1e9


class Arm(World):
    """The arm's topics."""

    def __init__(self, worlds: list[Any], settings: dict[str, Any], folder: Path) -> None:
        (folder / "contract.json").write_text(LIBERO.to_json())
        common = {"checkpoint": str(folder), "options": ROW, "joints": NAMES, "measurement_timeout_s": 5.0}
        super().__init__(worlds, CartesianNode, common | {"command_timeout_s": 5.0} | settings)
        self.start()
        self.joints = self.partner.create_publisher(JointState, "joint_states", 10)
        self.command = self.partner.create_publisher(Float64MultiArray, "cartesian_command", 10)
        self.states = self.listen(Float64MultiArray, "cartesian_state")
        self.until(lambda: self.joints.get_subscription_count() and self.command.get_subscription_count())

    def measure(self, joints: np.ndarray = BENT, fingers: float | None = 0.04, age_s: float = 0.0) -> dict[str, Any]:
        """Publish joints of the arm and, in a message before it, of the gripper; what the node makes of them."""
        count = len(self.states)
        for names, values in ((FINGERS, [fingers] * 2), (NAMES[::-1], joints[::-1].tolist())):
            message = JointState(name=names, position=values if values[0] is not None else [])
            self.joints.publish(stamped(message, self.now_s() - age_s))
        self.until(lambda: len(self.states) > count)
        return TABLE.states[0].codec.decode(self.states[-1])

    def move(self, *velocity: float, gripper: float = 0.0) -> None:
        action = np.array([*velocity, gripper])
        self.command.publish(TABLE.command.codec.encode({ACTION: action}, types, self.now_s()))


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    try:
        for world in made:
            world.close()
    finally:
        rclpy.try_shutdown()


@pytest.fixture
def arm(worlds, tmp_path) -> Any:
    def make(**settings: Any) -> Arm:
        gripper = {"fingers": FINGERS} | settings.pop("gripper", {})
        return Arm(worlds, settings | {"gripper": gripper}, tmp_path)

    return make


def measured(world: Arm, pose: Any) -> dict[str, Any]:
    world.until(lambda: pose.get_subscription_count() > 0)
    message = PoseStamped()
    message.header.frame_id = "base"
    message.pose.position.x, message.pose.position.z, message.pose.orientation.x = 0.5, 0.3, 1.0
    message.pose.orientation.w = 0.0
    pose.publish(message)
    world.until(lambda: world.node._hand is not None)
    return world.measure()


def test_trajectories_bring_the_hand_where_it_is_to_go(arm, tmp_path):
    kinematics = pytest.importorskip("real_robot.robots.kinematics")
    pytest.importorskip("mink")
    path = arm_file(tmp_path / "arm.xml")
    model = kinematics.Kinematics(path, "grip", JOINTS, 2.0)
    world = arm(model=str(path), site="grip", model_joints=JOINTS, base=QUARTER_LEFT)
    sent = world.listen(JointTrajectory, "joint_trajectory_controller/joint_trajectory")
    seen = world.measure()
    position, rotation = model.pose(BENT)
    np.testing.assert_allclose(seen["joint_position"], BENT, atol=1e-6)
    np.testing.assert_allclose(
        seen["end_effector_position"], [1 - position[1], 2 + position[0], position[2]], atol=1e-6
    )
    assert seen["gripper_position"].tolist() == pytest.approx([0.04, -0.04])
    assert seen["gripper_command"].tolist() == [-1.0]
    joints = BENT
    for number in range(1, 5):
        world.move(0.2, 0.0, -0.1, 0.0, 0.0, 0.4)
        world.until(lambda number=number: len(sent) == number)
        message = sent[-1]
        assert message.joint_names == NAMES
        reached, stop = message.points
        assert (reached.time_from_start.nanosec, list(stop.velocities)) == (50_000_000, [0.0] * 7)
        np.testing.assert_allclose(reached.velocities, (np.array(reached.positions) - joints) / 0.05, atol=1e-5)
        joints = np.array(reached.positions)
        seen = world.measure(joints)
    moved, turned = model.pose(joints)
    np.testing.assert_allclose(moved - position, [0.0, -0.04, -0.02], atol=1e-3)  # the world's x is the base's -y
    turn = turned @ rotation.T
    np.testing.assert_allclose(np.arctan2(turn[1, 0], turn[0, 0]), 0.08, atol=5e-3)


def test_impedance_controllers_get_targets_that_stay_near_the_hand(arm):
    world = arm(output="pose", measured_pose="current_pose", base=QUARTER_LEFT, leash_m=0.03)
    sent = world.listen(PoseStamped, "target_pose")
    measured(world, world.partner.create_publisher(PoseStamped, "current_pose", 10))
    for number in range(1, 6):
        world.move(0.2, 0.0, 0.0, 0.0, 0.0, 0.0)
        world.until(lambda number=number: len(sent) == number)
    away = [message.pose.position.y for message in sent]
    np.testing.assert_allclose(away, [-0.01, -0.02, -0.03, -0.03, -0.03], atol=1e-9)
    assert sent[0].header.frame_id == "base"
    assert sent[0].pose.orientation.x == pytest.approx(1.0)


def test_moveit_servo_gets_velocities_in_its_base_and_a_stop(arm):
    world = arm(output="twist", measured_pose="current_pose", base=QUARTER_LEFT, command_timeout_s=0.5)
    sent = world.listen(TwistStamped, "servo_node/delta_twist_cmds")
    measured(world, world.partner.create_publisher(PoseStamped, "current_pose", 10))
    world.move(0.2, 0.1, 0.3, 0.0, 0.5, 0.0)
    world.until(lambda: len(sent) == 2)  # the second when commands have stopped
    linear, angular = sent[0].twist.linear, sent[0].twist.angular
    np.testing.assert_allclose([linear.x, linear.y, linear.z], [0.1, -0.2, 0.3], atol=1e-7)
    np.testing.assert_allclose([angular.x, angular.y, angular.z], [0.5, 0.0, 0.0], atol=1e-7)
    assert sent[1].twist == TwistStamped().twist
    assert sent[0].header.frame_id == "base"


def test_nothing_is_commanded_from_an_old_measurement_nor_before_activation(arm):
    world = arm(output="twist", measured_pose="current_pose", measurement_timeout_s=2.0)
    sent = world.listen(TwistStamped, "servo_node/delta_twist_cmds")
    pose = world.partner.create_publisher(PoseStamped, "current_pose", 10)
    measured(world, pose)
    world.measure(age_s=60.0)
    world.move(0.2, 0.0, 0.0, 0.0, 0.0, 0.0)
    world.until(lambda: world.node._refused == 1)
    report = world.node.reports["arm"]()
    assert report.level == ERROR
    assert "was measured 60." in report.message
    world.measure()
    world.move(np.nan, 0.0, 0.0, 0.0, 0.0, 0.0)
    world.until(lambda: world.node._refused == 2)
    world.command.publish(Float64MultiArray(data=[1.0]))
    world.until(lambda: world.node._refused == 3)
    world.node.trigger_deactivate()
    world.move(0.2, 0.0, 0.0, 0.0, 0.0, 0.0)
    world.measure()
    assert not sent


def test_a_message_without_positions_or_in_another_frame_is_not_taken_for_a_measurement(arm):
    world = arm(output="pose", measured_pose="current_pose")
    pose = world.partner.create_publisher(PoseStamped, "current_pose", 10)
    measured(world, pose)
    message = PoseStamped()
    message.header.frame_id, message.pose.orientation.w = "camera", 1.0
    pose.publish(message)
    world.until(lambda: world.node._hand is None)
    world.move(0.2, 0.0, 0.0, 0.0, 0.0, 0.0)
    world.until(lambda: world.node._refused == 1)


def test_a_hand_that_motion_capture_has_lost_is_not_commanded_and_it_is_told(arm):
    world = arm(output="pose", measured_pose="current_pose", leash_m=0.03)
    sent = world.listen(PoseStamped, "target_pose")
    pose = world.partner.create_publisher(PoseStamped, "current_pose", 10)
    measured(world, pose)
    lost = PoseStamped()
    lost.header.frame_id, lost.pose.position.x = "base", np.nan
    pose.publish(lost)
    world.until(lambda: world.node._hand is None)
    world.move(0.2, 0.0, 0.0, 0.0, 0.0, 0.0)
    world.until(lambda: world.node._refused == 1)
    assert not sent
    assert world.node.reports["arm"]().message == "not measured: the hand"
    measured(world, pose)
    world.move(0.2, 0.0, 0.0, 0.0, 0.0, 0.0)
    world.until(lambda: len(sent) == 1)
    assert sent[0].pose.position.x == pytest.approx(0.51)
    assert world.node.reports["arm"]().message == "follows"


def jointed(arm: Any, tmp_path: Path, **settings: Any) -> Arm:
    """An arm with a model, whose trajectories are sent."""
    pytest.importorskip("mink")
    return arm(model=str(arm_file(tmp_path / "arm.xml")), site="grip", model_joints=JOINTS, **settings)


def test_joints_that_are_not_finite_are_no_measurement(arm):
    world = arm(output="pose", measured_pose="current_pose")
    sent = world.listen(PoseStamped, "target_pose")
    measured(world, world.partner.create_publisher(PoseStamped, "current_pose", 10))
    world.joints.publish(JointState(name=NAMES, position=[np.nan, *BENT[1:]]))
    world.until(lambda: world.node._hand is None)
    world.move(0.2, 0.0, 0.0, 0.0, 0.0, 0.0)
    world.until(lambda: world.node._refused == 1)
    assert world.node.active
    assert not sent


def test_an_arm_that_a_reset_has_put_elsewhere_is_commanded_from_there(arm, tmp_path):
    """A simulator's clock jumps back with it; without an end the old joints would be commanded again."""
    world = jointed(arm, tmp_path, use_sim_time=True)
    sent = world.listen(JointTrajectory, "joint_trajectory_controller/joint_trajectory")
    clock, now = world.partner.create_publisher(Clock, "/clock", 10), [100.0]
    world.now_s = lambda: now[0]

    def tell(seconds: float) -> None:
        now[0] = seconds
        message = Clock()
        message.clock.sec, message.clock.nanosec = int(seconds), int(1e9 * (seconds % 1.0))
        clock.publish(message)
        world.until(lambda: abs(world.node.get_clock().now().nanoseconds / 1e9 - seconds) < 1e-3)

    def commanded(joints: np.ndarray) -> np.ndarray:
        """The joints that are commanded when they are measured to be `joints`."""
        world.measure(joints)
        count = len(sent)
        world.move(0.02, 0.0, 0.0, 0.0, 0.0, 0.0)
        world.until(lambda: len(sent) > count)
        return np.array(sent[-1].points[0].positions)

    world.until(lambda: clock.get_subscription_count() > 0)
    tell(100.0)
    assert np.abs(commanded(BENT) - BENT).max() < 0.1
    tell(99.0)
    world.move(0.02, 0.0, 0.0, 0.0, 0.0, 0.0)
    world.until(lambda: world.node._refused == 1)  # where it was before is no measurement
    home = BENT + np.eye(7)[0]
    assert np.abs(commanded(home) - home).max() < 0.1


def test_after_a_pause_the_hand_goes_on_from_where_it_is_also_when_the_clock_was_set_back(arm, tmp_path):
    world = jointed(arm, tmp_path, command_timeout_s=0.5, measurement_timeout_s=1e4)
    sent = world.listen(JointTrajectory, "joint_trajectory_controller/joint_trajectory")
    world.measure()
    world.move(0.02, 0.0, 0.0, 0.0, 0.0, 0.0)
    world.until(lambda: len(sent) == 1)
    world.node._commanded_s += 1000.0  # as if the time of day had been set back since
    home = BENT + np.eye(7)[0]
    world.measure(home)
    world.move(0.02, 0.0, 0.0, 0.0, 0.0, 0.0)
    world.until(lambda: len(sent) == 2)
    assert np.abs(np.array(sent[-1].points[0].positions) - home).max() < 0.1


def test_the_fingers_are_told_once_per_change_and_their_command_travels(arm):
    gripper = {"kind": "trajectory", "name": "gripper/joint_trajectory"}
    world = arm(output="twist", measured_pose="current_pose", gripper=gripper)
    sent = world.listen(JointTrajectory, "gripper/joint_trajectory")
    measured(world, world.partner.create_publisher(PoseStamped, "current_pose", 10))
    for number, direction in enumerate((1.0, 0.4, 0.0, -0.2, 0.0), 1):
        world.move(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, gripper=direction)
        world.until(lambda number=number: world.node._commands == number)
    world.until(lambda: len(sent) == 2)
    assert [message.joint_names for message in sent] == [FINGERS] * 2
    assert [list(message.points[0].positions) for message in sent] == [[0.0, 0.0], pytest.approx([0.04, 0.04])]
    assert world.measure(fingers=0.02)["gripper_command"].tolist() == [-0.75]


class Driver:
    """A gripper's action servers in place of rclpy's client: control_msgs and franka_msgs are not on PyPI.

    Its answers to goals: accept, reject, or silence (None). A goal that it has accepted is given up.
    """

    made: ClassVar[dict[str, "Driver"]] = {}

    def __init__(self, node: Any, kind: Any, name: str) -> None:
        self.goals: list[Any] = []
        self.ready, self.answer = True, True
        self.made[name] = self

    def server_is_ready(self) -> bool:
        return self.ready

    def send_goal_async(self, goal: Any) -> Future:
        self.goals.append((goal.width, goal.speed))
        handle = SimpleNamespace(accepted=self.answer, get_result_async=lambda: done(SimpleNamespace(status=6)))
        return Future() if self.answer is None else done(handle)

    def destroy(self) -> None:
        self.goals = []


def done(result: Any) -> Future:
    future = Future()
    future.set_result(result)
    return future


@pytest.fixture
def gripped(arm, monkeypatch) -> tuple[Arm, Driver, Driver]:
    """An arm, and the drivers that close and open its gripper."""

    def goal() -> Any:
        return SimpleNamespace(width=0.0, speed=0.0, force=0.0, epsilon=SimpleNamespace(inner=0.0, outer=0.0))

    monkeypatch.setattr("rclpy.action.ActionClient", Driver)
    monkeypatch.setattr(fingers_module, "types", lambda name: SimpleNamespace(Goal=goal))
    monkeypatch.setattr(fingers_module, "ANSWER_S", 0.3)
    gripper = {"kind": "franka", "name": "franka_gripper"}
    world = arm(output="twist", measured_pose="current_pose", gripper=gripper, command_timeout_s=0.5)
    grasp, move = (Driver.made[f"franka_gripper/{name}"] for name in ("grasp", "move"))
    measured(world, world.partner.create_publisher(PoseStamped, "current_pose", 10))
    return world, grasp, move


def test_a_goal_is_sent_when_the_direction_changes(gripped):
    world, grasp, move = gripped
    for number, direction in enumerate((1.0, 1.0, 0.0, -1.0), 1):
        world.move(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, gripper=direction)
        world.until(lambda number=number: world.node._commands == number)
    assert grasp.goals == [(0.0, pytest.approx(0.2))]
    assert move.goals == [(pytest.approx(0.08), pytest.approx(0.2))]


@pytest.mark.parametrize(
    ("answer", "cause"), [(False, "rejects the goal to close"), (None, "has not answered a goal for 0.3 s to close")]
)
def test_a_goal_that_is_not_accepted_is_sent_again_and_the_arm_waits(gripped, answer, cause):
    world, grasp, _ = gripped
    grasp.answer = answer
    world.move(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, gripper=1.0)
    world.until(lambda: len(grasp.goals) >= 3)  # also after commands have ended
    report = world.node.reports["arm"]()
    assert report.level == ERROR
    assert cause in report.message
    world.in_vain(world.measure)
    grasp.answer = True
    world.until(lambda: not world.node._fingers.fault)
    count = len(grasp.goals)
    world.measure()
    world.move(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, gripper=1.0)
    world.until(lambda: world.node._commands == 2)
    assert len(grasp.goals) <= count + 1
    assert report.values["goals_given_up_by_the_gripper"] == 0
    assert world.node.reports["arm"]().values["goals_given_up_by_the_gripper"] > 0


def test_an_arm_whose_grippers_driver_ends_is_not_measured(gripped):
    world, grasp, move = gripped
    world.measure()
    grasp.ready = move.ready = False
    world.in_vain(world.measure)
    assert "start the gripper's driver" in world.node.reports["arm"]().message


def test_an_arm_whose_grippers_driver_is_missing_is_not_measured_and_it_is_told(arm):
    gripper = {"kind": "trajectory", "name": "gripper/joint_trajectory"}
    world = arm(output="twist", measured_pose="current_pose", gripper=gripper)
    pose = world.partner.create_publisher(PoseStamped, "current_pose", 10)
    world.in_vain(lambda: measured(world, pose))
    assert "start the gripper's controller" in world.node.reports["arm"]().message
    world.listen(JointTrajectory, "gripper/joint_trajectory")
    world.measure()


def test_a_gripper_that_has_died_makes_every_measurement_old(arm):
    world = arm(output="twist", measured_pose="current_pose", measurement_timeout_s=0.5)
    measured(world, world.partner.create_publisher(PoseStamped, "current_pose", 10))
    died_s = world.now_s()
    for _ in range(20):
        world.joints.publish(stamped(JointState(name=NAMES, position=list(BENT)), world.now_s()))
        world.executor.spin_once(timeout_sec=0.05)
        time.sleep(0.05)
    world.executor.spin_once(timeout_sec=0.05)
    assert stamp_s(world.states[-1]) <= died_s  # it was fresh for as long as the arm was
    report = world.node.reports["arm"]()
    assert report.level == ERROR
    assert "left_finger was measured" in report.message
    world.move(0.2, 0.0, 0.0, 0.0, 0.0, 0.0)
    world.until(lambda: world.node._refused == 1)


def test_commands_that_come_late_are_not_carried_out(arm):
    world = arm(output="twist", measured_pose="current_pose", command_timeout_s=1.0)
    sent = world.listen(TwistStamped, "servo_node/delta_twist_cmds")
    measured(world, world.partner.create_publisher(PoseStamped, "current_pose", 10))
    action = np.array([0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    world.command.publish(TABLE.command.codec.encode({ACTION: action}, types, world.now_s() - 2.0))
    world.until(lambda: world.node._refused == 1)
    assert not sent


TWO_SOURCES = {"output": "pose", "measured_pose": "pose", "hand_frame": "hand"}
OTHER_NAMES = {"output": "pose", "measured_pose": "pose", "model_joints": JOINTS[1:]}
NO_POSE = {"output": "pose", "measured_pose": "pose", "base": [0.0]}


@pytest.mark.parametrize("settings", [{}, {"output": "pose"}, TWO_SOURCES, OTHER_NAMES, NO_POSE])
def test_impossible_settings_are_refused(settings, worlds, tmp_path):
    (tmp_path / "contract.json").write_text(LIBERO.to_json())
    usual = {"checkpoint": str(tmp_path), "options": ROW, "joints": NAMES}
    assert World(worlds, CartesianNode, usual | settings).node.trigger_configure().name == "FAILURE"


def test_a_scene_without_moving_parts_tells_the_instruction_that_was_said_last(worlds, tmp_path):
    (tmp_path / "contract.json").write_text(LIBERO.to_json())
    settings = {"checkpoint": str(tmp_path), "options": {"arrays": ["instruction"]}, "instruction": "pick up the soup"}
    world = World(worlds, SceneNode, settings)
    world.start()
    heard = world.listen(Float64MultiArray, "observation")
    codec = LabelledArrays({"instruction": LIBERO.observation["instruction"]})

    def told(text: str) -> bool:
        return bool(heard) and bytes(codec.decode(heard[-1])["instruction"]).rstrip(b"\0").decode() == text

    world.until(lambda: told("pick up the soup"))
    said = world.partner.create_publisher(String, "scene_node/instruction", 1)
    world.until(lambda: said.get_subscription_count() > 0)
    said.publish(String(data="pick up the milk"))
    world.until(lambda: told("pick up the milk"))
    world.node.trigger_deactivate()
