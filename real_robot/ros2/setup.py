"""The ament_python package `embodied_ros2`, which `colcon build` installs in addition to the installed embodied-rl.

It contains only entry points and launch files; their code is in `real_robot.ros2`, part of embodied-rl.
"""

from glob import glob

from setuptools import setup

PACKAGE = "embodied_ros2"
NODES = ("policy_node", "safety_node", "cartesian_node", "scene_node", "sim_node")

if __name__ == "__main__":  # importing it builds nothing
    setup(
        name=PACKAGE,
        version="0.2.0",
        description="Runs policies trained with embodied-rl on robots that speak ROS 2",
        license="Apache-2.0",
        packages=[PACKAGE],
        data_files=[
            ("share/ament_index/resource_index/packages", [f"resource/{PACKAGE}"]),
            (f"share/{PACKAGE}", ["package.xml"]),
            (f"share/{PACKAGE}/launch", glob("launch/*.launch.py")),
            (f"share/{PACKAGE}/launch/config", glob("launch/config/*.yaml")),
        ],
        install_requires=["setuptools"],
        entry_points={"console_scripts": [f"{node} = {PACKAGE}.{node}:main" for node in NODES]},
    )
