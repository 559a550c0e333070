"""Flags of every program: --help (-h), and Hydra's -m (--multirun), --cfg (-c) job, -sc (--shell-completion)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from embodied.errors import UserError

HELP_ALL = "--help=all"
DESCRIBED = """\
-m seed=0,1,2      # a run of each, in folders of their own (Hydra's multirun)
--cfg job          # print the configuration and run nothing; -p PART: a part of it
-sc install=bash   # print a script for completion: eval "$(... -sc install=bash)"
"""
"""Descriptions in --help."""


@dataclass
class Flags:
    """Requests other than a run: help, a sweep, the configuration or a part of it, or completion.

    `help_all` requests all options, `help` the important ones of a program that has many.
    """

    help: bool = False
    help_all: bool = False
    multirun: bool = False
    cfg: str | None = None
    package: str | None = None
    resolve: bool = False
    completion: str | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help=all lists the options")


def parse(arguments: Sequence[str]) -> tuple[Flags, list[str]]:
    """Split `arguments` into flags and the others.

    Raises:
        UserError: for a flag with an invalid value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for names in (("-h", "--help"), ("-m", "--multirun"), ("--resolve",)):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("-p", "--package")
    parser.add_argument("-sc", "--shell-completion", "--shell_completion", dest="completion")
    parsed, rest = parser.parse_known_args([each for each in arguments if each != HELP_ALL], Flags())
    parsed.help_all = HELP_ALL in arguments
    return parsed, rest
