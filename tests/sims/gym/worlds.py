"""A small world, registered with Gymnasium: importing this module registers it."""

from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


class Line(gymnasium.Env):
    """A point on a line that ends beyond 3 (success) or below -3, with observations of every kind."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self,
        render_mode: str | None = None,
        spread: float = 1.0,
        told: str | None = "is_success",
        broken_at: int | None = None,
        seeded: bool = True,
        noisy: bool = False,
        modifies: bool = False,
        solved_beyond: float | None = None,
    ) -> None:
        self.render_mode, self.spread, self.told, self.broken_at = render_mode, spread, told, broken_at
        self.seeded, self.noisy, self.modifies, self.solved_beyond = seeded, noisy, modifies, solved_beyond
        self.observation_space = spaces.Dict(
            {
                "state": spaces.Box(-np.inf, np.inf, (2,), np.float64),
                "camera": spaces.Box(0, 255, (4, 5, 3), np.uint8),
                "mode": spaces.Discrete(3, start=1),
                "inner": spaces.Dict({"bounded": spaces.Box(-5.0, 5.0, (1,), np.float32)}),
            }
        )
        self.action_space = spaces.Box(np.array([[-1.0], [-2.0]]), np.array([[1.0], [2.0]]), (2, 1), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        random = self.np_random if self.seeded else np.random.default_rng()
        self.x, self.steps = self.spread * random.uniform(-1.0, 1.0), 0
        solved = {} if self.solved_beyond is None else {"is_success": self.x > self.solved_beyond}
        return self._observation(), solved

    def step(self, action):
        assert self.action_space.contains(action), action
        self.x, self.steps = self.x + float(action.sum()), self.steps + 1
        self.x += np.random.default_rng().normal() if self.noisy else 0.0
        if self.modifies:
            action *= 0.0
        ended = abs(self.x) > 3.0
        info = {self.told: self.x > 0.5} if self.told else {}
        return self._observation(), np.float64(-abs(self.x)), ended, False, info

    def render(self):
        return np.full((8, 12, 3), 10 * self.steps, np.uint8)

    def _observation(self):
        broken = self.steps == self.broken_at
        return {
            "state": np.array([np.nan if broken else self.x, self.steps]),
            "camera": np.full((4, 5, 3), self.steps, np.uint8),
            "mode": np.int64(1 + self.steps % 3),
            "inner": {"bounded": np.array([np.clip(self.x, -5, 5)], np.float32)},
        }


class Choices(gymnasium.Env):
    """Counts in steps of the choice; nothing but its time limit ends it, nothing tells its rate."""

    def __init__(self, actions: spaces.Space | None = None) -> None:
        self.observation_space = spaces.Box(0, 255, (1,), np.uint8)
        self.action_space = actions or spaces.Discrete(3, start=-1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 100
        return np.array([self.count], np.uint8), {}

    def step(self, action):
        self.count += int(action)
        return np.array([self.count], np.uint8), float(action), False, False, {}


class Goal(Choices):
    """Every goal is rewarded by its distance from what was achieved."""

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: dict) -> np.ndarray:
        return -np.abs(achieved_goal - desired_goal).sum(-1)


gymnasium.register("Goal-v0", Goal, max_episode_steps=6)
gymnasium.register("Line-v0", Line, max_episode_steps=6)
gymnasium.register("Choices-v0", Choices)
