"""Images of swarms from above and from the side: obstacles, paths, goals, and collisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from embodied.evaluation.evaluation import act
from embodied.evaluation.video import Film, Frames
from embodied.policy import Policy
from embodied.rollout.memory import Memory
from embodied.saving.files import complete_or_absent
from sims.quadrotor.video.camera import Array
from sims.quadrotor.video.pictures import GRID, PAPER
from sims.swarm.environment import SwarmEnvironment
from sims.swarm.mdp import AWAY_M, FLYING, HALF_ROOM_M, OBSTACLE_RADIUS_M, RADIUS_M
from sims.swarm.viewing import COLOURS

PIXELS = 36
TALL_M = 4.0
"""Pixels per metre; the visible height."""
WIDTH = int(2 * HALF_ROOM_M * PIXELS)
DEPTH = int(TALL_M * PIXELS)
PILLAR = (112, 116, 124)
CRASH = (255, 70, 60)


@dataclass(frozen=True, eq=False)
class Flown:
    """Recorded worlds, and whether all drones of a world succeeded, [W].

    `positions` [T, W, M, 3] m, `goals` [T, W, M, 3] m, `flying` [T, W, M], obstacles [W, C, 2] m.
    """

    positions: Array
    goals: Array
    flying: Array
    cylinders: Array
    success: NDArray[np.bool_]


def fly(env: SwarmEnvironment, policy: Policy, device: str, stride: int, first: int = 0) -> Flown:
    """Run one episode of the deterministic `policy` in worlds of the evaluation split, from that of start `first` on.

    States are recorded every `stride` steps.
    """
    starts = first // env.group * env.group + torch.arange(env.num_envs)
    observation = env.reset(starts=starts)
    memory = Memory(policy, env.num_envs)
    running = torch.ones(env.num_envs, dtype=torch.bool)
    moments = [_moment(env)]
    success = torch.zeros_like(running)
    while running.any():
        for _ in range(stride):
            transition = env.step(act(policy, observation, running, device, memory)[:, : env.contract.executed].cpu())
            observation = transition.observation
            running = running & ~transition.done
            success = transition.success
            if not running.any():
                break
        moments.append(_moment(env))
    positions, goals, flying = (np.stack(part) for part in zip(*moments, strict=True))
    return Flown(positions, goals, flying, env.worlds.cylinders.numpy(), success.view(-1, env.group).all(1).numpy())


def film(flown: Flown) -> Film:
    """Images of every world over time; the border turns green at the end if all drones succeeded."""
    worlds = range(flown.positions.shape[1])
    frames = [np.stack([draw(flown, world, moment) for world in worlds]) for moment in range(len(flown.positions))]
    won = np.zeros((len(frames), len(worlds)), dtype=bool)
    won[-1] = flown.success
    return Film(np.stack(frames), won)


def draw(flown: Flown, world: int, moment: int) -> Frames:
    """A world from above and, below that, from the side, [height, width, 3]."""
    image = Image.new("RGB", (WIDTH, WIDTH + DEPTH), PAPER)
    pen = ImageDraw.Draw(image)
    for x, y in flown.cylinders[world]:
        if x < AWAY_M:
            (left, top), (right, bottom) = _above(x - OBSTACLE_RADIUS_M, y), _above(x + OBSTACLE_RADIUS_M, y)
            radius = OBSTACLE_RADIUS_M * PIXELS
            pen.rectangle((left, WIDTH, right, WIDTH + DEPTH), fill=GRID)
            pen.ellipse((left, top - radius, right, bottom + radius), fill=PILLAR)
    pen.line((0, WIDTH, WIDTH, WIDTH), fill=PILLAR)
    for drone in range(flown.positions.shape[2]):
        way = flown.positions[: moment + 1, world, drone]
        _drone(pen, way, flown.goals[moment, world, drone], bool(flown.flying[moment, world, drone]), drone)
    return np.asarray(image)


def plot(path: Path, flights: Mapping[str, Flown]) -> None:
    """Plot the paths of all worlds from above, a row per caption, into the PNG file `path`."""
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.patches import Circle

    columns = max(flown.positions.shape[1] for flown in flights.values())
    figure = Figure(figsize=(5.0 * columns, 5.0 * len(flights)), layout="constrained")
    rows = figure.subplots(len(flights), columns, squeeze=False)
    for axes, (caption, flown) in zip(rows, flights.items(), strict=True):
        for world, axis in enumerate(axes):
            for x, y in flown.cylinders[world]:
                axis.add_patch(Circle((x, y), OBSTACLE_RADIUS_M, color="0.75"))
            for drone in range(flown.positions.shape[2]):
                colour = tuple(part / 280 for part in COLOURS[drone % len(COLOURS)])
                way = flown.positions[:, world, drone]
                goal = np.unique(flown.goals[:, world, drone], axis=0)
                axis.plot(way[:, 0], way[:, 1], color=colour, linewidth=1.0)
                axis.plot(way[0, 0], way[0, 1], "o", color=colour, markersize=4)
                axis.plot(goal[:, 0], goal[:, 1], "*", color=colour, markersize=8)
                if not flown.flying[-1, world, drone]:
                    axis.plot(way[-1, 0], way[-1, 1], "rx", markersize=9)
            collided = int((~flown.flying[-1, world]).sum())
            axis.set(title=f"{caption}: {collided} collided (m)", xlim=(-HALF_ROOM_M, HALF_ROOM_M), aspect="equal")
            axis.set_ylim(-HALF_ROOM_M, HALF_ROOM_M)
            axis.grid(alpha=0.3)
    with complete_or_absent(path) as temporary:
        figure.savefig(temporary, format="png", dpi=90)


def _moment(env: SwarmEnvironment) -> tuple[Array, Array, Array]:
    worlds = env.worlds
    return worlds.state[..., :3].numpy().copy(), worlds.goal().numpy(), (worlds.fate == FLYING).numpy()


def _above(x: float, y: float) -> tuple[float, float]:
    return (HALF_ROOM_M + x) * PIXELS, (HALF_ROOM_M - y) * PIXELS


def _aside(x: float, z: float) -> tuple[float, float]:
    return (HALF_ROOM_M + x) * PIXELS, WIDTH + (TALL_M - z) * PIXELS


def _drone(pen: ImageDraw.ImageDraw, way: Array, goal: Array, flying: bool, drone: int) -> None:
    """A drone in both views: the path, the goal as a cross, the drone as a disc or, after a collision, an X."""
    colour = COLOURS[drone % len(COLOURS)]
    reach = RADIUS_M * PIXELS * 1.5  # visible
    for view, column in ((_above, 1), (_aside, 2)):
        points = [view(point[0], point[column]) for point in way]
        x, y = view(goal[0], goal[column])
        pen.line((x - 5, y, x + 5, y), fill=colour)
        pen.line((x, y - 5, x, y + 5), fill=colour)
        if len(points) > 1:
            pen.line(points[-60:], fill=colour)
        x, y = points[-1]
        if flying:
            pen.ellipse((x - reach, y - reach, x + reach, y + reach), fill=colour)
        else:
            pen.line((x - 5, y - 5, x + 5, y + 5), fill=CRASH, width=2)
            pen.line((x - 5, y + 5, x + 5, y - 5), fill=CRASH, width=2)
