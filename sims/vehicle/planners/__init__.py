"""Planners that drive without learning: baselines, with and without a map."""
