"""One file tells one algorithm."""
