"""Simulators, each with the Environment protocol."""

import embodied  # noqa: F401 - sets how OpenMP waits, before PyTorch is loaded
