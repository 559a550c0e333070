"""Resets by a second policy, which learns to bring the scene back to a start while the first one learns the task.

A forward policy does the task and a backward policy undoes it, in turn, each with a learner and a store of experience
of its own (Han et al. 2015, IROS; Leave no Trace, arXiv 1711.06782; SERL, arXiv 2401.16013). Both have sparse rewards:
that of the backward policy is 1 where the scene is back at a start. MEDAL (arXiv 2205.05212) rewards it for all states
of the task's demonstrations instead, for which it learns a classifier online: more to tune, and no use without them.

Differs from Leave no Trace:
    - a person is asked after `tries` attempts in a row that have failed, as there; but no episode of the task is broken
    off early because a value says that it cannot be undone;
    - the backward policy also acts and learns between the episodes of an evaluation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict

from embodied import seeding
from embodied.algorithms.finite import check_finite, losses
from embodied.algorithms.parts import iter_parts
from embodied.contract import Contract
from embodied.data.episodes import Episodes
from embodied.data.store import EpisodeStore
from embodied.errors import UserError
from embodied.policy import PolicyConfig
from embodied.rollout.random_play import first_decisions
from embodied.rollout.rollout import Collector, Rollout
from embodied.runtime.interrupt import STOPPING
from embodied.saving.tree import copy_tree
from embodied.task import Learner, LearnerConfig
from embodied.world import ALONE
from real_robot.learning.environment import RobotEnvironment

PURPOSE = "backward policy"


@dataclass(frozen=True)
class BackwardConfig:
    """Configs of the backward policy and of its learner, which are those of the run, with its seed and device.

    `demonstrations` reads episodes that end at a start, by the contract; None: there are none.
    """

    policy: PolicyConfig
    algorithm: LearnerConfig
    seed: int = 0
    device: str = "cpu"
    demonstrations: Callable[[Contract], Episodes] | None = None


class BackwardEnvironment(RobotEnvironment):
    """The robot as an environment in which the scene has to be brought back; arguments as of `RobotEnvironment`.

    An episode succeeds where `is_back` returns True; None: only the judge of the rules and a person know. While it is
    `single`, only one episode begins after `begin_attempt`: later decisions of its last rollout execute nothing.
    """

    is_back: Callable[[], bool] | None = None
    single = False
    _begun = False

    def begin_attempt(self) -> None:
        """Let the next reset begin an episode."""
        self.single, self._begun = True, False
        self._ready = True  # the run has begun: from now on robot and person are waited for

    @property
    def over(self) -> bool:
        """Whether the attempt has ended."""
        return self._ended

    @property
    def succeeded(self) -> bool:
        """Whether the scene is back at a start, where an attempt has ended."""
        return self._success

    def reset(self, mask: torch.Tensor | None = None) -> TensorDict:
        """Begin an attempt, see `RobotEnvironment.reset`."""
        begins = mask is None or bool(mask[0])
        if begins and self.single and self._begun:
            return self._observed()
        self._begun |= begins
        return super().reset(mask)

    def _outcome(self) -> bool | None:
        # a judge decides in place of the simulated task
        asked = self.is_back if self.rules.judge is None else None
        return True if asked is not None and asked() else None


class PolicyResets:
    """Resets of the scene by a policy that learns in `env`; a person is asked after `tries` attempts have failed.

    It implements `embodied.environment.Resets`. Policy and learner are built at the first reset, and the policy's
    statistics are those of random play from there. Their minutes are those in which the robot moves.

    Raises:
        UserError: for a learner without a store of experience.
    """

    def __init__(self, env: BackwardEnvironment, config: BackwardConfig, tries: int) -> None:
        self.env = env
        self.config = config
        self.tries = tries
        self._demonstrations = config.demonstrations(env.contract) if config.demonstrations else None
        self.steps = 0
        """Control steps of the backward policy."""
        self.task_steps = 0
        """Control steps of the forward policy."""
        self.attempts = 0
        self.successes = 0
        self.request_steps: list[int] = []
        """Control steps of both policies before each request to a person."""
        self._failed = 0  # attempts in a row
        self._since_log = {"attempts": 0, "successes": 0}
        self._metrics: dict[str, float] = {}  # newest of the learner
        self._learner: Learner | None = None
        self._lock = threading.Lock()  # a collector ahead updates the learner in its thread while a checkpoint is saved

    @property
    def minutes(self) -> float:
        """Minutes of motion so far."""
        return self._in_minutes(self.steps + self.task_steps)

    @property
    def requests(self) -> int:
        """Number of requests to a person so far."""
        return len(self.request_steps)

    @property
    def note(self) -> str:
        """Text for a progress bar: when a person was last asked."""
        if not self.requests:
            return f"nobody asked for {self.minutes:.0f} min"
        since = self._in_minutes(self.steps + self.task_steps - self.request_steps[-1])
        return f"person asked {self.requests:,} times, last {since:.0f} min ago"

    def bring_back(self, training: bool) -> bool:
        """Let the backward policy bring the scene back, in `training` once, else until it succeeds.

        Returns False where a person has to put the scene back, which is a request. In training an episode may begin
        after a failed attempt, from where the scene is.
        """
        if not STOPPING.is_set():
            self._start()
        while not STOPPING.is_set():
            succeeded = self._attempt()
            if STOPPING.is_set():
                break
            self.attempts += 1
            self.successes += succeeded
            self._failed = 0 if succeeded else self._failed + 1
            if succeeded:
                return True
            if self._failed >= self.tries:
                self._failed = 0
                self.request_steps.append(self.steps + self.task_steps)
                return False
            if training:
                return True
        return True  # nothing begins any more

    def metrics(self) -> dict[str, float]:
        """See `Resets.metrics`: rates are those since the last call, and counts those of the run."""
        before = self._since_log
        self._since_log = {"attempts": self.attempts, "successes": self.successes}
        metrics = dict(self._metrics) | {"requests": float(self.requests), "steps": float(self.steps)}
        if attempts := self.attempts - before["attempts"]:
            metrics["success"] = (self.successes - before["successes"]) / attempts
        if self.requests:
            metrics["minutes_between_requests"] = self.minutes / self.requests
        return metrics

    def record(self) -> dict[str, Any]:
        """See `Resets.record`."""
        return {
            "requests": self.requests,
            "request_minutes": [round(self._in_minutes(steps), 3) for steps in self.request_steps],
            "minutes": round(self.minutes, 3),
            "minutes_between_requests": self.minutes / self.requests if self.requests else None,
            "attempts": self.attempts,
            "successes": self.successes,
            "steps": self.steps,
        }

    def state_dict(self) -> dict[str, Any]:
        """Counts and, once they are built, policy, learner and collector."""
        with self._lock:
            counts = {name: getattr(self, name) for name in _COUNTS}
            state: dict[str, Any] = {**counts, "request_steps": list(self.request_steps), "failed": self._failed}
            if self._learner is None:
                return state
            parts = {"learner": self._learner.state_dict(), "collector": self._collector.state_dict()}
            return state | copy_tree(parts | {"policy": dict(self._policy.state_dict())}, "cpu")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.request_steps, self._failed = list(state["request_steps"]), state["failed"]
        self._since_log = {"attempts": self.attempts, "successes": self.successes}
        if "policy" not in state:
            return
        self._build_policy()
        self._policy.load_state_dict(state["policy"])
        self._build_learner()
        assert self._learner is not None
        self._learner.load_state_dict(state["learner"])
        self._collector.load_state_dict(state["collector"])

    def _start(self) -> None:
        """Build policy and learner at the first reset."""
        if self._learner is not None:
            return
        self._build_policy()
        self.env.begin_attempt()
        self.env.single = False
        observation, actions = first_decisions(self.env, self._generator("random play"))
        if STOPPING.is_set():  # the observations are few
            return
        device = self._policy.device
        self._policy.fit(observation.to(device), actions.to(device))
        self._policy.start_critic()
        self._build_learner()

    def _build_policy(self) -> None:
        with seeding.undisturbed():
            torch.manual_seed(seeding.derive(self.config.seed, PURPOSE))
            self._policy = self.config.policy.build(self.env.contract).to(self.config.device)

    def _build_learner(self) -> None:
        generator = self._generator("learner")
        with seeding.undisturbed():
            torch.manual_seed(seeding.derive(self.config.seed, PURPOSE, "critics"))
            learner = self.config.algorithm.build(self._policy, self._demonstrations, self.env, generator)
        if not any(True for _ in iter_parts(learner, (EpisodeStore,))):
            raise UserError("a robot that resets itself needs a learner with a replay; use algorithm=rlpd")
        noise = seeding.generator(self.config.seed, PURPOSE, "noise", device=self._policy.device)
        self._collector: Collector = learner.collector(self.env, self._policy, noise, learner.starts)
        self._learner = learner

    def _attempt(self) -> bool:
        """Let the policy act for one episode, and learn from it; returns whether the scene is back at a start."""
        self.env.begin_attempt()
        self._collector.abandon()
        while True:
            rollout = self._collector.collect(self.config.algorithm.rollout_length)
            self.steps += rollout.env_steps
            self._update(rollout)
            if self.env.over or STOPPING.is_set():
                return self.env.succeeded

    def _update(self, rollout: Rollout) -> None:
        learner = cast(Learner, self._learner)
        with self._lock, torch.enable_grad():
            # schedules stand still: the number of attempts is not planned
            metrics = learner.update(rollout, 0.0, ALONE)
            check_finite(losses(metrics), learner.gradient_steps)
            self._metrics = metrics or self._metrics
            self._policy.renormalise(rollout.observation, ALONE)
            self._collector.version += 1

    def _generator(self, purpose: str) -> torch.Generator:
        return seeding.generator(self.config.seed, PURPOSE, purpose)

    def _in_minutes(self, steps: int) -> float:
        return steps * self.env.contract.control_dt_s / 60.0


_COUNTS = ("steps", "task_steps", "attempts", "successes")
