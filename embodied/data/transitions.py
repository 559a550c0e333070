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

SAME = 1e-6
"""Largest deviation of equal returns, as a share of the largest."""


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
        self.discount = discount
        after = self._after(torch.arange(len(episodes)), executed)
        if not bool(after["observed"].all()):
            raise UserError(
                f"expected an observation after every {executed} steps of episodes; set task.executed to their number"
            )
        self.terminated = after["terminated"]
        returns = rewards_to_go(episodes, discount)[episodes.first]
        # equal numbers deviate by rounding: as the scale of rewards that would be enormous
        if not (scale := float(returns.std())) > SAME * float(returns.abs().max()):
            raise UserError(
                "the rewards of all episodes are the same: there is nothing to prefer; "
                "record some that went better, or use stages=[sft]"
            )
        self.scale = scale
        self.returns = returns / scale
        self.reward = after["reward"] / scale
        self.carry = after["carry"]
        self.goes_on = ~after["ended"]
        self._following = after["following"]
        self._final = after["final"]
        self._use((self.goes_on | after["terminated"] | self._final).nonzero().squeeze(1))
        if not len(self._usable_rows):
            raise UserError("no observation of the episodes has a known successor; record longer episodes")

    def _use(self, rows: Tensor) -> None:
        """Draw among `rows`, ascending, from now on."""
        self._usable_rows = rows
        self._sizes: Tensor | None = None  # [D] how many there are of each dataset, if datasets have weights
        if self.episodes.weights is not None:
            assert self.episodes.dataset_index is not None
            datasets = self.episodes.dataset_index[self.episodes.episode[rows]]
            self._sizes = torch.bincount(datasets, minlength=len(self.episodes.weights))

    def of_episodes(self, chosen: Tensor) -> Transitions:
        """The same transitions, of which only those of the episodes `chosen` [E] bool are drawn.

        Raises:
            UserError: if there are none.
        """
        part = copy.copy(self)
        part._use(self._usable_rows[chosen[self.episodes.episode[self._usable_rows]]])
        if not len(part._usable_rows):
            raise UserError("no observation of a part of the episodes has a known successor; record more episodes")
        return part

    def spaced(self, count: int) -> Tensor:
        """Up to `count` evenly spaced rows among those that are drawn."""
        rows = self._usable_rows
        count = min(count, len(rows))
        return rows[torch.arange(count) * len(rows) // count]

    def draw(self, count: int, generator: torch.Generator, world: World = ALONE) -> Tensor:
        """Rows of this process among `count` observations, drawn uniformly, or from each dataset by its weight.

        Raises:
            UserError: if the processes of `world` cannot have equal parts.
        """
        if count % world.size:
            raise UserError(f"batch={count} is shared by {world.size} processes; use a multiple of {world.size}")
        weights = self.episodes.weights
        size = self._sizes
        if weights is None or size is None:
            rows = self._usable_rows[torch.randint(len(self._usable_rows), (count,), generator=generator)]
        else:
            dataset = torch.multinomial(weights * (size > 0), count, replacement=True, generator=generator)
            # a dataset by its weight, then one of its observations uniformly
            position = torch.rand(count, dtype=torch.float64, generator=generator)
            rows = self._usable_rows[(size.cumsum(0) - size)[dataset] + (position * size[dataset]).long()]
        return rows[world.rank :: world.size]

    def take(self, rows: Tensor, horizon: int) -> TensorDict:
        """Transitions from the observations `rows` [B].

        Returns {observation, actions [B, H, A], valid [B, H], reward [B], carry [B], returns [B], next_observation,
        next_actions [B, K, A], next_valid [B, K]}: `reward` is that of the first K actions, `carry` the factor of the
        following value. Only where `next_valid`, `next_actions` follow in the data.
        """
        chunks = self.episodes.chunks(rows, horizon)
        following = self.episodes.chunks(self._following[rows], self.executed)
        return TensorDict(
            {
                **{name: chunks[name] for name in ("observation", "actions", "valid")},
                **{name: getattr(self, name)[rows] for name in ("reward", "carry", "returns")},
                "next_observation": self._with_final(following["observation"], rows, self._final[rows]),
                "next_actions": following["actions"],
                "next_valid": following["valid"] & self.goes_on[rows].unsqueeze(1),
            },
            batch_size=[len(rows)],
        )

    def prefixes(self, rows: Tensor) -> TensorDict:
        """Transitions of the first 1 to K actions from the observations `rows`, [B, K].

        Returns {reward, carry, next_observation, is_known}: `is_known` is False where the data do not show what
        follows, as after a time limit, or between two observations. After a termination nothing follows, whatever the
        actions.
        """
        return torch.stack([self._prefix(rows, steps + 1) for steps in range(self.executed)], 1)  # type: ignore[arg-type]

    def _prefix(self, rows: Tensor, steps: int) -> TensorDict:
        after = self._after(rows, steps)
        observation = self.episodes.chunks(after["following"], 1)["observation"]
        follows = torch.where(after["ended"], after["final"], after["observed"])
        return TensorDict(
            {
                "reward": after["reward"] / self.scale,
                "carry": after["carry"],
                "next_observation": self._with_final(observation, rows, after["final"]),
                "is_known": after["terminated"] | follows & (after["steps"] == steps),
            },
            batch_size=[len(rows)],
        )

    def _after(self, rows: Tensor, steps: int) -> TensorDict:
        """Transitions over `steps` control steps from the observations `rows`, [B]; fewer where their episode ends.

        Returns {steps, reward, carry, following, observed, ended, terminated, final}: `following` is the observation
        after them if it is `observed`, where the episode `ended` their own; `final` is True where it was truncated and
        its final observation is known. Rewards are not scaled.
        """
        episodes = self.episodes
        first = episodes.first[rows]
        episode = torch.searchsorted(episodes.ends, first, right=True)
        end = episodes.ends[episode]
        # control steps, [B, K]
        index = first.unsqueeze(1) + torch.arange(steps)
        valid = index < end.unsqueeze(1)
        stop = first + valid.sum(1)
        ended = stop == end
        following = torch.searchsorted(episodes.first, stop).clamp_max(len(episodes) - 1)
        observed = ended | (episodes.first[following] == stop)
        terminated = ended & episodes.terminated[episode]
        has_final = episodes.final_observation is not None
        # R = sum_i gamma^i r_(t+i)
        rewards = episodes.reward[torch.minimum(index, end.unsqueeze(1) - 1)]
        reward = (rewards * valid * self.discount ** torch.arange(steps)).sum(1)
        return TensorDict(
            {
                "steps": valid.sum(1),
                "reward": reward,
                # gamma^k of the value that follows k steps, zero after a termination
                "carry": self.discount ** valid.sum(1).float() * ~terminated,
                "following": torch.where(ended | ~observed, rows, following),
                "observed": observed,
                "ended": ended,
                "terminated": terminated,
                "final": ended & ~terminated if has_final else torch.zeros_like(ended),
            },
            batch_size=[len(rows)],
        )

    def _with_final(self, observation: TensorDict, rows: Tensor, at_final: Tensor) -> TensorDict:
        """The `observation` after transitions from `rows`, which is the final one where a time limit ended them."""
        chosen = at_final.nonzero().squeeze(1)
        final = self.episodes.final_observation
        if final is not None and len(chosen):
            # not `episodes.episode`, which looks up all observations
            episode = torch.searchsorted(self.episodes.ends, self.episodes.first[rows[chosen]], right=True)
            after = cast(TensorDict, final[episode])
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
    named = [("reward", episodes.reward), ("action", episodes.actions), *episodes.observation.items()]
    if episodes.final_observation is not None:
        # nothing is read after a termination
        final = cast(TensorDict, episodes.final_observation[~episodes.terminated])
        named += [(f"the final {name}", values) for name, values in final.items()]
    for name, values in named:
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise UserError(f"episodes have infinity or not a number in {name}; leave these episodes out")
