"""Files that are complete or absent, with checksums."""
