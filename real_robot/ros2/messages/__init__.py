"""ROS messages <-> arrays: codecs, and the only place that converts frames and units."""
