"""Curriculum of initial states: some that the policy has tried begin more episodes than others.

A share of episodes repeats known initial states of the environment's task, by their weight, and the others begin in new
ones, which a curriculum of only known states would never find. For every task the `REMEMBERED` states of most weight
are remembered. The weight is exp(-|success - 1/2| / TEMPERATURE), because a state with a success rate of one half says
most about the policy's last change; or that of VLA-RL (arXiv 2505.18719) as its code has it, max(1 - success, LEAST),
by which states that are never solved are begun most often.

Differs from VLA-RL: there a task has a fixed set of initial states, which are all known, the success rate is that of
the last five attempts, and the paper also draws among tasks; here each environment keeps its task.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from embodied import seeding
from embodied.rollout.starts import RECENT, random_first_start

REMEMBERED = 32
TEMPERATURE = 0.1
LEAST = 0.1
"""Smallest weight of a state by its failures: VLA-RL's smallest probability, before normalisation."""
MEMORY = 0.9
"""Weight of an attempt relative to the one after it, because the policy changes."""

Record = tuple[float, float]
"""Numbers of attempts and successes of an initial state, which decay by `MEMORY` at each attempt."""


class Favours(Enum):
    """Initial states that a curriculum repeats most: those solved HALF of the time, or those of most FAILURES."""

    HALF = "half"
    FAILURES = "failures"

    def weight(self, record: Record) -> float:
        """Weight of an initial state that has been tried."""
        attempts, successes = record
        # w = max(1 - successes / attempts, LEAST)
        return max(1.0 - successes / attempts, LEAST) if self is Favours.FAILURES else weight(record)


def weight(record: Record) -> float:
    """Weight of an initial state, 1 where its success rate is one half.

    The rate begins at one half, as if one attempt of two had succeeded: a state tried once may have any rate.
    """
    attempts, successes = record
    # w = exp(-|(successes + 1) / (attempts + 2) - 1/2| / TEMPERATURE)
    return math.exp(-abs((successes + 1.0) / (attempts + 2.0) - 0.5) / TEMPERATURE)


class CurriculumStarts:
    """Starts that repeat known initial states in a share `repeated` of episodes.

    The known states are drawn by the weight of `favours`, the other episodes begin in new states. Starts are below
    `num_starts`; None: unlimited.
    """

    def __init__(
        self,
        task_index: Tensor,
        *,
        repeated: float,
        generator: torch.Generator,
        num_starts: int | None = None,
        favours: Favours = Favours.HALF,
    ) -> None:
        self.task_index = task_index.tolist()
        self.repeated = repeated
        self.weight = favours.weight
        self.num_starts = num_starts
        tasks = max(self.task_index) + 1
        count = len(self.task_index)
        self.fresh = [random_first_start(generator)] * tasks
        self.generator = seeding.child(generator)
        self.records: list[dict[int, Record]] = [{} for _ in range(tasks)]
        self.running: list[int] = [-1] * count  # initial states of the running episodes; -1: none yet
        self.first: list[bool] = [False] * count  # whether that state is a new one
        self.firsts: list[bool] = []  # success of the last episodes from new ones
        self.ended: list[bool] = [False] * count  # whether the environment has ended an episode

    def __call__(self, finished: Tensor, success: Tensor) -> Tensor:
        """Initial states [N] for environments that `finished` [N] with `success` [N]; elsewhere 0, which is unused."""
        rows = finished.nonzero().flatten().tolist()
        won = success.tolist()
        for env in rows:
            if self.running[env] >= 0:
                self._remember(env, won[env])
        draws = torch.rand(len(rows), generator=self.generator).tolist()
        for env, draw in zip(rows, draws, strict=True):
            self._begin(env, draw < self.repeated)
        starts = torch.zeros(len(self.running), dtype=torch.int64)
        for env in rows:
            starts[env] = self.running[env]
        return starts

    def separate(self, generator: torch.Generator) -> None:
        """See `OwnStarts.separate`."""
        self.generator = generator
        self.fresh = [random_first_start(generator)] * len(self.fresh)

    def abandon(self) -> None:
        """Drop the running episodes: they count neither as successes nor as failures."""
        self.running = [-1] * len(self.running)

    def metrics(self) -> dict[str, float]:
        """Metrics `new_starts_success` and `known_starts`, the number of remembered states.

        The former is the success rate of the last `RECENT` episodes from new initial states. It is left out until
        every environment has ended an episode, because successful episodes end first.
        """
        counts = {"known_starts": float(sum(map(len, self.records)))}
        return counts | ({"new_starts_success": sum(self.firsts) / len(self.firsts)} if all(self.ended) else {})

    def _remember(self, env: int, won: bool) -> None:
        records = self.records[self.task_index[env]]
        start = self.running[env]
        attempts, successes = records.get(start, (0.0, 0.0))
        records[start] = (MEMORY * attempts + 1.0, MEMORY * successes + won)
        if len(records) > REMEMBERED:
            del records[min(records, key=lambda each: self.weight(records[each]))]
        self.ended[env] = True
        if self.first[env]:
            self.firsts = [*self.firsts, won][-RECENT:]

    def _begin(self, env: int, repeat: bool) -> None:
        """Begin the next episode of `env`, in a known state if it is to `repeat` one and there is one."""
        task = self.task_index[env]
        records = self.records[task]
        self.first[env] = not (repeat and records)
        if self.first[env]:
            self.running[env] = self.fresh[task] % self.num_starts if self.num_starts else self.fresh[task]
            self.fresh[task] += 1
        else:
            weights = torch.tensor([self.weight(record) for record in records.values()])
            self.running[env] = list(records)[int(torch.multinomial(weights, 1, generator=self.generator))]

    def state_dict(self) -> dict[str, Any]:
        """Records of initial states, and counters."""
        state = {name: list(getattr(self, name)) for name in ("fresh", "running", "first", "firsts", "ended")}
        records = [[[start, *record] for start, record in task.items()] for task in self.records]
        return state | {"known": records, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for name in ("fresh", "running", "first", "firsts", "ended"):
            setattr(self, name, list(state[name]))
        self.records = [{int(start): (tried, won) for start, tried, won in task} for task in state["known"]]
        self.generator.set_state(state["generator"])
