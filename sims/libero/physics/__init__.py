"""Stepping: many simulations at once, compiled, with robosuite's controller."""
