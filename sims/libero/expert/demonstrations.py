"""Demonstrations of the scripted expert: successful episodes with an observation before every action.

With pictures, which take most of the time, there is an observation only every `stride` actions, and the first one is at
a different action in each episode. Demonstrations start from the training split of the wide distribution, never from
LIBERO's own initial states.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.data.episodes import Episodes, EpisodeWriter
from embodied.errors import UserError
from embodied.runtime.progress import Progress
from embodied.text import encode
from sims.libero.assets import Assets
from sims.libero.environment import LiberoEnvironment
from sims.libero.expert.expert import Expert
from sims.libero.language import INSTRUCTION_BYTES, Wordings
from sims.libero.observation import Observer
from sims.libero.published import Published
from sims.libero.suite import Task

AT_ONCE = 8
"""Largest number of environments per task."""
SPARE_FAILURES = 10
"""Excess of failures over successes at which a task is abandoned."""


def collect(
    writer: EpisodeWriter,
    tasks: Sequence[Task],
    episodes: int,
    *,
    assets: Assets | str | Path | None = None,
    seed: int = 0,
    noise: float = 0.1,
    step_limit: int | None = None,
    threads: int | None = None,
    progress: bool = True,
    image_size: int | None = None,
    images: Sequence[str] = (),
    convention: Published | None = None,
    stride: int = 1,
    starts: str = "wide",
    areas_share: float = 0.0,
    counterfactual_share: float = 0.0,
) -> None:
    """Run the expert until it has succeeded in `episodes` episodes of each task.

    Episodes are ordered by task and initial state. Instructions vary over the training wordings.

    Args:
        writer: receives the episodes; its origin lists the initial state of each and the failures of each task.
        tasks: pick-and-place tasks.
        episodes: number of episodes per task.
        assets: see `LiberoEnvironment`.
        seed: seed of initial states and noise.
        noise: standard deviation of the smooth noise on the expert's actions; 1 is full speed.
        step_limit: control steps within which an episode has to succeed; the suite's own if None.
        threads: number of simulation threads; the result does not depend on it.
        progress: whether to show a progress bar.
        image_size: pixels a side of pictures, if any.
        images: cameras of the pictures.
        convention: see `LiberoEnvironment`.
        stride: control steps from one observation to the next if there are pictures.
        starts: distribution of initial states.
        areas_share: see `LiberoEnvironment`.
        counterfactual_share: see `LiberoEnvironment`.

    Raises:
        UserError: if the expert cannot do a task.
    """
    if episodes < 1:
        raise UserError(f"expected at least one episode per task, got {episodes}")
    num_envs = len(tasks) * min(episodes, AT_ONCE)
    env = LiberoEnvironment(
        tasks,
        num_envs,
        distribution=starts,
        split="train",
        areas_share=areas_share,
        counterfactual_share=counterfactual_share,
        wording="training",
        horizon=1,
        executed=1,
        step_limit=step_limit,
        assets=assets,
        seed=seed,
        threads=threads,
        convention=convention,
    )
    eyes = Observer(env.simulation, image_size, images, convention)
    expert = Expert(env.simulation, noise=noise, seed=seed)
    recorder = _Recorder(env, expert, episodes, eyes, stride if image_size and images else 1)
    with Progress("demonstrations", len(tasks) * episodes, "episode", visible=progress) as bar:
        while recorder.running.any():
            bar.update(recorder.step())
    starts, recorded = recorder.result()
    instruction = 0
    for start, episode in zip(starts, recorded, strict=True):
        writer.add(worded(episode, env.aims[int(episode.task_index)](start).wordings, instruction))
        instruction += len(episode)
    writer.origin |= {"start": starts, "failed": recorder.failed}


def worded(episode: Episodes, wordings: Wordings, first: int) -> Episodes:
    """The episode with its task's instructions from number `first` on, one a step."""
    assert episode.final_observation is not None
    texts = [encode(wordings(number), INSTRUCTION_BYTES) for number in range(first, first + len(episode) + 1)]
    rows = torch.from_numpy(np.stack(texts))
    episode.observation["instruction"] = rows[:-1]
    episode.final_observation["instruction"] = rows[-1:]
    return episode


class _Recorder:
    """Runs the expert in all environments and keeps successful episodes."""

    def __init__(self, env: LiberoEnvironment, expert: Expert, episodes: int, eyes: Observer, stride: int) -> None:
        self.env = env
        self.expert = expert
        self.episodes = episodes
        self.eyes = eyes
        self.stride = stride
        self.task = env.task_index.tolist()
        self.started, self.succeeded, self.failed = ([0] * len(env.task_names) for _ in range(3))
        self.successes: list[tuple[int, int, Episodes]] = []  # task, initial state
        self.running = torch.zeros(env.num_envs, dtype=torch.bool)
        # observations and actions of the running episodes so far, [N][rows] and [N, step_limit]
        self.observations: list[list[TensorDict]] = [[] for _ in range(env.num_envs)]
        self.done = torch.zeros(env.num_envs, env.step_limit, 7)
        self.observation = self._begin(torch.ones(env.num_envs, dtype=torch.bool))

    def step(self) -> int:
        """Run one control step; returns the number of episodes that succeeded."""
        ids = self.running.nonzero().flatten()
        actions = torch.zeros(self.env.num_envs, 1, 7)
        actions[ids, 0] = torch.from_numpy(self.expert.act(ids.numpy())).float()
        self._see(ids[self.env.steps[ids] % self.stride == self._phase(ids)])
        self.done[ids, self.env.steps[ids]] = actions[ids, 0]
        transition = self.env.step(actions)
        self.observation = transition.observation
        finished = transition.done & self.running
        self._see((finished & transition.success).nonzero().flatten())
        before = len(self.successes)
        for index in finished.nonzero().flatten().tolist():
            self._keep(index, bool(transition.success[index]))
        if finished.any():
            self.observation = self._begin(finished)
        return len(self.successes) - before

    def result(self) -> tuple[list[int], list[Episodes]]:
        """Initial states and episodes, in order."""
        recorded = sorted(self.successes, key=lambda each: each[:2])
        return [start for _, start, _ in recorded], [episode for *_, episode in recorded]

    def _phase(self, ids: Tensor) -> Tensor:
        """Control step of the first observation of episodes in environments `ids` [M]."""
        return self.env.start[ids] % self.stride

    def _see(self, ids: Tensor) -> None:
        """Store observations of environments `ids` [M]."""
        rows = self.observation[ids].update(self.eyes.pictures(ids))
        for index, row in zip(ids.tolist(), rows.unbind(0), strict=True):
            self.observations[index].append(row.clone())

    def _keep(self, index: int, success: bool) -> None:
        task = self.task[index]
        start = int(self.env.start[index])
        length = int(self.env.steps[index])
        observations = self.observations[index]
        self.observations[index] = []
        if success:
            self.succeeded[task] += 1
            reward = torch.zeros(length)
            reward[-1] = 1.0
            episode = Episodes.of(
                torch.stack(observations[:-1]),
                self.done[index, :length].clone(),
                reward=reward,
                task_index=task,
                final_observation=observations[-1],
                first=torch.arange(start % self.stride, length, self.stride),
            )
            self.successes.append((task, start, episode))
            return
        self.failed[task] += 1
        if self.failed[task] > self.succeeded[task] + SPARE_FAILURES:
            attempts = self.failed[task] + self.succeeded[task]
            name = self.env.task_names[task]
            outcome = f"the scripted expert failed in {self.failed[task]} of {attempts} episodes of {name}"
            raise UserError(f"{outcome}; choose tasks that it can do, task.tasks=[...]")

    def _begin(self, free: Tensor) -> TensorDict:
        """Start as many new episodes in the `free` environments [N] as their tasks still need; stop the others."""
        begin = torch.zeros_like(free)
        for index in free.nonzero().flatten().tolist():
            task = self.task[index]
            begin[index] = self.started[task] - self.failed[task] < self.episodes
            self.started[task] += int(begin[index])
        self.running = (self.running & ~free) | begin
        self.expert.reset(begin.nonzero().flatten().numpy())
        return self.env.reset(mask=begin)
