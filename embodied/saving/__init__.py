"""Files that are complete or absent, with checksums, and what later runs may continue from them."""
