"""Gates of the race: their solid frames and their states (passed, next, ahead)."""

from __future__ import annotations

from enum import Enum

import numpy as np

from sims.quadrotor.tasks import race
from sims.quadrotor.tasks.race import BEAM_M, Gate
from sims.quadrotor.video.camera import Array

DEPTH_M = 0.16
"""Depth of a frame's beams."""
HALF_M = race.HALF_OPENING_M + race.RADIUS_M
"""Half the width of an opening."""
Colour = tuple[int, int, int]


class State(Enum):
    """State of a gate; the value is its colour."""

    ahead = (126, 140, 166)
    next = (255, 176, 46)
    passed = (64, 178, 96)
    now = (120, 232, 148)
    """Passed a moment ago."""
    hit = (240, 66, 56)

    @property
    def colour(self) -> Colour:
        """Red, green, blue."""
        return self.value


def states(first: int, passed: int, *, hit: bool, done: bool, now: int | None) -> list[State]:
    """States of the gates of `race.TRACK`.

    Args:
        first: number of the first gate of a lap.
        passed: number of gates passed in this lap.
        hit: whether a frame was hit, by a drone on its way to the next gate.
        done: whether all laps are complete.
        now: the gate that was passed a moment ago.
    """
    gate_states = []
    for number in range(len(race.TRACK)):
        order = (number - first) % len(race.TRACK)
        state = State.passed if done or order < passed else State.ahead
        if order == passed and not done:
            state = State.hit if hit else State.next
        gate_states.append(State.now if number == now and state is not State.hit else state)
    return gate_states


def corners(gate: Gate, half_m: float, ahead_m: float = 0.0) -> Array:
    """Corners of a square around the gate's middle, [4, 3] m, `ahead_m` further on than its plane."""
    nx, ny = gate.normal
    square = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0]]) * half_m
    middle = np.array([gate.x, gate.y, gate.z]) + ahead_m * np.array([nx, ny, 0.0])
    return middle + square @ np.array([[-ny, nx, 0.0], [0.0, 0.0, 1.0]])


def frame(gate: Gate) -> tuple[Array, Array]:
    """Faces of the frame [16, 4, 3] m, and their brightness [16]."""
    front, back, inner, outer = (
        corners(gate, HALF_M + beam, ahead)
        for beam, ahead in ((0.0, -DEPTH_M), (0.0, DEPTH_M), (BEAM_M, -DEPTH_M), (BEAM_M, DEPTH_M))
    )
    faces = []
    light = []
    for a in range(4):
        b = (a + 1) % 4
        for quad, shade in (
            ((front[a], front[b], inner[b], inner[a]), 1.0),
            ((back[a], back[b], outer[b], outer[a]), 1.0),
            ((front[a], front[b], back[b], back[a]), 0.62),
            ((inner[a], inner[b], outer[b], outer[a]), 0.78),
        ):
            faces.append(quad)
            light.append(shade)
    return np.array(faces), np.array(light)


def legs(gate: Gate) -> Array:
    """The two legs from the frame to the floor, [2, 2, 3] m."""
    below = corners(gate, HALF_M + 0.5 * BEAM_M)[1:3]
    return np.stack([below, below * np.array([1.0, 1.0, 0.0])], 1)


def footprint(gate: Gate) -> Array:
    """The frame seen from above, on the floor, [4, 3] m."""
    nx, ny = gate.normal
    along = np.array([nx, ny, 0.0]) * DEPTH_M
    across = np.array([-ny, nx, 0.0]) * (HALF_M + BEAM_M)
    middle = np.array([gate.x, gate.y, 0.0])
    return middle + np.stack([along + across, along - across, -along - across, -along + across])


def towards_next(position: Array, velocity: Array, states: list[State]) -> Array:
    """Heading of a racing drone, [2]: its velocity plus the direction to a point behind the next gate."""
    heading = 0.15 * velocity[:2]
    for gate, state in zip(race.TRACK, states, strict=True):
        if state in (State.next, State.hit):
            way = np.array([gate.x, gate.y]) + 1.5 * np.array(gate.normal) - position[:2]
            heading = heading + way / max(float(np.linalg.norm(way)), 0.5)
    return heading


LINES = np.stack([corners(gate, HALF_M)[1:3, :2] for gate in race.TRACK])
"""The gates from above, [G, 2, 2] m."""
