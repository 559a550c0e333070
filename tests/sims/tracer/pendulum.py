"""Another traced program: pendulums with a torque and noisy observations, in episodes."""

import torch

from sims.tracer.arithmetic import Rows, gaussians, squares, where
from sims.tracer.program import UNIFORM, WORD, Group, Program

DT_S, LIMIT = 0.05, 30.0


def step(state: Rows, record: Rows, action: Rows, key: Rows, length_m: Rows) -> dict[str, Rows]:
    """Angle (rad) and its speed (rad/s), at most `LIMIT` steps; the record counts them and says whether it ended."""
    angle, speed = state
    frozen = record[1] > 0.5
    turned = speed + DT_S * (9.81 / length_m[0] * angle.sin() + 4.0 * action[0])
    moved = [angle + DT_S * turned, turned]
    state = [where(frozen, old, new) for old, new in zip(state, moved, strict=True)]
    steps = record[0] + 1.0
    ended = where(steps >= LIMIT, 1.0, where(moved[0] * moved[0] > 9.0, 1.0, 0.0))
    record = [where(frozen, *pair) for pair in zip(record, (steps, ended), strict=True)]
    noise = gaussians(key, record[0], 0, 2)
    seen = [state[0].sin() + 0.01 * noise[0], state[0].cos() + 0.01 * noise[1], state[1]]
    cost = squares([state[0]]) + 0.1 * squares([state[1]]) + 0.01 * squares(action)
    return {
        "state": state,
        "record": record,
        "observation": seen,
        "reward": [where(frozen, 0.0, 1.0 - cost)],
        "executed": [where(frozen, 0.0, 1.0)],
    }


PENDULUM = Program(
    "swing",
    (
        Group("state", 2, differentiable=True),
        Group("record", 2),
        Group("action", 1, differentiable=True),
        Group("key", 2, WORD),
        Group("length_m", 1, UNIFORM),
    ),
    (
        Group("state", 2, differentiable=True),
        Group("record", 2),
        Group("observation", 3, differentiable=True),
        Group("reward", 1, differentiable=True),
        Group("executed", 1),
    ),
    step,
)


def given(lanes: int) -> dict[str, torch.Tensor]:
    """Inputs except the action; and the first observation."""
    g = torch.Generator().manual_seed(0)
    key = torch.randint(-(2**31), 2**31, (2, lanes), generator=g, dtype=torch.int64).int()
    return {
        "state": torch.randn(2, lanes, generator=g),
        "record": torch.zeros(2, lanes),
        "key": key,
        "length_m": torch.full((1, 1), 0.8),
        "observation": torch.randn(3, lanes, generator=g),
    }
