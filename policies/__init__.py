"""Policies: networks that turn observations into action chunks and compute the log-probability of their samples."""
