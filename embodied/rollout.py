"""Collect decisions from an environment, restarting finished episodes between chunks.

Letters: T decisions, N environments, H predicted and K executed actions, A action dimension, P log-probability parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import DifferentiableEnvironment, StartEnvironment, Transition
from embodied.errors import UserError
from embodied.memory import Memory
from embodied.policy import Decision, DensePolicy, DeterministicPolicy, Policy

Starts = Callable[[Tensor, Tensor], Tensor]
"""Called with who finished [N] and who succeeded [N]; returns the initial states [N] that the finished restart from."""


@dataclass
class Rollout:
    """T decisions of N environments; `next_observation` is the true one, also where an episode ended.

    What a policy with a memory read of it, and where episodes begin, are in `observation` too; see `memory.Memory`.
    """

    observation: TensorDict  # [T, N]
    next_observation: TensorDict  # [T, N]
    actions: Tensor  # [T, N, H, A]
    sample: TensorDict  # [T, N]
    log_prob: Tensor  # [T, N, P]
    reward: Tensor  # [T, N, K]
    executed: Tensor  # [T, N, K] bool
    terminated: Tensor  # [T, N] bool
    truncated: Tensor  # [T, N] bool
    success: Tensor  # [T, N] bool
    task_index: Tensor  # [T, N]
    start: Tensor  # [T, N] initial state of the episode
    simulation_s: float  # wall time
    policy_s: float
    human: Tensor | None = None  # [T, N, K] bool, actions in which a person took the place of the policy
    diverged: int = 0  # episodes that ended because the simulator's numbers blew up
    episode_return: Tensor | None = None  # [T, N] rewards of the episode up to this decision, in all, as collected
    episode_steps: Tensor | None = None  # [T, N] control steps of the same

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
        told = {"success": self.success, "episode_return": self.episode_return, "episode_steps": self.episode_steps}
        return {name: float(values[self.done].double().mean()) for name, values in told.items()}


RANDOM_DECISIONS = 8


def first_decisions(env: StartEnvironment, generator: torch.Generator, count: int = 2048) -> tuple[TensorDict, Tensor]:
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
            observations.append(observation)
            chunks.append(low + (high - low) * torch.rand(shape, generator=generator))
            observation = env.step(chunks[-1].to(env.device)).observation
    return TensorDict.cat(observations), torch.cat(chunks)


class Collector:
    """Steps `env` with `policy`, keeping the running episodes between calls.

    `generator` draws the policy's noise, on the policy's device; rollouts lie on the environment's.

    Raises:
        UserError: for a policy that was built for other tensors than the environment's.
    """

    def __init__(
        self, env: StartEnvironment, policy: Policy, generator: torch.Generator, starts: Starts | None = None
    ) -> None:
        policy.contract.check(env.contract)
        self.env, self.policy, self.generator, self.starts = env, policy, generator, starts
        self.observation: TensorDict | None = None
        self.finished = torch.ones(env.num_envs, dtype=torch.bool)
        self.success = torch.zeros(env.num_envs, dtype=torch.bool)
        self.totals = torch.zeros(2, env.num_envs, device=env.device)  # reward and steps of the running episodes
        self.memory = Memory(policy, env.num_envs, env.device)

    def collect(self, decisions: int) -> Rollout:
        """Run `decisions` chunks in every environment; finished ones restart before the next chunk."""
        rows: list[tuple[TensorDict, Decision, Transition, Tensor]] = []
        simulation_s = policy_s = 0.0
        for _ in range(decisions):
            started = time.perf_counter()
            observation = self.memory.with_observation(self._restart())
            start = self.env.start.clone()
            acted = time.perf_counter()
            decision = self._act(observation)
            self.memory.keep([decision])
            policy_s += time.perf_counter() - acted
            transition = self.env.step(decision.actions[:, : self.env.contract.executed])
            simulation_s += time.perf_counter() - started
            self.finished, self.success = transition.done, transition.success
            self.observation = transition.observation
            rows.append((observation, decision, transition, start))
        return self._with_totals(self._stack(rows, simulation_s - policy_s, policy_s))

    def _act(self, observation: TensorDict) -> Decision:
        decision = self.policy.act(observation.to(self.generator.device), generator=self.generator)
        actions, sample, log_prob = (
            part.to(self.env.device) for part in (decision.actions, decision.sample, decision.log_prob)
        )
        return Decision(actions, sample, log_prob)

    def _restart(self) -> TensorDict:
        if self.observation is None or self.finished.any():
            starts = self.starts(self.finished, self.success) if self.starts else None
            self.observation = self.env.reset(mask=self.finished, starts=starts)
            self.memory.restart(self.finished)
        return self.observation

    def state_dict(self) -> dict[str, Any]:
        """Running episodes, what is remembered of them, and the noise to come."""
        return {
            "env": self.env.state_dict(),
            "generator": self.generator.get_state(),
            "observation": self.observation,
            "finished": self.finished,
            "success": self.success,
            "totals": self.totals,
            **self.memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.env.load_state_dict(state["env"])
        self.generator.set_state(state["generator"])
        self.observation = None if state["observation"] is None else state["observation"].to(self.env.device)
        self.finished, self.success = (state[name].to(self.env.device) for name in ("finished", "success"))
        self.totals = state["totals"].to(self.env.device)
        self.memory.load_state_dict(state)

    def _with_totals(self, rollout: Rollout) -> Rollout:
        """`rollout` with the sums of its episodes, which go on across rollouts."""
        rows = []
        for reward, executed, done in zip(rollout.reward.detach(), rollout.executed, rollout.done, strict=True):
            rows.append(self.totals + torch.stack((reward.sum(-1), executed.sum(-1).to(reward.dtype))))
            self.totals = rows[-1] * ~done
        episode_return, episode_steps = torch.stack(rows).unbind(1)
        return replace(rollout, episode_return=episode_return, episode_steps=episode_steps)

    def _stack(
        self, rows: list[tuple[TensorDict, Decision, Transition, Tensor]], simulation_s: float, policy_s: float
    ) -> Rollout:
        observations, decisions, transitions, starts = zip(*rows, strict=True)
        human = [transition.human for transition in transitions if transition.human is not None]
        diverged = [each.diverged & each.executed.any(1) for each in transitions if each.diverged is not None]
        return Rollout(
            observation=torch.stack(list(observations)),
            next_observation=torch.stack([transition.observation for transition in transitions]),
            actions=torch.stack([_executed(*pair) for pair in zip(decisions, transitions, strict=True)]),
            sample=torch.stack([decision.sample for decision in decisions]),
            log_prob=torch.stack([decision.log_prob for decision in decisions]),
            **{
                field: torch.stack([getattr(transition, field) for transition in transitions])
                for field in ("reward", "executed", "terminated", "truncated", "success")
            },
            task_index=self.env.task_index.expand(len(rows), -1).clone(),
            start=torch.stack(list(starts)),
            simulation_s=simulation_s,
            policy_s=policy_s,
            human=torch.stack(human) if len(human) == len(transitions) else None,
            diverged=sum(int(each.sum()) for each in diverged),
        )


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
        self._restart()
        env = cast(DifferentiableEnvironment, self.env)
        if isinstance(env, UnrolledEnvironment) and isinstance(self.policy, DensePolicy):
            rollout = env.unroll(self.policy.layers(), decisions)
        else:
            rollout = self._by_steps(decisions)
        env.detach()
        self.finished, self.success = rollout.done[-1], rollout.success[-1]
        self.observation = rollout.next_observation[-1].detach()
        ran = rollout.executed.any(-1)  # an episode ends once
        ended = {name: getattr(rollout, name) & ran for name in ("terminated", "truncated", "success")}
        return self._with_totals(replace(rollout, simulation_s=time.perf_counter() - started, **ended))

    def _by_steps(self, decisions: int) -> Rollout:
        """As `unroll` of an environment that has it, for policies of any kind."""
        policy = cast(DeterministicPolicy, self.policy)
        rows: list[tuple[TensorDict, Decision, Transition, Tensor]] = []
        empty = TensorDict({}, batch_size=[self.env.num_envs])
        observation = cast(TensorDict, self.observation)
        for _ in range(decisions):
            actions = policy.actions(observation.to(policy.device)).to(self.env.device)
            decision = Decision(actions, empty, torch.zeros(len(actions), 1))
            transition = self.env.step(actions[:, : self.env.contract.executed])
            rows.append((observation, decision, transition, self.env.start.clone()))
            observation = transition.observation
        return self._stack(rows, 0.0, 0.0)
