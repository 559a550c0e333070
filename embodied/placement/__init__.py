"""Where the parts of a run are: in one process, or in several that train together."""
