"""ROS 2: robot tables, codecs and nodes."""
