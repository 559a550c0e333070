"""The program recorder_node."""

from real_robot.ros2.nodes.managed import spin
from real_robot.ros2.nodes.recorder import RecorderNode


def main() -> None:
    """Run it."""
    spin(RecorderNode)


if __name__ == "__main__":
    main()
