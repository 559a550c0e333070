"""A simulator held to the robot: one policy on several back ends, and parameters identified."""
