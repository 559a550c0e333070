"""Programs as processes: standard streams, the console, progress, interruption, and the guard against foreign code."""
