"""What every test shares: no time limits, one thread of torch, no figures on a screen."""

import os

os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import torch

hypothesis.settings.register_profile("house", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("house")
torch.set_num_threads(1)
