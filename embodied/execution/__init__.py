"""Execution of action chunks: overlap, delay."""
