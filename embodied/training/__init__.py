"""Training loop, and experiments with stages, evaluation and checkpoints."""
