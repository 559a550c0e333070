"""Entry point of cartesian_node."""

from real_robot.ros2.nodes.cartesian import CartesianNode
from real_robot.ros2.nodes.managed import spin


def main() -> None:
    """Run the node."""
    spin(CartesianNode)


if __name__ == "__main__":
    main()
