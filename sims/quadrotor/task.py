"""Quadrotor tasks as something a run can train on: environments, evaluation, video, trajectories."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch

from embodied.config import at_least
from embodied.files import complete_or_absent
from embodied.policy import Policy
from embodied.video import Frames, film, tile, write_video
from sims.quadrotor.airframes import AIRFRAMES, Airframe
from sims.quadrotor.environment import STEP_LIMIT, QuadrotorEnvironment
from sims.quadrotor.hover import Hover
from sims.quadrotor.pictures import Array, Camera, draw

FILMED, STRIDE = 4, 4
"""Episodes in a video, and control steps between its frames."""


@dataclass
class QuadrotorTask:
    """Hover at the origin of the world under constant random forces and torques (the MDP of arXiv 2311.13081).

    `airframe` flies; each episode's parameters differ from its own by up to the share `randomisation`. The policy
    observes its last `history` actions. `reward` holds weights that differ from the goal's own.
    """

    name: str = "quadrotor_hover"
    airframe: str = "crazyflie"
    randomisation: float = 0.0
    history: int = 1
    step_limit: int = STEP_LIMIT
    reward: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown airframe or impossible sizes."""
        at_least(self, 1, "history", "step_limit")
        if self.airframe not in AIRFRAMES:
            raise ValueError(f"unknown airframe {self.airframe!r}; expected one of {', '.join(AIRFRAMES)}")
        reweighted(Hover(), self.reward)
        if not 0.0 <= self.randomisation < 1.0:
            raise ValueError(f"expected randomisation in [0, 1), got {self.randomisation}")

    @property
    def distributions(self) -> tuple[str, ...]:
        """Random initial states, forces and torques."""
        return ("disturbed",)

    @property
    def asset_kind(self) -> None:
        """There is nothing that could be a stand-in."""
        return None

    def environment(self, num_envs: int, distribution: str, split: str, seed: int = 0) -> QuadrotorEnvironment:
        """Make environments that start from the `split` ("train" or "eval")."""
        return QuadrotorEnvironment(
            num_envs, mdp=reweighted(Hover(), self.reward), airframe=self._airframe, scatter_width=self.randomisation,
            split=split, history=self.history, step_limit=self.step_limit, seed=seed,
        )  # fmt: skip

    def demonstrations(self, directory: Path, seed: int) -> None:
        """There are none: policies begin from nothing."""
        return

    def video(self, path: Path, policies: Mapping[str, Policy], device: str) -> None:
        """Film each policy, by caption, from the same starts; trajectories.png beside it plots the ways flown."""
        flights, films = {}, {}
        for caption, policy in policies.items():
            env = self.environment(FILMED, self.distributions[0], "eval")
            flight = _Flight(env, math.hypot(self._airframe.arm_x_m, self._airframe.arm_y_m))
            films[caption] = film(env, policy, torch.arange(FILMED), flight.render, device, stride=STRIDE)
            flights[caption] = flight.positions
        frames_per_s = round(1.0 / (env.contract.control_dt_s * STRIDE))
        write_video(path, tile(films), frames_per_s)
        plot_trajectories(path.with_name("trajectories.png"), flights, env.contract.control_dt_s * STRIDE)

    @property
    def _airframe(self) -> Airframe:
        return AIRFRAMES[self.airframe]


def reweighted(mdp: Hover, reward: Mapping[str, float]) -> Hover:
    """`mdp` with other `reward` weights, by name.

    Raises:
        ValueError: where it has no such weight.
    """
    names = [entry.name for entry in fields(mdp) if entry.name.startswith(("reward_", "weight_"))]
    for name in reward:
        if name not in names:
            raise ValueError(f"unknown weight {name!r} in task.reward; expected one of {', '.join(names)}")
    return replace(mdp, **reward)


class _Flight:
    """Draws episodes and remembers where they went; a drone that has crashed stays where it did."""

    def __init__(self, env: QuadrotorEnvironment, arm_m: float) -> None:
        self.env, self.arm_m = env, arm_m
        self.camera = Camera(np.zeros(3), 0.6)
        self.positions: list[list[Array]] = [[] for _ in range(env.num_envs)]

    def render(self, ids: Array) -> Frames:
        """Pictures of environments `ids` as they are now."""
        position, rotation = (part.cpu().numpy() for part in self.env.pose)
        pictures = []
        for row in ids:
            self.positions[row].append(position[row].copy())
            trail = np.stack(self.positions[row])
            pose = [(position[row], rotation[row])]
            pictures.append(draw(self.camera, [trail], pose, arm_m=self.arm_m, markers=(np.zeros(3),)))
        return np.stack(pictures)


def plot_trajectories(path: Path, flights: Mapping[str, list[list[Array]]], dt_s: float) -> None:
    """Plot positions [3] m over time, a row per caption and a column per axis, into the PNG file `path`."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(11.0, 2.6 * len(flights)), layout="constrained")
    rows = figure.subplots(len(flights), 3, squeeze=False, sharex=True)
    for axes, (caption, episodes) in zip(rows, flights.items(), strict=True):
        for axis, (column, name) in zip(axes, enumerate("xyz"), strict=True):
            for episode in episodes:
                way = np.stack(episode)[:, column]
                axis.plot(dt_s * np.arange(len(way)), way, linewidth=1.0)
            axis.axhline(0.0, color="black", linewidth=0.5)
            axis.set(title=f"{caption}: {name} (m)", xlabel="s")
            axis.grid(alpha=0.3)
    with complete_or_absent(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
