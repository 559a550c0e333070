"""Gymnasium in both directions: its environments as ours, and ours for libraries that train on Gymnasium's."""
