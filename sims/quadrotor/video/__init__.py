"""Flights on film and in figures."""
