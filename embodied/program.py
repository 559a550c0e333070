"""What train.py and its siblings share: the console, --help, and errors on one line."""

from __future__ import annotations

import errno
import inspect
import logging
from collections.abc import Callable

from omegaconf import OmegaConf

from embodied.errors import UserError
from embodied.interrupt import Stopped
from embodied.logging import run_log, setup_console

log = logging.getLogger(__name__)
MACHINE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EISDIR, errno.ENOTDIR),
    *(errno.ENAMETOOLONG, errno.EADDRINUSE, errno.EADDRNOTAVAIL),
}
"""Errors of the operating system that no bug of ours causes: they say all on one line."""


def main(run: Callable[[list[str]], None], describe: Callable[[], str], arguments: list[str]) -> int:
    """Run a program, or describe it where `arguments` ask for help; returns its exit status.

    What a user can put right is told on one line, with status 1. Anything else keeps its traceback: in the log of the
    run where there is one, which that line then names.
    """
    setup_console()
    try:
        if {"-h", "--help"} & set(arguments):
            log.info(describe())
        else:
            run(arguments)
    except UserError as error:
        log.error(f"error: {_line(error)}")
        return 1
    except Stopped as stopped:
        log.info(stopped)
    except KeyboardInterrupt:
        log.error("interrupted")
        return 130
    except Exception as error:
        expected = isinstance(error, OSError) and error.errno in MACHINE and not run_log()
        log.error(f"error: {type(error).__name__}: {_line(error)}", exc_info=None if expected else error)
        return 1
    return 0


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def options(told: str | None, config: type) -> str:
    """What --help says: the program's docstring `told`, the docstrings of the dataclass `config`, its defaults."""
    classes = [each for each in config.__mro__ if each is not object]
    return "\n\n".join([*map(str.strip, [told or "", *map(_doc, classes)]), OmegaConf.to_yaml(config)])


def _doc(given: type) -> str:
    return inspect.cleandoc(given.__doc__ or "")
