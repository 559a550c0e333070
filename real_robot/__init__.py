"""Real robots: the same policies and contracts, outside a simulator."""
