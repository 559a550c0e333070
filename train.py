"""Train a robot policy: python train.py task=libero_pick [key=value ...].

All tasks: python train.py list=tasks. Options of a task: python train.py --help task=quadrotor_hover policy=mlp.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from embodied import start_up  # noqa: F401 - before PyTorch
from embodied.command_line import listing, program
from embodied.command_line.config import compose
from embodied.command_line.summary import summary
from embodied.command_line.train_options import (
    GROUPS,
    TrainConfig,
    check_robot,
    opened_task,
    with_starting_point,
    words_option,
)
from embodied.placement.registry import with_placement
from embodied.training.compute import prepare
from embodied.training.experiment import Experiment
from embodied.training.fitting_memory import show
from embodied.training.run_directory import new_directory, shared_run
from embodied.viewer.options import viewing
from real_robot.recording.demonstrations import reader, sources
from real_robot.recording.recorded_task import join
from sims.registry import NEEDS, VIEWABLE

log = logging.getLogger("embodied")


def run(arguments: list[str]) -> None:
    """Run one training from the command line to its report, or list the tasks with list=tasks."""
    if arguments == ["list=tasks"]:
        return log.info(listing.tasks(GROUPS["task"], NEEDS))
    config, record = composed(arguments)
    if config.plan:
        return show(lambda more: composed([*arguments, *more])[0], sources)
    demonstrations = reader(config, config.task)
    prepare(config.device, config.threads)
    if config.eval_only:
        program.evaluate_instead(Path(__file__).with_name("evaluate.py"), config.resume, arguments, GROUPS)
    record["values"]["resume"] = None  # not part of the run, which may be resumed several times
    name = new_directory(config.task.name, f"_seed{config.seed}")
    place, folders = config.placement.start(config.device), (config.resume, config.output, name)
    with ExitStack() as stack:
        world = stack.enter_context(place)
        viewed = stack.enter_context(viewing(config, VIEWABLE))
        directory = stack.enter_context(shared_run(world, *folders))
        trainer = Experiment(
            config,
            stack.enter_context(opened_task(config, viewed, directory, record)),
            config.policy,
            config.algorithm,
            directory,
            record=record,
            seed=config.seed,
            device=world.device,
            wandb_project=config.wandb,
            world=world,
            demonstrations=demonstrations,
            offline=config.offline,
        )
        if not world.rank:
            OmegaConf.save(OmegaConf.create(record["values"]), directory / "config.yaml")
        log.info(trainer.run().summary(directory))


def composed(arguments: list[str]) -> tuple[TrainConfig, dict[str, Any]]:
    """Compose the configuration and its record; a resumed run starts from its own configuration."""
    saved = program.check_start("train", arguments)
    options = with_placement(arguments if saved else with_starting_point(arguments), saved)
    config, record = compose(TrainConfig, "train", options, GROUPS, saved)
    if not saved:
        for choice in record["arguments"][len(options) :]:
            log.info(f"{choice}, because the default of task={record['choices']['task']} does not go with your choice")
        if words := words_option(config.policy):
            config, record = compose(TrainConfig, "train", [*options, words], GROUPS)
    check_robot(config, arguments)
    join(config)
    return config, record


def describe(arguments: list[str]) -> str:
    """Text of --help=all: the choices, and the options of the selected choices."""
    config, record = described(arguments)
    return program.options(listing.choices(str(__doc__), record["choices"], GROUPS), config)


def summarise(arguments: list[str]) -> str:
    """Text of --help: the options of the selected choices that people set first."""
    config, record = described(arguments)
    return summary(str(__doc__).strip(), arguments, record["choices"], config)


def described(arguments: list[str]) -> tuple[TrainConfig, dict[str, Any]]:
    """Compose the configuration and its record for --help, which needs no task."""
    return compose(TrainConfig, "train", with_placement(arguments), GROUPS, program.resumed(arguments))


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:], composed, summarise))
