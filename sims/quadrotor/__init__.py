"""Batched, differentiable quadrotors from one source: torch is the oracle, generated C is fast."""
