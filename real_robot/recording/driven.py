"""Recordings as episodes: unbroken sequences of measurements and the actions written to the robot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Binding, Contract, TensorSpec
from embodied.data.episodes import Episodes
from embodied.errors import UserError
from real_robot.recording.data_sets.matching import Match
from real_robot.recording.data_sets.outcomes import HUMAN, REWARD
from real_robot.recording.recording import Ended, Episode, Gap, Item, Recording, Tick
from real_robot.recording.topics import Topics
from real_robot.safety.safety import MISSING, State

NOTHING = "these recordings have no tick with both a measurement and a written action"
VERDICT = "verdict"
"""Value of a `chosen` topic: the signal is 1 at steps after which safety held, else 0."""
LATE = 1.5
"""A new episode begins if two ticks are more control periods apart than this."""


def episodes(recording: Recording, chosen: Mapping[str, Any] = MappingProxyType({})) -> Iterator[tuple[str, Episodes]]:
    """Yield each episode with its task's name: an observation before every action written to the robot.

    An episode ends where the robot held, where the recording has a gap, and where the loop skipped a period, so that
    its steps are one control period apart. All parts of a failed episode are failures. The last part of a successful
    episode is a success; the outcome of its other parts is unknown. Rewards, signals, successes and endings are those
    of the `chosen` topics, see `topics.py`. A signal of the topic `VERDICT` marks steps after which safety held because
    of a fault or a limit, not for lack of a command.

    Raises:
        UserError: if an observation changes its shape within an episode, and for unknown topics.
    """
    outcomes = recording.outcomes()
    holds = [name for name, topic in chosen.items() if topic == VERDICT]
    topics = Topics(recording, {name: topic for name, topic in chosen.items() if name not in holds})
    number = -1
    task = ""
    ticks: list[Tick] = []
    for item in chain(recording, [None]):
        # the ticks so far are one episode if this item interrupts them
        if ticks and _breaks(item, ticks, recording.contract.control_dt_s):
            success = _part_success(outcomes.get(number), last=isinstance(item, Ended))
            is_over = item is None or isinstance(item, Episode | Ended)
            held = _is_held(item)
            parts = [*_episodes(ticks, recording, topics, success, is_over=is_over)]
            for each in parts:
                yield task, _with_holds(each, holds, held=held and each is parts[-1])
            ticks = []
        if _is_driven(item):
            ticks.append(item)
        if isinstance(item, Episode):
            number = number + 1
            task = item.task


def _is_held(item: Item | None) -> bool:
    """Whether safety held in the period `item`, with a reason other than a missing command."""
    return isinstance(item, Tick) and item.verdict.state is not State.ACTIVE and item.verdict.reason != MISSING


def _with_holds(episode: Episodes, names: Sequence[str], *, held: bool) -> Episodes:
    """The `episode` with signals `names`, which are 1 at its last step if it was `held` afterwards, else 0."""
    if not names:
        return episode
    hold = torch.zeros(episode.steps)
    hold[-1] = float(held)
    signals = {} if episode.signals is None else dict(episode.signals.items())
    return replace(episode, signals=TensorDict(signals | dict.fromkeys(names, hold), [episode.steps]))


def _part_success(success: bool | None, *, last: bool) -> bool | None:
    """Success of a part of an episode with the outcome `success`; None if unknown."""
    return success if last or success is False else None


def read(paths: Sequence[str | Path], contract: Contract, match: Match) -> Iterator[Episodes]:
    """Yield the episodes of all recordings at `paths`, with the keys and the order of elements of `contract`.

    Episodes of other tasks than the run's are skipped, according to `match`.

    Raises:
        UserError: see `episodes`; also if a recording does not serve the contract or has no written actions.
    """
    count = 0
    for path in paths:
        recording = Recording(path)
        match.check_rate(1.0 / recording.contract.control_dt_s)
        try:
            binding = contract.bind(replace(recording.contract, horizon=1, executed=1))
        except UserError as error:
            raise UserError(f"{path} does not serve the contract: {' '.join(str(error).split())}") from error
        needed = {key: spec for key, spec in contract.observation.items() if not spec.privileged}
        for task, episode in episodes(recording, match.options.columns):
            count += 1
            if (number := match.task_number(task)) is not None:
                yield replace(
                    bound(episode, needed, contract.action, binding),
                    task_index=torch.tensor([number]),
                )
    if not count:
        raise UserError(NOTHING)


def bound(episodes: Episodes, needed: Mapping[str, TensorSpec], action: TensorSpec, binding: Binding) -> Episodes:
    """Reorder the elements of `episodes` by `binding`; keep the observations `needed`, with dtypes of the specs."""
    observation = {
        key: _ordered(episodes.observation[key], binding.observation[key]).to(getattr(torch, spec.dtype))
        for key, spec in needed.items()
    }
    # binding.action scatters a policy's action into the robot's order; argsort is its inverse
    order = None if binding.action is None else binding.action.argsort()
    actions = _ordered(episodes.actions, order).to(getattr(torch, action.dtype))
    final = episodes.final_observation
    if final is not None:
        final = TensorDict(
            {
                key: _ordered(final[key], binding.observation[key]).to(getattr(torch, spec.dtype))
                for key, spec in needed.items()
                if key in final
            },
            final.batch_size,
        )
    bound_observation = TensorDict(observation, [len(episodes)])
    return replace(episodes, observation=bound_observation, actions=actions, final_observation=final)


def _ordered(values: Tensor, order: Tensor | None) -> Tensor:
    return values if order is None else values[..., order]


def _is_driven(item: Item | None) -> TypeGuard[Tick]:
    """Whether an action was executed as it was decided, which excludes the steps of a stop."""
    if not isinstance(item, Tick) or item.reading is None or item.verdict.action is None:
        return False
    return item.verdict.state is State.ACTIVE


def _breaks(item: Item | None, ticks: Sequence[Tick], control_dt_s: float) -> bool:
    """Whether the current episode ends before `item`, None at the end of the recording."""
    if _is_driven(item):
        return item.now_s - ticks[-1].now_s > LATE * control_dt_s
    return item is None or isinstance(item, Episode | Ended | Gap | Tick)


def _episodes(
    ticks: Sequence[Tick], recording: Recording, topics: Topics, success: bool | None, *, is_over: bool
) -> Iterator[Episodes]:
    """Episodes of successive `ticks`, with the `success` that was recorded: one, unless `topics` end it before.

    Messages after the last tick belong to its step, if the episode is over.
    """
    contract = recording.contract
    end = recording.next_begin(ticks[-1].now_s) if is_over else ticks[-1].now_s + LATE * contract.control_dt_s
    rows = topics.rows([tick.now_s for tick in ticks], end)
    columns = topics.columns
    for part in columns.parts(rows, len(ticks), success):
        episode = _episode(ticks[part.begin : part.end], contract, success=part.success)
        cells = {key: values[part.begin : part.end] for key, values in rows.items()}
        changes: dict[str, Any] = {"terminated": torch.tensor([part.terminated])}
        if (reward := columns.values(REWARD, cells)) is not None:
            changes["reward"] = torch.from_numpy(reward)
        if (human := columns.values(HUMAN, cells)) is not None:
            changes["human"] = episode.human | torch.from_numpy(human > 0.5)
        if names := columns.signals():
            signals = {name: torch.from_numpy(columns.values(name, cells)) for name in names}
            changes["signals"] = TensorDict(signals, [part.end - part.begin])
        yield replace(episode, **changes)


def _episode(ticks: Sequence[Tick], contract: Contract, *, success: bool | None) -> Episodes:
    """Stack the measurements and written actions of `ticks` to one episode."""
    readings = [tick.reading.observation for tick in ticks if tick.reading is not None]
    observation = {}
    for key, spec in contract.observation.items():
        if spec.privileged:
            continue
        if missing := [tick.now_s for tick, reading in zip(ticks, readings, strict=True) if key not in reading]:
            raise UserError(f"{key} is missing in the measurement at {missing[0]} s, though the contract has it")
        shapes = {reading[key].shape for reading in readings}
        if len(shapes) > 1:
            raise UserError(f"{key} changes its shape ({sorted(shapes)}) within an episode, which no dataset supports")
        observation[key] = torch.from_numpy(np.stack([reading[key] for reading in readings]))
    actions = np.stack([np.asarray(tick.verdict.action) for tick in ticks]).astype(contract.action.dtype)
    return Episodes.of(
        TensorDict(observation, [len(ticks)]),
        torch.from_numpy(actions),
        human=torch.tensor([tick.intervention for tick in ticks]),
        success=success,
    )
