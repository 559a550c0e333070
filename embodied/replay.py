"""Storage of chunks that learners sample again and again."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDict

from embodied.rollout import Rollout


class ChunkReplay:
    """A ring of rows with fixed capacity."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.written = 0
        self._storage: TensorDict | None = None

    def __len__(self) -> int:
        """Rows held."""
        return min(self.written, self.capacity)

    def add(self, rows: TensorDict) -> None:
        """Append `rows` [n], overwriting the oldest once full."""
        rows = rows[-self.capacity :]
        if self._storage is None:
            self._storage = TensorDict(
                {key: value.new_zeros(self.capacity, *value.shape[1:]) for key, value in _leaves(rows)},
                batch_size=[self.capacity],
            )
        place = (self.written + torch.arange(len(rows))) % self.capacity
        self._storage[place] = rows
        self.written += len(rows)

    def sample(self, count: int, generator: torch.Generator) -> TensorDict:
        """Draw `count` rows uniformly with replacement."""
        rows = torch.randint(len(self), (count,), generator=generator)
        # Copies rows, which is several times as fast as self.rows[rows].
        return cast(
            TensorDict, self.rows.apply(lambda part: part.index_select(0, rows.to(part.device)), batch_size=[count])
        )

    @property
    def rows(self) -> TensorDict:
        """What is held, [size]."""
        if self._storage is None:
            raise ValueError("the replay is empty; add rows before sampling")
        return self._storage[: len(self)]

    def state_dict(self) -> dict[str, Any]:
        """Filled rows and counter."""
        return {"written": self.written, "rows": self.rows if len(self) else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._storage, self.written = None, 0
        if state["rows"] is not None:
            self.add(state["rows"])
        self.written = state["written"]


class EpisodeAssembler:
    """Cuts the chunks of successful episodes out of rollouts; episodes may span several rollouts."""

    def __init__(self, num_envs: int, horizon: int) -> None:
        self.horizon = horizon
        self.pending: list[TensorDict | None] = [None] * num_envs

    def add(self, rollout: Rollout) -> TensorDict | None:
        """Chunks {observation, actions [E, H, A], valid [E, H], task_index [E]} of what just succeeded, or None."""
        executed = rollout.executed.shape[-1]
        rows = TensorDict(
            {
                "observation": rollout.observation,
                "actions": rollout.actions[:, :, :executed],
                "executed": rollout.executed,
                "task_index": rollout.task_index,
            },
            batch_size=list(rollout.done.shape),
        )
        chunks = []
        for env in range(rollout.done.shape[1]):
            start = 0
            for end in torch.nonzero(rollout.done[:, env]).flatten().tolist():
                episode = self._joined(env, rows[start : end + 1, env])
                self.pending[env], start = None, end + 1
                if rollout.success[end, env]:
                    chunks.append(self._chunks(episode))
            if start < len(rows):
                self.pending[env] = self._joined(env, rows[start:, env])
        return TensorDict.cat(chunks) if chunks else None

    def _joined(self, env: int, rows: TensorDict) -> TensorDict:
        before = self.pending[env]
        return rows if before is None else TensorDict.cat((before, rows))

    def _chunks(self, episode: TensorDict) -> TensorDict:
        """From each decision, the next `horizon` actions that were executed, across later decisions too."""
        actions = episode["actions"][episode["executed"]]
        count = episode["executed"].sum(-1)
        first = count.cumsum(0) - count
        index = first.unsqueeze(1) + torch.arange(self.horizon)
        return TensorDict(
            {
                "observation": episode["observation"],
                "actions": actions[index.clamp_max(len(actions) - 1)],
                "valid": index < len(actions),
                "task_index": episode["task_index"],
            },
            batch_size=[len(count)],
        )

    def state_dict(self) -> dict[str, Any]:
        """Unfinished episodes."""
        return {"pending": self.pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.pending = list(state["pending"])


def _leaves(rows: TensorDict) -> list[tuple[Any, torch.Tensor]]:
    return cast(list[tuple[Any, torch.Tensor]], list(rows.items(include_nested=True, leaves_only=True)))
