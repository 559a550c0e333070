"""A policy on an arm: safety_node runs, policy_node waits for its activation.

ros2 launch embodied_ros2 arm.launch.py checkpoint:=/path/to/run (more with --show-args)
"""

from pathlib import Path

from embodied_ros2.launching import description
from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    """For ros2 launch."""
    return description("arm", Path(__file__).parent)
