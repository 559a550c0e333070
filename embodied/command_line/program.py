"""Common parts of train.py and the other programs: the console, --help, and errors on one line."""

from __future__ import annotations

import errno
import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from omegaconf import DictConfig, OmegaConf

from embodied import start_up  # noqa: F401 - before PyTorch
from embodied.command_line import combinations, flags
from embodied.command_line.completion import completion
from embodied.command_line.config import parsed
from embodied.command_line.multirun import multirun
from embodied.commands import option
from embodied.errors import OutOfMemoryError, UserError
from embodied.runtime import foreign_code as foreign
from embodied.runtime.console import run_log, setup_console
from embodied.runtime.interrupt import Stopped
from embodied.runtime.streams import flush_streams
from embodied.saving import checkpoint
from embodied.training.compute import enough_memory

log = logging.getLogger(__name__)
Composed = Callable[[list[str]], tuple[Any, Mapping[str, Any]]]
"""Function that composes a program's configuration from arguments: an object, and its record with "values"."""
MACHINE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EISDIR, errno.ENOTDIR),
    *(errno.ENAMETOOLONG, errno.EADDRINUSE, errno.EADDRNOTAVAIL),
}
"""Errors of the operating system that are not bugs: their message suffices."""

SIZES = (
    "num_envs",
    "evaluation_envs",
    "task.image_size",
    "sft.batch",
    "algorithm.rollout_length",
    "algorithm.minibatch",
    "policy.hidden",
)
SPARING = {"algorithm.memory_gb": "0.3", "policy.gradient_checkpointing": "true"}
"""Options that memory depends on, where a program has them, and values of others that need less."""


def main(
    run: Callable[[list[str]], None],
    describe: Callable[[list[str]], str],
    arguments: list[str],
    composed: Composed | None = None,
    summarise: Callable[[list[str]], str] | None = None,
) -> int:
    """Run a program, or describe it if `arguments` request help; return its exit status.

    With `composed`, which composes its configuration, it has Hydra's flags: -m, --cfg job and -sc. `summarise` returns
    the text of --help where that of `describe` is too long; --help=all prints the latter.

    Errors that a user can correct are printed on one line, with status 1. Others keep their traceback: it goes to the
    run's log if there is one, and the line names that file. A run that a signal stopped returns 128 plus its
    number, as a killed program does, whether it could save or not.
    """
    setup_console()
    try:
        return _status(run, describe, arguments, composed, summarise or describe)
    finally:
        flush_streams()


def _status(
    run: Callable[[list[str]], None],
    describe: Callable[[list[str]], str],
    arguments: list[str],
    composed: Composed | None,
    summarise: Callable[[list[str]], str],
) -> int:
    """Exit status of `main`, without setting up the console."""
    try:
        requested, options = flags.parse(arguments) if composed else _help(arguments)
        if requested.help or requested.help_all:
            text = (describe if requested.help_all else summarise)(options)
            log.info(text + (f"\n{flags.DESCRIBED}" if composed else ""))
        elif requested.completion:
            log.info(completion(requested.completion, describe))
        elif composed and requested.cfg:
            log.info(_configuration(composed(options)[1], requested.package))
        elif composed and requested.multirun:
            return multirun(sys.argv[0], options, composed)
        else:
            with enough_memory():
                run(options)
    except OutOfMemoryError as error:
        log.error(f"error: {_line(error)}; {_smaller(describe, arguments)}")
        return 1
    except UserError as error:
        log.error(f"error: {_line(error)}")
        return 1
    except Stopped as stopped:
        log.info(stopped)
        return stopped.status
    except KeyboardInterrupt:
        log.error("interrupted")
        return 130
    except Exception as error:
        expected = isinstance(error, OSError) and error.errno in MACHINE and not run_log()
        log.error(f"error: {type(error).__name__}: {_line(error)}", exc_info=None if expected else error)
        return 1
    return 0


def _help(arguments: list[str]) -> tuple[flags.Flags, list[str]]:
    """Flags of a program without Hydra's."""
    rest = [each for each in arguments if each not in ("-h", "--help", flags.HELP_ALL)]
    return flags.Flags(help=rest != arguments), rest


def _configuration(record: Mapping[str, Any], package: str | None) -> str:
    """Format the configuration `record`, or its part `package`, for --cfg job."""
    values = OmegaConf.create(record["values"])
    selected = OmegaConf.select(values, package) if package else values
    if not OmegaConf.is_config(selected):
        raise UserError(f"unknown --package {package}; expected one of {', '.join(map(str, values))}, or a part of one")
    return OmegaConf.to_yaml(selected).rstrip()


def evaluate_instead(evaluate: Path, resumed: str | None, arguments: list[str], groups: Collection[str]) -> NoReturn:
    """Run the program `evaluate` on the run `resumed`, with `arguments`, instead of this one, without its `groups`."""
    if resumed is None:
        raise UserError("eval_only=true needs a run to evaluate: resume=DIR")
    rest = [each for each in arguments if each.partition("=")[0] not in ("resume", "eval_only", *groups)]
    os.execv(sys.executable, [sys.executable, str(evaluate), option("checkpoint", resumed), *rest])


def check_start(name: str, arguments: list[str]) -> dict[str, Any] | None:
    """Check the command of program `name`; returns the record of the run that `arguments` resume, or None.

    Raises:
        UserError: for a new run without a task, and a resumed one whose record names a server that `arguments` do not.
    """
    saved = resumed(arguments)
    if saved is None:
        combinations.check_named(arguments, name)
    else:
        foreign.check(saved, arguments, foreign.PLACEMENT)
    return saved


def resumed(arguments: list[str]) -> dict[str, Any] | None:
    """Composed configuration of the run that resume=DIR among `arguments` continues; None without it."""
    path = parsed([each for each in arguments if each.startswith("resume=")]).get("resume")
    return checkpoint.load(str(path)).config if path else None


def _smaller(describe: Callable[[list[str]], str], arguments: list[str]) -> str:
    """Advice where memory is short: options of the program that would reduce it with `arguments`."""
    if any(each.startswith("resume=") for each in arguments):
        return "a run goes on with its sizes; set storage=disk or a smaller evaluation_envs, or free some memory"
    option_values = dict(re.findall(r"^([\w.]+)=(\S*)", describe(arguments), re.MULTILINE))
    no_images = option_values.get("task.images", "[]") == "[]"
    names = [name for name in SIZES if name in option_values and not (no_images and name == "task.image_size")]
    if not names:
        return "free some memory, or use a machine with more"
    smaller = f"use a smaller {', '.join(names[:-1])}{' or ' * (len(names) > 1)}{names[-1]}"
    alternatives = [f"{name}={value}" for name, value in SPARING.items() if name in option_values]
    plan_advice = "; plan=true tells what takes how much" if "plan" in option_values else ""
    return smaller + (f", or {', '.join(alternatives)}" if alternatives else "") + plan_advice


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def options(described: str | None, config: Any) -> str:  # noqa: ANN401 - a dataclass, or an object of one
    """Text of --help: the program's docstring `described`, the docstring of `config`, and all its options.

    An option is listed as typed, with its value and the sentence of its dataclass's docstring that names it.
    """
    values = OmegaConf.structured(config)
    return "\n\n".join([(described or "").strip(), _doc(_kind(values)), aligned(listed(values))]) + "\n"


def aligned(entries: Iterable[tuple[str, str]]) -> str:
    """Lines of names and their sentences, which begin in one column."""
    entries = list(entries)
    width = min(44, max((len(name) for name, _ in entries), default=0))
    return "\n".join(f"{name:{width}}  # {sentence}" if sentence else name for name, sentence in entries)


def listed(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:  # noqa: ANN401 - OmegaConf's
    """Iterate over the options of `config`, "key=value", with their sentences in the docstring."""
    for key in config:
        name = f"{prefix}{key}"
        node = None if OmegaConf.is_missing(config, key) else config[key]
        if isinstance(node, DictConfig) and node:
            yield from listed(node, f"{name}.")
        else:
            written = "..." if OmegaConf.is_missing(config, key) else _written(config, key)
            yield f"{name}={written}", _sentence(_kind(config), str(key))


def _written(config: DictConfig, key: Any) -> str:  # noqa: ANN401 - OmegaConf's
    value = cast(dict[Any, Any], OmegaConf.to_container(config, enum_to_str=True))[key]
    return "null" if value is None else value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _sentence(kind: type, field: str) -> str:
    """First sentence, or part of one, on `field` in the docstrings of the dataclass `kind` and its parents."""
    for each in kind.__mro__:
        for sentence in re.split(r"(?<=[.;])\s+|\n\n", _doc(each)):
            if re.search(rf"`{field}[`=]", sentence):
                return " ".join(sentence.split()).rstrip(";.")
    return ""


def _kind(config: Any) -> type:  # noqa: ANN401 - OmegaConf's
    return OmegaConf.get_type(config) or dict


def _doc(documented: type) -> str:
    return inspect.cleandoc(documented.__dict__.get("__doc__") or "")
