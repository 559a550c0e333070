"""Batched, differentiable quadrotors from one source: torch is the reference, generated C is fast."""
