"""The training loop, and experiments with stages, evaluation and checkpoints."""
