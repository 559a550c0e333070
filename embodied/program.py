"""What train.py and its siblings share: the console, --help, and errors on one line."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable

from omegaconf import OmegaConf

from embodied.interrupt import Stopped
from embodied.logging import setup_console

log = logging.getLogger(__name__)


def main(run: Callable[[list[str]], None], describe: Callable[[], str], arguments: list[str]) -> int:
    """Run a program, or describe it where `arguments` ask for help; returns its exit status.

    What a user can put right is told on one line, with status 1; anything else is a bug and keeps its traceback.
    """
    setup_console()
    try:
        if {"-h", "--help"} & set(arguments):
            log.info(describe())
        else:
            run(arguments)
    except (ValueError, FloatingPointError, OSError) as error:
        log.error(f"error: {' '.join(str(error).split())}")
        return 1
    except Stopped as stopped:
        log.info(stopped)
    except KeyboardInterrupt:
        log.error("interrupted")
        return 130
    return 0


def options(told: str | None, config: type) -> str:
    """What --help says: the program's docstring `told`, the docstrings of the dataclass `config`, its defaults."""
    classes = [each for each in config.__mro__ if each is not object]
    return "\n\n".join([*map(str.strip, [told or "", *map(_doc, classes)]), OmegaConf.to_yaml(config)])


def _doc(given: type) -> str:
    return inspect.cleandoc(given.__doc__ or "")
