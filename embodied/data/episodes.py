"""Episodes of observations, actions and rewards: demonstrations, datasets and recordings.

They are in memory or mapped from files; chunks of actions are cut when they are sampled. Letters: E episodes, R
observations, S control steps, H actions of a chunk, A action dimension, B sampled rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.data.columns import Column, mapped
from embodied.data.pictures import BYTES, Pictures
from embodied.data.texts import Texts
from embodied.errors import UserError
from embodied.saving import sealed
from embodied.saving.files import flush, rename
from embodied.world import ALONE, World

FORMATS = 2, 3
"""Formats of folders that `read` reads; the last is written.

Format 2 has texts as bytes of each observation, and zeros for unknown rewards.
"""
RECORD = "episodes.json"
FOLDER = "demonstrations"
"""Folder of a run's demonstrations."""
OPTIONAL = "final_observation", "dataset_index", "signals"
SUCCEEDED = 1
FAILED = 0
UNKNOWN = -1
"""Values of `Episodes.success`."""


@dataclass(frozen=True, eq=False)
class Episodes:
    """E complete episodes, concatenated.

    There is an observation before every control step, or only before every decision: `first` [R] is the index of the
    step after each. Unknown rewards and actions are NaN. `pictures` and `texts` are further observations, which stay
    encoded and numbers of a table until they are sampled. Episodes of D datasets can be drawn by `weights`. Failed
    episodes are stored, but `sample` draws none.
    """

    observation: TensorDict  # [R]
    first: Tensor  # [R] int64, ascending
    actions: Tensor  # [S, A], as executed; NaN where they are unknown
    reward: Tensor  # [S] NaN where it is unknown
    human: Tensor  # [S] bool, a person acted instead of the policy
    ends: Tensor  # [E] int64, the step after the last of each episode
    terminated: Tensor  # [E] bool; the others were truncated
    success: Tensor  # [E] int8: SUCCEEDED, FAILED or UNKNOWN
    task_index: Tensor  # [E] int64
    final_observation: TensorDict | None = None  # [E] after the last step; None: not recorded
    pictures: Pictures | None = None  # [R]
    dataset_index: Tensor | None = None  # [E] int64, ascending from 0; None: of one dataset
    weights: Tensor | None = None  # [D] of each dataset in `sample`, not in files; None: its number of observations
    signals: TensorDict | None = None  # [S] further values of steps by name; None: not recorded
    texts: Texts | None = None  # [R]
    sources: tuple[str, ...] = ()  # [D] names of the datasets, for messages; not in files

    @staticmethod
    def of(
        observation: TensorDict,
        actions: Tensor,
        *,
        success: bool | None = True,
        reward: Tensor | None = None,
        human: Tensor | None = None,
        terminated: bool | None = None,
        task_index: int = 0,
        final_observation: TensorDict | None = None,
        pictures: Pictures | None = None,
        first: Tensor | None = None,
    ) -> Episodes:
        """Build one episode: `observation` [L], each before one of `actions` [L, A]; terminated if it succeeded.

        A `success` or `reward` of None is unknown. With `first` [R] there are observations before those actions only.

        Raises:
            UserError: if there is not an observation, a reward and a mark of a person for each action.
        """
        length = len(actions)
        first = torch.arange(length) if first is None else first
        _check_shapes(
            length, {"observation": (observation, first), "reward": (reward, actions), "human": (human, actions)}
        )
        outcome = UNKNOWN if success is None else int(success)
        return Episodes(
            observation,
            first,
            actions,
            torch.full((length,), torch.nan) if reward is None else reward,
            torch.zeros(length, dtype=torch.bool) if human is None else human,
            torch.tensor([length]),
            torch.tensor([bool(success) if terminated is None else terminated]),
            torch.tensor([outcome], dtype=torch.int8),
            torch.tensor([task_index]),
            None if final_observation is None else final_observation.unsqueeze(0),
            pictures,
        )

    @staticmethod
    def join(parts: Sequence[Episodes]) -> Episodes:
        """Concatenate the episodes of `parts`; final observations, datasets and signals only if all have the same."""
        if len({part.texts is None for part in parts}) > 1:
            parts = [part.expanded() for part in parts]
        offset = 0
        shifted = []
        for part in parts:
            shifted.append(replace(part, first=part.first + offset, ends=part.ends + offset))
            offset += part.steps
        missing = [name for name in OPTIONAL if any(getattr(part, name) is None for part in parts)]
        if len({frozenset(part.signals.keys()) for part in parts if part.signals is not None}) > 1:
            missing.append("signals")
        excluded = {"pictures", "texts", "weights", "sources", *missing}
        joined = {
            field.name: torch.cat([getattr(part, field.name) for part in shifted])
            for field in fields(Episodes)
            if field.name not in excluded
        }
        pictures = [part.pictures for part in parts if part.pictures is not None]
        assert len(pictures) in (0, len(parts))
        texts = [part.texts for part in parts if part.texts is not None]
        return Episodes(
            **cast(dict[str, Any], joined),
            pictures=Pictures.join(pictures) if pictures else None,
            texts=Texts.join(texts) if texts else None,
        )

    def indexed(self, contract: Contract) -> Episodes:
        """The same episodes, in which the texts of `contract` are numbers of a table."""
        keys = [key for key, spec in contract.observation.items() if spec.is_text and key in self.observation]
        if not keys:
            return self
        assert self.texts is None
        texts = Texts.of({key: self.observation[key] for key in keys})
        return replace(self, observation=self.observation.exclude(*keys), texts=texts)

    def expanded(self) -> Episodes:
        """The same episodes with texts as bytes of their observations, uint8; the inverse of `indexed`."""
        if self.texts is None:
            return self
        texts = self.texts.take(torch.arange(len(self)))
        return replace(self, observation=self.observation.copy().update(texts), texts=None)

    def __len__(self) -> int:
        """Number of observations, R; a chunk can begin at each."""
        return len(self.first)

    @property
    def steps(self) -> int:
        """Number of control steps, S."""
        return len(self.actions)

    @property
    def episode(self) -> Tensor:
        """Index of each observation's episode, [R]."""
        return torch.searchsorted(self.ends, self.first, right=True)

    @property
    def failed(self) -> Tensor:
        """Whether each episode is known to have failed, [E] bool."""
        return self.success == FAILED

    @property
    def unlabelled(self) -> Tensor:
        """Whether each episode has unknown actions, [E] bool."""
        steps = self.actions.isnan().any(1).nonzero().squeeze(1)
        own = torch.searchsorted(self.ends, steps, right=True)
        return torch.zeros(len(self.ends), dtype=torch.bool).index_fill(0, own, True)

    def chunks(self, rows: Tensor, horizon: int) -> TensorDict:
        """Chunks that begin at the observations `rows` [B].

        Returns {observation, actions [B, H, A], valid [B, H], human [B, H], task_index [B]}. Chunks that extend beyond
        their episode repeat its last action; `valid` is False there. `human` marks actions of a person.
        """
        first = self.first[rows]
        episode = torch.searchsorted(self.ends, first, right=True)
        end = self.ends[episode].unsqueeze(1)
        # steps of each chunk, [B, H]
        index = first.unsqueeze(1) + torch.arange(horizon)
        action = torch.minimum(index, end - 1)
        observation = self._observation(rows)
        if self.pictures is not None:
            observation.update(self.pictures.take(rows))
        return TensorDict(
            {
                "observation": observation,
                "actions": self.actions[action],
                "valid": index < end,
                "human": self.human[action],
                "task_index": self.task_index[episode],
            },
            batch_size=[len(rows)],
        )

    def _observation(self, rows: Tensor) -> TensorDict:
        """The observations `rows` without pictures, [B]."""
        # Several times as fast as observation[rows].
        observation = self.observation.apply(lambda part: part.index_select(0, rows), batch_size=[len(rows)])
        return observation if self.texts is None else observation.update(self.texts.take(rows))

    def sample(self, count: int, horizon: int, generator: torch.Generator, world: World = ALONE) -> TensorDict:
        """Chunks to imitate, from `count` observations of episodes that did not fail.

        They are drawn by `generator`: uniformly, or from each dataset by its weight. Processes whose generators are in
        the same state share the draw: each gets its part.

        Raises:
            UserError: if all episodes, or all of a dataset, failed.
        """
        own_part = slice(world.rank, None, world.size)
        batch = self.chunks(self._random_rows(count, generator)[own_part], horizon)
        if self.pictures is not None:  # rows of the next call, if nothing else uses the generator in between
            self.pictures.foresee(self._random_rows(count, generator.clone_state())[own_part])
        return batch

    def by_weight(self) -> tuple[TensorDict, Tensor]:
        """Observations and actions for statistics of the distribution that `sample` draws from.

        Without weights these are all that `sample` can draw. With weights there are as many observations as before,
        each dataset's share by its weight: evenly spaced ones, each with the action after it. Where all episodes
        failed, of which a learner of values may learn, they are those of failures.
        """
        counted = self._counted()
        if self.weights is None:
            if counted.all():
                return self.expanded().observation, self.actions
            steps = torch.searchsorted(self.ends, torch.arange(self.steps), right=True)
            return self._observation(counted[self.episode].nonzero().squeeze(1)), self.actions[counted[steps]]
        begin, size = (each.tolist() for each in self._datasets())
        total = sum(size)
        counts = (self.weights / self.weights.sum() * total).round().clamp_min(1).long().tolist()
        # n evenly spaced ones of a dataset: first + floor(i * available / n)
        spaced = [
            first + torch.arange(n) * available // n for first, available, n in zip(begin, size, counts, strict=True)
        ]
        rows = self._rows(torch.cat(spaced))
        return self._observation(rows), self.actions[self.first[rows]]

    def imitated_rows(self) -> Tensor:
        """Indices of the observations of episodes that did not fail, ascending.

        Raises:
            UserError: if all episodes, or all of a dataset, failed.
        """
        self.check_imitable()
        return (~self.failed[self.episode]).nonzero().squeeze(1)

    def _random_rows(self, count: int, generator: torch.Generator) -> Tensor:
        """Random indices of observations, [count]."""
        self.check_imitable()
        if self.weights is None:
            total = int(self._imitated()[-1]) if self.failed.any() else len(self)
            return self._rows(torch.randint(total, (count,), generator=generator))
        begin, size = self._datasets()
        dataset = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        # a dataset by its weight, then one of its observations uniformly
        position = torch.rand(count, dtype=torch.float64, generator=generator)
        return self._rows(begin[dataset] + (position * size[dataset]).long())

    def check_imitable(self) -> None:
        """Check that there are episodes to imitate, in each dataset if there are weights.

        Raises:
            UserError: if all episodes, or all of a dataset, failed.
        """
        for number, episodes in self._of_failures().items():
            names = self.sources if self.weights is None else self.sources[number : number + 1]
            raise UserError(
                f"all {int(episodes.sum())} episodes of {' and '.join(names) or 'the demonstrations'} failed; imitation"
                " needs others, and stages=[offline] learns from the rewards of failures, too"
            )

    def _of_failures(self) -> dict[int, Tensor]:
        """Episodes [E] bool of each dataset in which all failed, by its number; without weights all are one dataset."""
        dataset = torch.zeros_like(self.ends) if self.weights is None else self.dataset_index
        assert dataset is not None
        members = {int(number): dataset == number for number in dataset[self.failed].unique()}
        return {number: episodes for number, episodes in members.items() if bool(self.failed[episodes].all())}

    def _counted(self) -> Tensor:
        """Whether each episode is one of those to draw, [E] bool: it did not fail, or all of its dataset did."""
        counted = ~self.failed
        for episodes in self._of_failures().values():
            counted |= episodes
        return counted

    def _imitated(self) -> Tensor:
        """Number of observations up to the end of each episode, [E], without those that do not count."""
        ends = torch.searchsorted(self.first, self.ends)
        return (ends.diff(prepend=ends.new_zeros(1)) * self._counted()).cumsum(0)

    def _rows(self, numbers: Tensor) -> Tensor:
        """Indices of the observations with these `numbers`, which leave out episodes that do not count."""
        if not self.failed.any():
            return numbers
        cumulative = self._imitated()
        episode = torch.searchsorted(cumulative, numbers, right=True)
        return numbers - cumulative[episode] + torch.searchsorted(self.first, self.ends)[episode]

    def _datasets(self) -> tuple[Tensor, Tensor]:
        """First observation and number of observations of each dataset, of episodes that count, [D] each."""
        assert self.weights is not None
        assert self.dataset_index is not None
        episodes = torch.searchsorted(self.dataset_index, torch.arange(len(self.weights)), right=True)
        end = self._imitated()[episodes - 1]
        size = end.diff(prepend=end.new_zeros(1))
        return end - size, size

    def part(self, begin: int, end: int) -> Episodes:
        """Episodes from `begin` to `end` - 1, which share the memory of these."""
        step, stop = (int(self.ends[episode - 1]) if episode else 0 for episode in (begin, end))
        row, last = torch.searchsorted(self.first, torch.tensor([step, stop])).tolist()
        rows = slice(row, last)
        steps = slice(step, stop)
        slices = {"observation": rows, "first": rows, "actions": steps, "reward": steps, "human": steps}
        slices["signals"] = steps
        whole = columns(replace(self, pictures=None, texts=None))
        parts = {name: value[slices.get(name.partition(".")[0], slice(begin, end))] for name, value in whole.items()}
        parts["first"], parts["ends"] = parts["first"] - step, parts["ends"] - step
        return replace(
            from_columns(parts),
            pictures=self.pictures and self.pictures.part(row, last),
            texts=self.texts and self.texts.part(row, last),
        )

    def selected(self, which: Tensor) -> Episodes:
        """The episodes `which`, ascending indices; pictures stay where they are, all else is copied."""
        chosen = torch.zeros(len(self.ends), dtype=torch.bool).index_fill(0, which, True)
        steps = chosen[torch.searchsorted(self.ends, torch.arange(self.steps), right=True)].nonzero().squeeze(1)
        rows = chosen[self.episode].nonzero().squeeze(1)
        places = {"observation": rows, "first": rows, "actions": steps, "reward": steps, "human": steps}
        places["signals"] = steps
        whole = columns(replace(self, pictures=None, texts=None))
        parts = {name: value[places.get(name.partition(".")[0], which)] for name, value in whole.items()}
        lengths = self.ends.diff(prepend=self.ends.new_zeros(1))
        # steps of unselected episodes before each episode
        removed = (lengths * ~chosen).cumsum(0)
        parts["first"] = parts["first"] - removed[self.episode[rows]]
        parts["ends"] = lengths[which].cumsum(0)
        return replace(
            from_columns(parts),
            pictures=self.pictures and self.pictures.selected(rows),
            texts=self.texts and self.texts.selected(rows),
            weights=self.weights,
            sources=self.sources,
        )


def _check_shapes(steps: int, parts: Mapping[str, tuple[TensorDict | Tensor | None, Tensor]]) -> None:
    """Raise UserError unless each of the `parts` of an episode has a row for each of the tensor beside it."""
    for name, (part, rows) in parts.items():
        if part is not None and part.shape != rows.shape[:1]:
            raise UserError(
                f"expected {name} of shape [{len(rows)}] for {steps} actions, got {list(part.shape)}; what follows the"
                " last action is the final_observation"
            )


class EpisodeWriter:
    """Writer of episodes to a folder, complete or not at all: one .npy file per column, and `episodes.json`.

    `contract` describes observations and actions; `origin` is any JSON of the writer. Used as a context manager.

    Raises:
        UserError: if the folder exists.
    """

    def __init__(self, folder: str | Path, contract: Contract, origin: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self.contract = contract
        self.origin = origin or {}
        if self.folder.exists():
            raise UserError(f"{folder} exists; choose another folder for episodes")
        self._temporary = self.folder.with_name(f".{self.folder.name}.tmp")
        self._columns: dict[str, Column] = {}
        self._texts: Texts | None = None
        self._steps = 0

    def __enter__(self) -> Self:
        """Create a temporary folder."""
        shutil.rmtree(self._temporary, ignore_errors=True)  # left by a killed process
        self._temporary.mkdir(parents=True)
        return self

    def add(self, episodes: Episodes) -> None:
        """Append `episodes` to the files; nothing stays in memory.

        Raises:
            UserError: if names, shapes or types of the tensors differ from those before; then nothing is written.
        """
        episodes = episodes.indexed(self.contract)
        shifted = replace(episodes, first=episodes.first + self._steps, ends=episodes.ends + self._steps)
        texts = None
        if episodes.texts is not None:
            texts, appended = episodes.texts.continuing(self._texts)
            shifted = replace(shifted, texts=appended)
        if episodes.pictures is not None:
            begin = {key: self._columns[f"{BYTES}.{key}"].rows for key in episodes.pictures.data if self._columns}
            shifted = replace(shifted, pictures=episodes.pictures.shifted(begin))
        rows = {name: values.cpu().numpy() for name, values in columns(shifted).items()}
        if self._columns and rows.keys() != self._columns.keys():
            raise UserError(f"expected episodes with {', '.join(self._columns)}, got {', '.join(rows)}")
        for name, values in rows.items():
            if name not in self._columns:
                self._columns[name] = Column(self._temporary / f"{name}.npy", values)
            self._columns[name].check(values)
        for name, values in rows.items():
            self._columns[name].append(values)
        self._steps = self._steps + episodes.steps
        self._texts = texts

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Complete the folder; after an error nothing remains."""
        try:
            with ExitStack() as closing:
                for column in self._columns.values():
                    closing.callback(column.close)
            if kind is None:
                record = {"format": FORMATS[-1], "contract": self.contract.to_dict(), "origin": self.origin}
                sealed.write(self._temporary / RECORD, record, [f"{name}.npy" for name in self._columns])
                flush(self._temporary)
                rename(self._temporary, self.folder)
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)


def read(folder: str | Path) -> tuple[Episodes, Contract, dict[str, Any]]:
    """Read episodes, contract and origin from the folder of an `EpisodeWriter`; files are mapped, not loaded.

    Raises:
        UserError: if the folder is missing, damaged or of another kind.
    """
    folder = Path(folder)
    try:
        record = sealed.read(folder / RECORD, *FORMATS)
        sealed.check_files(folder / RECORD, record)
        tensors = {name.removesuffix(".npy"): mapped(folder / name) for name in record["files"]}
        contract = Contract.from_dict(record["contract"])
        if tensors["success"].dtype == torch.bool:  # of earlier versions, where False was also unknown
            if not tensors["success"].all():
                raise UserError(f"{RECORD} is of a version that did not tell failed from unknown; write them again")
            tensors["success"] = tensors["success"].to(torch.int8)
        if record["format"] == FORMATS[0] and not tensors["reward"].any():
            tensors["reward"] = torch.full_like(tensors["reward"], torch.nan)
        return from_columns(tensors), contract, record["origin"]
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"cannot read episodes from {folder}: {error}") from error


def columns(episodes: Episodes) -> dict[str, Tensor]:
    """Tensors of `episodes` by name; names of observations are "observation.KEY"."""
    tensors = {}
    for field in fields(Episodes):
        value = getattr(episodes, field.name)
        if isinstance(value, TensorDict):
            tensors |= {f"{field.name}.{key}": part for key, part in value.items()}
        elif isinstance(value, Pictures | Texts):
            tensors |= value.columns()
        elif isinstance(value, Tensor) and field.name != "weights":
            tensors[field.name] = value
    return tensors


def from_columns(named: Mapping[str, Tensor]) -> Episodes:
    """Build episodes from the tensors of `columns`; its inverse."""
    nested: dict[str, dict[str, Any]] = {"observation": {}}
    pictures = Pictures.from_columns(named)
    texts = Texts.from_columns(named)
    flat: dict[str, Any] = {"pictures": pictures, "texts": texts}
    encoded = {name for part in (pictures, texts) if part is not None for name in part.columns()}
    for name, values in named.items():
        if name in encoded:
            continue
        outer, _, key = name.partition(".")
        if key:
            nested.setdefault(outer, {})[key] = values
        else:
            flat[name] = values
    sizes = {name: len(next(iter(parts.values()), named["first"])) for name, parts in nested.items()}
    batches = {name: TensorDict(parts, [sizes[name]]) for name, parts in nested.items()}
    return Episodes(**flat, **batches)
