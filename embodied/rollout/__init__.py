"""Rollouts: what policies collect in environments, and from which initial states."""
