"""Programs of the ROS 2 package, which connect policies and simulators with the nodes in `real_robot.ros2`."""
