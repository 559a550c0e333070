"""Rewards and ends of episodes by a classifier of success, for tasks whose own success only a simulator knows.

The classifier reads the observation after each chunk. When as many consecutive ones as it requires reach its threshold,
the reward is 1 at the last executed action and the episode terminates; all other rewards are 0. In training the
success is the classifier's, as on a robot. In evaluation it is the simulator's own until the episode ends, and metrics
of the episode compare both. Letters: N environments, K executed actions of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.contract import Contract
from embodied.environment import Environment, Restorable, SwitchableEnvironment, Transition, group_size
from embodied.environments.wrapping import WrappedEnvironment, WrappedTask
from embodied.errors import UserError
from embodied.task import Task

SUCCESS = "classifier_success"
FALSE_POSITIVE = "classifier_false_positive"
FALSE_NEGATIVE = "classifier_false_negative"
"""Verdicts on episodes: the classifier detected a success; wrongly; it missed the simulator's success."""
EVALUATION = "eval"
"""Split of evaluations."""
FLAGS = "terminated", "truncated", "success"
KINDS = "metrics", "failures", "events"
"""Flags of a transition, and its values by name, that keep their values from the end of an episode."""


class Classifier(Protocol):
    """Classifier of success: `frames` consecutive observations of `contract` with a probability of `threshold`."""

    contract: Contract
    threshold: float
    frames: int

    def probability(self, observation: TensorDict) -> Tensor:
        """Probability of success of observations [N], [N]."""
        ...


class ClassifiedEnvironment(WrappedEnvironment):
    """Environment `env` whose rewards and ends are those of `classifier`.

    An episode that the simulator ends by its own success stays there: its last observation counts for all that the
    classifier still requires. If it is not classified as a success, the episode is truncated, with the reward 0. Other
    ends of the simulator remain. With `true_success` the success is the simulator's own, else the classifier's.

    Raises:
        UserError: if the classifier reads observations that `env` lacks, or environments share a world.
    """

    def __init__(self, env: Environment, classifier: Classifier, *, true_success: bool) -> None:
        super().__init__(env)
        check(classifier.contract, env.contract)
        if group_size(env) > 1:
            raise UserError(
                "success_classifier ends each episode by itself, and these environments share a world; leave it out"
            )
        self.classifier = classifier
        self.true_success = true_success
        self.notes = [
            *getattr(env, "notes", ()),
            "Rewards and ends of episodes are those of a success classifier. Success in evaluations is the simulator's"
            " own, in curves of training the classifier's.",
        ]
        self._consecutive = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        self._kept: dict[str, dict[str, Tensor]] = {}  # flags and values by episode of the last transition
        self._done = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
        self._observation: TensorDict | None = None
        if hasattr(self, "detach"):
            delattr(self, "detach")  # a classified reward has no gradient
        if isinstance(env, Restorable):
            self.state_dict, self.load_state_dict = self._state_dict, self._load_state_dict
        if isinstance(env, SwitchableEnvironment):
            self.switch = self._switch

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        """See `NumberedStarts.reset`."""
        observation = super().reset(mask, starts)
        begins = torch.ones_like(self._done) if mask is None else mask.to(self.device).bool()
        self._consecutive = self._consecutive * ~begins
        self._done = self._done & ~begins
        self._observation = self._frozen_observation(observation)
        return self._observation

    def step(self, actions: Tensor) -> Transition:
        """See `Environment.step`; episodes that the classifier ended stay frozen."""
        frozen = self._done
        transition = self.env.step(actions)
        observation = self._frozen_observation(transition.observation)
        above = self.classifier.probability(observation).to(self.device) >= self.classifier.threshold
        self._consecutive = torch.where(frozen, self._consecutive, (self._consecutive + 1) * above)
        stays = transition.terminated & transition.success
        positive = (self._consecutive >= self.classifier.frames) | (above & stays & ~frozen)
        self._observation = observation
        executed = transition.executed & ~frozen.unsqueeze(1)
        result = replace(
            transition,
            observation=observation,
            reward=_at_last(executed, positive).to(transition.reward.dtype),
            executed=executed,
            terminated=positive | (transition.terminated & ~transition.success),
            truncated=~positive & (transition.truncated | stays),
            success=transition.success if self.true_success else positive,
            has_success=transition.has_success or not self.true_success,
            signals={name: values * ~frozen.unsqueeze(1) for name, values in transition.signals.items()},
        )
        result = self._compared(result, transition, positive)
        result = _with_kept(result, frozen, self._kept)
        self._kept, self._done = _values(result), result.done
        return result

    def _compared(self, result: Transition, simulated: Transition, positive: Tensor) -> Transition:
        """`result` with the verdicts on episodes [N]: metrics in evaluations, since reports list them, else events.

        Without a success of the simulator, only the classifier's is known.
        """
        verdicts = {SUCCESS: positive}
        if simulated.has_success:
            verdicts[FALSE_POSITIVE] = positive & ~simulated.success
            verdicts[FALSE_NEGATIVE] = result.done & ~positive & simulated.success
        if not self.true_success:
            return replace(result, events=result.events | verdicts)
        return replace(result, metrics=result.metrics | {name: each.double() for name, each in verdicts.items()})

    def _frozen_observation(self, observation: TensorDict) -> TensorDict:
        """Observations [N], of episodes that have ended those from their end."""
        if self._observation is None or not bool(self._done.any()):
            return observation.clone()
        return _chosen(self._done, self._observation, observation)

    def _switch(self, distribution: str, split: str) -> None:
        """See `SwitchableEnvironment.switch`."""
        cast(SwitchableEnvironment, self.env).switch(distribution, split)
        self.true_success = split == EVALUATION

    def _state_dict(self) -> dict[str, Any]:
        """See `Restorable.state_dict`."""
        observation = {} if self._observation is None else dict(self._observation.items())
        own = {"consecutive": self._consecutive, "done": self._done, "kept": self._kept, "observation": observation}
        return {"env": cast(Restorable, self.env).state_dict(), **own}

    def _load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        """See `Restorable.load_state_dict`."""
        observation = cast(Restorable, self.env).load_state_dict(state["env"])
        self._consecutive, self._done = (state[name].to(self.device) for name in ("consecutive", "done"))
        moved = {
            kind: {name: each.to(self.device) for name, each in kept.items()} for kind, kept in state["kept"].items()
        }
        self._kept = moved
        stored = {name: each.to(self.device) for name, each in state["observation"].items()}
        self._observation = TensorDict(stored, batch_size=[self.num_envs]) if stored else None
        self._observation = self._frozen_observation(observation)
        return self._observation


def check(contract: Contract, provider: Contract) -> None:
    """Check that an environment of the contract `provider` has the observations of a classifier's `contract`.

    Raises:
        UserError: with all differences, on one line.
    """
    rows = []
    for key, spec in contract.observation.items():
        if key not in provider.observation:
            rows.append(f"observation {key!r}: missing")
            continue
        other = provider.observation[key]
        rows += [f"observation {key!r} {row}" for row in spec.differences(other)]
        if spec.names != other.names:
            rows.append(f"observation {key!r} order: expected {spec.names}, got {other.names}")
    if rows:
        raise UserError(
            f"the success classifier reads other observations than the task has ({'; '.join(rows)}); train it with"
            " the same task and its options: classify.py task=NAME"
        )


def _at_last(executed: Tensor, flags: Tensor) -> Tensor:
    """Whether an action is the last executed one of a chunk [N, K] whose flag [N] is set."""
    later = executed.flip(1).cumsum(1).flip(1)  # number of executed actions from each on
    return executed & (later == 1) & flags.unsqueeze(1)


def _chosen(mask: Tensor, old: TensorDict, new: TensorDict) -> TensorDict:
    """`old` [N] where `mask` [N], else `new` [N]."""
    parts = {}
    for key, value in new.items():
        tensor = cast(Tensor, value)
        parts[key] = torch.where(mask.view(-1, *(1,) * (tensor.ndim - 1)), cast(Tensor, old[key]), tensor)
    return TensorDict(parts, batch_size=new.batch_size)


def _values(transition: Transition) -> dict[str, dict[str, Tensor]]:
    """Flags and values [N] of a transition that keep their values from the end of an episode, by kind and name."""
    flags = {name: getattr(transition, name) for name in FLAGS}
    return {"flags": flags} | {kind: dict(getattr(transition, kind)) for kind in KINDS}


def _with_kept(transition: Transition, frozen: Tensor, kept: Mapping[str, Mapping[str, Tensor]]) -> Transition:
    """`transition` with the values `kept` where `frozen` [N]."""
    values = {
        kind: {name: torch.where(frozen, kept.get(kind, {}).get(name, new), new) for name, new in by_name.items()}
        for kind, by_name in _values(transition).items()
    }
    flags = values.pop("flags")
    return replace(transition, **flags, **cast(dict[str, Any], values))


class ClassifiedTask(WrappedTask):
    """Task whose environments have the rewards and ends of `classifier`; its demonstrations and videos do not."""

    def __init__(self, task: Task, classifier: Classifier) -> None:
        super().__init__(task)
        self.classifier = classifier

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        """See `Task.environment`."""
        env = super().environment(num_envs, distribution, split, seed, device)
        is_true = split == EVALUATION
        return cast(Environment, ClassifiedEnvironment(env, self.classifier, true_success=is_true))
