"""A toy that only a person can reset: a hand carries a mug across a table, from the left to the right and back.

As in the tabletop task of autonomous reinforcement learning (EARL, arXiv 2112.09605), in two dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDict

from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import Episodes
from embodied.environment import Environment, Transition
from embodied.policy import PolicyConfig
from embodied.task import LearnerConfig, Task
from real_robot.learning.resetting import BackwardConfig
from real_robot.learning.task import Helper, Reset, RobotConfig, RobotTask

EDGE_M = 0.3
"""Distance of the table's edges from its middle: a mug beyond it has fallen, out of reach of the hand."""
HAND_M = 0.35
"""Largest distance of the hand from the middle."""
GRASP_M = 0.1
"""Largest distance of a mug that the hand grasps."""
AREA_M = 0.08
"""Largest distance of the mug from the middle of an area that it is in."""
START = (-0.12, 0.0)
GOAL = (0.12, 0.0)
"""Middles of both areas."""


class Table:
    """The mug begins in the area at `START` and succeeds in that at `GOAL`; the hand begins anywhere."""

    num_envs = 1
    device = torch.device("cpu")
    task_names = instructions = ("table",)

    def __init__(self, seed: int = 0) -> None:
        xy = ("x", "y")
        specs = {"hand": TensorSpec((2,), unit="m", names=xy), "mug": TensorSpec((2,), unit="m", names=xy)}
        specs |= {"offset": TensorSpec((2,), unit="m", names=xy), "held": TensorSpec((1,), unit="1")}
        limits = {"low": (-0.06, -0.06, -1.0), "high": (0.06, 0.06, 1.0)}
        action = TensorSpec((3,), unit="m, m, 1", names=("x", "y", "grip"), **limits)
        self.contract = Contract(specs, action, 0.2, 1, 1)
        self.task_index = torch.zeros(1, dtype=torch.int64)
        self.generator = torch.Generator().manual_seed(seed)
        self.resets = 0
        """Number of scenes so far."""
        self.done = True

    def reset(self, mask: torch.Tensor | None = None) -> TensorDict:
        """A new scene."""
        self.resets += 1
        draw = 2.0 * torch.rand(2, 2, generator=self.generator) - 1.0
        self.hand = 0.25 * draw[0]
        self.mug = torch.tensor(START) + 0.03 * draw[1]
        return self.go_on()

    def go_on(self) -> TensorDict:
        """An episode in the present scene."""
        self.held = torch.zeros(1)
        self.done = False
        return self._observation()

    def step(self, actions: torch.Tensor) -> Transition:
        assert actions.shape == (1, 1, 3)
        executed = torch.tensor([[not self.done]])
        if not self.done:
            self._move(actions[0, 0])
        self.done = self.done or self.within(GOAL)
        done = torch.tensor([self.done])
        reward = (executed & done).float()
        return Transition(self._observation(), reward, executed, done, torch.zeros_like(done), done.clone())

    def within(self, middle: tuple[float, float]) -> bool:
        """Whether the mug is in the area around `middle`."""
        return float((self.mug - torch.tensor(middle)).norm()) <= AREA_M

    def close(self) -> None: ...

    def _move(self, action: torch.Tensor) -> None:
        closed = bool(action[2] > 0)
        fallen = bool((self.mug.abs() > EDGE_M).any())
        near = float((self.hand - self.mug).norm()) <= GRASP_M
        self.held = torch.full((1,), float(closed and near and not fallen))
        before = self.hand
        self.hand = (self.hand + action[:2].clamp(-0.06, 0.06)).clamp(-HAND_M, HAND_M)
        if self.held:
            self.mug = self.mug + self.hand - before

    def _observation(self) -> TensorDict:
        values = {"hand": self.hand, "mug": self.mug, "offset": self.mug - self.hand, "held": self.held}
        return TensorDict({name: value.unsqueeze(0).clone() for name, value in values.items()}, [1])


class TableTask(Task):
    """The table as a task; `tables` are the environments that it has made."""

    name = "table"
    distributions = ("table",)

    def __init__(self) -> None:
        self.tables: list[Table] = []

    def contract(self, distribution: str) -> Contract:
        return Table().contract

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        self.tables.append(Table(seed))
        return self.tables[-1]

    def start_condition(self, env: Environment) -> Callable[[], bool]:
        assert isinstance(env, Table)
        return lambda: env.within(START)


def demonstrations(to: tuple[float, float], count: int, seed: int = 0) -> Episodes:
    """`count` successful episodes in which the mug is carried `to` the middle of one area from the other one."""
    table = Table(seed)
    origin = torch.tensor(START if to == GOAL else GOAL)
    episodes = []
    for _ in range(count):
        table.reset()
        table.mug = table.mug - torch.tensor(START) + origin
        observations, actions = [table.go_on()], []
        while not table.within(to):
            noise = 0.02 * torch.randn(2, generator=table.generator)
            aim = torch.tensor(to) if table.held else table.mug
            grip = 1.0 if table.held or float((table.mug - table.hand).norm()) < GRASP_M else -1.0
            move = (aim - table.hand + noise).clamp(-0.06, 0.06)
            actions.append(torch.cat((move, torch.tensor([grip]))))
            table.done = False
            observations.append(table.step(actions[-1].view(1, 1, 3)).observation)
        rows = cast(TensorDict, torch.cat(cast(Any, observations)))
        reward = torch.zeros(len(actions))
        reward[-1] = 1.0
        final = cast(TensorDict, rows[-1])
        episodes.append(
            Episodes.of(cast(TensorDict, rows[:-1]), torch.stack(actions), reward=reward, final_observation=final)
        )
    return Episodes.join(episodes)


def on_robot(
    algorithm: LearnerConfig, policy: PolicyConfig, seed: int = 0, demonstrated: int = 10, **options: Any
) -> tuple[RobotTask, TableTask]:
    """The table behind the interface of a robot, with nobody who takes over, and its simulator.

    The way back is `demonstrated` so many times.
    """
    task = TableTask()
    config = RobotConfig(person=Helper.NOBODY, waits=False, **({"reset": Reset.POLICY, "step_limit": 50} | options))
    shown = partial(demonstrations, START, demonstrated, seed)
    backward = BackwardConfig(policy, algorithm, seed, demonstrations=lambda contract: shown())
    return RobotTask(task, task, config, backward=backward), task
