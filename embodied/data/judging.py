"""Rewards and outcomes of recorded episodes by a classifier of success, where no person has judged them.

Letters: R observations, S control steps of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.data.episodes import FAILED, SUCCEEDED, UNKNOWN, Episodes

Detect = Callable[[TensorDict], int | None]
"""Function from the observations of an episode, in the order of time, to the first detected success; None: none."""


def judged(episodes: Episodes, detect: Detect) -> Iterator[Episodes]:
    """Yield each episode with known rewards: 1 for the step to the success, else 0.

    An outcome that a person has given remains, and the success is then the end. An episode of unknown outcome succeeds
    and ends where `detect` finds a success, and fails without one. Recorded rewards remain, too.
    """
    for number in range(len(episodes.ends)):
        episode = episodes.part(number, number + 1)
        if int(episode.success[0]) == UNKNOWN:
            episode = _decided(episode, detect(_observations(episode)))
        if bool(episode.reward.isnan().any()):
            reward = torch.zeros(episode.steps)
            reward[-1] = float(episode.success[0] == SUCCEEDED)
            episode = replace(episode, reward=reward)
        yield episode


def _decided(episode: Episodes, frame: int | None) -> Episodes:
    """The episode of unknown outcome, which ends at the observation `frame`, of R or R + 1; None: it failed."""
    if frame is None:
        return replace(episode, success=_flag(FAILED))
    if frame == len(episode):
        return replace(episode, success=_flag(SUCCEEDED), terminated=torch.tensor([True]))
    # a success at the first observation is that of the first decision
    rows = max(frame, 1)
    steps = int(episode.first[rows]) if rows < len(episode) else episode.steps
    last = _observation(episode, torch.tensor([rows])) if rows < len(episode) else None
    final = episode.final_observation
    if final is not None and last is not None:
        final = last.select(*final.keys())
    return replace(
        episode,
        observation=episode.observation[:rows],
        first=episode.first[:rows],
        actions=episode.actions[:steps],
        reward=episode.reward[:steps],
        human=episode.human[:steps],
        ends=torch.tensor([steps]),
        terminated=torch.tensor([True]),
        success=_flag(SUCCEEDED),
        final_observation=final,
        pictures=episode.pictures and episode.pictures.part(0, rows),
        signals=None if episode.signals is None else episode.signals[:steps],
        texts=episode.texts and episode.texts.part(0, rows),
    )


def _observations(episode: Episodes) -> TensorDict:
    """All observations of an episode [R], or [R + 1] with the one after its last step."""
    rows = _observation(episode, torch.arange(len(episode)))
    final = episode.final_observation
    return rows if final is None else torch.cat((rows.select(*final.keys()), final))


def _observation(episode: Episodes, rows: Tensor) -> TensorDict:
    return episode.chunks(rows, 1)["observation"]


def _flag(outcome: int) -> Tensor:
    return torch.tensor([outcome], dtype=torch.int8)
