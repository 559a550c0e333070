"""One picture of a drone: floor, gates or reference, the path so far, and the airframe with its front in red."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from sims.quadrotor.physics.rotors import place
from sims.quadrotor.tasks import race
from sims.quadrotor.video import gates
from sims.quadrotor.video.camera import Array, Camera
from sims.quadrotor.video.canvas import Canvas
from sims.quadrotor.video.gates import State
from sims.quadrotor.video.scenery import Scenery

PAPER = (24, 26, 30)
GRID = (62, 66, 74)
TRAIL = (112, 186, 255)
GOAL = (70, 205, 110)
ARM = (205, 210, 220)
FRONT = (255, 92, 70)
BACK = (190, 200, 218)
LEG = (88, 96, 112)
ERROR = (255, 176, 46)
HULL_COLOURS = ((34, 37, 44), (58, 63, 74))
HULL = np.array([[0.42, 0.0, 0.0], [0.1, 0.22, 0.0], [-0.36, 0.2, 0.0], [-0.36, -0.2, 0.0], [0.1, -0.22, 0.0]])
TRAILED = 25
"""Number of pieces of the path that are shown."""
CIRCLE = np.stack([np.cos(np.linspace(0, 2 * np.pi, 17)), np.sin(np.linspace(0, 2 * np.pi, 17)), np.zeros(17)], -1)
FRAMES, LIGHT = (np.stack(part) for part in zip(*map(gates.frame, race.TRACK), strict=True))
LEGS = np.stack([gates.legs(gate) for gate in race.TRACK])


def draw(
    camera: Camera, around: Scenery, way: Array, rotation: Array, goal: Array | None, states: Sequence[State] = ()
) -> Image.Image:
    """The picture of a drone that is at the end of its `way` [P, 3] m.

    Args:
        camera: the viewpoint.
        around: the surroundings.
        way: path of the drone so far.
        rotation: the drone's rotation matrix [3, 3] (body FLU to world).
        goal: the desired position [3] m at present, if any.
        states: states of the gates in a race.
    """
    canvas = Canvas(camera, around.cell_m)
    canvas.floor(around.grid)
    position = way[-1]
    _shadow(canvas, position, around)
    if around.raced:
        _gates(canvas, states)
    if around.goal is not None and goal is not None:
        _goal(canvas, around, goal, position)
    if len(way) > 1:
        recent = way[-TRAILED - 1 :]
        pieces = np.stack([recent[:-1], recent[1:]], 1)
        fading = np.linspace(0.05, 0.85, TRAILED)[-len(pieces) :]
        canvas.lines(pieces, 0.014 * around.distance_m, TRAIL, fading)
    _airframe(canvas, position, rotation, around.arm_m, around.rotors)
    return canvas.finished()


def _shadow(canvas: Canvas, position: Array, around: Scenery) -> None:
    height = position[2] - around.floor_m
    if height > 0.0:
        spread = 1.5 * around.arm_m * (1.0 + 0.15 * height / around.distance_m)
        middle = np.array([*position[:2], around.floor_m])
        canvas.shadow(middle + spread * CIRCLE, 0.5 / (1.0 + 0.25 * height / around.distance_m))


def _gates(canvas: Canvas, states: Sequence[State]) -> None:
    for gate in race.TRACK:
        canvas.shadow(gates.footprint(gate), 0.35)
    colours = np.array([state.colour for state in states], dtype=float)
    canvas.faces(FRAMES.reshape(-1, 4, 3), (LIGHT[..., None] * colours[:, None]).reshape(-1, 3), solid_m=1.2)
    canvas.lines(LEGS.reshape(-1, 2, 3), 0.06, LEG)
    for gate, state, colour in zip(race.TRACK, states, colours, strict=True):
        if state in (State.next, State.hit):
            canvas.faces(gates.corners(gate, gates.HALF_M)[None], colour[None], alpha=0.15)


def _goal(canvas: Canvas, around: Scenery, goal: Array, position: Array) -> None:
    if np.ptp(around.goal, axis=0).max() > 0.0:
        canvas.path(around.goal[::4], 0.008 * around.distance_m, GOAL, 0.45)
    size = 0.05 * around.distance_m
    cross = goal + size * np.stack([-np.eye(3), np.eye(3)], 1)
    canvas.lines(cross, 0.01 * around.distance_m, GOAL)
    foot = np.array([*goal[:2], around.floor_m])
    canvas.lines(np.stack([goal, foot])[None], 0.004 * around.distance_m, GOAL, np.array([0.35]))
    canvas.lines(np.stack([position, goal])[None], 0.006 * around.distance_m, ERROR)


def _airframe(canvas: Canvas, position: Array, rotation: Array, arm: float, rotors: int) -> None:
    at = [place(rotor, rotors) for rotor in range(rotors)]
    disc = 2.08 / rotors * CIRCLE
    hubs = arm / np.sqrt(2) * np.array([[ahead, aside, 0.0] for ahead, aside, _ in at])
    canvas.lines(position + np.stack([np.zeros_like(hubs), hubs], 1) @ rotation.T, 0.16 * arm, ARM)
    for hub in hubs:
        rim = position + (hub + arm * (disc + np.array([0.0, 0.0, 0.12]))) @ rotation.T
        colour = FRONT if hub[0] > 0.1 * arm else BACK
        canvas.faces(rim[None], np.array(colour, dtype=float)[None], alpha=0.5)
        canvas.path(rim, 0.05 * arm, colour)
    bodies = arm * (HULL + np.array([[[0.0, 0.0, -0.08]], [[0.0, 0.0, 0.1]]]))
    canvas.faces(position + bodies @ rotation.T, np.array(HULL_COLOURS, dtype=float))
