"""Videos of policies from the same starts, and their paths as a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from embodied.evaluation.video import Frames, film, paths_beside, tile, write_video
from embodied.policy import Policy
from embodied.saving.files import complete_or_absent
from sims.quadrotor.airframes import Airframe
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.video.pictures import Array, draw
from sims.quadrotor.video.scenery import Scenery, scenery

FILMED, STRIDE = 4, 4
"""Episodes in a video, and control steps between its frames."""


def film_policies(
    path: Path,
    envs: Mapping[str, QuadrotorEnvironment],
    policies: Mapping[str, Policy],
    airframe: Airframe,
    device: str,
    first: int = 0,
) -> None:
    """Film each policy, by caption, in its own of `envs`, of `FILMED` drones, from start `first` on; plot their paths.

    The plot is `paths_beside` the video. `airframe` is drawn.
    """
    flights, films, goals = {}, {}, []
    for caption, policy in policies.items():
        env = envs[caption]
        flight = _Flight(env, math.hypot(airframe.arm_x_m, airframe.arm_y_m))
        films[caption] = film(env, policy, torch.arange(first, first + FILMED), flight.render, device, stride=STRIDE)
        flights[caption] = flight.positions
        goals = [around.goal for around in flight.surroundings]
    dt_s = next(iter(envs.values())).contract.control_dt_s * STRIDE
    write_video(path, tile(films), round(1.0 / dt_s))
    plot_trajectories(paths_beside(path), flights, dt_s, goals)


class _Flight:
    """Draws episodes and records their paths; a crashed drone stays where it is."""

    def __init__(self, env: QuadrotorEnvironment, arm_m: float) -> None:
        self.env, self.arm_m = env, arm_m
        self.surroundings: list[Scenery] = []
        self.positions: list[list[Array]] = [[] for _ in range(env.num_envs)]

    def render(self, ids: Array) -> Frames:
        """Current images of environments `ids`."""
        if not self.surroundings:  # those of the episodes that have begun by now
            self.surroundings = [scenery(self.env, row) for row in range(self.env.num_envs)]
        position, rotation = (part.cpu().numpy() for part in self.env.pose)
        pictures = []
        for row, step in zip(ids, self.env.steps[ids].tolist(), strict=True):
            self.positions[row].append(position[row].copy())
            trail, around = np.stack(self.positions[row]), self.surroundings[row]
            markers = () if around.goal is None else (around.goal[step],)
            pose = [(position[row], rotation[row])]
            pictures.append(draw(around.camera, [trail], pose, arm_m=self.arm_m, paths=around.paths, markers=markers))
        return np.stack(pictures)


def plot_trajectories(
    path: Path, flights: Mapping[str, list[list[Array]]], dt_s: float, goals: Sequence[Array | None]
) -> None:
    """Plot positions [3] m over time, a row per caption and a column per axis, into the PNG file `path`.

    `goals` are those of each episode after every control step, [T + 1, 3] m, dashed; None if there is none.
    """
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(11.0, 2.6 * len(flights)), layout="constrained")
    rows = figure.subplots(len(flights), 3, squeeze=False, sharex=True)
    for axes, (caption, episodes) in zip(rows, flights.items(), strict=True):
        for axis, (column, name) in zip(axes, enumerate("xyz"), strict=True):
            for episode, goal in zip(episodes, goals, strict=True):
                way = np.stack(episode)[:, column]
                (line,) = axis.plot(dt_s * np.arange(len(way)), way, linewidth=1.0)
                if goal is not None:
                    wanted = goal[::STRIDE, column][: len(way)]
                    axis.plot(dt_s * np.arange(len(wanted)), wanted, "--", color=line.get_color(), linewidth=0.6)
            axis.axhline(0.0, color="black", linewidth=0.5)
            axis.set(title=f"{caption}: {name} (m)", xlabel="s")
            axis.grid(alpha=0.3)
    with complete_or_absent(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
