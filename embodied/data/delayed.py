"""Recorded episodes as a learner under an inference delay reads them. Letters: S control steps, R observations."""

from __future__ import annotations

from dataclasses import replace

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import ACTION_PREFIX
from embodied.data.episodes import Episodes
from embodied.errors import UserError


def with_action_prefix(episodes: Episodes, delay: int) -> Episodes:
    """The same `episodes`, in which row t has the action of step t + `delay`, and observations have those until then.

    An action is where it has to be decided; rewards stay where they were earned. The last action of an episode is
    repeated: what is decided in its last `delay` steps is never executed.

    Raises:
        UserError: for unknown actions.
    """
    if bool(episodes.actions.isnan().any()):
        raise UserError("episodes without actions cannot be learned from under a delay; use delay=0, or leave them out")
    end = episodes.ends[torch.searchsorted(episodes.ends, torch.arange(episodes.steps), right=True)]

    def following(first: Tensor, count: int) -> Tensor:
        """Indices of `count` steps from the steps `first` [...] on, but for the end of their episode, [..., count]."""
        index = first.unsqueeze(-1) + torch.arange(count)
        return torch.minimum(index, end[first].unsqueeze(-1) - 1)

    decided = following(torch.arange(episodes.steps), delay + 1)[:, -1]
    prefix = {ACTION_PREFIX: episodes.actions[following(episodes.first, delay)]}
    final = episodes.final_observation
    if final is not None:
        last = episodes.actions[episodes.ends - 1].unsqueeze(1).expand(-1, delay, -1)
        final = _with(final, {ACTION_PREFIX: last.clone()})
    return replace(
        episodes,
        observation=_with(episodes.observation, prefix),
        actions=episodes.actions[decided],
        human=episodes.human[decided],
        final_observation=final,
    )


def _with(observation: TensorDict, added: dict[str, Tensor]) -> TensorDict:
    return observation.copy().update(added)
