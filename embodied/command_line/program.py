"""Common parts of train.py and the other programs: the console, --help, and errors on one line."""

from __future__ import annotations

import errno
import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

from omegaconf import DictConfig, OmegaConf

from embodied.command_line.compute import enough_memory
from embodied.errors import UserError
from embodied.training.interrupt import Stopped
from embodied.training.logging import run_log, setup_console

log = logging.getLogger(__name__)
MACHINE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EISDIR, errno.ENOTDIR),
    *(errno.ENAMETOOLONG, errno.EADDRINUSE, errno.EADDRNOTAVAIL),
}
"""Errors of the operating system that are no bugs: their message suffices."""


def main(run: Callable[[list[str]], None], describe: Callable[[list[str]], str], arguments: list[str]) -> int:
    """Run a program, or describe it if `arguments` ask for help; returns its exit status.

    Errors that a user can correct are printed on one line, with status 1. Others keep their traceback: it goes to the
    run's log if there is one, and the line names that file.
    """
    setup_console()
    try:
        if {"-h", "--help"} & set(arguments):
            log.info(describe([each for each in arguments if each not in ("-h", "--help")]))
        else:
            with enough_memory():
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


def evaluate_instead(evaluate: Path, resumed: str | None, arguments: list[str]) -> NoReturn:
    """Run the program `evaluate` on the run `resumed`, with `arguments`, in place of this one."""
    if resumed is None:
        raise UserError("eval_only=true needs a run to evaluate: resume=DIR")
    os.execv(sys.executable, [sys.executable, str(evaluate), f"checkpoint={resumed}", *arguments])


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def options(described: str | None, config: Any) -> str:  # noqa: ANN401 - a dataclass, or an object of one
    """Text of --help: the program's docstring `described`, that of the dataclass `config`, and all its options.

    An option is listed as typed, with its value and the sentence of its dataclass's docstring that names it.
    """
    values = OmegaConf.structured(config)
    listed = list(_listed(cast(DictConfig, values), ""))
    width = min(44, max((len(option) for option, _ in listed), default=0))
    lines = (f"{option:{width}}  # {sentence}" if sentence else option for option, sentence in listed)
    return "\n\n".join([(described or "").strip(), _doc(_kind(values)), "\n".join(lines)]) + "\n"


def _listed(config: DictConfig, prefix: str) -> Iterator[tuple[str, str]]:
    """Every option of `config`, "key=value", and its sentence in the docstring."""
    for key in config:
        name = f"{prefix}{key}"
        node = None if OmegaConf.is_missing(config, key) else config[key]
        if isinstance(node, DictConfig) and node:
            yield from _listed(node, f"{name}.")
        else:
            written = "..." if OmegaConf.is_missing(config, key) else _written(config, key)
            yield f"{name}={written}", _sentence(_kind(config), str(key))


def _written(config: DictConfig, key: Any) -> str:  # noqa: ANN401 - OmegaConf's
    value = cast(dict[Any, Any], OmegaConf.to_container(config, enum_to_str=True))[key]
    return "null" if value is None else value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _sentence(kind: type, field: str) -> str:
    """The first sentence, or part of one, of the docstrings of the dataclass `kind` and its parents on `field`."""
    for each in kind.__mro__:
        for sentence in re.split(r"(?<=[.;])\s+|\n\n", _doc(each)):
            if re.search(rf"`{field}[`=]", sentence):
                return " ".join(sentence.split()).rstrip(";.")
    return ""


def _kind(config: Any) -> type:  # noqa: ANN401 - OmegaConf's
    return OmegaConf.get_type(config) or dict


def _doc(given: type) -> str:
    return inspect.cleandoc(given.__dict__.get("__doc__") or "")
