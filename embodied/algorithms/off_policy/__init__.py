"""Learners of values of actions, from stored transitions."""
