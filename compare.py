"""Compare finished runs: python compare.py RUN RUN ... [output=DIR].

RUN is the folder of a run, such as outputs/libero_pick/<run>, or of a sweep (-m), or a report.json. Runs that differ
only in their seed are one row, named by the options in which it differs from other rows.
"""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from embodied.command_line import program
from embodied.command_line.config import compose
from embodied.configuration import Configuration
from embodied.report.comparison import compare
from embodied.report.comparison_report import write
from embodied.report.finished_run import run_folders

log = logging.getLogger("embodied")


@dataclass
class CompareConfig(Configuration):
    """`output` is the folder for compare.md, compare.json and compare.png; null: outputs/comparisons/<time>."""

    output: str | None = None


def run(arguments: list[str]) -> None:
    """Print the comparison, and write it to the output folder."""
    options = [each for each in arguments if re.match(r"\w+=", each) and not Path(each).exists()]
    config, _ = compose(CompareConfig, "compare", options, {})
    comparison = compare(run_folders(each for each in arguments if each not in options))
    log.info(write(Path(config.output or f"outputs/comparisons/{datetime.now():%Y-%m-%d_%H-%M-%S}"), comparison))


def describe(_: list[str]) -> str:
    """Describe the options."""
    return program.options(__doc__, CompareConfig)


if __name__ == "__main__":
    sys.exit(
        program.main(run, describe, sys.argv[1:], lambda arguments: compose(CompareConfig, "compare", arguments, {}))
    )
