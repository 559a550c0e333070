"""Programs of the ROS 2 package: they connect policies and simulators with the nodes in `real_robot.ros2`."""
