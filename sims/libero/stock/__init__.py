"""Stock LIBERO (robosuite 1.4.0) in a virtual environment of its own, for evaluations and benchmarks."""
