"""View of vehicles for the viewer: walls, obstacles, goal or centre line, and the vehicle, which can be pushed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from embodied.scene import shapes
from embodied.scene.shapes import Mesh
from embodied.scene.viewable import Array, Body, Scene, View
from sims.vehicle.episode import FORWARD, LEFTWARD, YAW, Mdp, Moment
from sims.vehicle.geometry import FAR_M
from sims.vehicle.vehicles import Vehicle

NAME = "vehicle"
ORIGIN_POSE = (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
WALL = (0.62, 0.65, 0.7)
SHAPE = (0.45, 0.55, 0.68)
GOAL = (0.25, 0.7, 0.35)
SHELL = (0.93, 0.6, 0.2)
WHEEL = (0.13, 0.13, 0.15)
FRONT = (0.9, 0.28, 0.24)
PERSON = (0.75, 0.35, 0.55)
TALL_M = 0.15
THIN_M = 0.02
HIGH_M = 0.85
"""Half the height of walls, half their thickness, half the height of people."""
WHEEL_M = 0.06


class VehicleView(View):
    """View of N vehicles in worlds of their own, whose state is the result of `now`."""

    def __init__(self, mdp: Mdp, vehicle: Vehicle, now: Callable[[], Moment]) -> None:
        self._mdp = mdp
        self._vehicle = vehicle
        self._now = now

    def scene(self, row: int) -> Scene:
        """Scene of the running episode: world, vehicle and people."""
        world = self._now().world[row]
        circles, segments, route = (world[name].cpu().numpy() for name in ("circles", "segments", "route"))
        walls = segments[(np.abs(segments) < FAR_M / 2).all(1)]
        low = walls.reshape(-1, 2).min(0)
        high = walls.reshape(-1, 2).max(0)
        middle = 0.5 * (low + high)
        reach = 0.5 * float((high - low).max())
        parts = [_wall(wall).coloured(WALL) for wall in walls]
        parts += [
            shapes.cylinder(radius, TALL_M).moved((x, y, TALL_M)).coloured(SHAPE)
            for x, y, radius in circles
            if radius > 0.0 and abs(x) < FAR_M / 2
        ]
        flat = np.column_stack((route, np.full(len(route), 0.01)))
        if len(route) == 1:
            parts.append(shapes.cylinder(0.3, 0.01).moved(flat[0]).coloured(GOAL))
        else:
            parts.append(shapes.path(np.concatenate((flat, flat[:1])), 0.02).coloured(GOAL))
        bodies = [Body(NAME, _vehicle(self._vehicle)), Body("world", shapes.joined(parts))]
        for number, (_, _, radius) in enumerate(self._moving(row), 1):
            person = shapes.cylinder(radius, HIGH_M).moved((0.0, 0.0, HIGH_M)).coloured(PERSON)
            bodies.append(Body(f"person {number}", person))
        eye = (*(middle + reach * np.array([0.5, -1.7])).tolist(), 1.9 * reach)
        return Scene(tuple(bodies), eye, (*middle.tolist(), 0.0), 0.0, 1.5 * reach, (NAME,))

    def poses(self, row: int) -> Array:
        """Poses of the vehicle, of the world, which does not move, and of people."""
        x, y, yaw = self._now().state[row, :3].tolist()
        people = [(*place, *ORIGIN_POSE[2:]) for *place, _ in self._moving(row)]
        return np.array([(x, y, 0.0, np.cos(0.5 * yaw), 0.0, 0.0, np.sin(0.5 * yaw)), ORIGIN_POSE, *people])

    def _moving(self, row: int) -> list[list[float]]:
        """Centres and radii of people, the circles that move."""
        now = self._now()
        circles = self._mdp.circles(now)[row, now.world["circles"].shape[1] :]
        return [circle for circle in circles.tolist() if abs(circle[0]) < FAR_M / 2]

    def push(self, row: int, body: str, change_m_s: Array) -> None:
        """Change the vehicle's velocity, see `View.push`; wheels without slip lose its lateral part at once."""
        now = self._now()
        yaw, (x, y, _) = float(now.state[row, YAW]), change_m_s
        state = now.state.clone()
        state[row, FORWARD] += np.cos(yaw) * x + np.sin(yaw) * y
        state[row, LEFTWARD] += np.cos(yaw) * y - np.sin(yaw) * x
        now.state = state


def _wall(ends: Array) -> Mesh:
    """A wall between two points, (x, y) of both."""
    along = ends[2:] - ends[:2]
    length = float(np.hypot(*along))
    cos, sin = along / max(length, 1e-9)
    turn = np.array([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])
    middle = (*(0.5 * (ends[:2] + ends[2:])).tolist(), TALL_M)
    return shapes.box((0.5 * length + THIN_M, THIN_M, TALL_M)).moved(middle, turn)


def _vehicle(vehicle: Vehicle) -> Mesh:
    """A box on wheels with the front in red; x is forward."""
    length = 0.5 * vehicle.length_m
    width = 0.5 * vehicle.width_m
    parts = [shapes.box((length, 0.8 * width, 0.07)).moved((0.0, 0.0, 0.12)).coloured(SHELL)]
    parts += [shapes.box((0.03, 0.8 * width, 0.071)).moved((length - 0.03, 0.0, 0.12)).coloured(FRONT)]
    parts += [shapes.cylinder(0.05, 0.03).moved((vehicle.lidar_x_m, 0.0, 0.21)).coloured(WHEEL)]
    across = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, 0.0]])  # z to y
    for x, y in ((1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0)):
        at = (0.65 * x * length, 0.85 * y * width, WHEEL_M)
        parts.append(shapes.cylinder(WHEEL_M, 0.15 * width).moved(at, across).coloured(WHEEL))
    return shapes.joined(parts)
