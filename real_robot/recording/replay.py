"""Replays a recording: checks that a policy still returns the recorded answers.

On the recording machine they match bit for bit. On another machine matrix products may round differently; the largest
difference is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tensordict import TensorDict

from embodied.errors import UserError
from embodied.execution.chunking import InpaintingPolicy, Running
from embodied.policy import MEMORY, Decision, Policy
from embodied.rollout.memory import STARTED, Memory
from real_robot.recording.recording import Decided, Episode, Gap, Recording
from real_robot.robots.robot import Array


@dataclass(frozen=True)
class Replay:
    """Result of a replay: number of `compared` answers, of bitwise `identical` ones, and of `skipped` ones.

    Answers after a gap are skipped, because memory is unknown there. `episodes` holds the pairs of new and recorded
    answers, by episode.
    """

    compared: int
    identical: int
    largest_difference: float
    skipped: int
    episodes: tuple[tuple[tuple[Array, Array], ...], ...] = field(repr=False)

    @property
    def exact(self) -> bool:
        """Whether all answers were compared and none differed."""
        return self.compared == self.identical > 0 and not self.skipped


def replay(recording: Recording, policy: Policy, device: torch.device | str = "cpu") -> Replay:
    """Run `policy`, on `device`, on the recorded measurements of every decision of `recording`.

    The policy's memory is carried between decisions and restarts with episodes, as on the robot; its generator
    continues from the recorded state. Recorded memory is compared, too.

    Raises:
        UserError: if the recording contains no decisions, or other observations than the policy's.
    """
    memory = Memory(policy, 1, device)
    tally = _Tally()
    generator = torch.Generator(device)
    for item in recording:
        if isinstance(item, Episode):
            memory.restart(None)
        if not isinstance(item, Decided):
            tally.mark(item)
            continue
        if item.generator is not None:
            generator.set_state(torch.from_numpy(item.generator))
        observation = memory.with_observation(_batch(item.observation).to(device))
        decision = _ask(policy, observation, item, generator)
        memory.keep([decision])
        # the memory before this decision shows an earlier difference that the actions may hide
        pairs = [(_array(decision.actions), item.actions)]
        if MEMORY in item.observation:
            pairs.append((_array(observation[MEMORY]), item.observation[MEMORY]))
        tally.add(pairs)
    return tally.result()


def _ask(policy: Policy, observation: TensorDict, item: Decided, generator: torch.Generator) -> Decision:
    options = {"deterministic": item.deterministic, "generator": generator}
    try:
        if not item.running:
            return policy.act(observation, **options)
        if not isinstance(policy, InpaintingPolicy):
            raise UserError(f"the recorded policy continued running chunks, {type(policy).__name__} cannot")
        running_fields = {name: torch.from_numpy(value).to(observation.device) for name, value in item.running.items()}
        return policy.inpaint(observation, Running(**{k: v.unsqueeze(0) for k, v in running_fields.items()}), **options)
    except KeyError as error:
        keys = ", ".join(item.observation)
        raise UserError(f"the policy reads {error}, the recorded one read {keys}; replay the one recorded") from error


def _batch(observation: dict[str, Array]) -> TensorDict:
    observations = {key: value for key, value in observation.items() if key not in (MEMORY, STARTED)}
    return TensorDict(
        {key: torch.from_numpy(value).unsqueeze(0) for key, value in observations.items()}, batch_size=[1]
    )


def _array(batch: torch.Tensor) -> Array:
    return batch[0].detach().cpu().numpy()


class _Tally:
    """Counts answers; answers after a gap are skipped until the next episode."""

    def __init__(self) -> None:
        self.compared = self.identical = self.skipped = 0
        self.largest = 0.0
        self.lost = False
        self.episodes: list[list[tuple[Array, Array]]] = [[]]

    def mark(self, item: object) -> None:
        if isinstance(item, Gap):
            self.lost = True
        elif isinstance(item, Episode):
            self.lost = False
            self.episodes.append([])

    def add(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Add one answer: all pairs of new and recorded parts, the action first."""
        if self.lost:
            self.skipped += 1
            return
        self.episodes[-1].append(pairs[0])
        differences = [_difference(*pair) for pair in pairs]
        self.compared += 1
        self.identical += not any(differences)
        self.largest = max(self.largest, *differences)

    def result(self) -> Replay:
        if not self.compared + self.skipped:
            raise UserError("the recording holds no decisions; record with recorder.watch(policy)")
        episodes = tuple(tuple(answers) for answers in self.episodes if answers)
        return Replay(self.compared, self.identical, self.largest, self.skipped, episodes)


def _difference(replayed: Array, recorded: Array) -> float:
    """0 if every bit agrees, else the largest difference; infinity if one is not a number."""
    if (replayed.dtype, replayed.shape) != (recorded.dtype, recorded.shape):
        return np.inf
    if replayed.tobytes() == recorded.tobytes():
        return 0.0
    largest = float(np.abs(np.subtract(replayed, recorded, dtype=np.float64)).max())
    return max(largest, np.finfo(np.float64).tiny) if np.isfinite(largest) else np.inf  # 0.0 and -0.0 differ
