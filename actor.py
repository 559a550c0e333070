"""Act on a robot for a learner elsewhere: python actor.py learner=HOST:PORT token_file=FILE robot=ROW [key=value ...].

The learner is `python train.py task=NAME robot=ROW robot.listen=HOST:PORT ...` on another computer, which sends its
task, policy and weights. Options of the robot, robot.*, are those of train.py and of this program alone: none are taken
from the learner. The policy acts here, so that a lost network neither delays nor loses a step.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from embodied import start_up  # noqa: F401 - before PyTorch
from embodied.command_line import program
from embodied.command_line.config import compose
from embodied.command_line.train_options import GROUPS, LEARNER, TrainConfig, robot_task
from embodied.configuration import Configuration, PositiveInt
from embodied.contract import Contract
from embodied.errors import UserError
from embodied.runtime.interrupt import STOPPING, GracefulStop
from embodied.seeding import derive, seed_everything
from embodied.training.compute import prepare
from real_robot.learning.remote.actor import Actor
from real_robot.learning.remote.link import ActorLink
from real_robot.learning.remote.messages import entry, help_of
from real_robot.learning.remote.outbox import Outbox
from real_robot.learning.task import RobotConfig
from real_robot.serving.credentials import token

log = logging.getLogger("embodied")
OWN = "robot", "device", "threads", "wandb", "output", "resume", "viewer", "overlap", "placement"
"""Parts of a run's configuration that are not taken from the learner."""
READ = "robot", "task", "policy", "success_classifier"
"""Options of train.py, with those below them, that have an effect here."""


@dataclass
class ActorConfig(Configuration):
    """`learner` is its address, HOST:PORT, `token_file` a copy of `actor_token` in its run. `device` is the policy's.

    PyTorch uses `threads` cores. All other options are those of train.py: robot=ROW, robot.*, and files that the
    learner's task names, such as task.mdp.
    """

    learner: str = MISSING
    token_file: str = MISSING
    device: str = "cpu"
    threads: PositiveInt | None = None


NAMES = tuple(f"{each.name}=" for each in fields(ActorConfig))


def run(arguments: list[str]) -> None:
    """Act until Ctrl-C or SIGTERM."""
    config, _ = composed(arguments)
    path = Path(config.token_file)
    if not path.exists():
        raise UserError(f"there is no token_file={path}; copy actor_token from the run's folder at the learner")
    prepare(config.device, config.threads)
    outbox = Outbox(config.learner)
    with GracefulStop("Stopping: the robot holds"), ActorLink(outbox, config.learner, token(path)):
        if not _greeted(outbox):
            return
        greeting = outbox.greeting or {}
        rest = [each for each in arguments if not each.startswith(NAMES)]
        act(outbox, greeting, trained(greeting, rest), config.device)


def act(outbox: Outbox, greeting: Mapping[str, Any], config: TrainConfig, device: str) -> None:
    """Act by the orders of the learner with this `greeting`, in the task of `config`.

    Raises:
        UserError: if the learner has another contract than this computer's task.
    """
    # numbers that no actor of this run has drawn before
    seed = derive(entry(greeting, "seed", int), "actor", entry(greeting, "total", int)) & 0x7FFFFFFF
    seed_everything(seed)
    task = robot_task(config)
    distribution = entry(greeting, "distribution", str)
    try:
        contract = task.contract(distribution)
        if rows := Contract.from_dict(entry(greeting, "contract", dict)).mismatches(contract):
            raise UserError(f"the learner's task differs from this computer's ({'; '.join(rows)}); use one version")
        policy = config.policy.build(contract).to(device)
        env = task.environment(1, distribution, "train", seed)
        if env.scripted_help and (used := help_of(greeting)):
            env.scripted_help.load_state_dict(used)
        Actor(env, policy, outbox, seed, distribution).run()
    finally:
        task.close()


def trained(greeting: Mapping[str, Any], arguments: list[str]) -> TrainConfig:
    """Configuration of the learner's run, with the robot of `arguments`.

    Raises:
        UserError: without a robot, for arguments without effect, and for files that the learner names and they do not.
    """
    names = [each.partition("=")[0] for each in arguments]
    if unread := [name for name in names if name in LEARNER or name.partition(".")[0] not in READ]:
        raise UserError(f"{', '.join(unread)} would have no effect: the learner decides; leave them out here")
    if not any(each.startswith("robot=") and each != "robot=null" for each in arguments):
        raise UserError("expected robot=ROW, the robot of this computer, such as robot=fr3 robot.limits=limits.yaml")
    saved = greeting.get("config")
    if not isinstance(saved, dict) or not all(isinstance(saved.get(name), dict) for name in ("choices", "values")):
        raise UserError("the learner did not send its configuration; use the same version")
    parts = {name: {key: each for key, each in saved[name].items() if key not in OWN} for name in ("choices", "values")}
    config, _ = compose(TrainConfig, "train", arguments, GROUPS, parts)
    assert isinstance(config.robot, RobotConfig)
    return config


def _greeted(outbox: Outbox) -> bool:
    """Wait for the learner; False if a stop is requested before.

    Raises:
        UserError: if it refuses this program.
    """
    with outbox.changed:
        while outbox.greeting is None and not outbox.refusal and not STOPPING.is_set():
            outbox.changed.wait(0.2)
    if outbox.refusal:
        raise UserError(outbox.refusal)
    return outbox.greeting is not None


def composed(arguments: list[str]) -> tuple[ActorConfig, dict[str, Any]]:
    """Compose the options of this program among `arguments`, and their record."""
    return compose(ActorConfig, "actor", [each for each in arguments if each.startswith(NAMES)], {})


def describe(_: list[str]) -> str:
    """Describe the options."""
    return program.options(__doc__, ActorConfig)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:], composed))
