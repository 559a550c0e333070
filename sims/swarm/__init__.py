"""Swarms of quadrotors among obstacles: worlds of drones beside the single ones, on the same dynamics."""
