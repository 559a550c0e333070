"""Real robots: the same policies and contracts, outside a simulator."""

import embodied  # noqa: F401 - sets how OpenMP waits, before PyTorch is loaded
