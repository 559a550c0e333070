"""Deployment of policies: exportable networks, real-time chunks, latencies."""
