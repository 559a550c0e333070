"""Simulators, each behind the Environment protocol."""
