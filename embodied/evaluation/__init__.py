"""Success rates, reports, learning curves, videos, and comparisons of simulators with robots."""
