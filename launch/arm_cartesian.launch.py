"""A policy on an arm's hand and gripper: like arm.launch.py, with cartesian_node and scene_node.

ros2 launch embodied_ros2 arm_cartesian.launch.py checkpoint:=/path/to/run (more with --show-args)
"""

from pathlib import Path

from embodied_ros2.launching import description
from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    """For ros2 launch."""
    return description("arm_cartesian", Path(__file__).parent)
