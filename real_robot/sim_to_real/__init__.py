"""Comparison of a simulator with the robot: one policy on several back ends, and system identification."""
