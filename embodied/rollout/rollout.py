"""Collect decisions from an environment, restarting finished episodes between chunks.

Letters: T decisions, N environments, H predicted and K executed actions, A action dimension, P log-probability parts, E
endings.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import (
    DifferentiableEnvironment,
    Environment,
    NumberedStarts,
    Restorable,
    Transition,
)
from embodied.errors import UserError
from embodied.policy import Decision, DensePolicy, DeterministicPolicy, Policy
from embodied.rollout.memory import Memory
from embodied.rollout.starts import Starts


class Storage(Enum):
    """Where a rollout lies: on the environment's device, in the CPU's memory, or in files that nothing else sees."""

    DEVICE = "device"
    CPU = "cpu"
    DISK = "disk"


@dataclass
class Rollout:
    """T decisions of N environments. Every observation is held once.

    What followed decision t is `observation[t + 1]`, or `last_observation` after the last; where an episode ended and
    another began between them it is a row of `final_observation`. What a policy with a memory read, and where episodes
    begin, are in `observation` too; see `memory.Memory`.
    """

    observation: TensorDict  # [T, N]
    last_observation: TensorDict  # [N] after the last decision
    actions: Tensor  # [T, N, H, A]
    sample: TensorDict  # [T, N]
    log_prob: Tensor  # [T, N, P]
    reward: Tensor  # [T, N, K]
    executed: Tensor  # [T, N, K] bool
    terminated: Tensor  # [T, N] bool
    truncated: Tensor  # [T, N] bool
    success: Tensor  # [T, N] bool
    task_index: Tensor  # [N]
    start: Tensor | None = None  # [T, N] initial state of the episode; None: they have no numbers
    final_observation: TensorDict | None = None  # [E] the true ones at endings inside the rollout; None: no such
    final_rows: Tensor | None = None  # [E] which decisions they follow, t * N + n, ascending
    value: Tensor | None = None  # [T, N] as the policy gave it with its decision
    human: Tensor | None = None  # [T, N, K] bool, actions in which a person took the place of the policy
    diverged: int = 0  # episodes that ended because the simulator's numbers blew up
    policy_version: int = 0  # updates that the policy had seen
    simulation_s: float = 0.0  # wall time
    policy_s: float = 0.0
    episode_return: Tensor | None = None  # [T, N] rewards of the episode up to this decision, in all, as collected
    episode_steps: Tensor | None = None  # [T, N] control steps of the same

    def next_observation(self) -> TensorDict:
        """The true observation after every decision, a copy, [T, N]."""
        last = self.last_observation.unsqueeze(0)
        following = TensorDict.cat((self.observation[1:].select(*last.keys()), last))
        if self.final_observation is not None:
            following.view(-1)[self.final_rows] = self.final_observation
        return following

    @property
    def done(self) -> Tensor:
        """Episode ended after this decision, [T, N] bool."""
        return self.terminated | self.truncated

    @property
    def own(self) -> Tensor:
        """The policy's own decisions, [T, N] bool: no person took over."""
        return torch.ones_like(self.done) if self.human is None else ~self.human.any(-1)

    @property
    def cut(self) -> Tensor:
        """Of what follows a decision its value alone counts, [T, N] bool: at time limits, where a person takes over."""
        following = torch.cat((self.own[1:], torch.ones_like(self.own[:1])))
        return self.truncated | ~following

    @property
    def env_steps(self) -> int:
        """Control steps executed."""
        return int(self.executed.sum())

    def ended(self) -> dict[str, float]:
        """Means over the episodes that ended in it: success, episode_return, episode_steps; empty where none did."""
        if self.episode_return is None or self.episode_steps is None or not self.done.any():
            return {}
        found = {"success": self.success, "episode_return": self.episode_return, "episode_steps": self.episode_steps}
        return {name: float(values[self.done].double().mean()) for name, values in found.items()}


RANDOM_DECISIONS = 8


def first_decisions(env: Environment, generator: torch.Generator, count: int = 2048) -> tuple[TensorDict, Tensor]:
    """At least `count` observations [B] from the beginnings of episodes, and uniformly random actions [B, K, A].

    What a policy without demonstrations takes its normalisation statistics from. Each episode runs for
    `RANDOM_DECISIONS`: initial states alone may not vary where it matters, and longer random play leads far from the
    states that a policy will live in.

    Raises:
        UserError: where actions have no limits.
    """
    spec = env.contract.action
    if not spec.low:
        raise UserError("expected action limits in the contract; a policy without demonstrations starts from them")
    low, high = torch.tensor(spec.low), torch.tensor(spec.high)
    shape = (env.num_envs, env.contract.executed, *spec.shape)
    observations: list[TensorDict] = []
    chunks: list[Tensor] = []
    while sum(map(len, observations)) < count:
        observation = env.reset()
        for _ in range(RANDOM_DECISIONS):
            observations.append(observation.clone())
            chunks.append(low + (high - low) * torch.rand(shape, generator=generator))
            observation = env.step(chunks[-1].to(env.device)).observation
    return TensorDict.cat(observations), torch.cat(chunks)


class Collector:
    """Steps `env` with `policy`, keeping the running episodes between calls.

    `generator` draws the policy's noise, on the policy's device; rollouts lie where `storage` says, on disk in
    `folder` (the system's for temporary files if None).

    Raises:
        UserError: for a policy that was built for other tensors than the environment's, or `starts` for an environment
            whose initial states have no numbers.
    """

    def __init__(
        self,
        env: Environment,
        policy: Policy,
        generator: torch.Generator,
        starts: Starts | None = None,
        storage: Storage = Storage.DEVICE,
        folder: Path | None = None,
    ) -> None:
        policy.contract.check(env.contract)
        self.numbered = isinstance(env, NumberedStarts)  # asked once: isinstance of a protocol looks up every name
        if starts is not None and not self.numbered:
            raise UserError("expected an environment whose initial states have numbers, to begin from chosen ones")
        self.env, self.policy, self.generator, self.starts = env, policy, generator, starts
        self.storage, self.folder = storage, folder
        self.version = 0  # updates that the policy has seen
        self.memory = Memory(policy, env.num_envs, env.device)
        self.observation: TensorDict | None = None
        self.abandon()

    def abandon(self) -> None:
        """Forget the running episodes: the next decision begins new ones everywhere."""
        env = self.env
        self.observation = None
        self.finished = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        self.success = torch.zeros_like(self.finished)
        self.totals = torch.zeros(2, env.num_envs, device=env.device)  # reward and steps of the running episodes

    def collect(self, decisions: int) -> Rollout:
        """Run `decisions` chunks in every environment; finished ones restart before the next chunk."""
        rows, finals, diverged = _Rows(decisions, self.storage, self.folder), [], 0
        simulation_s = policy_s = 0.0
        for t in range(decisions):
            started = time.perf_counter()
            ended = self.finished.nonzero().squeeze(1)
            if t and len(ended):
                finals.append((ended + (t - 1) * self.env.num_envs, cast(TensorDict, self.observation)[ended]))
            observation = self.memory.with_observation(self._restart(len(ended) > 0))
            rows.put(t, {"observation": observation})  # before the step, which may write over it
            if self.numbered:
                rows.put(t, {"start": cast(NumberedStarts, self.env).start})
            acted = time.perf_counter()
            decision = self._act(observation)
            self.memory.keep([decision])
            policy_s += time.perf_counter() - acted
            transition = self.env.step(decision.actions[:, : self.env.contract.executed])
            simulation_s += time.perf_counter() - started
            self.finished, self.success = transition.done, transition.success
            self.observation = transition.observation
            rows.put(t, _row(decision, transition))
            diverged += _diverged(transition)
        there = self.env.device if self.storage is Storage.DEVICE else torch.device("cpu")
        rollout = Rollout(
            **rows.tensors(), last_observation=cast(TensorDict, self.observation).clone().to(there),
            task_index=self.env.task_index.clone(),
            diverged=diverged, policy_version=self.version, simulation_s=simulation_s - policy_s, policy_s=policy_s,
            final_rows=torch.cat([place for place, _ in finals]).to(there) if finals else None,
            final_observation=TensorDict.cat([seen for _, seen in finals]).to(there) if finals else None,
        )  # fmt: skip
        return self._with_totals(rollout)

    def _act(self, observation: TensorDict) -> Decision:
        there, here = self.generator.device, self.env.device
        if there != here:
            observation = observation.to(there)
        decision = self.policy.act(observation, generator=self.generator)
        sample = decision.sample if there == here else decision.sample.to(here)
        value = None if decision.value is None else decision.value.to(here, torch.float32)
        return Decision(decision.actions.to(here), sample, decision.log_prob.to(here), value)

    def _restart(self, ended: bool) -> TensorDict:
        if self.observation is None or ended:
            if self.starts:
                if self.observation is None:
                    self.starts.abandon()
                starts = self.starts(self.finished, self.success).to(self.env.device)
                self.observation = cast(NumberedStarts, self.env).reset(self.finished, starts)
            else:
                self.observation = self.env.reset(self.finished)
            self.memory.restart(self.finished)
        return self.observation

    def state_dict(self) -> dict[str, Any]:
        """Running episodes, what is remembered of them, and the noise to come.

        Of an environment that can't be put back, only what begins its episodes anew.
        """
        state: dict[str, Any] = {"generator": self.generator.get_state(), "version": self.version}
        if not isinstance(self.env, Restorable):
            return state
        return state | {
            "env": self.env.state_dict(),
            "observation": self.observation,
            "finished": self.finished,
            "success": self.success,
            "totals": self.totals,
            **self.memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.generator.set_state(state["generator"])
        self.version = state["version"]
        if "env" not in state:
            self.abandon()
            return
        cast(Restorable, self.env).load_state_dict(state["env"])
        self.observation = None if state["observation"] is None else state["observation"].to(self.env.device)
        self.finished, self.success = (state[name].to(self.env.device) for name in ("finished", "success"))
        self.totals = state["totals"].to(self.env.device)
        self.memory.load_state_dict(state)

    def _with_totals(self, rollout: Rollout) -> Rollout:
        """`rollout` with the sums of its episodes, which go on across rollouts."""
        rows, device = [], self.totals.device
        reward, steps = rollout.reward.detach().sum(-1).to(device), rollout.executed.sum(-1).to(device)
        for now in zip(reward, steps, rollout.done.to(device), strict=True):
            rows.append(self.totals + torch.stack((now[0], now[1].to(reward.dtype))))
            self.totals = rows[-1] * ~now[2]
        episode_return, episode_steps = torch.stack(rows).unbind(1)
        return replace(rollout, episode_return=episode_return, episode_steps=episode_steps)


class _Rows:
    """Tensors [T, ...] that are filled row by row, so that a rollout is in memory once while it grows."""

    def __init__(self, length: int, storage: Storage, folder: Path | None) -> None:
        self.length, self.storage, self.folder = length, storage, folder
        self.found: dict[tuple[str, ...], Tensor] = {}
        self.batch: dict[str, list[int]] = {}

    def put(self, t: int, row: dict[str, Tensor | TensorDict]) -> None:
        for name, value in row.items():
            if isinstance(value, TensorDict):
                self.batch[name] = [self.length, *value.batch_size]
                for key, leaf in value.items(include_nested=True, leaves_only=True):
                    path = key if isinstance(key, tuple) else (key,)
                    tensor = cast(Tensor, leaf)
                    self._into((name, *path), tensor)[t] = tensor
            else:
                self._into((name,), value)[t] = value

    def tensors(self) -> dict[str, Any]:
        made: dict[str, Any] = {name: TensorDict({}, batch) for name, batch in self.batch.items()}
        for (name, *path), tensor in self.found.items():
            if path:
                made[name].set(tuple(path), tensor)
            else:
                made[name] = tensor
        return made

    def _into(self, path: tuple[str, ...], leaf: Tensor) -> Tensor:
        if path not in self.found:
            self.found[path] = self._empty((self.length, *leaf.shape), leaf)
        return self.found[path]

    def _empty(self, shape: tuple[int, ...], leaf: Tensor) -> Tensor:
        if self.storage is Storage.DEVICE:
            return leaf.new_empty(shape)
        if self.storage is Storage.CPU or 0 in shape:
            return torch.empty(shape, dtype=leaf.dtype)
        size = torch.Size(shape).numel()
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:  # its memory stays as long as the tensor lives
            return torch.from_file(file.name, shared=True, size=size, dtype=leaf.dtype).view(shape)


def _row(decision: Decision, transition: Transition) -> dict[str, Tensor | TensorDict]:
    """What a rollout keeps of one decision, but for the observation."""
    optional = {"value": decision.value, "human": transition.human}
    return {
        "actions": _executed(decision, transition),
        "sample": decision.sample,
        "log_prob": decision.log_prob,
        **{field: getattr(transition, field) for field in ("reward", "executed", *ENDS)},
        **{name: value for name, value in optional.items() if value is not None},
    }


ENDS = ("terminated", "truncated", "success")


def _diverged(transition: Transition) -> int:
    return 0 if transition.diverged is None else int((transition.diverged & transition.executed.any(1)).sum())


def _executed(decision: Decision, transition: Transition) -> Tensor:
    """Actions [N, H, A] of the chunk, the executed ones as they were executed."""
    if transition.actions is None:
        return decision.actions
    return torch.cat((transition.actions, decision.actions[:, transition.actions.shape[1] :]), 1)


@runtime_checkable
class UnrolledEnvironment(DifferentiableEnvironment, Protocol):
    """A DifferentiableEnvironment that runs a feed-forward policy by itself, faster than step by step."""

    def unroll(self, layers: Sequence[tuple[Tensor, Tensor]], decisions: int) -> Rollout:
        """Run `decisions` single actions of a feed-forward policy from the present state.

        `layers` are (weight [out, in], bias [out]) with tanh after each, from the concatenated observations that are
        not privileged, or that a teacher may be told, to actions in half ranges around the middle. Reward, observations
        and actions carry gradients to the layers. An environment whose episode ends on the way stays frozen.
        """
        ...


class DifferentiableCollector(Collector):
    """Collects deterministic decisions whose reward and observations carry gradients to the policy.

    Environments restart between rollouts alone: one whose episode ends inside stays frozen until the next.
    """

    def collect(self, decisions: int) -> Rollout:
        """Run `decisions` single actions in every environment, from where the last rollout ended."""
        started = time.perf_counter()
        self._restart(bool(self.finished.any()))
        env = cast(DifferentiableEnvironment, self.env)
        if isinstance(env, UnrolledEnvironment) and isinstance(self.policy, DensePolicy):
            layers = [(weight.to(env.device), bias.to(env.device)) for weight, bias in self.policy.layers()]
            rollout = env.unroll(layers, decisions)
        else:
            rollout = self._by_steps(decisions)
        env.detach()
        self.finished, self.success = rollout.done[-1], rollout.success[-1]
        self.observation = rollout.last_observation.detach()
        ran = rollout.executed.any(-1)  # an episode ends once
        ended = {name: getattr(rollout, name) & ran for name in ENDS}
        counted = {"simulation_s": time.perf_counter() - started, "policy_version": self.version}
        return self._with_totals(replace(rollout, **counted, **ended))

    def _by_steps(self, decisions: int) -> Rollout:
        """As `unroll` of an environment that has it, for policies of any kind."""
        policy = cast(DeterministicPolicy, self.policy)
        seen, made = [cast(TensorDict, self.observation)], []
        empty = TensorDict({}, batch_size=[self.env.num_envs])
        for _ in range(decisions):
            actions = policy.actions(seen[-1].to(policy.device)).to(self.env.device)
            transition = self.env.step(actions[:, : self.env.contract.executed])
            made.append(_row(Decision(actions, empty, actions.new_zeros(len(actions), 1)), transition))
            seen.append(transition.observation)
        stacked = {name: torch.stack([row[name] for row in made]) for name in made[0]}
        start = self.env.start.expand(decisions, -1) if isinstance(self.env, NumberedStarts) else None
        return Rollout(
            observation=TensorDict.stack(seen[:-1]), last_observation=seen[-1], task_index=self.env.task_index,
            start=start, **cast(dict[str, Any], stacked),
        )  # fmt: skip
