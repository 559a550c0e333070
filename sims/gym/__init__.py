"""Gymnasium in both directions: its environments as ours, and ours for the libraries that train on its."""
