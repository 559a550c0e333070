"""Learners that train on rollouts of the present policy."""
