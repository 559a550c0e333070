"""Placements of the parts of a run: in one process, in several that train together, or with collectors on a cluster."""
