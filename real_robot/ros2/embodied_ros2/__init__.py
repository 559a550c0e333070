"""Programs of the ROS 2 package: they join policies and simulators with the nodes in `real_robot.ros2`."""
