"""The core: contracts, environments, policies, rollouts, algorithms, training, evaluation and deployment."""

import os

# OpenMP reads this when PyTorch loads it. Otherwise its threads spin while they wait for each other, and where another
# process needs the cores, too, a small network's step takes 10 to 100 times as long (benchmarks/shared_cores.py).
if "GOMP_SPINCOUNT" not in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
