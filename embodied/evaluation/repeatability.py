"""Check of a simulator's repeatability: the same initial states and actions have the same consequences twice."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import NumberedStarts, Transition

ROUNDING = 1e-3
"""Tolerance of observations and rewards, relative and absolute, for equal initial states."""


class Replay:
    """First chunk of an evaluation, which is run twice to compare the simulator's results."""

    def __init__(self) -> None:
        self.first: tuple[Tensor, TensorDict, Tensor] | None = None  # initial states, observations, chunk
        self.next: tuple[TensorDict, Tensor] | None = None  # observations and rewards after the chunk

    def begin(self, starts: Tensor, observation: TensorDict, chunk: Tensor) -> None:
        """Store the observations of the initial states `starts` [N], and the first `chunk` [N, K, A]."""
        if self.first is None:
            self.first = starts.clone(), observation.clone(), chunk.clone()

    def end(self, transition: Transition) -> None:
        """Store the observations and rewards after the first chunk."""
        if self.first and self.next is None:
            self.next = transition.observation.clone(), transition.reward.detach().clone()

    def repeats(self, env: NumberedStarts) -> bool:
        """Whether the initial states have equal observations again, and on the CPU the chunk has equal consequences.

        On a GPU contacts amplify differences of rounding, whose order is not fixed there.
        """
        assert self.first
        assert self.next
        starts, observation, chunk = self.first
        if not _alike(env.reset(None, starts.to(env.device)), observation):
            return False
        # only the reset is compared on a GPU, see above
        if env.device.type != "cpu":
            return True
        transition = env.step(chunk)
        rewards = (TensorDict({"reward": each.detach()}, []) for each in (transition.reward, self.next[1]))
        return _alike(transition.observation, self.next[0]) and _alike(*rewards)


def _alike(one: TensorDict, other: TensorDict) -> bool:
    """Whether two observations are equal up to rounding: pictures up to 2 of 255 levels."""
    for key in one.keys(include_nested=True, leaves_only=True):
        values = one[key]
        other_values = other[key]
        tolerance = ROUNDING if values.is_floating_point() else 2.0 if values.dtype == torch.uint8 else 0.0
        if not torch.allclose(values.double(), other_values.double(), rtol=ROUNDING, atol=tolerance, equal_nan=True):
            return False
    return True
