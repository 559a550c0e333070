"""Collection of decisions from an environment; finished episodes restart between chunks.

Letters: T decisions, N environments, H predicted and K executed actions, A action size, P parts, E episode ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import (
    ODD_EVENTS,
    Environment,
    NumberedStarts,
    Restorable,
    Transition,
    in_real_time,
    show_values,
)
from embodied.errors import UserError
from embodied.policy import EXECUTED, Decision, Policy, sum_of_executed
from embodied.rollout.finite import check_observation, check_transition
from embodied.rollout.memory import Memory
from embodied.rollout.patience import Patience
from embodied.rollout.starts import Starts
from embodied.rollout.storage import Rows, Storage

INTERVENTIONS = {"takeovers": "takeovers", "human_steps": "human"}
"""Signals of a person's interventions, by the names of their sums."""


@dataclass
class Rollout:
    """Decisions of N environments over T steps; every observation is stored once.

    The observation after decision t is `observation[t + 1]`, or `last_observation` after the last; if an episode ended
    and another began between them, it is a row of `final_observation`. For a policy with memory, `observation` also has
    the memory and the beginnings of episodes, see `memory.Memory`.
    """

    observation: TensorDict  # [T, N]
    last_observation: TensorDict  # [N] after the last decision
    actions: Tensor  # [T, N, H, A]
    sample: TensorDict  # [T, N], with the executed actions as `policy.EXECUTED`
    log_prob: Tensor  # [T, N, P] of the executed actions
    reward: Tensor  # [T, N, K]
    executed: Tensor  # [T, N, K] bool
    terminated: Tensor  # [T, N] bool
    truncated: Tensor  # [T, N] bool
    success: Tensor  # [T, N] bool
    task_index: Tensor  # [N]
    start: Tensor | None = None  # [T, N] initial state of the episode; None: not numbered
    final_observation: TensorDict | None = None  # [E] true ones at episode ends inside the rollout; None: no ends
    final_rows: Tensor | None = None  # [E] the decisions before them, t * N + n, ascending
    value: Tensor | None = None  # [T, N] from the policy's decisions
    signals: dict[str, Tensor] = field(default_factory=dict)  # [T, N, K] each
    events: dict[str, Tensor] = field(default_factory=dict)  # [T, N] bool each, False after the end of an episode
    vanished: int = 0  # number of further episodes that diverged and were lost with their collector's process
    policy_version: int = 0  # number of updates before the collection
    simulation_s: float = 0.0  # wall time of the simulation
    policy_s: float = 0.0
    episode_return: Tensor | None = None  # [T, N] sum of the episode's rewards up to and including this decision
    episode_steps: Tensor | None = None  # [T, N] control steps up to and including this decision
    episode_totals: dict[str, Tensor] = field(default_factory=dict)
    """Running totals [T, N]: sum of each signal, number of decisions with each event; NaN where it began unknown."""
    has_success: bool = True  # False: the environment does not define it
    starts: dict[str, float] = field(default_factory=dict)  # metrics of the choice of initial states, after the rollout
    placement_metrics: dict[str, float] = field(
        default_factory=dict
    )  # metrics of the collectors' placement, for the log

    def next_observation(self) -> TensorDict:
        """Copy of the true observations after every decision [T, N]."""
        last = self.last_observation.unsqueeze(0)
        following = TensorDict.cat((self.observation[1:].select(*last.keys()), last))
        if self.final_observation is not None:
            following.view(-1)[self.final_rows] = self.final_observation
        return following

    def encoded(self, encode: Callable[[TensorDict], TensorDict]) -> Rollout:
        """Copy whose observations are those that `encode` returns for the observations [N] of a step."""
        final = self.final_observation
        return replace(
            self,
            observation=cast(TensorDict, torch.stack([cast(Any, encode(each)) for each in self.observation])),
            last_observation=encode(self.last_observation),
            final_observation=None if final is None else encode(final),
        )

    @property
    def done(self) -> Tensor:
        """Whether the episode ended after this decision, [T, N] bool."""
        return self.terminated | self.truncated

    @property
    def own(self) -> Tensor:
        """Decisions of the policy whose consequences are known, [T, N] bool.

        False where a person took over or the simulation diverged.
        """
        human = self.signals.get("human")
        return self.simulated if human is None else self.simulated & ~human.any(-1)

    @property
    def simulated(self) -> Tensor:
        """Decisions whose simulation did not diverge, [T, N] bool."""
        diverged = self.events.get("diverged")
        return torch.ones_like(self.done) if diverged is None else ~diverged

    @property
    def cut(self) -> Tensor:
        """Decisions after which returns are bootstrapped, [T, N] bool.

        They are those at time limits and before decisions that are not `own`.
        """
        following = torch.cat((self.own[1:], torch.ones_like(self.own[:1])))
        return self.truncated | ~following

    @property
    def env_steps(self) -> int:
        """Number of control steps executed."""
        return int(self.executed.sum())

    def ended(self) -> dict[str, float]:
        """Means of `episode_values`; empty if no episode ended here."""
        return {name: float(values.mean()) for name, values in self.episode_values().items() if len(values)}

    def episode_values(self) -> dict[str, Tensor]:
        """Values by name of the episodes that ended here, [E], or fewer where some are unknown.

        They are success (if defined), episode_return, episode_steps; the sum of each signal, unknown where the
        simulation diverged; 1 or 0 for each event but `ODD_EVENTS`, which `odd_episodes` counts.
        """
        if self.episode_return is None or self.episode_steps is None or not self.done.any():
            return {}
        values = {"success": self.success} if self.has_success else {}
        values |= {"episode_return": self._returns(), "episode_steps": self.episode_steps}
        ended = {name: each[self.done].double() for name, each in values.items()}
        whole = self.simulated[self.done]
        for name, total in self.episode_totals.items():
            totals = total[self.done].double()
            if name in self.signals:
                ended[name] = totals[whole & ~totals.isnan()]
            elif name not in ODD_EVENTS:
                ended[name] = totals[~totals.isnan()].clamp(max=1.0)
        return ended

    def intervention_counts(self) -> dict[str, int]:
        """Number of take-overs by a person, and of control steps that a person acted; empty where nobody can."""
        if "takeovers" not in self.signals:
            return {}
        return {name: int(self.signals[signal].sum()) for name, signal in INTERVENTIONS.items()}

    def odd_episodes(self) -> dict[str, int]:
        """Number of episodes that ended here with each of `ODD_EVENTS`, and of those that vanished."""
        counts = dict.fromkeys(ODD_EVENTS, 0) | {"diverged": self.vanished, "lost": self.vanished}
        for name in counts.keys() & self.episode_totals.keys():
            counts[name] += int((self.episode_totals[name][self.done] > 0).sum())
        return counts

    def _returns(self) -> Tensor:
        """Returns of episodes [T, N].

        A diverged episode gets the lowest return of those that ended, as it is not comparable.
        """
        assert self.episode_return is not None
        # a diverged simulation may have earned any reward before it blew up
        worst = self.episode_return[self.done].min()
        return torch.where(self.simulated, self.episode_return, worst)


class RolloutSource(Protocol):
    """Source of a learner's rollouts: a `Collector`, a `CollectorAhead`, or collectors in other processes."""

    version: int
    """Number of updates so far, which rollouts carry."""

    @property
    def policy(self) -> Policy:
        """Policy that is trained."""
        ...

    @property
    def generator(self) -> torch.Generator:
        """Generator of the policy's noise, on the device of the policy."""
        ...

    def collect(self, decisions: int) -> Rollout:
        """Collect a rollout of `decisions` chunks in every environment."""
        ...

    def abandon(self) -> None:
        """Drop the running episodes of environments in this process."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        ...


class Cancelled(Exception):  # noqa: N818 - not an error
    """A collection was `cancelled`; its decisions are lost."""


class Collector:
    """Collector that steps `env` with `policy`; running episodes continue between calls.

    `generator` draws the policy's noise, on the policy's device; rollouts are stored in `storage`, on disk in `folder`
    (the system's temporary folder if None). With `patience` hopeless episodes are truncated.

    Raises:
        UserError: if the policy was built for other tensors than the environment's, or `starts` is given for an
            environment without numbered initial states.
    """

    def __init__(
        self,
        env: Environment,
        policy: Policy,
        generator: torch.Generator,
        starts: Starts | None = None,
        storage: Storage = Storage.DEVICE,
        folder: Path | None = None,
        *,
        patience: Patience | None = None,
    ) -> None:
        policy.contract.check(env.contract)
        self.cancelled = False  # set by another thread: the running collection ends at its next decision
        self.numbered = isinstance(env, NumberedStarts)  # once: isinstance of a protocol is slow
        if starts is not None and not self.numbered:
            raise UserError("expected an environment with numbered initial states, to begin from chosen ones")
        self.env = env
        self.policy = policy
        self.generator = generator
        self.starts = starts
        self.storage = storage
        self.folder = folder
        self.patience = patience
        self.version = 0  # number of updates so far
        self.memory = Memory(policy, env.num_envs, env.device)
        self.observation: TensorDict | None = None
        self.abandon()

    def abandon(self) -> None:
        """Drop the running episodes: new ones begin everywhere at the next decision."""
        env = self.env
        self.observation = None
        self.finished = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        self.success = torch.zeros_like(self.finished)
        self.totals = torch.zeros(2, env.num_envs, device=env.device)  # reward and steps of the running episodes
        self.named_totals: dict[str, Tensor] = {}  # [N] totals of signals and events of the running episodes

    def collect(self, decisions: int) -> Rollout:
        """Run `decisions` chunks in every environment; finished ones restart before the next chunk.

        Raises:
            UserError: for an observation or a reward that is not finite.
        """
        # finals: [(decisions before episode ends, the observations after them)], for bootstrapping at time limits
        rows = Rows(decisions, self.storage, self.folder)
        finals = []
        has_success = True
        simulation_s = policy_s = 0.0
        for t in range(decisions):
            if self.cancelled:
                raise Cancelled
            if self._is_over():
                rows.end(t)
                break
            started = time.perf_counter()
            due = self._due()
            ended = due.nonzero().squeeze(1)
            if t and len(ended):
                finals.append((ended + (t - 1) * self.env.num_envs, cast(TensorDict, self.observation)[ended]))
            if not t and self.observation is not None and not len(ended) and in_real_time(self.env):
                self.observation = self.env.reset(due)  # a learner's update took time, in which the world went on
            try:
                started_observation = self._restart(due, len(ended) > 0)
            except Cancelled:
                if not t:
                    raise
                rows.end(t)  # what was decided before the episode that does not begin is kept
                break
            observation = self.memory.with_observation(started_observation)
            rows.put(t, {"observation": observation})  # before the step, which may overwrite it
            if self.numbered:
                rows.put(t, {"start": cast(NumberedStarts, self.env).start})
            act_began = time.perf_counter()
            decision = self._act(observation)
            self.memory.keep([decision])
            policy_s += time.perf_counter() - act_began
            show_values(self.env, decision.value, None)
            transition = self.env.step(decision.actions[:, : self.env.contract.executed].clone())  # it may modify it
            simulation_s += time.perf_counter() - started
            check_transition(self.env, transition)
            if self.patience:
                transition = self.patience(due, transition)
            frozen = self.finished & ~due
            self.finished = transition.done
            self.success = transition.success
            self.observation = transition.observation
            rows.put(t, stacked_row(decision, transition, frozen))
            has_success = transition.has_success
        storage_device = self.env.device if self.storage is Storage.DEVICE else torch.device("cpu")
        rollout = Rollout(
            **rows.tensors(),
            last_observation=cast(TensorDict, self.observation).clone().to(storage_device),
            task_index=self.env.task_index.clone(),
            has_success=has_success,
            policy_version=self.version,
            starts=self.starts.metrics() if self.starts else {},
            simulation_s=simulation_s - policy_s,
            policy_s=policy_s,
            final_rows=torch.cat([place for place, _ in finals]).to(storage_device) if finals else None,
            final_observation=TensorDict.cat([final for _, final in finals]).to(storage_device) if finals else None,
        )
        return self._with_totals(rollout)

    def _act(self, observation: TensorDict) -> Decision:
        policy_device = self.generator.device
        env_device = self.env.device
        if policy_device != env_device:
            observation = observation.to(policy_device)
        decision = self._decide(observation)
        sample = decision.sample if policy_device == env_device else decision.sample.to(env_device)
        value = None if decision.value is None else decision.value.to(env_device, torch.float32)
        return Decision(decision.actions.to(env_device), sample, decision.log_prob_terms.to(env_device), value)

    def _decide(self, observation: TensorDict) -> Decision:
        """Decision of the policy on its own device."""
        return self.policy.act(observation, generator=self.generator)

    def _is_over(self) -> bool:
        """Whether the rollout ends before the next decision."""
        return False

    def _due(self) -> Tensor:
        """Environments that begin a new episode before the next chunk, [N] bool."""
        return self.finished

    def _restart(self, due: Tensor, ended: bool) -> TensorDict:
        if self.observation is None or ended:
            if self.starts:
                if self.observation is None:
                    self.starts.abandon()
                starts = self.starts(due, self.success).to(self.env.device)
                self.observation = cast(NumberedStarts, self.env).reset(due, starts)
            else:
                self.observation = self.env.reset(due)
            check_observation(self.env, self.observation)
            self.memory.restart(due)
        return self.observation

    def state_dict(self) -> dict[str, Any]:
        """Running episodes, policy memory, choice of initial states, and the noise generator.

        For an environment that is not `Restorable`, no episodes and no memory: its episodes begin again.
        """
        state: dict[str, Any] = {"generator": self.generator.get_state(), "version": self.version}
        if self.starts:
            state["starts"] = self.starts.state_dict()
        if self.patience:
            state["patience"] = self.patience.state_dict()
        if not isinstance(self.env, Restorable):
            return state
        return state | {
            "env": self.env.state_dict(),
            "observation": self.observation,
            "finished": self.finished,
            "success": self.success,
            "totals": self.totals,
            "named_totals": self.named_totals,
            **self.memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            UserError: for a state of an earlier release, which had initial states elsewhere.
        """
        self.generator.set_state(state["generator"])
        self.version = state["version"]
        if self.starts:
            if "starts" not in state:
                raise UserError("this checkpoint is of an earlier release: go on from its weights with start_from=")
            self.starts.load_state_dict(state["starts"])
        if self.patience:
            self.patience.load_state_dict(state["patience"])
        if "env" not in state:
            self.abandon()
            return
        cast(Restorable, self.env).load_state_dict(state["env"])
        self.observation = None if state["observation"] is None else state["observation"].to(self.env.device)
        self.finished, self.success = (state[name].to(self.env.device) for name in ("finished", "success"))
        self.totals = state["totals"].to(self.env.device)
        named = state.get("named_totals", {})  # none in states of earlier releases
        self.named_totals = {name: total.to(self.env.device) for name, total in named.items()}
        self.memory.load_state_dict(state)

    def _with_totals(self, rollout: Rollout) -> Rollout:
        """Copy of `rollout` with the running totals of its episodes, which continue across rollouts."""
        rows = []
        device = self.totals.device
        named = {name: values.detach().sum(-1) for name, values in rollout.signals.items()} | rollout.events
        sums = [rollout.reward.detach().sum(-1), rollout.executed.sum(-1), *named.values()]
        added = torch.stack([each.to(device, rollout.reward.dtype) for each in sums], 1)  # [T, quantities, N]
        unknown = torch.where(self.totals[1] > 0, torch.nan, 0.0)  # a name that is new in the middle of an episode
        totals = torch.stack([*self.totals, *(self.named_totals.get(name, unknown) for name in named)])
        for step_sums, done in zip(added, rollout.done.to(device), strict=True):
            # total_t = total_{t-1} (1 - done_{t-1}) + x_t
            rows.append(totals + step_sums)
            totals = rows[-1].masked_fill(done, 0.0)
        self.totals, self.named_totals = totals[:2], dict(zip(named, totals[2:], strict=True))
        episode_return, episode_steps, *others = torch.stack(rows).unbind(1)
        episode_totals = dict(zip(named, others, strict=True))
        return replace(
            rollout, episode_return=episode_return, episode_steps=episode_steps, episode_totals=episode_totals
        )


Row = dict[str, Tensor | TensorDict | dict[str, Tensor]]


def stacked_row(decision: Decision, transition: Transition, frozen: Tensor) -> Row:
    """Row of a rollout for one decision, without the observation; `frozen` [N] environments had ended before."""
    sample = decision.sample.copy().update({EXECUTED: transition.executed})
    return {
        "actions": _executed(decision, transition),
        "sample": sample,
        "log_prob": sum_of_executed(decision.log_prob_terms, sample),
        **{field: getattr(transition, field) for field in ("reward", "executed", *ENDS)},
        **({} if decision.value is None else {"value": decision.value}),
        "signals": transition.signals,
        "events": {name: happened & ~frozen for name, happened in transition.events.items()},
    }


ENDS = ("terminated", "truncated", "success")


def _executed(decision: Decision, transition: Transition) -> Tensor:
    """Actions [N, H, A] of the chunk, in which the executed actions replace the decided ones."""
    if transition.actions is None:
        return decision.actions
    return torch.cat((transition.actions, decision.actions[:, transition.actions.shape[1] :]), 1)
