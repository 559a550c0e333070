"""Tasks on MJCF models, each one file beside its model."""
