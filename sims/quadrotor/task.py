"""Quadrotor tasks as something a run can train on: environments, evaluation, video, trajectories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied.config import at_least
from embodied.errors import UserError
from embodied.files import complete_or_absent
from embodied.policy import Policy
from embodied.video import Frames, film, tile, write_video
from sims.quadrotor import swarm_pictures
from sims.quadrotor.airframes import AIRFRAMES, SCATTER_MAX, Airframe
from sims.quadrotor.dynamics import Options
from sims.quadrotor.environment import STEP_LIMIT, QuadrotorEnvironment
from sims.quadrotor.episode import Mdp
from sims.quadrotor.hover import Hover
from sims.quadrotor.pictures import Array, draw
from sims.quadrotor.platforms import MEASURED, POSITION_LIMIT_M, AnyHover
from sims.quadrotor.race import Race
from sims.quadrotor.recover import Recover
from sims.quadrotor.scenery import Scenery, scenery
from sims.quadrotor.swarm import Swarm
from sims.quadrotor.swarm_environment import SwarmEnvironment
from sims.quadrotor.track import Track

FILMED, STRIDE = 4, 4
"""Episodes in a video, and control steps between its frames."""
FILMED_WORLDS, WORLD_STRIDE = 2, 6
"""The same for swarms."""


def _eight(speed_m_s: float) -> Track:
    return Track(eight_share=1.0, lissajous_share=0.0, speed_low_m_s=speed_m_s, speed_high_m_s=speed_m_s)


@dataclass(frozen=True)
class Goal:
    """What a drone is to do: MDPs by the name of their distribution, the first to train on; effects of the dynamics.

    `platforms` fly in place of the task's airframe, by distribution; None: a random one in every episode.
    """

    distributions: Mapping[str, Mdp | Swarm]
    options: Options = field(default_factory=Options)
    platforms: Mapping[str, Airframe | None] = field(default_factory=dict)


GOALS = {
    "hover": Goal({"disturbed": Hover()}),
    "track": Goal(
        {
            "mixed": Track(),
            "random": Track(eight_share=0.0, lissajous_share=0.0),
            "lissajous": Track(eight_share=0.0, lissajous_share=1.0),
            **{f"figure_eight_{speed}": _eight(speed) for speed in (1, 2, 3)},
        }
    ),
    "recover": Goal({"thrown": Recover()}),
    "race": Goal({"track": Race()}, Options(drag=True, delay_steps=1)),
    "any": Goal(
        {"random": AnyHover(), **dict.fromkeys(MEASURED, Hover(position_limit_m=POSITION_LIMIT_M))},
        platforms={"random": None, **MEASURED},
    ),
    "swarm": Goal({"density_20": Swarm()}),
}


def weights(mdp: Any) -> list[str]:  # noqa: ANN401 - an Mdp or Swarm
    """Names of the weights of its reward."""
    return [entry.name for entry in fields(mdp) if entry.name.startswith(("reward_", "weight_"))]


WEIGHTS = tuple(
    dict.fromkeys(w for goal in GOALS.values() for mdp in goal.distributions.values() for w in weights(mdp))
)
"""Those of all goals."""


@dataclass
class QuadrotorTask:
    """A goal, under constant random forces and torques, and who flies.

    `goal` is to "hover" at the origin of the world (the MDP of arXiv 2311.13081), to "track" moving references (numbers
    of distributions are highest speeds in m/s), to "recover" from a throw, to "race" through gates, to hover with "any"
    platform or to fly in a "swarm" (numbers of distributions are shares of cells with an obstacle, in %). `airframe`
    flies; each episode's parameters differ from its own by up to the share `randomisation`; goal "any" has platforms of
    its own, random ones to train on. The policy observes its last `history` actions. `reward` holds
    weights that differ from the goal's own; null: they do not.
    """

    name: str = "quadrotor_hover"
    goal: str = "hover"
    airframe: str = "crazyflie"
    randomisation: float = 0.0
    history: int = 1
    step_limit: int = STEP_LIMIT
    reward: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(WEIGHTS))

    def __post_init__(self) -> None:
        """Raise UserError for an unknown airframe or impossible sizes."""
        at_least(self, 1, "history", "step_limit")
        if self.history > self.step_limit:
            raise UserError(f"expected history of at most step_limit={self.step_limit} actions, got {self.history}")
        if self.goal not in GOALS:
            raise UserError(f"unknown goal {self.goal!r}; expected one of {', '.join(GOALS)}")
        if self.airframe not in AIRFRAMES:
            raise UserError(f"unknown airframe {self.airframe!r}; expected one of {', '.join(AIRFRAMES)}")
        for mdp in GOALS[self.goal].distributions.values():
            reweighted(mdp, self.reward)
        if not 0.0 <= self.randomisation <= SCATTER_MAX:
            raise UserError(f"expected randomisation from 0 to {SCATTER_MAX}, got {self.randomisation}")
        if self.goal == "swarm" and (self.randomisation or self.history != 1):
            raise UserError("goal=swarm has no randomisation and no history; leave them out")
        if GOALS[self.goal].platforms and (self.randomisation or self.airframe != "crazyflie"):
            raise UserError(f"goal={self.goal} flies platforms of its own; leave out airframe and randomisation")

    @property
    def distributions(self) -> tuple[str, ...]:
        """Those of the goal, each with random initial states, forces and torques."""
        return tuple(GOALS[self.goal].distributions)

    @property
    def asset_kind(self) -> None:
        """There is nothing that could be a stand-in."""
        return None

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> QuadrotorEnvironment | SwarmEnvironment:
        """Make environments that start from the `split` ("train" or "eval").

        Raises:
            UserError: for an unknown distribution.
        """
        goal = GOALS[self.goal]
        if distribution not in goal.distributions:
            raise UserError(f"unknown distribution {distribution!r}; expected one of {', '.join(self.distributions)}")
        mdp = reweighted(goal.distributions[distribution], self.reward)
        common: dict[str, Any] = {
            "options": goal.options, "split": split, "step_limit": self.step_limit, "seed": seed,
        }  # fmt: skip
        if isinstance(mdp, Swarm):
            return SwarmEnvironment(num_envs, mdp=mdp, airframe=self._airframe, **common)
        airframe = goal.platforms.get(distribution, self._airframe)
        return QuadrotorEnvironment(
            num_envs, mdp=mdp, airframe=airframe, scatter_width=self.randomisation, history=self.history,
            device=device, **common,
        )  # fmt: skip

    def demonstrations(self, directory: Path, seed: int) -> None:
        """There are none: policies begin from nothing."""
        return

    def video(self, path: Path, policies: Mapping[str, Policy], device: str) -> None:
        """Film each policy, by caption, from the same starts; trajectories.png beside it plots the ways flown."""
        if self.goal == "swarm":
            self._swarm_video(path, policies, device)
            return
        flights, films, goals = {}, {}, []
        for caption, policy in policies.items():
            env = self.environment(FILMED, self.distributions[0], "eval", device=device)
            flight = _Flight(env, math.hypot(self._airframe.arm_x_m, self._airframe.arm_y_m))
            films[caption] = film(env, policy, torch.arange(FILMED), flight.render, device, stride=STRIDE)
            flights[caption] = flight.positions
            goals = [around.goal for around in flight.surroundings]
        frames_per_s = round(1.0 / (env.contract.control_dt_s * STRIDE))
        write_video(path, tile(films), frames_per_s)
        plot_trajectories(path.with_name("trajectories.png"), flights, env.contract.control_dt_s * STRIDE, goals)

    def _swarm_video(self, path: Path, policies: Mapping[str, Policy], device: str) -> None:
        flights, films = {}, {}
        for caption, policy in policies.items():
            env = self.environment(FILMED_WORLDS * Swarm.drones, self.distributions[0], "eval")
            flights[caption] = swarm_pictures.fly(env, policy, device, WORLD_STRIDE)
            films[caption] = swarm_pictures.film(flights[caption])
        frames_per_s = round(1.0 / (env.contract.control_dt_s * WORLD_STRIDE))
        write_video(path, tile(films), frames_per_s)
        swarm_pictures.plot(path.with_name("trajectories.png"), flights)

    @property
    def _airframe(self) -> Airframe:
        return AIRFRAMES[self.airframe]


def reweighted(mdp: Any, reward: Mapping[str, float | None]) -> Any:  # noqa: ANN401 - an Mdp or Swarm, as it is given
    """`mdp` with other `reward` weights, by name; those that are None stay.

    Raises:
        UserError: where it has no such weight.
    """
    changed = {name: weight for name, weight in reward.items() if weight is not None}
    names = weights(mdp)
    for name in changed:
        if name not in names:
            raise UserError(f"unknown weight {name!r} in task.reward; expected one of {', '.join(names)}")
    return replace(mdp, **changed)


class _Flight:
    """Draws episodes and remembers where they went; a drone that has crashed stays where it did."""

    def __init__(self, env: QuadrotorEnvironment, arm_m: float) -> None:
        self.env, self.arm_m = env, arm_m
        self.surroundings: list[Scenery] = []
        self.positions: list[list[Array]] = [[] for _ in range(env.num_envs)]

    def render(self, ids: Array) -> Frames:
        """Pictures of environments `ids` as they are now."""
        if not self.surroundings:  # they are those of the episodes that have begun by now
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

    `goals` are those of each episode after every control step, [T + 1, 3] m, dashed; None where there is none.
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
