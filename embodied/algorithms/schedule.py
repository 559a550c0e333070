"""Learning rate schedules over a run."""

from __future__ import annotations

from torch.optim import Optimizer


def linear_decay(optimiser: Optimizer, progress: float, final_lr_share: float, *rates: float) -> None:
    """Set the learning rate of each parameter group: linear from its entry in `rates` to `final_lr_share` of that."""
    # rate(p) = rate_0 (1 - (1 - share) p), p from 0 to 1 over the run
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        group["lr"] = rate * (1.0 - (1.0 - final_lr_share) * progress)
