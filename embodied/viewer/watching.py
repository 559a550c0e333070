"""Environments that a viewer shows while a run steps them; the numbers stay those of a run without a viewer.

Letters in shape comments: N environments, K executed actions, A action dimension.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import Environment, NumberedStarts, Restorable, Transition, group_size
from embodied.environments.wrapping import WrappedEnvironment, WrappedTask
from embodied.errors import UserError
from embodied.rollout.rollout import Rollout
from embodied.scene.viewable import Array, View, view
from embodied.task import Task

log = logging.getLogger(__name__)
RECENT = 100
"""Number of episodes of the latest success rate and mean return."""
POINTS = 500
"""Largest number of points of a curve."""


@dataclass
class Push:
    """Push requested by a person: change the velocity of `body` by `change_m_s` [3]."""

    body: str
    change_m_s: Array


class Screen(ABC):
    """Screen that shows one environment at a time; `row` is its index."""

    row: int = 0

    @abstractmethod
    def before(self, watched: WatchedEnvironment) -> list[Push]:
        """Show the coming step, wait while paused, and return the requested pushes."""

    @abstractmethod
    def after(self, watched: WatchedEnvironment, seconds: float) -> None:
        """Show the state after a step of the environment shown that lasted `seconds` of simulated time."""


@dataclass
class Score:
    """Statistics of ended episodes: success rate and mean return of the last `RECENT`, and their curves."""

    episodes: int = 0
    successes: int = 0
    has_success: bool = True
    curve: list[tuple[int, float, float]] = field(default_factory=list)  # episodes, success rate, mean return
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, success: Tensor, returns: Tensor) -> None:
        """Add episodes [M] by `success` and `returns`."""
        self.episodes, self.successes = self.episodes + len(success), self.successes + int(success.sum())
        self._recent.extend(zip(success.double().tolist(), returns.double().tolist(), strict=True))
        success_rate, mean_return = (sum(each) / len(self._recent) for each in zip(*self._recent, strict=True))
        self.curve.append((self.episodes, success_rate, mean_return))
        if len(self.curve) > POINTS:
            del self.curve[1:-1:2]


class WatchedEnvironment(WrappedEnvironment):
    """Wrapper that shows `env` on `screen` under the name `label`.

    Attributes:
        observation: the policy's input, [N]; None before the first reset.
        actions: the chunk that is executed next, [N, K, A]; None where the environment runs a policy itself.
        value: the policy's expected return, [N]; None if it has none.
        returns: reward of the running episodes so far, [N].
        steps: their control steps, [N].
        fresh: whether an episode of the shown environment has begun since it was last drawn.
        score: statistics of the episodes that ended.
    """

    def __init__(self, env: Environment, view: View, screen: Screen, label: str) -> None:
        super().__init__(env)
        self.env_view = view
        self.label = label
        self._screen = screen
        self.observation: TensorDict | None = None
        self.actions: Tensor | None = None
        self.value: Tensor | None = None
        self.fresh = True
        self.score = Score()
        self._counts: Tensor | None = None
        self.returns, self.steps = torch.zeros(2, env.num_envs, device=env.device)
        self.done, self._pushed = torch.zeros(2, env.num_envs, dtype=torch.bool, device=env.device)
        if hasattr(env, "unroll"):
            self.unroll = self._unroll
        if isinstance(env, Restorable):
            self.load_state_dict = self._load_state_dict

    def show_values(self, value: Tensor | None, counts: Tensor | None) -> None:
        """See `embodied.environment.show_values`."""
        self.value = value
        self._counts = counts

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        """See `NumberedStarts.reset`."""
        self.observation = super().reset(mask, starts)
        begins = torch.ones_like(self.done) if mask is None else mask.to(self.device).bool()
        self.done, self._pushed = self.done & ~begins, self._pushed & ~begins
        self.returns, self.steps = self.returns * ~begins, self.steps * ~begins
        self.fresh = self.fresh or bool(begins[min(self._screen.row, self.num_envs - 1)])
        return self.observation

    def step(self, actions: Tensor) -> Transition:
        """See `Environment.step`."""
        self.actions = actions.detach()
        self._push(self._screen.before(self))
        transition = self.env.step(actions)
        self.observation = transition.observation
        self._add(transition.reward, transition.executed, transition.done, transition.success, transition.has_success)
        return replace(transition, events=transition.events | {"pushed": self._pushed.clone()})

    def _unroll(
        self, layers: Sequence[tuple[Tensor, Tensor]], decisions: int, max_action_gradient: float = math.inf
    ) -> Rollout:
        """See `embodied.rollout.differentiable.Unroll`; only the states before and after are shown."""
        self.actions = None
        self._push(self._screen.before(self))
        before = self._pushed & ~self.done
        rollout = cast(Any, self.env).unroll(layers, decisions, max_action_gradient)
        self.observation = rollout.last_observation
        reward, executed = (each.transpose(0, 1).flatten(1) for each in (rollout.reward, rollout.executed))
        self._add(reward, executed, rollout.done[-1], rollout.success[-1], rollout.has_success)
        return replace(rollout, events=rollout.events | {"pushed": before & rollout.executed.any(-1)})

    def _add(self, reward: Tensor, executed: Tensor, done: Tensor, success: Tensor, has_success: bool) -> None:
        """Add the result of a step [N, K] to the statistics, and show it."""
        self.returns = self.returns + reward.detach().sum(1)
        self.steps, before = self.steps + executed.sum(1), self.steps
        ended = done & ~self.done
        self.done = done.clone()
        self.score.has_success = has_success
        counted = ended if self._counts is None else ended & self._counts
        if bool(counted.any()):
            self.score.add(success[counted], self.returns[counted])
        row = min(self._screen.row, self.num_envs - 1)
        self._screen.after(self, float(self.steps[row] - before[row]) * self.contract.control_dt_s)

    def _push(self, pushes: list[Push]) -> None:
        row = min(self._screen.row, self.num_envs - 1)
        for push in pushes:
            if bool(self.done[row]):
                log.info(f"viewer: environment {row} was not pushed, its episode has ended")
                continue
            self.env_view.push(row, push.body, push.change_m_s)
            world = row // (group := group_size(self.env))
            self._pushed[world * group : (world + 1) * group] = True
            start = f", start {int(self.start[row])}" if isinstance(self.env, NumberedStarts) else ""
            change = ", ".join(f"{part:.3g}" for part in push.change_m_s)
            log.warning(
                f"viewer: {push.body} of environment {row} ({self.label}{start}) pushed by ({change}) m/s at control"
                f" step {int(self.steps[row])}"
            )

    def _load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        """See `Restorable.load_state_dict`; scores start again at zero."""
        self.observation = cast(Restorable, self.env).load_state_dict(state)
        self.fresh = True
        return self.observation


class WatchedTask(WrappedTask):
    """Wrapper of `task` that shows its environments on `screen`; `viewable` describes which can be shown."""

    def __init__(self, task: Task, screen: Screen, viewable: str) -> None:
        super().__init__(task)
        self._screen = screen
        self._viewable = viewable

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        """See `Task.environment`.

        Raises:
            UserError: for environments that cannot be viewed, with a description of those that can.
        """
        env = super().environment(num_envs, distribution, split, seed, device)
        if (env_view := view(env)) is None:
            env.close()
            raise UserError(f"viewer=true cannot show these environments of {self.name}; it shows {self._viewable}")
        return cast(Environment, WatchedEnvironment(env, env_view, self._screen, f"{split}, {distribution}"))
