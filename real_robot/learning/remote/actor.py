"""The robot's computer: acts by a copy of the policy, and sends what happens to a learner elsewhere.

The actor carries out the learner's orders one after another: random play, rollouts without end, evaluations. Whatever
becomes of the learner, the robot is driven by `RobotEnvironment` alone, which asks the `Outbox` before every step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch
from tensordict import TensorDict

from embodied import seeding
from embodied.errors import UserError
from embodied.evaluation.evaluation import EvaluationResult, evaluate
from embodied.policy import Decision, TrainablePolicy
from embodied.rollout.random_play import first_decisions
from embodied.rollout.rollout import Cancelled, Collector, Rollout
from embodied.rollout.storage import Storage
from embodied.runtime.interrupt import STOPPING
from real_robot.learning.control import StopRequestedError
from real_robot.learning.environment import RobotEnvironment
from real_robot.learning.remote.messages import entry, rollout_entries
from real_robot.learning.remote.outbox import Outbox

log = logging.getLogger(__name__)
POLL_S = 0.02
"""Pause between two looks at what the learner has sent, s."""
FLUSH_S = 5.0
"""Longest wait for the learner to store the last rollouts when the program ends, s."""


class ActingCollector(Collector):
    """Collector that acts by the newest weights at every decision; a rollout has the version of its first one."""

    def __init__(
        self, env: RobotEnvironment, policy: TrainablePolicy, generator: torch.Generator, outbox: Outbox
    ) -> None:
        super().__init__(env, policy, generator, storage=Storage.CPU)
        self.outbox = outbox
        self._decided = 0  # decisions of the present rollout

    def take_weights(self) -> None:
        """Load the newest weights, if there are newer ones.

        Raises:
            UserError: if they are of another network.
        """
        if (weights := self.outbox.take_weights()) is not None:
            load(self.policy, weights)

    def collect(self, decisions: int) -> Rollout:
        """See `Collector.collect`; another order cuts the rollout short, so that nothing a person did is lost."""
        self._decided = 0
        return super().collect(decisions)

    def _is_over(self) -> bool:
        return self._decided > 0 and self.outbox.superseded

    def _decide(self, observation: TensorDict) -> Decision:
        if self.outbox.refusal or (self.outbox.superseded and not self._decided):
            raise Cancelled
        self.take_weights()
        self._decided += 1
        return super()._decide(observation)


class Actor:
    """Acts in `env` by `policy`, whose weights the learner of `outbox` sends; `seed` is that of its noise.

    `distribution` is that of the task, for `RobotEnvironment.switch`.
    """

    def __init__(
        self, env: RobotEnvironment, policy: TrainablePolicy, outbox: Outbox, seed: int, distribution: str
    ) -> None:
        self.env = env
        self.policy = policy
        self.outbox = outbox
        self.distribution = distribution
        self.env.consent = outbox
        generator = seeding.generator(seed, "actor", "noise", device=policy.device)
        self.collector = ActingCollector(env, policy, generator, outbox)

    def run(self) -> None:
        """Carry out orders until a stop is requested; then wait briefly until the learner has stored everything.

        Raises:
            UserError: if the learner refuses, or orders something impossible.
        """
        try:
            with suppress(StopRequestedError):
                while True:
                    self._carry_out(self._next_order())
            self.env.hold("the program has ended")
            for _ in range(round(FLUSH_S / POLL_S)):
                if not (self.outbox.unstored and self.outbox.connected):
                    break
                self.env.control.station.sleep(POLL_S)
        finally:
            if self.outbox.unstored:
                log.warning(f"the learner has not stored {self.outbox.unstored} rollouts, which are lost")

    def _next_order(self) -> Mapping[str, Any]:
        """Wait for an order, while the robot holds."""
        self._wait("there is nothing to do", lambda: self.outbox.order() is None)
        order = self.outbox.order()
        assert order is not None
        return order

    def _wait(self, reason: str, waits: Callable[[], bool]) -> None:
        """Hold the robot while `waits` returns True.

        Raises:
            StopRequestedError: if a stop of the program is requested.
            UserError: if the learner refuses.
        """
        self._check()
        if waits():
            self.env.hold(reason)
        while waits():
            self.env.control.pause(POLL_S)
            self._check()

    def _check(self) -> None:
        """Raise StopRequestedError if a stop of the program is requested, UserError if the learner refuses."""
        if STOPPING.is_set():
            raise StopRequestedError
        if self.outbox.refusal:
            raise UserError(self.outbox.refusal)

    def _carry_out(self, order: Mapping[str, Any]) -> None:
        """Carry out an order, or what can be done of it before there is another one; of rollouts, one of them."""
        begins = self.outbox.running != order["id"]
        self.outbox.running = order["id"]
        if begins:
            self._abandon()
        if order["do"] == "collect":
            return self._collect(entry(order, "decisions", int))
        self.outbox.exempt = True
        try:
            if order["do"] == "play":
                result = self._play(entry(order, "seed", int))
            elif order["do"] == "evaluate":
                result = self._evaluate(entry(order, "episodes", int), entry(order, "weights", dict))
            else:
                raise UserError(f"the learner orders {order['do']!r:.40}, which this version does not know")
            self._check_order()  # what was cut short is no result
        except Cancelled:
            return self._abandon()
        finally:
            self.outbox.exempt = False
        self.outbox.finish(order, result, self._used_help())
        return None

    def _used_help(self) -> dict[str, int]:
        """Used part of the budget of the scripted person; {} without one."""
        return self.env.scripted_help.state_dict() if self.env.scripted_help else {}

    def _check_order(self) -> None:
        """Raise Cancelled if there is another order, and see `_check`."""
        self._check()
        if self.outbox.superseded:
            raise Cancelled

    def _collect(self, decisions: int) -> None:
        """Collect one rollout, once the policy may act or the person does."""
        self._wait("the learner is slower than the robot", self._waits_for_learner)
        if self.outbox.version is None or self.outbox.superseded:
            return
        self.collector.version = self.outbox.version
        try:
            self.outbox.add(rollout_entries(self.collector.collect(decisions)), self._used_help())
        except Cancelled:
            self._abandon()

    def _abandon(self) -> None:
        """End a running episode of training; the robot holds."""
        self.env.switch(self.distribution, "train")
        self.collector.abandon()

    def _waits_for_learner(self) -> bool:
        """Whether the next rollout waits for a slow learner: for its weights, or for it to take earlier rollouts.

        Without a learner there is nothing to wait for: the next step ends the episode, and the next episode waits.
        """
        self.collector.take_weights()
        late = self.outbox.full or (self.outbox.stale and not self.env.human)
        return bool((self.outbox.connected and late) or self.outbox.version is None) and not self.outbox.superseded

    def _play(self, seed: int) -> dict[str, Any]:
        observation, actions = first_decisions(self.env, torch.Generator().manual_seed(seed))
        self._abandon()
        return {"observation": observation, "actions": actions}

    def _evaluate(self, episodes: int, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluate `weights`; the policy then acts by those of training again."""
        acting = {name: part.clone() for name, part in self.policy.state_dict().items()}
        load(self.policy, weights)
        self.env.switch(self.distribution, "eval")
        try:
            result = evaluate(
                self.env,
                self.policy,
                starts_per_task=episodes,
                device=self.policy.device,
                progress="evaluation",
                watch=lambda *_: self._check_order(),
            )
        finally:
            self.env.switch(self.distribution, "train")
            self.policy.load_state_dict(acting)
        return {each.name: getattr(result, each.name) for each in fields(EvaluationResult)}


def load(policy: TrainablePolicy, weights: Mapping[str, Any]) -> None:
    """Load the learner's `weights` into `policy`.

    Raises:
        UserError: if they are of another network.
    """
    try:
        policy.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the learner's weights are of another network ({reason}); use the same version") from error
