"""The program deadman_node."""

from real_robot.ros2.nodes.deadman import DeadmanNode
from real_robot.ros2.nodes.managed import spin


def main() -> None:
    """Run it."""
    spin(DeadmanNode)


if __name__ == "__main__":
    main()
