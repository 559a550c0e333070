"""Algorithms, one per file."""
