"""LIBERO (arXiv 2306.03310): its tasks, its scenes composed from MJCF, its physics on plain MuJoCo."""
