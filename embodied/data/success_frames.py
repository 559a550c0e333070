"""Frames of recorded episodes with labels for a classifier of success.

The last frames of a successful episode, or those marked by a signal, are positive. Earlier frames, and all frames of a
failed episode, are negative. The frames of a gap before the positive ones are unknown and are in no batch. Letters: E
episodes, F frames, R observations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.configuration import Configuration, NonNegativeInt, PositiveInt, Range
from embodied.data.episodes import FAILED, SUCCEEDED, UNKNOWN, Episodes
from embodied.errors import UserError

POSITIVE = 1
NEGATIVE = 0
FINAL = -1
"""Value of `Frames.row` for the observation after the last step of an episode."""
PARTS = TRAIN, VALIDATION, TEST = range(3)
"""Parts of a split."""
JOINED = "success", "row", "source_episode", "label"
"""Columns of `Frames` that are concatenated as they are."""
SMALLEST_SPLIT = 3
"""Number of episodes below which all are in the part TRAIN."""


@dataclass
class LabelConfig(Configuration):
    """Labels of frames, and the split of episodes.

    The last `positive_last` frames of a successful episode are positive, or those whose signal `positive_key` is above
    0.5, if it is set: a column named by demonstration_columns. The `gap` frames before them are unknown. A share
    `validation_share` of the episodes chooses the threshold, and a share `test_share` measures the classifier.
    """

    positive_last: PositiveInt = 5
    gap: NonNegativeInt = 10
    positive_key: str | None = None
    validation_share: Annotated[float, Range(above=0, below=1)] = 0.2
    test_share: Annotated[float, Range(above=0, below=1)] = 0.2

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and unless a share is left to train on."""
        super().__post_init__()
        if self.validation_share + self.test_share >= 1:
            raise UserError(
                f"validation_share={self.validation_share} and test_share={self.test_share} leave nothing to train on;"
                " expected a sum below 1"
            )


@dataclass(frozen=True, eq=False)
class Frames:
    """F frames of E episodes from several `sources`, in the order of the episodes and of time."""

    sources: tuple[Episodes, ...]
    names: tuple[str, ...]  # [E] names of the episodes, for reports
    success: Tensor  # [E] int8, SUCCEEDED or FAILED
    source: Tensor  # [F] index of the frame's source
    row: Tensor  # [F] index of the observation in its source, or FINAL
    source_episode: Tensor  # [F] index of the episode in its source
    episode: Tensor  # [F] index of the episode, ascending
    label: Tensor  # [F] int8, POSITIVE, NEGATIVE or UNKNOWN

    def __len__(self) -> int:
        """Number of frames, F."""
        return len(self.row)

    @staticmethod
    def join(parts: Sequence[Frames]) -> Frames:
        """Frames of all `parts`, in order."""
        sources = 0
        episodes = 0
        shifted: dict[str, list[Tensor]] = {"source": [], "episode": []}
        for part in parts:
            shifted["source"].append(part.source + sources)
            shifted["episode"].append(part.episode + episodes)
            sources, episodes = sources + len(part.sources), episodes + len(part.names)
        columns = {name: [getattr(part, name) for part in parts] for name in JOINED} | shifted
        return Frames(
            tuple(source for part in parts for source in part.sources),
            tuple(name for part in parts for name in part.names),
            **{name: torch.cat(values) for name, values in columns.items()},
        )

    def take(self, index: Tensor) -> TensorDict:
        """Observations [B] of the frames `index` [B]."""
        parts = []
        places = []
        for number, episodes in enumerate(self.sources):
            for is_final in (False, True):
                chosen = (self.source[index] == number) & ((self.row[index] == FINAL) == is_final)
                where = chosen.nonzero().squeeze(1)
                if len(where):
                    frames = index[where]
                    rows = self.source_episode[frames] if is_final else self.row[frames]
                    parts.append(_final(episodes, rows) if is_final else episodes.chunks(rows, 1)["observation"])
                    places.append(where)
        # parts are in the order of sources; the inverse permutation puts them in the order of `index`
        return cast(TensorDict, torch.cat(parts))[torch.cat(places).argsort()]

    @property
    def step(self) -> Tensor:
        """Control step of its episode before which each frame was observed, [F]; not every step has a frame."""
        steps = torch.zeros_like(self.row)
        for number, episodes in enumerate(self.sources):
            own = self.source == number
            episode, row = self.source_episode[own], self.row[own]
            begins = torch.cat((episodes.ends.new_zeros(1), episodes.ends[:-1]))
            observed = torch.where(row == FINAL, episodes.ends[episode], episodes.first[row.clamp_min(0)])
            steps[own] = observed - begins[episode]
        return steps

    def of_part(self, part: Tensor, number: int) -> Tensor:
        """Indices of the frames whose episode is in the part `number` of the split `part` [E]."""
        return (part[self.episode] == number).nonzero().squeeze(1)


def labelled_frames(
    episodes: Episodes, config: LabelConfig, name: str, *, failed_only: bool = False
) -> tuple[Frames, list[str]]:
    """Frames of the `episodes` of data set `name` with labels, and notes on episodes that are left out.

    Episodes of unknown outcome are left out; with `failed_only` also those that succeeded.

    Raises:
        UserError: if no episode remains, or the data set lacks the signal `config.positive_key`.
    """
    kept = episodes.success == FAILED if failed_only else episodes.success != UNKNOWN
    notes = _left_out(episodes, kept, name, failed_only=failed_only)
    numbers = kept.nonzero().squeeze(1)
    if not len(numbers):
        expected = "episodes that a person marked as failures" if failed_only else "episodes of known outcome"
        raise UserError(
            f"{name} has no {expected} among its {len(kept):,}; add 'demonstration_columns={{success:NAME}}', or record"
            " again and end each episode as a success or a failure"
        )
    chosen = episodes if bool(kept.all()) else episodes.selected(numbers)
    if config.positive_key is not None and not failed_only:
        _check_key(chosen, config.positive_key, name)
    stops = [0, *torch.searchsorted(chosen.first, chosen.ends).tolist()]
    parts = [
        _labelled_episode(chosen, number, torch.arange(*stops[number : number + 2]), config)
        for number in range(len(numbers))
    ]
    unmarked = [f"{int(numbers[n])}" for n, (_, label) in enumerate(parts) if _lacks_positive(chosen, n, label)]
    if unmarked:
        notes.append(f"{name}: no frame of the successful episodes {', '.join(unmarked)} is marked: they are unknown.")
    lengths = torch.tensor([len(label) for _, label in parts])
    episode = torch.arange(len(parts)).repeat_interleave(lengths)
    return (
        Frames(
            (chosen,),
            tuple(f"episode {number} of {name}" for number in numbers.tolist()),
            chosen.success,
            torch.zeros_like(episode),
            torch.cat([row for row, _ in parts]),
            episode,
            episode,
            torch.cat([label for _, label in parts]),
        ),
        notes,
    )


def _left_out(episodes: Episodes, kept: Tensor, name: str, *, failed_only: bool) -> list[str]:
    """Note on the number of episodes that are left out, and the reason."""
    unknown = int((episodes.success == UNKNOWN).sum())
    succeeded = int((~kept).sum()) - unknown
    reasons = [f"{unknown:,} of unknown outcome"] * bool(unknown)
    reasons += [f"{succeeded:,} that succeeded"] * bool(failed_only and succeeded)
    return [f"{name}: of {len(kept):,} episodes {' and '.join(reasons)} are left out."] if reasons else []


def _check_key(episodes: Episodes, key: str, name: str) -> None:
    names = [] if episodes.signals is None else sorted(map(str, episodes.signals.keys()))
    if key not in names:
        raise UserError(
            f"{name} has no signal {key} for positive_key; it has {', '.join(names) or 'none'}: name its column with"
            f" 'demonstration_columns={{{key}:COLUMN}}'"
        )


def _labelled_episode(episodes: Episodes, number: int, row: Tensor, config: LabelConfig) -> tuple[Tensor, Tensor]:
    """Rows and labels of the frames of an episode: its observations `row`, then the final one if that is recorded."""
    step = episodes.first[row]
    if episodes.final_observation is not None:
        row = torch.cat((row, torch.tensor([FINAL])))
        step = torch.cat((step, episodes.ends[number : number + 1] - 1))
    label = torch.full((len(row),), NEGATIVE, dtype=torch.int8)
    marks = None
    signals = {} if episodes.signals is None else dict(episodes.signals.items())
    if config.positive_key in signals:
        marks = cast(Tensor, signals[config.positive_key])[step]
    if episodes.success[number] == FAILED:
        if marks is not None:  # a success that did not last, or a mark that is unknown
            label[~(marks <= 0.5)] = UNKNOWN
        return row, label
    positive = torch.arange(len(row)) >= len(row) - config.positive_last if marks is None else marks > 0.5
    first = int(positive.long().argmax()) if bool(positive.any()) else 0
    label[max(0, first - config.gap) :] = UNKNOWN
    label[positive] = POSITIVE
    if marks is not None:
        label[marks.isnan()] = UNKNOWN
    return row, label


def _lacks_positive(episodes: Episodes, number: int, label: Tensor) -> bool:
    return bool(episodes.success[number] == SUCCEEDED) and not bool((label == POSITIVE).any())


def _final(episodes: Episodes, numbers: Tensor) -> TensorDict:
    """Observations after the last step of the episodes `numbers`."""
    assert episodes.final_observation is not None
    return episodes.final_observation[numbers]


def split(success: Tensor, config: LabelConfig, generator: torch.Generator) -> Tensor:
    """Part of each episode, [E]: TRAIN, VALIDATION or TEST, with the same shares of successes `success` [E] in each.

    All frames of an episode are in one part, since neighbouring frames are almost the same picture. Of fewer than three
    successes, or failures, all are in TRAIN.
    """
    part = torch.full((len(success),), TRAIN)
    for outcome in (SUCCEEDED, FAILED):
        own = (success == outcome).nonzero().squeeze(1)
        own = own[torch.randperm(len(own), generator=generator)]
        if len(own) < SMALLEST_SPLIT:
            continue
        validation, test = (max(1, round(share * len(own))) for share in (config.validation_share, config.test_share))
        # one remains to train on, however large the shares are
        validation, test = (min(each, (len(own) - 1) // 2) for each in (validation, test))
        part[own[:validation]] = VALIDATION
        part[own[validation : validation + test]] = TEST
    return part


def as_earlier(frames: Frames, part: Tensor, earlier: Mapping[str, int]) -> Tensor:
    """The `part` of each episode, [E], but that of an `earlier` training, by name, where it was in one.

    A network that goes on learning would otherwise be measured by episodes that it has learned, if the data set has
    grown, or by another seed.
    """
    return torch.tensor([earlier.get(name, drawn) for name, drawn in zip(frames.names, part.tolist(), strict=True)])


def joined(labelled: Sequence[Frames], parts: Sequence[Tensor]) -> tuple[Frames, Tensor]:
    """Frames of all data sets, and the part of each episode, [E].

    Raises:
        UserError: see `check_parts`.
    """
    frames, part = Frames.join(labelled), torch.cat(list(parts))
    check_parts(frames, part)
    return frames, part


def check_parts(frames: Frames, part: Tensor) -> None:
    """Check that each part of a split has positive and negative frames.

    Raises:
        UserError: with the number of successful episodes that are needed.
    """
    for number, name in ((TRAIN, "training"), (VALIDATION, "validation"), (TEST, "test")):
        labels = frames.label[frames.of_part(part, number)]
        for label, kind in ((POSITIVE, "positive"), (NEGATIVE, "negative")):
            if not bool((labels == label).any()):
                succeeded = int((frames.success == SUCCEEDED).sum())
                raise UserError(
                    f"the {name} episodes have no {kind} frames ({succeeded} of {len(frames.success)} episodes"
                    f" succeeded); expected at least {SMALLEST_SPLIT} successful episodes, each longer than"
                    " positive_last and gap: record more, or use a smaller gap"
                )


def counts(frames: Frames, part: Tensor) -> dict[str, dict[str, Any]]:
    """Number of episodes, successes, positive and negative frames in each part, by its name."""
    result = {}
    for number, name in ((TRAIN, "training"), (VALIDATION, "validation"), (TEST, "test")):
        labels = frames.label[frames.of_part(part, number)]
        result[name] = {
            "episodes": int((part == number).sum()),
            "successes": int((frames.success[part == number] == SUCCEEDED).sum()),
            "positive_frames": int((labels == POSITIVE).sum()),
            "negative_frames": int((labels == NEGATIVE).sum()),
        }
    return result
