"""A robot at another computer as a learner sees it: its actor plays, collects and evaluates on order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from embodied.environment import Transition
from embodied.errors import UserError
from embodied.evaluation.evaluation import EvaluationResult
from embodied.policy import TrainablePolicy
from embodied.rollout.rollout import Collector, Rollout, RolloutSource
from embodied.runtime.interrupt import Abandoned, Stopped
from embodied.task import Task
from real_robot.learning.remote.inbox import Inbox
from real_robot.learning.remote.journal import FOLDER, Journal
from real_robot.learning.remote.link import LearnerServer, address
from real_robot.learning.remote.messages import play_of
from real_robot.learning.task import RobotConfig, RobotTask
from real_robot.serving.credentials import token

log = logging.getLogger(__name__)
TOKEN = "actor_token"
"""File of a run with the token of its actor."""


class RemoteRobotTask(RobotTask):
    """The `task` on a robot whose computer connects to this program at `config.listen`.

    Args:
        task: the task; its demonstrations are those of the run.
        config: the robot; its other options are those of the actor.
        directory: the run's, with the rollouts and the actor's token.
        record: configuration of the run, from which the actor makes the same task and policy.
    """

    def __init__(self, task: Task, config: RobotConfig, directory: Path, record: Mapping[str, Any]) -> None:
        super().__init__(task, task, config)
        self.directory = directory
        self.record = record
        self._remote: RemoteRobot | None = None

    def environment(
        self, num_envs: int, distribution: str, split: str, seed: int = 0, device: str = "cpu"
    ) -> RemoteRobot:
        """Robot that listens for its computer with the first order, once the run's parts are checked.

        Raises:
            UserError: for several environments.
        """
        if num_envs != 1 or self._remote:
            raise UserError("a robot is one environment; use num_envs=1 evaluation_envs=1 and one collector")
        contract = self.contract(distribution)
        description = {
            "contract": contract.to_dict(),
            "config": {"choices": self.record["choices"], "values": self.record["values"]},
            "seed": seed,
            "distribution": distribution,
            "max_staleness": self.config.max_staleness,
        }
        inbox = Inbox(Journal(self.directory / FOLDER), contract, description)
        self._remote = RemoteRobot(inbox, self._listen, self.name)
        return self._remote

    def _listen(self, inbox: Inbox) -> LearnerServer:
        """Listen for the robot's computer.

        Raises:
            OSError: if nothing can listen at the address.
        """
        assert self.config.listen is not None
        path = self.directory / TOKEN
        server = LearnerServer(inbox, *address(self.config.listen), token(path)).__enter__()
        log.info(
            f"waiting for the robot's computer at {server.host}:{server.port}; there:"
            f" python actor.py learner=THIS_MACHINE:{server.port} token_file=COPY robot={self.config.row}, with a copy"
            f" of {path}"
        )
        return server

    def close(self) -> None:
        """Disconnect the actor, whose robot holds."""
        if self._remote:
            self._remote.close()
        self._remote = None


class RemoteRobot:
    """An `ActorEnvironment`: the robot of the actor that is connected with `inbox`, with N = 1.

    `listen` starts the server. `switch` makes it one environment for training and evaluation; nothing but its actor
    resets and steps it.
    """

    real_time = True
    num_envs = 1

    def __init__(self, inbox: Inbox, listen: Callable[[Inbox], LearnerServer], name: str) -> None:
        self.inbox = inbox
        self.contract = inbox.contract
        self._listen = listen
        self.device = torch.device("cpu")
        self.task_names = self.instructions = (name,)
        self.task_index = torch.zeros(1, dtype=torch.int64)

    @cached_property
    def server(self) -> LearnerServer:
        """Server to which the actor connects."""
        return self._listen(self.inbox)

    def order(self, **content: Any) -> str:  # noqa: ANN401 - entries of a message
        """See `Inbox.order`; listens from now on."""
        assert self.server
        return self.inbox.order(**content)

    def reset(self, mask: Tensor | None = None) -> TensorDict:
        """Not called."""
        raise AssertionError

    def step(self, actions: Tensor) -> Transition:
        """Not called."""
        raise AssertionError

    def switch(self, distribution: str, split: str) -> None:
        """No-op: an order names what it is for."""

    def close(self) -> None:
        """Disconnect the actor."""
        if "server" in vars(self):
            self.server.__exit__()

    def play(self, generator: torch.Generator) -> tuple[TensorDict, Tensor]:
        """See `ActorEnvironment.play`.

        Raises:
            Stopped: if a stop of the run is requested meanwhile.
            UserError: for something else than observations and actions of the contract.
        """
        try:
            result = self.inbox.result(self.order(do="play", seed=generator.initial_seed()))
        except Abandoned:
            raise Stopped("Stopped while waiting for the robot's computer; nothing was learned.") from None
        return play_of(result, self.contract)

    def evaluate(self, policy: TrainablePolicy, episodes: int) -> EvaluationResult:
        """See `ActorEnvironment.evaluate`.

        Raises:
            Abandoned: if a stop of the run is requested meanwhile.
            UserError: for something else than a result.
        """
        result = self.inbox.result(self.order(do="evaluate", episodes=episodes, weights=_weights(policy)))
        names = {each.name for each in fields(EvaluationResult)}
        if not isinstance(result, dict) or result.keys() != names or not isinstance(result["success"], Tensor):
            raise UserError("expected the result of an evaluation from the actor")
        return EvaluationResult(**result | {"tasks": tuple(result["tasks"])})

    def rollouts(self, policy: TrainablePolicy, collector: Collector, max_staleness: int) -> RolloutSource:
        """See `ActorEnvironment.rollouts`.

        Raises:
            UserError: for a collector with a state, which the actor would lose, and for an algorithm that cannot take
                rollouts as old as the actor makes.
        """
        allowed = self.inbox.description["max_staleness"]
        if type(collector) is not Collector:
            raise UserError(
                "this algorithm's exploration has a state, which an actor does not keep; use algorithm=rlpd, sac or ppo"
            )
        if allowed > max_staleness:
            raise UserError(f"robot.max_staleness={allowed} is more than the algorithm takes, {max_staleness}")
        return RemoteRollouts(self, policy, collector.generator)


class RemoteRollouts:
    """Rollouts of the actor of `robot`, in the order in which they were stored.

    Rollout n is learned from in update n, which makes a resumed learner take the same steps.
    """

    def __init__(self, robot: RemoteRobot, policy: TrainablePolicy, generator: torch.Generator) -> None:
        self.robot = robot
        self.policy = policy
        self.generator = generator
        self.version = 0

    def collect(self, decisions: int) -> Rollout:
        """Send the weights, and wait for the next rollout.

        Raises:
            Abandoned: if a stop of the run is requested meanwhile; nothing has changed.
        """
        inbox = self.robot.inbox
        self.robot.order(do="collect", decisions=decisions)
        inbox.publish(self.version, _weights(self.policy))
        began = time.perf_counter()
        if inbox.journal.total <= self.version and not self.robot.server.connected:
            log.info("waiting for the robot's computer")
        rollout = inbox.rollout(self.version)
        metrics = {
            "staleness": float(self.version - rollout.policy_version),
            "waiting_rollouts": float(inbox.journal.total - self.version - 1),
        }
        waited_s = time.perf_counter() - began
        return replace(rollout, simulation_s=waited_s, policy_s=0.0, placement_metrics=metrics)

    def abandon(self) -> None:
        """No-op: the actor's episodes end with its orders."""

    def state_dict(self) -> dict[str, Any]:
        """Number of the next rollout."""
        return {"version": self.version, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            UserError: if the rollouts from before are not there any more.
        """
        self.version = state["version"]
        self.generator.set_state(state["generator"])
        journal = self.robot.inbox.journal
        if journal.total < self.version:
            raise UserError(
                f"expected {self.version} rollouts in {journal.folder}, got {journal.total}; the last ones have to stay"
            )


def _weights(policy: TrainablePolicy) -> dict[str, Tensor]:
    return {name: part.detach().cpu() for name, part in policy.state_dict().items()}
