"""Who sends a Crazyflie what: RosRobot with Crazyswarm2's services and a firmware's supervisor, in process."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from real_robot.ros2 import ros_robot
from real_robot.ros2.nodes.managed import ERROR
from real_robot.ros2.robots.quadrotors import CRAZYFLIE_ARMED, CRAZYFLIE_LOCKED, CRAZYFLIE_TUMBLED
from real_robot.ros2.robots.registry import robot_table
from real_robot.ros2.ros_robot import RosRobot
from tests.real_robot.ros2.in_process import Graph, InProcess, interfaces
from tests.real_robot.ros2.robots.test_tables import ATTITUDE, FULL_STATE, flying

SERVICES = ("arm", "notify_setpoints_stop", "land", "emergency")


@dataclass
class Nothing:
    """No settings."""


class Crazyflie:
    """Crazyswarm2 with one Crazyflie, and a policy that commands it."""

    def __init__(self, row: str, info: int, services: tuple[str, ...] = SERVICES) -> None:
        self.graph, self.info, self.calls = Graph(), info, []
        self.got: list[Any] = []
        node = type("Node", (InProcess,), {"graph": self.graph})("commander", Nothing)
        contract = flying(ATTITUDE if row == "crazyswarm2" else FULL_STATE)
        table = robot_table(row, contract, {"rate_hz": 100.0, "arrays": ["angular_velocity"]})
        self.table = table
        self.robot = RosRobot(node, table)
        self.graph.heard[table.command.name].append(self.got.append)
        for service in services:
            self.serve(service)
        self.report = node.reports["robot"]
        self.robot.engage()

    def serve(self, name: str) -> None:
        def answer(request: Any, response: Any) -> None:
            self.calls.append(name)
            self.info |= {"emergency": CRAZYFLIE_LOCKED, "arm": CRAZYFLIE_ARMED}.get(name, 0)

        self.graph.services[name] = answer

    def run(self, seconds: float, commands: bool = True) -> None:
        for step in range(round(seconds / 0.01)):
            if step % 50 == 0:
                status = interfaces("crazyflie_interfaces/msg/Status")()
                status.supervisor_info = self.info
                self.graph.send("status", status)
            if commands:
                self.robot.write(np.array(self.table.contract.action.high))
            self.graph.tick(0.01)


@pytest.fixture(autouse=True)
def without_ros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ros_robot, "types", interfaces)


@pytest.mark.parametrize("row", ["crazyswarm2", "crazyswarm2_full_state"])
@pytest.mark.parametrize("info", [0, CRAZYFLIE_ARMED])
def test_it_is_armed_and_unlocked_before_the_first_command(row: str, info: int):
    flown = Crazyflie(row, info)
    flown.run(1.0, commands=False)
    assert (flown.got, flown.calls) == ([], [])
    flown.run(1.0)
    assert flown.calls == ["arm"]
    assert len(flown.got) > 90
    if row == "crazyswarm2":
        assert flown.got[0].linear.z == 0.0  # the firmware wants a thrust of zero first
        assert flown.got[1].linear.z == 60000.0
    assert flown.report().message == "nothing readable on odom, observation"  # which are not sent here


def test_it_lands_when_commands_stop_and_does_not_take_off_again_by_itself():
    flown = Crazyflie("crazyswarm2", CRAZYFLIE_ARMED)
    flown.run(1.0)
    flown.run(0.05, commands=False)
    flown.run(0.5)
    assert flown.calls == ["arm"]  # a late command changes nothing
    flown.run(1.0, commands=False)
    assert flown.calls == ["arm", "notify_setpoints_stop", "land"]
    count = len(flown.got)
    flown.run(3.0)
    assert len(flown.got) == count
    assert flown.report().level == ERROR
    flown.robot.engage()
    flown.run(0.5)
    assert flown.got[count].linear.z == 0.0
    assert len(flown.got) > count + 40


@pytest.mark.parametrize(("bit", "word"), [(CRAZYFLIE_LOCKED, "locked"), (CRAZYFLIE_TUMBLED, "tumbled")])
def test_anybodys_emergency_and_a_crash_end_it(bit: int, word: str):
    flown = Crazyflie("crazyswarm2", CRAZYFLIE_ARMED)
    flown.run(1.0)
    flown.info |= bit
    flown.run(0.6)
    count = len(flown.got)
    flown.info &= ~bit  # rebooted
    flown.run(3.0)
    assert len(flown.got) == count
    assert flown.calls == ["arm"]
    assert f"is {word}: reboot it" in flown.report().message


def test_an_emergency_stop_is_repeated_until_the_firmware_is_locked():
    flown = Crazyflie("crazyswarm2", CRAZYFLIE_ARMED, services=("arm", "land"))
    flown.run(1.0)
    flown.robot.stopped = True
    flown.robot.hold()
    flown.run(4.0, commands=False)
    assert "does not confirm the emergency stop" in flown.report().message
    flown.serve("emergency")
    flown.run(2.0, commands=False)
    count = flown.calls.count("emergency")
    assert 1 < count < 30  # not one for each period in which it was missing
    flown.run(2.0, commands=False)
    assert flown.calls.count("emergency") == count


def test_a_request_to_land_that_found_no_service_is_dropped_by_the_next_flight():
    flown = Crazyflie("crazyswarm2", CRAZYFLIE_ARMED, services=("arm",))
    flown.run(1.0)
    flown.run(1.0, commands=False)
    flown.robot.engage()
    flown.run(0.5)
    for name in ("land", "notify_setpoints_stop"):
        flown.serve(name)
    flown.run(0.5)
    assert flown.calls == ["arm", "arm"]


def test_a_request_to_arm_that_found_no_service_is_dropped_with_the_flight():
    flown = Crazyflie("crazyswarm2", 0, services=())
    flown.run(1.0)
    flown.info |= CRAZYFLIE_TUMBLED
    flown.run(1.0)
    flown.serve("arm")
    flown.run(1.0)
    assert flown.calls == []


def test_a_silent_crazyflie_gets_nothing():
    flown = Crazyflie("crazyswarm2", CRAZYFLIE_ARMED)
    flown.run(1.0)
    flown.graph.lost = lambda topic: topic == "status"
    flown.run(4.0)
    count = len(flown.got)
    flown.graph.lost = lambda topic: False
    flown.run(2.0)
    assert len(flown.got) == count
    assert flown.calls[1:] == ["notify_setpoints_stop", "land"]
