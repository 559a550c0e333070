"""The ROS 2 nodes, their common base, and the table of nodes that are launched together."""
