"""Simulators, each with the Environment protocol."""
