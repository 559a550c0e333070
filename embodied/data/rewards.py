"""Check of recorded rewards, for learners of values."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.data.episodes import UNKNOWN, Episodes
from embodied.errors import UserError


def check_rewards(episodes: Episodes, without: str = "stages=[sft]") -> None:
    """Check that all rewards are known; the error suggests the option `without`, which does not read them.

    Raises:
        UserError: with the data sets that have unknown ones, and an option for them.
    """
    step = episodes.reward.isnan().nonzero().squeeze(1)
    if not len(step):
        return
    unknown = torch.zeros(len(episodes.ends), dtype=torch.bool)
    unknown[torch.searchsorted(episodes.ends, step, right=True)] = True
    dataset = torch.zeros_like(episodes.ends) if episodes.dataset_index is None else episodes.dataset_index
    parts = [_described(episodes, dataset == number, unknown, int(number)) for number in dataset[unknown].unique()]
    if bool((episodes.success[unknown] == UNKNOWN).any()):
        advice = (
            "add 'demonstration_columns={reward:NAME}', or demonstration_rewards=success with a known success,"
            " 'demonstration_columns={success:NAME}', or {success:true} for all episodes"
        )
    else:
        advice = "add demonstration_rewards=success, 1 at the end of an episode that succeeded"
    raise UserError(f"rewards are unknown in {' and in '.join(parts)}: {advice}; or use {without}")


def _described(episodes: Episodes, of_dataset: Tensor, unknown: Tensor, number: int) -> str:
    """Number of episodes with unknown rewards in data set `number`, and its name."""
    name = episodes.sources[number] if episodes.sources else "the demonstrations"
    return f"{int((of_dataset & unknown).sum()):,} of {int(of_dataset.sum()):,} episodes of {name}"
