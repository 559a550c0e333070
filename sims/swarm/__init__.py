"""Swarms of quadrotors among obstacles, on the same dynamics as the single ones."""
