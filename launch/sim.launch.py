"""A policy and its simulator over ROS topics, in real time, as a test before a robot moves.

ros2 launch embodied_ros2 sim.launch.py checkpoint:=/path/to/run (more with --show-args)
"""

from pathlib import Path

from embodied_ros2.launching import description
from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    """For ros2 launch."""
    return description("sim", Path(__file__).parent)
