"""Conversion between ROS messages and arrays: codecs, and the only module that converts frames and units."""
