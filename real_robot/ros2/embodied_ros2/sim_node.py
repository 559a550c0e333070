"""Entry point of sim_node."""

from real_robot.ros2.nodes.managed import spin
from real_robot.ros2.nodes.sim import SimNode

from .parts import load_environment


def main() -> None:
    """Run the node."""
    spin(lambda: SimNode(load_environment))


if __name__ == "__main__":
    main()
