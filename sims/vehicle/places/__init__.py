"""Surroundings of vehicles: rooms with people, and tracks."""
