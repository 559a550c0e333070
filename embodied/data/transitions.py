"""Transitions of recorded episodes, for learners of values: a view of `Episodes`, which are not copied.

Letters: E episodes, R observations of them, S control steps, K executed actions of a transition, H actions of a chunk,
B sampled rows.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.data.episodes import Episodes
from embodied.data.rewards import check_rewards
from embodied.errors import UserError
from embodied.world import ALONE, World


class Transitions:
    """Transitions of `executed` control steps from the observations of `episodes`, whatever their outcome.

    Rewards are divided by the deviation of the returns, so that values of all tasks have one scale. A transition is
    shorter where its episode ends. Without a recorded final observation, the last transitions of a truncated episode
    have no following value and are never drawn.

    Attributes:
        returns: discounted sum of the scaled rewards from each observation to the end of its episode, [R].
        scale: deviation of the returns before scaling.
        terminated: whether a transition terminates its episode, [R] bool.

    Raises:
        UserError: for unknown or equal rewards, numbers that are not finite, and if an episode has no observation where
            a transition ends.
    """

    def __init__(self, episodes: Episodes, executed: int, discount: float) -> None:
        check_rewards(episodes)
        _check_finite(episodes)
        self.episodes = episodes
        self.executed = executed
        first = episodes.first
        episode = episodes.episode
        end = episodes.ends[episode]
        # steps of each transition, [R, K]
        index = first.unsqueeze(1) + torch.arange(executed)
        valid = index < end.unsqueeze(1)
        stop = first + valid.sum(1)
        ended = stop == end
        # the observation after each transition; its own where its episode ends
        self._following = torch.where(ended, torch.arange(len(first)), torch.searchsorted(first, stop))
        if not bool((first[self._following.clamp_max(len(first) - 1)] == stop)[~ended].all()):
            raise UserError(
                f"expected an observation after every {executed} steps of episodes; set task.executed to their number"
            )
        self.terminated = terminated = ended & episodes.terminated[episode]
        returns = rewards_to_go(episodes, discount)[first]
        if not (scale := float(returns.std())) > 0.0:
            raise UserError("the rewards of all episodes are the same: there is nothing to prefer; use stages=[sft]")
        self.scale = scale
        self.returns = returns / scale
        # R = sum_i gamma^i r_(t+i)
        powers = discount ** torch.arange(executed)
        rewards = episodes.reward[torch.minimum(index, end.unsqueeze(1) - 1)]
        self.reward = (rewards * valid * powers).sum(1) / scale
        # gamma^k of the value that follows k steps, zero after a termination
        self.carry = discount ** valid.sum(1).float() * ~terminated
        self.goes_on = ~ended
        has_final = episodes.final_observation is not None
        self._final = ended & ~terminated if has_final else torch.zeros_like(ended)
        self._known = (self.goes_on | terminated | self._final).nonzero().squeeze(1)
        if not len(self._known):
            raise UserError("no observation of the episodes has a known successor; record longer episodes")

    def of_episodes(self, chosen: Tensor) -> Transitions:
        """The same transitions, of which only those of the episodes `chosen` [E] bool are drawn.

        Raises:
            UserError: if there are none.
        """
        part = copy.copy(self)
        part._known = self._known[chosen[self.episodes.episode[self._known]]]
        if not len(part._known):
            raise UserError("no observation of a part of the episodes has a known successor; record more episodes")
        return part

    def spaced(self, count: int) -> Tensor:
        """Up to `count` evenly spaced rows among those that are drawn."""
        known = self._known
        return known[torch.arange(min(count, len(known))) * len(known) // min(count, len(known))]

    def draw(self, count: int, generator: torch.Generator, world: World = ALONE) -> Tensor:
        """Rows of this process among `count` observations, drawn uniformly, or from each dataset by its weight.

        Raises:
            UserError: if the processes of `world` cannot have equal parts.
        """
        if count % world.size:
            raise UserError(f"batch={count} is shared by {world.size} processes; use a multiple of {world.size}")
        weights = self.episodes.weights
        if weights is None:
            rows = self._known[torch.randint(len(self._known), (count,), generator=generator)]
        else:
            assert self.episodes.dataset_index is not None
            datasets = self.episodes.dataset_index[self.episodes.episode[self._known]]
            size = torch.bincount(datasets, minlength=len(weights))
            dataset = torch.multinomial(weights * (size > 0), count, replacement=True, generator=generator)
            # a dataset by its weight, then one of its observations uniformly
            position = torch.rand(count, dtype=torch.float64, generator=generator)
            rows = self._known[(size.cumsum(0) - size)[dataset] + (position * size[dataset]).long()]
        return rows[world.rank :: world.size]

    def take(self, rows: Tensor, horizon: int) -> TensorDict:
        """Transitions from the observations `rows` [B].

        Returns {observation, actions [B, H, A], valid [B, H], reward [B], carry [B], returns [B], next_observation,
        next_actions [B, K, A], goes_on [B]}: `reward` is that of the first K actions, `carry` the factor of the
        following value. Only where `goes_on`, `next_actions` follow in the data.
        """
        chunks = self.episodes.chunks(rows, horizon)
        following = self.episodes.chunks(self._following[rows], self.executed)
        return TensorDict(
            {
                **{name: chunks[name] for name in ("observation", "actions", "valid")},
                **{name: getattr(self, name)[rows] for name in ("reward", "carry", "returns", "goes_on")},
                "next_observation": self._with_final(following["observation"], rows),
                "next_actions": following["actions"],
            },
            batch_size=[len(rows)],
        )

    def _with_final(self, observation: TensorDict, rows: Tensor) -> TensorDict:
        """The `observation` after the transitions `rows`, which is the final one where a time limit ended them."""
        chosen = self._final[rows].nonzero().squeeze(1)
        final = self.episodes.final_observation
        if final is not None and len(chosen):
            after = cast(TensorDict, final[self.episodes.episode[rows[chosen]]])
            for key in observation.keys():  # noqa: SIM118 - of a TensorDict
                if key not in after:
                    raise UserError(f"final observations of episodes have no {key}; leave them out of the data set")
                observation[key][chosen] = after[key]
        return observation


def held_out_episodes(count: int, share: float) -> Tensor:
    """Random episodes, a `share` of `count` but at least one, the same in every run, [count] bool.

    Raises:
        UserError: for a single episode.
    """
    if count < 2:
        raise UserError("expected at least 2 episodes, one of them to be held out; record more")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    number = min(count - 1, max(1, round(share * count)))
    return torch.zeros(count, dtype=torch.bool).index_fill(0, order[:number], True)


def rewards_to_go(episodes: Episodes, discount: float) -> Tensor:
    """Discounted sum of the rewards from each control step to the end of its episode, [S]."""
    last = {*(episodes.ends - 1).tolist()}
    returns = []
    following = 0.0
    for step, reward in zip(reversed(range(episodes.steps)), reversed(episodes.reward.tolist()), strict=True):
        # G_t = r_t + gamma G_(t+1)
        following = reward + (0.0 if step in last else discount * following)
        returns.append(following)
    return torch.tensor(returns[::-1])


def _check_finite(episodes: Episodes) -> None:
    named = {"reward": episodes.reward, "action": episodes.actions, **dict(episodes.observation.items())}
    for name, values in named.items():
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise UserError(f"episodes have infinity or not a number in {name}; leave these episodes out")
