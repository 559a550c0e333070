"""Interfaces of robots by name: the topic of each array of a contract."""
