"""Choose options of a training: python tune.py task=NAME 'tune.options={NAME: [LOW, HIGH]}' [key=value ...].

Two numbers are the bounds of a range, other values a list: 'tune.options={algorithm.learning_rate: [1e-4, 1e-2],
policy.hidden: [[64,64],[256,256]]}'. All other options are those of train.py, which runs once for each try.
"""

from __future__ import annotations

import logging
import shlex
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from signal import SIGINT
from typing import Any

import train
from embodied.command_line import program
from embodied.command_line.config import compose
from embodied.command_line.tuning import Search, SearchOptions
from embodied.commands import command, option
from embodied.configuration import Configuration
from embodied.runtime.interrupt import Stopped

log = logging.getLogger("embodied")


@dataclass
class TuneConfig(Configuration):
    """`output` is the folder for tune.json and the runs; null: outputs/tuning/<time>.

    The same command and `output` continue a search that was stopped, or extend it by a larger tune.tries.
    """

    tune: SearchOptions = field(default_factory=SearchOptions)
    output: str | None = None


def run(arguments: list[str]) -> None:
    """Run the tries, and print their table and the command of the best one."""
    config, _ = own(arguments)
    training = [each for each in arguments if not _is_own(each)]
    directory = config.output or f"outputs/tuning/{datetime.now():%Y-%m-%d_%H-%M-%S}"
    search = Search(Path(__file__).with_name("train.py"), training, config.tune, Path(directory), train.composed)
    try:
        log.info(search.run())
    except KeyboardInterrupt:
        again = [*(each for each in arguments if not each.startswith("output=")), option("output", directory)]
        raise Stopped(f"stopped; go on with: {command('tune')} {shlex.join(again)}", SIGINT) from None


def own(arguments: list[str]) -> tuple[TuneConfig, dict[str, Any]]:
    """Compose the configuration from all arguments except options of train.py."""
    return compose(TuneConfig, "tune", [each for each in arguments if _is_own(each)], {})


def _is_own(argument: str) -> bool:
    return argument.startswith(("tune.", "output="))


def describe(_: list[str]) -> str:
    """Describe the options."""
    return program.options(__doc__, TuneConfig)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:], own))
