"""Videos and figures of flights."""
