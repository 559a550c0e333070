"""recorder_node with publishers of every QoS: what is kept of them, and how what is lost is told."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from diagnostic_msgs.msg import DiagnosticArray
from mcap.reader import make_reader
from mcap_ros2.decoder import DecoderFactory
from rclpy.qos import QoSDurabilityPolicy, QoSProfile, QoSReliabilityPolicy
from sensor_msgs.msg import Image
from std_msgs.msg import String

from embodied.contract import Contract, TensorSpec
from real_robot.ros2.nodes.recorder import matching
from real_robot.ros2.processes import Processes

CONTRACT = Contract({"position": TensorSpec((3,))}, TensorSpec((1,)), control_dt_s=0.1)
RELIABLE, BEST_EFFORT = QoSReliabilityPolicy.RELIABLE, QoSReliabilityPolicy.BEST_EFFORT
LATCHED = QoSProfile(depth=5, durability=QoSDurabilityPolicy.TRANSIENT_LOCAL)
IMAGE, TEXT = "sensor_msgs/msg/Image", "std_msgs/msg/String"


class Recorded(Processes):
    """recorder_node, and what it says."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.report: tuple[str, dict[str, str]] = ("", {})
        self.node.create_subscription(DiagnosticArray, "/diagnostics", self._hear, 50)
        (directory / "contract.json").write_text(json.dumps(CONTRACT.to_dict()))
        topics = [f"/camera {IMAGE}", f"/poor_camera {IMAGE}", f"/map {TEXT}", f"/never {TEXT}"]
        settings = {"checkpoint": str(directory / "contract.json"), "directory": str(directory), "topics": topics}
        self.start("recorder_node", settings)
        self.change("recorder_node", "configure")

    def _hear(self, message: DiagnosticArray) -> None:
        for status in message.status:
            if status.name == "/recorder_node: recording":
                self.report = status.message, {entry.key: entry.value for entry in status.values}

    def publish(self, topic: str, profile: QoSProfile, frames: int) -> None:
        """Publish pictures of 640x480, of which best effort loses most, numbered by their stamps."""
        out = self.node.create_publisher(Image, topic, profile)
        self.wait(lambda: out.get_subscription_count() == 1, "the recorder to listen")
        picture = Image(height=480, width=640, step=1920, encoding="rgb8", data=bytes(480 * 640 * 3))
        for number in range(frames):
            picture.header.stamp.sec = number
            out.publish(picture)
            self.spin(1 / 30)
        self.pictures = out


@pytest.fixture
def robot(tmp_path: Path) -> Iterator[Recorded]:
    with Recorded(tmp_path) as nodes:
        yield nodes


def read(path: Path) -> dict[str, list]:
    found: dict[str, list] = {}
    with path.open("rb") as file:
        for _, channel, _, message in make_reader(file, decoder_factories=[DecoderFactory()]).iter_decoded_messages():
            found.setdefault(channel.topic, []).append(message)
    return found


def test_pictures_arrive_and_what_was_published_before_is_there(robot: Recorded):
    early = robot.node.create_publisher(String, "/map", LATCHED)
    for text in ("floor", "walls"):
        early.publish(String(data=text))
    for _ in range(2):
        robot.change("recorder_node", "activate")
        robot.publish("/camera", QoSProfile(depth=2, reliability=RELIABLE), 60)
        robot.wait(lambda: float(robot.report[1].get("messages", 0)) >= 62, "all messages")
        assert robot.report[0] == "recording"
        assert robot.report[1]["not published"].endswith("/poor_camera, /never")
        robot.change("recorder_node", "deactivate")
        robot.node.destroy_publisher(robot.pictures)
        path = max(robot.directory.glob("20*.mcap"))
        found = read(path)
        assert [picture.header.stamp.sec for picture in found["/camera"]] == list(range(60))
        assert [text.data for text in found["/map"]] == ["floor", "walls"]  # in each file
        robot.report = "", {}
        path.unlink()


def test_lost_pictures_are_counted_and_a_remedy_is_told(robot: Recorded):
    robot.change("recorder_node", "activate")
    robot.publish("/poor_camera", QoSProfile(depth=2, reliability=BEST_EFFORT), 60)
    robot.wait(lambda: "were lost on their way here" in robot.report[0], "the loss")
    assert "reliable QoS" in robot.report[0]
    robot.wait(lambda: "lost /poor_camera" in robot.report[1], "the count")
    robot.publish("/camera", QoSProfile(depth=2, reliability=RELIABLE), 5)
    robot.wait(lambda: "/camera" not in robot.report[1]["not published"].split(", "), "another report")
    lost = int(robot.report[1]["lost /poor_camera"])
    robot.change("recorder_node", "deactivate")
    arrived = len(read(next(robot.directory.glob("20*.mcap"))).get("/poor_camera", []))
    assert 50 <= arrived + lost <= 60  # DDS counts from the first message that arrives, to the last


def test_qos_is_the_strictest_that_hears_all_publishers():
    sure, poor = (QoSProfile(depth=1, reliability=each) for each in (RELIABLE, BEST_EFFORT))
    assert matching([]) is None
    assert matching([sure, sure]).reliability == RELIABLE
    assert matching([sure, poor]).reliability == BEST_EFFORT
    assert matching([LATCHED]).durability == QoSDurabilityPolicy.TRANSIENT_LOCAL
    assert matching([LATCHED, sure]).durability == QoSDurabilityPolicy.VOLATILE
