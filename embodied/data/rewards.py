"""Check of recorded rewards, for learners of values."""

from __future__ import annotations

import torch

from embodied.data.episodes import Episodes
from embodied.errors import UserError


def check_rewards(episodes: Episodes) -> None:
    """Check that all rewards are known.

    Raises:
        UserError: with the number of episodes that have unknown ones.
    """
    if len(steps := episodes.reward.isnan().nonzero().squeeze(1)):
        unknown = torch.searchsorted(episodes.ends, steps, right=True).unique()
        count = f"{len(unknown):,} of {len(episodes.ends):,} episodes of the demonstrations"
        raise UserError(f"rewards are unknown in {count}: use episodes recorded with rewards, or stages=[sft]")
