"""ROS messages <-> arrays: codecs, and the one place that converts frames and units."""
