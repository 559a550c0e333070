"""Exported policies: their networks and the conditions that they were trained for."""
