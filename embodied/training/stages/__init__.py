"""Stages of a run, which an experiment walks in order."""
