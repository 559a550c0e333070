"""Latency in training: delayed observations and commands for any environment.

Sensors measure and actuators take commands at the control rate; each message has its own latency, and the newest one
that has arrived counts. Ages are therefore whole periods: a latency below one period counts as one. With K > 1
measurements are made once per chunk; commands are delayed one by one. A physical delay between command and effect, in
fractions of a period, belongs in the simulator's dynamics (quadrotors: `delay_s` of an airframe); the inference time
of chunks is in `delay.py`. Letters: N environments, K executed actions, A action dimension, D ages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.configuration import Configuration, NonNegativeFloat
from embodied.contract import Contract, TensorSpec
from embodied.data.episodes import Episodes
from embodied.environment import DifferentiableEnvironment, Environment, NumberedStarts, Restorable, Transition
from embodied.environments.wrapping import WrappedEnvironment, WrappedTask
from embodied.errors import UserError
from embodied.policy import Decision, Policy
from embodied.rollout.memory import RecurrentPolicy
from embodied.task import Task

LATENCY = "latency"
NAMES = ("observation", "action")


@dataclass
class LatencyConfig(Configuration):
    """Latencies drawn per episode between a lowest and a highest one, s; each message deviates by up to `jitter_s`.

    With `observed` the policy reads observation "latency" [N, 2], s: the observation's age and the episode's action
    latency. Otherwise only critics read it (privileged).
    """

    observation_s: list[NonNegativeFloat] = field(default_factory=lambda: [0.0, 0.0])
    action_s: list[NonNegativeFloat] = field(default_factory=lambda: [0.0, 0.0])
    jitter_s: NonNegativeFloat = 0.0
    observed: bool = False

    def __post_init__(self) -> None:
        """Raise UserError for numbers out of range, and unless ranges are [lowest, highest]."""
        super().__post_init__()
        for name in ("observation_s", "action_s"):
            bounds_s = getattr(self, name)
            if len(bounds_s) != 2 or bounds_s[0] > bounds_s[1]:
                raise UserError(f"expected {name} as [lowest, highest], got {bounds_s}")

    @property
    def present(self) -> bool:
        """Whether any latency is above zero, or latency is observed."""
        return self.observed or max(*self.observation_s, *self.action_s, self.jitter_s) > 0.0


def contract(without: Contract, config: LatencyConfig) -> Contract:
    """Contract of an environment with latencies, from its contract `without`: adds the observation "latency"."""
    spec = TensorSpec((2,), unit="s", names=NAMES, privileged=not config.observed)
    return replace(without, observation={**without.observation, LATENCY: spec})


class LatencyEnvironment(WrappedEnvironment):
    """Environment `env` with latencies; it keeps the other capabilities of `env`.

    Initial state `start` of a task has the same latencies in every run; without numbered initial states, the n-th
    episode of each environment has. An episode begins as if its first observation and its first command had been sent
    long before.
    """

    def __init__(self, env: Environment, config: LatencyConfig) -> None:
        super().__init__(env)
        self.config = config
        self.episode_counts = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)  # episodes
        self.contract = contract(env.contract, config)
        dt_s = env.contract.control_dt_s
        executed = env.contract.executed
        jitter_s = config.jitter_s
        device = env.device
        self._observations = _Line(config.observation_s, jitter_s, executed * dt_s, purpose=0, device=device)
        self._commands = _Line(config.action_s, jitter_s, dt_s, purpose=1, device=device)
        if isinstance(env, Restorable):
            self.state_dict, self.load_state_dict = self._state_dict, self._load_state_dict
        if isinstance(env, DifferentiableEnvironment):
            self.detach = self._detach

    def reset(self, mask: Tensor | None = None, starts: Tensor | None = None) -> TensorDict:
        """See `NumberedStarts.reset`."""
        numbered = isinstance(self.env, NumberedStarts)
        observation = super().reset(mask, starts)
        begins = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask
        begins = begins.to(self.device)
        self.episode_counts = self.episode_counts + begins
        number = (
            self.start
            if numbered
            else self.episode_counts * self.num_envs + torch.arange(self.num_envs, device=self.device)
        )
        # seed of the episode's latencies, a function of task and initial state
        key = 1_000_003 * self.task_index.to(self.device) + number.to(self.device)
        for line in (self._observations, self._commands):
            line.begin(begins, key)
        self._observations.push(_parts(observation), begins)
        return self._observed()

    def step(self, actions: Tensor) -> Transition:
        """See `Environment.step`; every control step executes the newest command that has arrived."""
        if not self._observations.has_messages or not bool(actions.isfinite().all()):
            return self.env.step(actions)  # raises the environment's own error
        everywhere = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        arrived = []
        for action in actions.unbind(1):
            self._commands.push({"action": action}, everywhere)
            arrived.append(self._commands.newest()[0]["action"])
        transition = self.env.step(torch.stack(arrived, 1))
        self._observations.push(_parts(transition.observation), transition.executed.any(1))
        return replace(transition, observation=self._observed())

    def _state_dict(self) -> dict[str, Any]:
        """See `Restorable.state_dict`."""
        lines = {"observations": self._observations.state_dict(), "commands": self._commands.state_dict()}
        return {"env": cast(Restorable, self.env).state_dict(), "begun": self.episode_counts, **lines}

    def _load_state_dict(self, state: dict[str, Any]) -> TensorDict:
        """See `Restorable.load_state_dict`."""
        cast(Restorable, self.env).load_state_dict(state["env"])
        self.episode_counts = state["begun"].to(self.device)
        self._observations.load_state_dict(state["observations"])
        self._commands.load_state_dict(state["commands"])
        return self._observed()

    def _observed(self) -> TensorDict:
        observation, age = self._observations.newest()
        latency_s = torch.stack((age * self._observations.period_s, self._commands.base_s), 1)
        return TensorDict({**observation, LATENCY: latency_s.float()}, batch_size=[self.num_envs])

    def _detach(self) -> None:
        """Cut the graph, see `DifferentiableEnvironment`."""
        assert isinstance(self.env, DifferentiableEnvironment)
        self.env.detach()
        for line in (self._observations, self._commands):
            line.detach()


class _Line:
    """Messages in transit, newest first, with delays in whole periods; for N environments on `device`."""

    def __init__(
        self, range_s: list[float], jitter_s: float, period_s: float, *, purpose: int, device: torch.device
    ) -> None:
        self.range_s = range_s
        self.jitter_s = jitter_s
        self.period_s = period_s
        self.purpose = purpose
        self.device = device
        self.longest = int(_periods(torch.tensor(range_s[1] + jitter_s, dtype=torch.float64), period_s))
        self.messages: dict[str, Tensor] = {}  # [D, N, ...]
        self.delays = self.sent = self.key = torch.empty(0, dtype=torch.int64)  # delays [D, N], others [N]
        self.base_s = torch.empty(0, dtype=torch.float64)  # [N]

    @property
    def has_messages(self) -> bool:
        """Whether any message was sent."""
        return bool(self.messages)

    def begin(self, fresh: Tensor, key: Tensor) -> None:
        """Remove all messages where `fresh` [N]; later latencies are a function of `key` [N]."""
        if not len(self.sent):
            self.sent, self.key, self.base_s = torch.zeros_like(key), key, torch.zeros_like(key, dtype=torch.float64)
            self.delays = torch.zeros(self.longest + 1, len(key), dtype=torch.int64, device=key.device)
        low, high = self.range_s
        base_s = low + (high - low) * _uniform(key, torch.full_like(key, -1), self.purpose)
        self.key, self.base_s = torch.where(fresh, key, self.key), torch.where(fresh, base_s, self.base_s)
        self.sent = torch.where(fresh, 0, self.sent)

    def push(self, message: Mapping[str, Tensor], mask: Tensor) -> None:
        """Send `message`, tensors [N, ...], where `mask` [N]."""
        delay_s = self.base_s
        if self.jitter_s:
            deviation = 2.0 * _uniform(self.key, self.sent, self.purpose) - 1.0
            # delay = max(0, base + jitter u), u uniform in [-1, 1)
            delay_s = (delay_s + self.jitter_s * deviation).clamp_min(0.0)
        self.delays = _pushed(self.delays, _periods(delay_s, self.period_s), mask)
        before = self.messages or {name: part.expand(self.longest + 1, *part.shape) for name, part in message.items()}
        self.messages = {name: _pushed(before[name], part, mask) for name, part in message.items()}
        self.sent = self.sent + mask

    def newest(self) -> tuple[dict[str, Tensor], Tensor]:
        """Newest message that has arrived, or the first one, [N, ...], and its age [N] in periods."""
        if not self.longest:
            return {name: part[0] for name, part in self.messages.items()}, torch.zeros_like(self.sent)
        ages = torch.arange(self.longest + 1, device=self.delays.device).unsqueeze(1)
        age = (self.delays <= ages).long().argmax(0)  # the youngest that has arrived; the oldest always has
        # at the beginning of an episode the first message counts as arrived
        age = torch.minimum(age, self.sent - 1)
        rows = torch.arange(len(age), device=age.device)
        return {name: part[age, rows] for name, part in self.messages.items()}, age

    def detach(self) -> None:
        """Cut the graph of messages in transit."""
        self.messages = {name: part.detach() for name, part in self.messages.items()}

    def state_dict(self) -> dict[str, Any]:
        """All messages in transit."""
        return {"messages": self.messages} | {name: getattr(self, name) for name in LINE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for name in LINE:
            setattr(self, name, state[name].to(self.device))
        self.messages = {name: part.to(self.device) for name, part in state["messages"].items()}


LINE = ("delays", "sent", "key", "base_s")


def _pushed(rows: Tensor, new: Tensor, mask: Tensor) -> Tensor:
    """Rows [D, N, ...] where `mask` [N] shifted by one: `new` [N, ...] in front, without the last."""
    moved = torch.cat((new.unsqueeze(0), rows[:-1]))
    return torch.where(mask.view(-1, *(1,) * (new.ndim - 1)), moved, rows)


def _parts(observation: TensorDict) -> dict[str, Tensor]:
    return cast(dict[str, Tensor], dict(observation.items()))


def _periods(latency_s: Tensor, period_s: float) -> Tensor:
    """Number of whole periods until a message has arrived."""
    return torch.ceil(latency_s / period_s - 1e-6).long().clamp_min(0)


def _uniform(key: Tensor, number: Tensor, purpose: int) -> Tensor:
    """Pseudo-random numbers in [0, 1) by SplitMix64 of integers [N], the same on every device."""
    x = key * -7046029254386353131 + number * 6364136223846793005 + purpose * 1442695040888963407
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        # int64 shifts are arithmetic: the mask makes them logical
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return (x >> 11 & (1 << 53) - 1).double() / (1 << 53)


class LatencyTask(WrappedTask):
    """Task with latencies in its environments; videos and demonstrations have none."""

    def __init__(self, task: Task, config: LatencyConfig) -> None:
        super().__init__(task)
        self.config = config

    def contract(self, distribution: str) -> Contract:
        """See `Task.contract`."""
        return contract(super().contract(distribution), self.config)

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> Environment:
        """See `Task.environment`."""
        env = super().environment(num_envs, distribution, split, seed, device)
        return cast(Environment, LatencyEnvironment(env, self.config))  # whose attributes are only read

    def demonstrations(self, directory: Path, seed: int) -> Episodes | None:
        """Demonstrations of the task, which have no latency.

        Raises:
            UserError: if the policy observes latency.
        """
        demonstrations = super().demonstrations(directory, seed)
        if demonstrations is not None and self.config.observed:
            raise UserError("demonstrations have no latency to observe; use latency.observed=false")
        return demonstrations

    def video(
        self, path: Path, policies: Mapping[str, Policy], device: str, distribution: str | None = None, first: int = 0
    ) -> None:
        """Video of the task, without latency; policies that observe latency read 0."""
        punctual = {caption: _Punctual(policy) for caption, policy in policies.items()}
        super().video(path, punctual, device, distribution, first)


class _Punctual:
    """Policy with latency 0 added to its observations."""

    def __init__(self, policy: Policy) -> None:
        observation = {key: spec for key, spec in policy.contract.observation.items() if key != LATENCY}
        self.policy = policy
        self.contract = replace(policy.contract, observation=observation)
        if isinstance(policy, RecurrentPolicy):
            self.initial_memory = policy.initial_memory

    def act(
        self, observation: TensorDict, *, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> Decision:
        """Act like `policy.act`, with latency 0."""
        zero_latency = torch.zeros(*observation.batch_size, len(NAMES), device=observation.device)
        punctual = observation.copy().update({LATENCY: zero_latency})
        return self.policy.act(punctual, deterministic=deterministic, generator=generator)


def with_latency(task: Task, config: LatencyConfig) -> Task:
    """Task with the latencies of `config`; unchanged if there are none."""
    return LatencyTask(task, config) if config.present else task
