"""Robots by name: which arrays of a contract use which topic."""
