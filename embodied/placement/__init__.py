"""Where the parts of a run are: in one process, in several that train together, or with collectors on a Ray cluster."""
