"""A reflex in simulation: chunks of any environment are checked at every control step, see `execution.reflex`.

Letters: N environments, K executed actions, A action dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import Environment, Restorable, Transition
from embodied.environments.wrapping import WrappedEnvironment, WrappedTask
from embodied.errors import UserError
from embodied.execution.reflex import Reflex
from embodied.task import Task

CUT = "reflex"
"""Event of the chunks in which the reflex acted in place of the policy."""
STEPS = "reflex_steps"
"""Signal of the steps in which it did."""


class ReflexEnvironment(WrappedEnvironment):
    """Environment whose chunks of `executed` actions are checked by `reflex`; `env` executes one action in a step.

    After a cut the robot brakes until the policy's next decision, which comes after K steps.
    `Transition.actions` are the actions as executed.

    Raises:
        UserError: if `env` executes several actions in a step, or has other actions or observations than the reflex.
    """

    def __init__(self, env: Environment, reflex: Reflex, horizon: int, executed: int) -> None:
        super().__init__(env)
        if env.contract.executed != 1:
            raise UserError(f"a reflex checks every action; the simulator executes {env.contract.executed} at once")
        if rows := reflex.contract.mismatches(env.contract):
            raise UserError(f"the reflex was learned for another task ({'; '.join(rows)}); learn one for this task")
        self.reflex = reflex
        self.contract = replace(env.contract, horizon=horizon, executed=executed)
        self._observation: TensorDict | None = None
        if isinstance(env, Restorable):
            self.load_state_dict = self._load_state_dict

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        """See `NumberedStarts.reset`."""
        self._observation = super().reset(mask, starts)
        return self._observation

    def step(self, actions: Tensor) -> Transition:
        """See `Environment.step`; an action whose risk is too high cuts the chunk."""
        expected = (self.num_envs, self.contract.executed, *self.contract.action.shape)
        if tuple(actions.shape) != expected:
            raise ValueError(f"expected actions of shape {expected}, got {tuple(actions.shape)}")
        if self._observation is None or not bool(actions.isfinite().all()):
            return self.env.step(torch.full_like(actions[:, :1], torch.nan))  # raises the environment's own error
        cut = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        steps = []
        taken = []
        replaced = []
        for action in actions.to(self.device).unbind(1):
            action, cut = self.reflex.check(self._observation, action, cut)
            steps.append(_copied(self.env.step(action.unsqueeze(1))))
            self._observation = steps[-1].observation
            taken.append(action if steps[-1].actions is None else steps[-1].actions.squeeze(1))
            replaced.append(cut.unsqueeze(1) & steps[-1].executed)
        return _chunk(steps, torch.stack(taken, 1), torch.cat(replaced, 1))

    def _load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        """See `Restorable.load_state_dict`."""
        self._observation = cast(Restorable, self.env).load_state_dict(state)
        return self._observation


def _copied(step: Transition) -> Transition:
    """Transition of a `step` whose chunk goes on, with copies of what the simulator may overwrite in the next one."""
    return replace(
        step,
        reward=step.reward.clone(),
        executed=step.executed.clone(),
        actions=None if step.actions is None else step.actions.clone(),
        signals={name: values.clone() for name, values in step.signals.items()},
        events={name: flags.clone() for name, flags in step.events.items()},
    )


def _chunk(steps: list[Transition], actions: Tensor, replaced: Tensor) -> Transition:
    """Transition of a chunk from those of its `steps`, with its `actions` [N, K, A] as executed."""
    last = steps[-1]
    signals = {name: torch.cat([each.signals[name] for each in steps], 1) for name in last.signals}
    events = {name: torch.stack([each.events[name] for each in steps]).any(0) for name in last.events}
    return replace(
        last,
        reward=torch.cat([each.reward for each in steps], 1),
        executed=torch.cat([each.executed for each in steps], 1),
        actions=actions,
        signals=signals | {STEPS: replaced.to(last.reward.dtype)},
        events=events | {CUT: replaced.any(1)},
    )


class ReflexTask(WrappedTask):
    """Task `task` with a reflex in its environments, which are those of `steps`, the task with chunks of one action.

    Videos and demonstrations have no reflex.
    """

    def __init__(self, task: Task, steps: Task, reflex: Reflex) -> None:
        super().__init__(task)
        self.steps = steps
        self.reflex = reflex

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        """See `Task.environment`."""
        contract = self.contract(distribution)
        env = self.steps.environment(num_envs, distribution, split, seed, device)
        # whose attributes are only read
        return cast(Environment, ReflexEnvironment(env, self.reflex, contract.horizon, contract.executed))


def with_reflex(task: Task, reflex: Reflex | None, wrapped: Callable[[Task], Task]) -> Task:
    """The task `wrapped` in further wrappers, with a `reflex` outside of them; None: without."""
    return wrapped(task) if reflex is None else ReflexTask(wrapped(task), wrapped(in_steps(task)), reflex)


def in_steps(task: Task) -> Task:
    """The same task with chunks of one action.

    Raises:
        UserError: for a task that has no other chunks.
    """
    names = {entry.name for entry in fields(task)} if is_dataclass(task) else set()
    if "executed" in names:
        return replace(cast(Any, task), **dict.fromkeys(names & {"executed", "horizon"}, 1))
    if task.contract(task.distributions[0]).executed != 1:
        raise UserError(f"task={task.name} has no option task.executed: it cannot be taken in single actions")
    return task
