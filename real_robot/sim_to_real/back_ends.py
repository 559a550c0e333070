"""Recordings as back ends of the sim-to-real comparison; see `real_robot.sim_to_real.results`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodied.policy import Policy
from real_robot.recording.recording import Episode, Recording, Tick
from real_robot.recording.replay import replay
from real_robot.sim_to_real.results import BackEndRun
from real_robot.sim_to_real.results import Episode as Numbered


def replayed(path: str | Path, policy: Policy, device: str = "cpu") -> BackEndRun:
    """Back end of a recording: decisions of `policy` on its measurements, compared with the recorded decisions.

    Episodes are numbered as recorded. The latency is measured in the recorded periods.

    Raises:
        UserError: if `path` is no recording, or has other observations.
    """
    recording = Recording(path)
    actions: dict[Numbered, Tensor] = {}
    expected: dict[Numbered, Tensor] = {}
    for number, answers in enumerate(replay(recording, policy, device).episodes):
        decided, recorded = zip(*answers, strict=True)
        actions[0, number], expected[0, number] = (
            torch.from_numpy(np.concatenate(part)) for part in (decided, recorded)
        )
    return BackEndRun("bag", None, actions, expected, written(recording)[1])


def written(recording: Recording) -> tuple[list[Tensor], Tensor]:
    """Actions [T, A] that safety wrote in each episode of `recording`, and seconds from measurement to command [M].

    Periods in which the robot held by itself are omitted, because no action was written.
    """
    episodes: list[list[np.ndarray]] = []  # items before the first episode are ignored
    latency_s = []
    for item in recording:
        if isinstance(item, Episode):
            episodes.append([])
        elif episodes and isinstance(item, Tick) and item.verdict.action is not None and item.reading is not None:
            episodes[-1].append(item.verdict.action)
            # from the measurement's stamp to the command's
            latency_s.append(item.now_s - item.reading.stamp_s)
    shape = recording.contract.action.shape
    actions = [torch.from_numpy(np.array(rows, np.float32).reshape(-1, *shape)) for rows in episodes]
    return actions, torch.tensor(latency_s, dtype=torch.float64)
