"""Functions of rows, traced once: plain torch is the reference, generated C with gradients is fast."""
