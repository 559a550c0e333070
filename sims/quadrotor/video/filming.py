"""Videos of policies from the same starts, and their paths as a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from embodied.evaluation.video import Frames, film, tile, trajectories_path, write_video
from embodied.policy import Policy
from embodied.saving.files import complete_or_absent
from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.physics.airframes import Airframe
from sims.quadrotor.physics.dynamics import DT_S
from sims.quadrotor.tasks.race import Race
from sims.quadrotor.video import gates, hud
from sims.quadrotor.video.camera import Array, Follow
from sims.quadrotor.video.instruments import Progress, Snapshot, instruments, states
from sims.quadrotor.video.pictures import draw
from sims.quadrotor.video.scenery import Scenery, scenery

FILMED = 3
STRIDE = 4
"""Episodes in a video, and control steps between its frames."""
WIDTH = 368
HEIGHT = 276
SCALE = 2
"""Pixels of an episode's picture, and the factor by which it is drawn larger before it is reduced."""
FOCAL = 0.72
"""The camera's focal length, in widths of a picture."""


def film_policies(
    path: Path,
    envs: Mapping[str, QuadrotorEnvironment],
    policies: Mapping[str, Policy],
    airframe: Airframe,
    device: str,
    first: int = 0,
) -> None:
    """Film each policy, by caption, in its own of `envs`, of `FILMED` drones, from start `first` on; plot their paths.

    The plot is `trajectories_path` the video. `airframe` is drawn.
    """
    flights = {}
    films = {}
    goals = []
    for caption, policy in policies.items():
        env = envs[caption]
        flight = _Flight(env, math.hypot(airframe.arm_x_m, airframe.arm_y_m))
        films[caption] = film(env, policy, torch.arange(first, first + FILMED), flight.render, device, stride=STRIDE)
        flights[caption] = flight.positions
        goals = [around.goal for around in flight.surroundings]
    dt_s = next(iter(envs.values())).contract.control_dt_s * STRIDE
    write_video(path, tile(films), round(1.0 / dt_s))
    plot_trajectories(trajectories_path(path), flights, dt_s, goals)


class _Flight:
    """Draws episodes and records their paths; a crashed drone remains at its last position."""

    def __init__(self, env: QuadrotorEnvironment, arm_m: float) -> None:
        self.env = env
        self.arm_m = arm_m
        self.surroundings: list[Scenery] = []
        self.cameras: list[Follow] = []
        self.races = [Progress() for _ in range(env.num_envs)]
        self.positions: list[Array] = [np.zeros((0, 3)) for _ in range(env.num_envs)]

    def render(self, ids: NDArray[np.int64]) -> Frames:
        """Current images of environments `ids`."""
        if not self.surroundings:  # those of the episodes that have begun by now
            self.surroundings = [scenery(self.env, row, self.arm_m) for row in range(self.env.num_envs)]
            self.cameras = [around.follow() for around in self.surroundings]
        snapshot = Snapshot.of(self.env)
        return np.stack([np.asarray(self._picture(row, snapshot)) for row in ids.tolist()])

    def _picture(self, row: int, snapshot: Snapshot) -> Image.Image:
        surroundings = self.surroundings[row]
        mdp = self.env.mdp
        position = snapshot.position[row].astype(float)
        self.positions[row] = way = np.concatenate([self.positions[row], position[None]])
        gate_states = []
        first = 0
        ahead = None
        if isinstance(mdp, Race):
            first = int(self.env.plan[0, row])
            gate_states = states(first, snapshot, row, self.races[row], mdp)
            ahead = gates.towards_next(position, snapshot.velocity[row], gate_states)
        size = WIDTH * SCALE, HEIGHT * SCALE
        camera = self.cameras[row].camera(position, ahead, DT_S * STRIDE, FOCAL * size[0], size)
        goal = None if surroundings.goal is None else surroundings.goal[snapshot.steps[row]]
        picture = draw(camera, surroundings, way, snapshot.rotation[row], goal, gate_states).reduce(SCALE)
        hud.draw(picture, instruments(mdp, snapshot, row, surroundings, gate_states, self.races[row], first))
        if gate_states:
            hud.draw_map(picture, gates.LINES, [state.colour for state in gate_states], way)
        return picture


def plot_trajectories(
    path: Path, flights: Mapping[str, list[Array]], dt_s: float, goals: Sequence[Array | None]
) -> None:
    """Plot positions [3] m over time, a row per caption and a column per axis, into the PNG file `path`.

    `goals` are the goal positions of each episode after every control step, [T + 1, 3] m, drawn dashed, or None.
    """
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(11.0, 2.6 * len(flights)), layout="constrained")
    rows = figure.subplots(len(flights), 3, squeeze=False, sharex=True)
    for axes, (caption, episodes) in zip(rows, flights.items(), strict=True):
        for axis, (column, name) in zip(axes, enumerate("xyz"), strict=True):
            for episode, goal in zip(episodes, goals, strict=True):
                way = episode[:, column]
                (line,) = axis.plot(dt_s * np.arange(len(way)), way, linewidth=1.0)
                if goal is not None:
                    goal_column = goal[::STRIDE, column][: len(way)]
                    axis.plot(
                        dt_s * np.arange(len(goal_column)), goal_column, "--", color=line.get_color(), linewidth=0.6
                    )
            axis.axhline(0.0, color="black", linewidth=0.5)
            axis.set(title=f"{caption}: {name} (m)", xlabel="s")
            axis.grid(alpha=0.3)
    with complete_or_absent(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
