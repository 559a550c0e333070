"""Entry point of policy_node."""

from real_robot.ros2.nodes.managed import spin
from real_robot.ros2.nodes.policy import PolicyNode

from .parts import load_policy


def main() -> None:
    """Run the node."""
    spin(lambda: PolicyNode(load_policy))


if __name__ == "__main__":
    main()
