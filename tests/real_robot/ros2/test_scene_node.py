"""scene_node within one process: vision_msgs need not be installed."""

import pytest

from real_robot.ros2 import topics
from real_robot.ros2.messages.codecs import set_stamp, stamp_s
from real_robot.ros2.nodes import scene
from real_robot.ros2.nodes.managed import OK, WARN, Report
from tests.real_robot.ros2.in_process import Graph, InProcess, interfaces
from tests.real_robot.ros2.messages.test_cartesian_codecs import detection
from tests.real_robot.ros2.test_cartesian_node import LIBERO, ROW


class Node(scene.SceneNode, InProcess):
    """scene_node, in process."""


@pytest.mark.parametrize("stamped", [True, False])
def test_detections_become_old_and_are_reported(stamped, tmp_path, monkeypatch):
    for module in (topics, scene):
        monkeypatch.setattr(module, "types", interfaces)
    (tmp_path / "contract.json").write_text(LIBERO.to_json())
    Node.graph = graph = Graph()
    node, stamps = Node(), []
    node.settings = scene.SceneSettings(str(tmp_path), options=ROW, objects=["soup", "basket"], detections="detections")
    node.configure()
    graph.heard["observation"].append(lambda message: stamps.append(stamp_s(message)))
    node.activate()

    def let_pass(seconds: float, *seen: str) -> Report:
        for _ in range(round(seconds / LIBERO.control_dt_s)):
            message = interfaces("vision_msgs/msg/Detection3DArray")()
            set_stamp(message, graph.ros_s if stamped else 0.0, "world")
            message.detections = [detection(name, 1.0, 0.3) for name in seen]
            graph.send("detections", message)
            graph.tick(LIBERO.control_dt_s)
        return node.reports["scene"]()

    assert let_pass(0.5).message == "not detected yet: soup, basket"
    assert let_pass(0.5, "soup", "basket").level == OK
    assert graph.ros_s - stamps[-1] <= LIBERO.control_dt_s + 1e-6
    report = let_pass(20.0, "soup")
    assert (report.level, report.message) == (WARN, "the oldest pose, of basket, is 20 s old")
    assert graph.ros_s - stamps[-1] == pytest.approx(20.0, abs=0.1)
    assert let_pass(0.1, "soup", "basket").level == OK
    node.jump_back(100.0)  # a simulator is reset
    assert let_pass(0.1, "soup").message == "not detected yet: basket"
