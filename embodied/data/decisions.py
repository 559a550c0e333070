"""Decisions of rollouts and of episodes as rows of a store, in order of arrival: by time, then by environment.

Letters: T decisions of N environments in a rollout, K executed actions of a decision, R decisions of episodes.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.data.episodes import FAILED, SUCCEEDED, UNKNOWN, Episodes
from embodied.errors import UserError
from embodied.rollout.rollout import Rollout

NONE = -1
"""No following decision, no final observation because the episode continues, or no number because it still runs."""
LOST = -2
"""The episode ends here, and its final observation was not recorded."""


def of_rollout(rollout: Rollout, continues: Tensor) -> dict[str, Any]:
    """Columns [T, N] of the decisions of `rollout`, in which the episodes where `continues` [N] began before."""
    signals = dict(rollout.signals)
    shape = rollout.done.shape
    human = signals.pop("human", torch.zeros_like(rollout.executed))
    outcome = torch.where(rollout.success, SUCCEEDED, FAILED if rollout.has_success else UNKNOWN).to(torch.int8)
    cut = rollout.cut | rollout.terminated
    cut[-1] = True
    if rollout.episode_steps is None:
        starts = torch.cat((~continues.to(cut.device).unsqueeze(0), rollout.done[:-1]))
    else:
        starts = rollout.episode_steps == rollout.executed.sum(-1)
    return {
        "observation": rollout.observation,
        "actions": rollout.actions[:, :, : rollout.executed.shape[-1]],
        "reward": rollout.reward,
        "executed": rollout.executed,
        "human": human,
        "terminated": rollout.terminated,
        "truncated": rollout.truncated & ~rollout.terminated,
        "success": outcome.where(rollout.done, torch.full_like(outcome, UNKNOWN)),
        "task_index": rollout.task_index.expand(shape),
        "signals": TensorDict(cast(Any, signals), shape),
        "events": TensorDict(cast(Any, rollout.events), shape),
        "env": torch.arange(shape[1], device=cut.device).expand(shape),
        "episode": torch.full(shape, NONE, device=cut.device),
        "cut": cut,
        "known": rollout.simulated,
        "starts": starts,
    }


def of_episodes(episodes: Episodes, rows: Tensor, executed: int) -> tuple[TensorDict, Tensor, TensorDict | None]:
    """Decisions of `executed` actions that begin at the observations `rows` [R], which are the last of `episodes`.

    Returns the decisions [R], which of them end an episode [E], and the observations after these, None if not recorded.

    Raises:
        UserError: if an episode has no observation where the next decision begins.
    """
    episode = episodes.episode[rows]
    first = episodes.first[rows]
    chunks = episodes.chunks(rows, executed)
    valid = chunks["valid"]
    # steps of each decision, [R, K]
    index = torch.minimum(first.unsqueeze(1) + torch.arange(executed), episodes.ends[episode].unsqueeze(1) - 1)
    stop = first + valid.sum(1)
    ended = stop == episodes.ends[episode]
    # the decision whose observation is the first after this one
    following = torch.searchsorted(first, stop).clamp_max(len(rows) - 1).masked_fill(ended, NONE)
    if not bool((first[following] == stop)[~ended].all()):
        raise UserError(f"expected an observation after every {executed} steps of episodes; choose another length")
    terminated = ended & episodes.terminated[episode]
    is_complete = ~ended | terminated | (episodes.final_observation is not None)
    signals = {} if episodes.signals is None else dict(episodes.signals.items())
    decisions = TensorDict(
        {
            "observation": chunks["observation"],
            "actions": chunks["actions"],
            "reward": episodes.reward[index].masked_fill(~valid, 0.0),
            "executed": valid,
            "human": episodes.human[index] & valid,
            "terminated": terminated,
            "truncated": ended & ~terminated,
            "success": episodes.success[episode],
            "task_index": episodes.task_index[episode],
            "signals": TensorDict({name: values[index] * valid for name, values in signals.items()}, [len(rows)]),
            "events": TensorDict({}, [len(rows)]),
            "following": following,
            "env": torch.full_like(rows, NONE),
            "episode": episode,
            "cut": ended | ~is_complete[following],
            "known": is_complete,
            "starts": episode.diff(prepend=torch.full((1,), NONE)) != 0,
        },
        batch_size=[len(rows)],
    )
    ends = ended.nonzero().squeeze(1)
    final = episodes.final_observation
    return decisions, ends, None if final is None else cast(TensorDict, final[episode[ends]])


def following_decisions(position: Tensor) -> tuple[Tensor, Tensor]:
    """For each decision in `position` [T, N] the next one of its environment, and the first of each environment [N]."""
    following = torch.empty_like(position)
    later = torch.full_like(position[0], NONE)
    for t in reversed(range(len(position))):
        following[t] = later
        later = torch.where(position[t] >= 0, position[t], later)
    return following, later


def observation_after(rollout: Rollout, decisions: Tensor) -> TensorDict:
    """True observations after `decisions` t * N + n of `rollout`."""
    last = rollout.last_observation
    count = rollout.done.shape[1]
    inside = decisions + count < rollout.done.numel()
    following = rollout.observation.select(*last.keys()).flatten(0, 1)
    after = cast(TensorDict, following[torch.where(inside, decisions + count, decisions)])
    after[~inside] = last[decisions[~inside] % count]
    if rollout.final_rows is not None and len(rollout.final_rows):
        assert rollout.final_observation is not None
        place = torch.searchsorted(rollout.final_rows, decisions).clamp_max(len(rollout.final_rows) - 1)
        ended = rollout.final_rows[place] == decisions
        after[ended] = rollout.final_observation[place[ended]]
    return after
