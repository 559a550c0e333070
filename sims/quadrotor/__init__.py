"""Batched, differentiable quadrotors from one source: torch is the oracle, generated C and CUDA are fast."""
