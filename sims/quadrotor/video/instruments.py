"""Instruments of a task, and the progress of a race."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from sims.quadrotor.environment import QuadrotorEnvironment
from sims.quadrotor.physics.dynamics import DT_S
from sims.quadrotor.tasks import race
from sims.quadrotor.tasks.race import Race
from sims.quadrotor.tasks.recover import Recover
from sims.quadrotor.tasks.track import Track
from sims.quadrotor.video import gates
from sims.quadrotor.video.camera import Array
from sims.quadrotor.video.gates import State
from sims.quadrotor.video.hud import Instruments
from sims.quadrotor.video.scenery import Scenery

LABEL_S = 0.5
"""Duration for which a gate is shown as passed a moment ago."""


@dataclass
class Progress:
    """Progress of a race: number of passed gates, the last gate and its control step, control steps at ends of laps."""

    passed: int = 0
    last: int | None = None
    at: int = -1000
    laps: list[int] = field(default_factory=lambda: [0])


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Present state of all environments, without gradients, on the CPU; arrays have rows [N, ...]."""

    position: Array
    rotation: Array
    velocity: Array
    speeds: Array
    commands: Array
    terminated: Array
    truncated: Array
    memory: Array
    won: Array
    steps: Array

    @classmethod
    def of(cls, env: QuadrotorEnvironment) -> Snapshot:
        """Present state of `env`."""
        (position, rotation), (speeds, commands), record = env.pose, env.rotors, env.record
        won = env.mdp.success(record)
        velocity = torch.stack(env.body.velocity, 1)
        parts = (
            *(position, rotation, velocity, speeds.t(), commands.t()),
            *(record.terminated, record.truncated, record.memory.t(), won, env.steps),
        )
        return cls(*(part.cpu().numpy() for part in parts))


def states(first: int, snapshot: Snapshot, row: int, before: Progress, mdp: Race) -> list[State]:
    """States of the gates, of which `first` is the first in a lap; updates the progress `before`."""
    passed, laps, lap_steps, hit = snapshot.memory[row].tolist()
    step = int(snapshot.steps[row])
    if (total := round(len(race.TRACK) * laps + passed)) > before.passed:
        before.passed = total
        before.at = step
        before.last = (first + total - 1) % len(race.TRACK)
    if laps > len(before.laps) - 1:
        before.laps.append(round(lap_steps))
    now = before.last if (step - before.at) * DT_S < LABEL_S else None
    return gates.states(first, round(passed), hit=hit > 0.5, done=laps >= mdp.laps, now=now)


def instruments(
    mdp: object, snapshot: Snapshot, row: int, around: Scenery, states: list[State], before: Progress, first: int
) -> Instruments:
    """Instruments of environment `row`; `states` are the states of the gates, `first` the first one of a lap."""
    common = {
        "time_s": DT_S * float(snapshot.steps[row]),
        "speed_m_s": float(np.linalg.norm(snapshot.velocity[row])),
        "speed_full_m_s": around.speed_full_m_s,
        "rotors": snapshot.speeds[row],
        "commanded": snapshot.commands[row],
        "won": bool(snapshot.won[row]),
    }
    ended = bool(snapshot.terminated[row] or snapshot.truncated[row])
    memory = snapshot.memory[row]
    if isinstance(mdp, Race):
        laps = round(float(memory[1]))
        order = [(first + number) % len(states) for number in range(len(states))]
        lap_s = DT_S * np.diff(before.laps)
        return Instruments(
            **common,
            title=f"lap {min(laps + 1, round(float(mdp.laps)))} of {mdp.laps:.0f}",
            pips=tuple(states[number].colour for number in order),
            below=f"last lap {lap_s[-1]:.2f} s" if len(lap_s) else "",
            ending=_race_ending(mdp, snapshot, row, states),
        )
    if isinstance(mdp, Recover):
        tilt = math.degrees(math.acos(min(max(float(snapshot.rotation[row][2, 2]), -1.0), 1.0)))
        calm = f"calm since {DT_S * float(memory[0]):.2f} s" if memory[0] > 0.5 else ""
        late = "recovered" if snapshot.won[row] else "too late"
        ending = "crashed" if snapshot.terminated[row] else late if ended else ""
        return Instruments(**common, title=f"{tilt:.0f}° tilt", below=calm, ending=ending)
    error = (
        0.0 if around.goal is None else float(np.linalg.norm(snapshot.position[row] - around.goal[snapshot.steps[row]]))
    )
    lost = "lost the reference" if isinstance(mdp, Track) else "left the space"
    ending = lost if snapshot.terminated[row] else "flew to the end" if ended else ""
    return Instruments(**common, title=f"{100 * error:.1f} cm", detail=around.goal_name, ending=ending)


def _race_ending(mdp: Race, snapshot: Snapshot, row: int, states: list[State]) -> str:
    if State.hit in states:
        return "hit a gate"
    if snapshot.won[row]:
        return f"{mdp.laps:.0f} laps in {DT_S * float(snapshot.steps[row]):.2f} s"
    return "left the course" if snapshot.terminated[row] else "out of time" if snapshot.truncated[row] else ""
