"""Tasks on MJCF models; each is one Python file next to its model."""
