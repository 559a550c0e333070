"""Demonstrations of the scripted expert: successful episodes, kept in one file with the contract they fit.

They start from the training split of the wide distribution, never from LIBERO's own initial states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.command_line.progress import Progress
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.saving.tree import load_tree, save_tree
from sims.libero.assets import Assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.expert.expert import Expert
from sims.libero.suite import Task

FORMAT = 1
AT_ONCE = 8
"""Environments per task."""
SPARE_FAILURES = 10
"""A task is given up after this many more failures than successes."""


@dataclass(frozen=True, eq=False)
class Demonstrations:
    """E episodes of S control steps in all, ordered by task and initial state.

    `observation` [S] was seen before each of `actions` [S, 7]; `lengths`, `task_index` and `start` are [E]. `contract`
    has K=1: one action per observation. `origin` tells how they were made (tasks, assets, seed, noise).
    """

    contract: Contract
    observation: TensorDict
    actions: Tensor
    lengths: Tensor
    task_index: Tensor
    start: Tensor
    origin: dict[str, Any]

    def episodes(self) -> Iterator[tuple[TensorDict, Tensor]]:
        """Observation [L] and actions [L, 7] of every episode."""
        lengths = self.lengths.tolist()
        yield from zip(self.observation.split(lengths), self.actions.split(lengths), strict=True)

    def save(self, path: str | Path) -> None:
        """Write everything to `path`, whole or not at all."""
        fields = {"observation": self.observation, "actions": self.actions, "lengths": self.lengths}
        fields |= {"task_index": self.task_index, "start": self.start, "origin": self.origin}
        save_tree(path, {"demonstrations": FORMAT, "contract": self.contract.to_dict(), **fields})


def load(path: str | Path) -> Demonstrations:
    """Read what `Demonstrations.save` wrote.

    Raises:
        UserError: where the file is missing, cut short or something else.
    """
    tree = load_tree(path)
    if not isinstance(tree, dict) or tree.pop("demonstrations", None) != FORMAT:
        raise UserError(f"{path}: expected demonstrations of format {FORMAT}; make them anew")
    return Demonstrations(contract=Contract.from_dict(tree.pop("contract")), **tree)


def collect(
    tasks: Sequence[Task],
    episodes: int,
    *,
    assets: Assets | str | Path | None = None,
    seed: int = 0,
    noise: float = 0.1,
    step_limit: int | None = None,
    threads: int | None = None,
    progress: bool = True,
) -> Demonstrations:
    """Run the expert until it has succeeded in `episodes` episodes of each task; a bar shows how far it is.

    Args:
        tasks: pick-and-place tasks.
        episodes: per task.
        assets: see `LiberoEnvironment`.
        seed: of initial states and noise.
        noise: standard deviation of the smooth noise on the expert's actions, 1 is full speed.
        step_limit: control steps within which an episode has to succeed; the suite's own if None.
        threads: of the simulation; the result does not depend on it.
        progress: whether to show the bar.

    Raises:
        UserError: where the expert cannot do a task.
    """
    if episodes < 1:
        raise UserError(f"expected at least one episode per task, got {episodes}")
    num_envs = len(tasks) * min(episodes, AT_ONCE)
    env = LiberoEnvironment(
        tasks, num_envs, distribution="wide", split="train", horizon=1, executed=1,
        step_limit=step_limit, assets=assets, seed=seed, threads=threads,
    )  # fmt: skip
    recorder = _Recorder(env, Expert(env.simulation, noise=noise, seed=seed), episodes)
    with Progress("demonstrations", len(tasks) * episodes, "episode", shown=progress) as bar:
        while recorder.running.any():
            bar.update(recorder.step())
    origin = {"tasks": list(env.task_names), "assets": env.assets.kind, "seed": seed, "noise": noise}
    return recorder.result(origin | {"step_limit": env.step_limit})


class _Recorder:
    """Runs the expert everywhere at once and keeps the episodes that succeed."""

    def __init__(self, env: LiberoEnvironment, expert: Expert, episodes: int) -> None:
        self.env, self.expert, self.episodes = env, expert, episodes
        self.task = env.task_index.tolist()
        self.begun, self.succeeded, self.failed = ([0] * len(env.task_names) for _ in range(3))
        self.kept: list[tuple[int, int, TensorDict, Tensor]] = []  # task, initial state, observation, actions
        self.running = torch.zeros(env.num_envs, dtype=torch.bool)
        self.observation = self._begin(torch.ones(env.num_envs, dtype=torch.bool))
        # what the running episodes have seen and done so far, [N, step_limit]
        self.seen = self.observation.unsqueeze(1).expand(-1, env.step_limit).clone()
        self.done = torch.zeros(env.num_envs, env.step_limit, 7)

    def step(self) -> int:
        """One control step; returns how many episodes it completed successfully."""
        ids = self.running.nonzero().flatten()
        actions = torch.zeros(self.env.num_envs, 1, 7)
        actions[ids, 0] = torch.from_numpy(self.expert.act(ids.numpy())).float()
        now = self.env.steps[ids]
        self.seen[ids, now], self.done[ids, now] = self.observation[ids], actions[ids, 0]
        transition = self.env.step(actions)
        self.observation = transition.observation
        finished = transition.done & self.running
        before = len(self.kept)
        for index in finished.nonzero().flatten().tolist():
            self._keep(index, bool(transition.success[index]))
        if finished.any():
            self.observation = self._begin(finished)
        return len(self.kept) - before

    def result(self, origin: dict[str, Any]) -> Demonstrations:
        """Everything kept, in order."""
        kept = sorted(self.kept, key=lambda episode: episode[:2])
        return Demonstrations(
            contract=self.env.contract,
            observation=torch.cat([episode[2] for episode in kept]),
            actions=torch.cat([episode[3] for episode in kept]),
            lengths=torch.tensor([len(episode[3]) for episode in kept]),
            task_index=torch.tensor([episode[0] for episode in kept]),
            start=torch.tensor([episode[1] for episode in kept]),
            origin=origin | {"failed": self.failed},
        )

    def _keep(self, index: int, success: bool) -> None:
        task, start, length = self.task[index], int(self.env.start[index]), int(self.env.steps[index])
        if success:
            self.succeeded[task] += 1
            self.kept.append((task, start, self.seen[index, :length].clone(), self.done[index, :length].clone()))
            return
        self.failed[task] += 1
        if self.failed[task] > self.succeeded[task] + SPARE_FAILURES:
            tried, name = self.failed[task] + self.succeeded[task], self.env.task_names[task]
            outcome = f"the scripted expert failed in {self.failed[task]} of {tried} episodes of {name}"
            raise UserError(f"{outcome}; choose tasks that it can do, task.tasks=[...]")

    def _begin(self, free: Tensor) -> TensorDict:
        """Start as many new episodes in the `free` environments [N] as their tasks still need; stop the others."""
        begin = torch.zeros_like(free)
        for index in free.nonzero().flatten().tolist():
            task = self.task[index]
            begin[index] = self.begun[task] - self.failed[task] < self.episodes
            self.begun[task] += int(begin[index])
        self.running = (self.running & ~free) | begin
        self.expert.reset(begin.nonzero().flatten().numpy())
        return self.env.reset(mask=begin)
