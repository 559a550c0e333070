"""Rewards of failed episodes by their distance from the batch's own successes (SRPO, arXiv 2511.15605).

An encoder turns each episode into a vector. Successes of a task are clustered; a failure earns the more, the nearer it
is to the centre of a cluster, compared with the task's other failures: 0.6 sigmoid(10 (0.5 - d)), where d is its
distance, scaled to [0, 1] over these failures. Successes earn 1.

Differs from the paper: episodes are encoded by their observations, or by the features that the policy has learned from
demonstrations (`learned`), not by a video model; where a task has no success at all, its failures earn nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.policy import TrainablePolicy
from embodied.rollout.groups import WholeRollout

ROWS = 256
"""Observations that are encoded together."""
POINTS = 32
"""Observations that represent an episode, equally spaced in time."""
NEAR = 0.5
LEAST = 2
"""DBSCAN's radius (RMS distance, in standard deviations) and the least size of a cluster."""


def changes(observation: TensorDict) -> Tensor:
    """Differences of all float32 observations [E, POINTS] from each episode's first, [E, F]."""
    parts = [part.flatten(2) for _, part in sorted(observation.items()) if part.dtype == torch.float32]
    values = torch.cat(parts, -1)
    return (values - values[:, :1]).flatten(1)


def learned(policy: TrainablePolicy) -> Callable[[TensorDict], Tensor]:
    """Encoder of episodes by the features of `policy`, as differences from each episode's first, [E, F]."""

    def encode(observation: TensorDict) -> Tensor:
        rows = observation.flatten(0, 1)
        pieces = [policy.features(piece.to(policy.device)).to(rows.device) for piece in rows.split(ROWS)]
        values = torch.cat(pieces).unflatten(0, tuple(observation.batch_size))
        return (values - values[:, :1]).flatten(1)

    return encode


@dataclass(frozen=True)
class ProgressReward:
    """Rewards of whole episodes: 1 for successes, less for failures by their distance from successes."""

    encoder: Callable[[TensorDict], Tensor] = changes
    """Encoder of episodes: features [E, F] of observations [E, POINTS] of E episodes of one task."""

    @torch.no_grad()
    def __call__(self, observation: TensorDict, episodes: WholeRollout, success: Tensor) -> Tensor:
        """Rewards [E] in [0, 1] of the `episodes` of a rollout with `observation` [T, N] and `success` [E]."""
        reward = success.float()
        for task in episodes.task[~success].unique():
            rows = (episodes.task == task).nonzero().squeeze(1)
            successful = success[rows]
            if successful.any():
                features = self.encoder(sampled(observation, episodes, rows))
                # Scale each feature to unit deviation; the factor 1 / sqrt(F) turns Euclidean distances into RMS
                # distances.
                features = features / features.std(0, correction=0).clamp_min(1e-6) / features.shape[1] ** 0.5
                reward[rows[~successful]] = progress(features[~successful], features[successful]).to(reward.dtype)
        return reward


def sampled(observation: TensorDict, episodes: WholeRollout, rows: Tensor) -> TensorDict:
    """Observations [E, POINTS] of the episodes `rows` [E], equally spaced in time."""
    flat = observation.flatten(0, 1)
    envs = observation.shape[1]
    length = torch.bincount(episodes.episode[episodes.episode >= 0], minlength=len(episodes))[rows]
    # decisions before the last one, from length - 1 down to 0: [E, POINTS]
    back = (torch.linspace(1.0, 0.0, POINTS, device=length.device) * (length[:, None] - 1)).round().long()
    return flat[(episodes.last[rows, None] - back * envs).to(flat.device)]


def progress(failed: Tensor, won: Tensor) -> Tensor:
    """Rewards [M] of failures [M, F], compared with successes [S, F]."""
    distance = torch.cdist(failed, centres(won)).amin(1)
    low, high = distance.aminmax()
    # 0.6 sigmoid(10 (0.5 - d)), d = distance scaled to [0, 1] over the failures
    return 0.6 * torch.sigmoid(10.0 * (0.5 - (distance - low) / (high - low).clamp_min(1e-6)))


def centres(won: Tensor) -> Tensor:
    """Centres [C, F] of the clusters of [S, F], by DBSCAN with `LEAST` = 2, whose clusters are connected neighbours.

    Episodes without a neighbour are noise, unless there are no others.
    """
    is_neighbour = torch.cdist(won, won) < NEAR
    label = torch.arange(len(won), device=won.device)
    while not torch.equal(label, lower := torch.where(is_neighbour, label, len(won)).amin(1)):
        label = lower  # the lowest label among the neighbours, until it has reached the whole component
    clusters, index, count = label.unique(return_inverse=True, return_counts=True)
    sums = won.new_zeros(len(clusters), won.shape[1]).index_add_(0, index, won)
    means = sums / count.unsqueeze(1)
    return means[count >= LEAST] if (count >= LEAST).any() else means
