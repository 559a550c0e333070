"""Success rates, reports, curves, films, and simulators held against robots."""
