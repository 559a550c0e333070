"""The program safety_node."""

from real_robot.ros2.managed import spin
from real_robot.ros2.safety_node import SafetyNode


def main() -> None:
    """Run it."""
    spin(SafetyNode)


if __name__ == "__main__":
    main()
