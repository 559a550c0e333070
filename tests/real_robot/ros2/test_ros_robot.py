"""A robot behind topics: real publishers and subscriptions within one process."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from rclpy.time import Time
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool, Float64MultiArray, String

from embodied.contract import Contract, TensorSpec
from real_robot.ros2.messages.codecs import LabelledArrays
from real_robot.ros2.nodes.managed import ManagedNode
from real_robot.ros2.processes import claim_domain
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.robots.tables import (
    ACTION,
    COMMAND,
    Behaviour,
    Condition,
    Fixed,
    Heartbeat,
    Pause,
    Status,
    Table,
    Topic,
)
from real_robot.ros2.ros_robot import RosRobot
from real_robot.ros2.topics import types

CONTRACT = Contract({"position": TensorSpec((1,), unit="m")}, TensorSpec((1,), unit="m", low=(-1.0,), high=(1.0,)), 0.1)
STATE = LabelledArrays({"position": CONTRACT.observation["position"]})
JOINTS = ("shoulder", "elbow")
ANGLES = TensorSpec((2,), unit="rad", names=JOINTS)
TWO_JOINTS = Contract({"joint_position": ANGLES}, ANGLES, 0.05)


@dataclass
class Nothing:
    """No settings."""


def word(text: str) -> Fixed:
    return Fixed("said", "std_msgs/msg/String", {"data": text})


ARM = Behaviour(messages=(word("arm"),))
CONDITIONS = {
    "idle": Condition(follows=False, fault="idle", stopped=True, request=ARM),
    "follows": Condition(follows=True),
    "flown": Condition(follows=False, fault="somebody else flies"),
}
TABLE = Table(
    "drone",
    (Topic("observation", STATE, COMMAND),),
    Topic("action", LabelledArrays({ACTION: CONTRACT.action}), COMMAND),
    0.1,
    None,
    hold=Behaviour(messages=(word("hold"),)),
    emergency=Behaviour(messages=(word("off"),)),
    heartbeat=Heartbeat(Fixed("alive", "std_msgs/msg/Bool", {"data": True}), rate_hz=50.0, before_s=0.0),
    status=Status("status", "std_msgs/msg/String", COMMAND, lambda m: CONDITIONS[m.data], (ARM,), 60.0),
    pause=Pause(60.0),
)


def commander() -> ManagedNode:
    node = ManagedNode("commander", Nothing)
    if not node.has_parameter("use_sim_time"):
        node.declare_parameter("use_sim_time", False)
    return node


class World:
    """The node of the robot, and a node that is the drone."""

    def __init__(self) -> None:
        self.node = commander()
        self.drone = rclpy.create_node("drone")
        self.robot = RosRobot(self.node, TABLE)
        self.said: list[str] = []
        self.beats = self.commanded = 0
        self.drone.create_subscription(Float64MultiArray, "action", self._command, 100)
        self.drone.create_subscription(String, "said", lambda m: self.said.append(m.data), 100)
        self.drone.create_subscription(Bool, "alive", self._count, 100)
        self.status = self.drone.create_publisher(String, "status", 1)
        self.observation = self.drone.create_publisher(Float64MultiArray, "observation", 1)
        self.executor = SingleThreadedExecutor()
        for node in (self.node, self.drone):
            self.executor.add_node(node)
        self.until(lambda: self.status.get_subscription_count() and self.observation.get_subscription_count())
        self.until(lambda: all(self.node.count_subscribers(name) for name in ("said", "alive", "action")))

    def _count(self, message: Bool) -> None:
        self.beats += 1

    def _command(self, message: Float64MultiArray) -> None:
        self.commanded += 1

    def write(self) -> None:
        self.robot.write(np.zeros(1))

    def until(self, condition) -> None:
        for _ in range(400):
            if condition():
                return
            self.executor.spin_once(timeout_sec=0.05)
        raise AssertionError("waited in vain")

    def spin(self, times: int = 20) -> None:
        for _ in range(times):
            self.executor.spin_once(timeout_sec=0.01)

    def measure(self) -> None:
        now_s = self.node.get_clock().now().nanoseconds / 1e9
        self.observation.publish(STATE.encode({"position": np.zeros(1)}, types, now_s))


@pytest.fixture
def world() -> Iterator[World]:
    rclpy.init(domain_id=claim_domain()[1])
    yield World()
    rclpy.shutdown()


def test_a_robot_that_others_fly_too_is_asked_followed_and_left(world: World):
    robot = world.robot
    robot.engage()
    world.measure()
    world.spin()
    assert robot.read() is None  # who flies it is not known yet
    assert "no message on status" in robot.report().message
    world.status.publish(String(data="idle"))
    world.until(lambda: robot.read() is not None)
    world.write()
    world.until(lambda: world.said == ["arm"] and world.beats > 2)
    world.write()
    world.spin()
    assert (world.said, world.commanded) == (["arm"], 0)
    world.status.publish(String(data="idle"))  # the request has had no effect
    world.until(lambda: world.said == ["arm", "arm"])
    world.status.publish(String(data="follows"))
    world.until(lambda: not robot.report().message.startswith("idle"))
    world.write()
    world.until(lambda: world.commanded == 1)
    robot.hold()  # a command may be late
    world.spin()
    assert world.said == ["arm", "arm"]
    robot.leave("it was enough")
    world.until(lambda: world.said[2:] == ["hold"])
    beats = world.beats
    world.write()
    world.spin()
    assert world.commanded == 1
    assert world.beats <= beats + 1  # its own failsafe stands behind our hold
    assert robot.report().message == "it was enough; it gets nothing from here before ~/reset"
    world.status.publish(String(data="flown"))
    world.until(lambda: robot._condition == CONDITIONS["flown"])
    said = list(world.said)
    world.write()
    robot.hold()
    world.spin()
    assert world.said == said
    robot.stopped = True
    robot.hold()
    world.until(lambda: world.said[-3:] == ["off", "off", "off"])
    world.status.publish(String(data="idle"))
    world.until(lambda: robot._engagement.stopped)
    world.spin()
    said = list(world.said)
    world.spin()
    assert world.said == said


def test_joint_states_of_a_gripper_do_not_hold_the_arm():
    rclpy.init(domain_id=claim_domain()[1])
    try:
        node = commander()
        robot = RosRobot(node, robot_table("forward_position", TWO_JOINTS, {"rate_hz": 20.0, "joints": JOINTS}))
        robot._hear(robot._table.states[0], JointState(name=["elbow", "shoulder"], position=[0.2, 0.1]))
        before = robot.read()
        robot._hear(robot._table.states[0], JointState(name=["finger"], position=[0.04]))
        assert robot.read() is before is not None  # neither refused nor taken for a new measurement
        assert "without joints" in robot.report().values["ignored"]
        robot._hear(robot._table.states[0], JointState(name=["elbow", "shoulder"], position=[0.2]))
        assert robot.read() is None
        assert "expected 2 elements of position, got 1" in robot.report().values["unreadable"]
    finally:
        rclpy.shutdown()


def test_a_measurement_of_several_topics_has_the_stamp_of_each():
    rclpy.init(domain_id=claim_domain()[1])
    try:
        table = robot_table("forward_position", TWO_JOINTS, {"rate_hz": 20.0, "joints": JOINTS})
        (joints,), other = table.states, Topic("other", STATE, COMMAND)
        robot = RosRobot(commander(), replace(table, states=(joints, other)))
        message = JointState(name=list(JOINTS), position=[0.1, 0.0])
        message.header.stamp.sec = 3
        robot._hear(joints, message)
        robot._hear(other, STATE.encode({"position": np.zeros(1)}, types, 2.0))
        reading = robot.read()
        assert (reading.stamp_s, reading.newest_s) == (2.0, 3.0)
        assert reading.stamps == {"joint_position": 3.0, "position": 2.0}
    finally:
        rclpy.shutdown()


def test_a_measurement_that_a_simulator_repeats_begins_no_other_period():
    """In lock-step a measurement without an answer is sent again; a policy that is slow would act on it twice."""
    rclpy.init(domain_id=claim_domain()[1])
    try:
        node = commander()
        node.set_parameters([Parameter("use_sim_time", value=True)])
        table, periods = robot_table("forward_position", TWO_JOINTS, {"rate_hz": 20.0, "joints": JOINTS}), []
        (topic,), goal = table.states, Topic("goal", STATE, COMMAND, lasting=True)
        robot = RosRobot(node, replace(table, states=(topic, goal)), measured=lambda: periods.append(robot.read()))

        def measured(nanosec: int) -> None:
            message = JointState(name=list(JOINTS), position=[0.1, 0.0])
            message.header.stamp.nanosec = nanosec
            robot._hear(topic, message)

        robot._hear(goal, STATE.encode({"position": np.zeros(1)}, types, 0.1))
        measured(0)
        assert not periods  # its command would be lost
        node.create_subscription(Float64MultiArray, table.command.name, print, 1)
        deadline = time.monotonic() + 20.0
        while not robot.has_subscriber and time.monotonic() < deadline:
            time.sleep(0.01)
        for nanosec in (0, 0, 50_000_000, 50_000_000, 50_000_000, 100_000_000):  # a stamp of zero means none in ROS
            measured(nanosec)
        assert [period.stamp_s for period in periods] == [0.0, 0.05, 0.1]
        robot.start()
        measured(100_000_000)  # a node that is activated again begins with what the simulator repeats
        assert len(periods) == 4
        node.get_clock().set_ros_time_override(Time(nanoseconds=150_000_000))
        measured(100_000_000)  # time goes on: of somebody who measures more slowly than others
        assert len(periods) == 5
        robot._hear(goal, STATE.encode({"position": np.ones(1)}, types, 0.1))  # set by people, whatever the clock does
        assert robot.read().observation["position"] == 1.0
        robot._hear(goal, STATE.encode({"position": np.ones(1)}, types, 1.8e9))  # from RViz, in the time of day
        assert robot.clock() < 1.0
        assert robot.read().observation["position"] == 1.0
    finally:
        rclpy.shutdown()
