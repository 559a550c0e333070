"""A policy and its simulator over ROS topics, in lock-step and recorded: episodes to compare with a robot's.

ros2 launch embodied_ros2 sim_to_real_eval.launch.py checkpoint:=/path/to/run (more with --show-args)
"""

from pathlib import Path

from embodied_ros2.launching import description
from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    """For ros2 launch."""
    return description("sim_to_real_eval", Path(__file__).parent)
