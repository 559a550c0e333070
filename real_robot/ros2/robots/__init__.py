"""Robots by name: which arrays of a contract travel on which topic."""
