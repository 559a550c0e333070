"""Policies: networks that turn observations into action chunks and compute the log-probability of their samples."""

import embodied  # noqa: F401 - sets how OpenMP waits, before PyTorch is loaded
