"""Neutral functions of rows, traced once: plain torch is the oracle, generated C with gradients is fast."""
