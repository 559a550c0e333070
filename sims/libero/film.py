"""Before and after on video: the same LIBERO episodes by several policies, as seen by the agent's camera."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.policy import Policy
from embodied.video import film, tile, write_video
from sims.libero.assets import Assets
from sims.libero.cameras import AGENT_VIEW, Cameras
from sims.libero.environment import CONTROL_DT_S, STEP_LIMIT, LiberoEnvironment
from sims.libero.suite import Task

SIZE = 240  # pixels a side of one episode's picture
SPEED = 2  # times real time
MOST_STEPS = 4  # control steps between frames
EPISODES = 5


def film_policies(
    path: Path,
    policies: Mapping[str, Policy],
    tasks: Sequence[Task],
    assets: Assets,
    *,
    distribution: str = "wide",
    step_limit: int = STEP_LIMIT,
    device: torch.device | str = "cpu",
) -> None:
    """Write a video of `EPISODES` evaluation episodes of each policy, one row per caption, spread over `tasks`.

    All policies start from the same states and decide as often as in evaluation. `device` is theirs.
    """
    contract = next(iter(policies.values())).contract
    chosen = [tasks[i] for i in np.linspace(0, len(tasks) - 1, min(EPISODES, len(tasks))).round().astype(int)]
    every = max(steps for steps in range(1, MOST_STEPS + 1) if contract.executed % steps == 0)
    env = LiberoEnvironment(
        chosen,
        EPISODES,
        distribution=distribution,
        split="eval",
        horizon=contract.horizon,
        executed=every,
        step_limit=step_limit,
        assets=assets,
    )
    cameras = Cameras(env.simulation, (AGENT_VIEW,), SIZE, SIZE)

    def render(ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        return cameras.render(ids)[:, 0]

    starts = torch.arange(EPISODES) // len(chosen)  # of a task filmed more than once, another state each time
    films = {caption: film(env, policy, starts, render, device) for caption, policy in policies.items()}
    titles = [chosen[index].language for index in env.task_index.tolist()]
    write_video(path, tile(films, titles), fps=round(SPEED / (every * CONTROL_DT_S)))
