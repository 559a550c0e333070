"""Entry point of scene_node."""

from real_robot.ros2.nodes.managed import spin
from real_robot.ros2.nodes.scene import SceneNode


def main() -> None:
    """Run the node."""
    spin(SceneNode)


if __name__ == "__main__":
    main()
