"""Replay buffers of chunks, transitions, and a policy's successful episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.data.episodes import Episodes, columns, from_columns
from embodied.rollout.rollout import Rollout


class ChunkReplay:
    """Ring buffer of rows with fixed capacity."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.written = 0
        self._storage: TensorDict | None = None

    def __len__(self) -> int:
        """Number of rows."""
        return min(self.written, self.capacity)

    def add(self, rows: TensorDict) -> None:
        """Append `rows` [n], overwriting the oldest once full."""
        rows = rows[-self.capacity :]
        if self._storage is None:
            self._storage = TensorDict(
                {key: value.new_zeros(self.capacity, *value.shape[1:]) for key, value in _leaves(rows)},
                batch_size=[self.capacity],
            )
        device = _leaves(self._storage)[0][1].device  # after a restart it may differ from the device of new rows
        index = (self.written + torch.arange(len(rows), device=device)) % self.capacity
        self._storage[index] = rows.to(device)
        self.written += len(rows)

    def sample(self, count: int, generator: torch.Generator) -> TensorDict:
        """Draw `count` rows uniformly with replacement."""
        rows = torch.randint(len(self), (count,), generator=generator)
        # Several times as fast as self.rows[rows].
        return cast(
            TensorDict, self.rows.apply(lambda part: part.index_select(0, rows.to(part.device)), batch_size=[count])
        )

    @property
    def rows(self) -> TensorDict:
        """Filled rows, [size]."""
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


class EpisodeReplay:
    """Buffer of the last episodes with at least `capacity` observations; chunks are cut when sampled."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.episodes: Episodes | None = None
        self._room: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """Number of observations."""
        return 0 if self.episodes is None else len(self.episodes)

    def add(self, episodes: Episodes) -> None:
        """Append `episodes`; the oldest are dropped once observations exceed `capacity` by a quarter."""
        stored = columns(self.episodes) if self.episodes else {}
        if self.episodes:
            episodes = replace(
                episodes, first=episodes.first + self.episodes.steps, ends=episodes.ends + self.episodes.steps
            )
        # columns that all have
        new = {name: rows for name, rows in columns(episodes).items() if not stored or name in stored}
        grown = {name: self._append(name, stored.get(name), rows) for name, rows in new.items()}
        self.episodes = from_columns(grown)
        if len(self.episodes) > 1.25 * self.capacity:
            last = self.episodes.last(self.capacity)
            self.episodes, self._room = last, {}

    def _append(self, name: str, held: Tensor | None, rows: Tensor) -> Tensor:
        """Append `rows` to `held`, in a buffer with spare room, so that `held` is seldom copied."""
        count = 0 if held is None else len(held)
        if name not in self._room or len(self._room[name]) < count + len(rows):
            self._room[name] = rows.new_empty(2 * (count + len(rows)), *rows.shape[1:])
            if held is not None:
                self._room[name][:count] = held
        self._room[name][count : count + len(rows)] = rows
        return self._room[name][: count + len(rows)]

    def state_dict(self) -> dict[str, Any]:
        """Columns of the stored episodes."""
        return {"episodes": columns(self.episodes) if self.episodes else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.episodes, self._room = None, {}
        if state["episodes"] is not None:
            self.episodes = from_columns(state["episodes"])


class EpisodeAssembler:
    """Assembler of the successful episodes of rollouts; an episode may span several rollouts.

    `pending` are the decisions of unfinished episodes, in order, with their environments.
    """

    def __init__(self) -> None:
        self.pending: TensorDict | None = None

    def add(self, rollout: Rollout) -> Episodes | None:
        """Add `rollout`; returns the episodes that succeeded in it, by environment, then by time; None if none did."""
        shape = list(rollout.done.shape)
        signals = dict(rollout.signals)
        human = signals.pop("human", torch.zeros_like(rollout.executed))
        new = TensorDict(
            {
                "observation": rollout.observation,
                "actions": rollout.actions[:, :, : rollout.executed.shape[-1]],
                "executed": rollout.executed,
                "reward": rollout.reward,
                "human": human,
                "signals": TensorDict(cast(Any, signals), shape),
                "task_index": rollout.task_index.expand(shape),
                "done": rollout.done,
                "terminated": rollout.terminated,
                "success": rollout.success & rollout.done,
                "env": torch.arange(shape[1], device=rollout.done.device).expand(shape),
            },
            batch_size=shape,
        ).flatten(0, 1)
        continued = self._continued(rollout)
        parts = [new] if continued is None else _with_shared_signals(continued, new)
        done, success, env = (torch.cat([part[name].cpu() for part in parts]) for name in ("done", "success", "env"))
        order = env.argsort(stable=True)  # by environment, then by time
        ended = done[order].long()
        episode = ended.cumsum(0) - ended + env[order]  # ascending; changes after each ending and environment
        whole, succeeded = (
            torch.zeros(int(episode[-1]) + 1, dtype=torch.bool).index_put((episode,), flag[order], accumulate=True)
            for flag in (done, success)
        )
        unfinished = order[~whole[episode]].sort().values
        successful = order[succeeded[episode]]
        episodes = _episodes(_rows(parts, successful)) if len(successful) else None
        self.pending = _rows(parts, unfinished) if len(unfinished) else None
        return episodes

    def _continued(self, rollout: Rollout) -> TensorDict | None:
        """Pending decisions whose episode continues in `rollout`; the others are dropped."""
        if self.pending is None or rollout.episode_steps is None:
            return self.pending
        begins = (rollout.episode_steps[0] == rollout.executed[0].sum(-1)).cpu()
        continues = ~begins[self.pending["env"].cpu()]
        if bool(continues.all()):
            return self.pending
        return cast(TensorDict, self.pending[continues]) if bool(continues.any()) else None

    def state_dict(self) -> dict[str, Any]:
        """Unfinished episodes."""
        return {"pending": self.pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.pending = state["pending"]


def _episodes(rows: TensorDict) -> Episodes:
    """Build complete episodes from their concatenated decisions."""
    executed, done = rows["executed"], rows["done"]
    ends = executed.sum(-1).cumsum(0)
    return Episodes(
        observation=rows["observation"],
        first=ends - executed.sum(-1),
        actions=rows["actions"][executed],
        reward=rows["reward"][executed],
        human=rows["human"][executed],
        signals=_by_step(rows["signals"], executed),
        ends=ends[done],
        terminated=rows["terminated"][done],
        success=rows["success"][done].to(torch.int8),
        task_index=rows["task_index"][done],
    )


def _by_step(signals: TensorDict, executed: Tensor) -> TensorDict | None:
    """Signals of executed control steps [S], from the `signals` [D] of decisions; None if there are none."""
    named = {name: values[executed] for name, values in signals.items()}
    return TensorDict(named, [int(executed.sum())]) if named else None


def _with_shared_signals(*parts: TensorDict) -> list[TensorDict]:
    """Copies of `parts`, reduced to the signals that all of them have."""
    shared = set[Any].intersection(*(set(part["signals"].keys()) for part in parts))
    return [part.copy().set("signals", part["signals"].select(*shared)) for part in parts]


def _rows(parts: list[TensorDict], rows: Tensor) -> TensorDict:
    """Select `rows` of the concatenated `parts`, without concatenating other rows."""
    if len(parts) == 1:
        return _picked(parts[0], rows)
    first = len(parts[0])
    before = rows < first
    selected = TensorDict.cat((_picked(parts[0], rows[before]), _picked(parts[1], rows[~before] - first)))
    order = torch.empty_like(rows)
    order[torch.cat((before.nonzero().squeeze(1), (~before).nonzero().squeeze(1)))] = torch.arange(len(rows))
    return cast(TensorDict, selected[order])


def _picked(part: TensorDict, rows: Tensor) -> TensorDict:
    return cast(TensorDict, part[rows.to(part["env"].device)]).cpu()


def _leaves(rows: TensorDict) -> list[tuple[Any, torch.Tensor]]:
    return cast(list[tuple[Any, torch.Tensor]], list(rows.items(include_nested=True, leaves_only=True)))
