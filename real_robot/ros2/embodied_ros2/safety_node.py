"""Entry point of safety_node."""

from real_robot.ros2.nodes.managed import spin
from real_robot.ros2.nodes.safety import SafetyNode


def main() -> None:
    """Run the node."""
    spin(SafetyNode)


if __name__ == "__main__":
    main()
