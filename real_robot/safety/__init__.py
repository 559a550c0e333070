"""Checks between commands and a robot: limits, distance, energy, and the only caller of `write`."""
