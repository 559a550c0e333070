"""Plot a metric of runs: python plot.py RUN RUN ... metric=NAME [x=env_steps|wall_s|cpu_s] [output=FILE].

RUN is the folder of a run, finished or not, or of a sweep (-m). Runs that differ only in their seed are one line, their
mean, in a band: the 95% interval of the mean (Student's), or the range of two seeds. Without metric=NAME the metrics
are listed.
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
from embodied.command_line.suggestion import did_you_mean
from embodied.configuration import Configuration
from embodied.errors import UserError
from embodied.report.finished_run import run_folders
from embodied.report.plot import Axis, draw, metrics, read

log = logging.getLogger("embodied")


@dataclass
class PlotConfig(Configuration):
    """`metric` is drawn over `x`: environment steps, or the wall or CPU time of reinforcement learning.

    `output` is a .png, .svg or .pdf file; null: outputs/plots/<metric>_<time>.png.
    """

    metric: str | None = None
    x: Axis = Axis.ENV_STEPS
    output: str | None = None


def run(arguments: list[str]) -> None:
    """Draw the metric, or list the metrics of the runs."""
    options = [each for each in arguments if re.match(r"\w+=", each) and not Path(each).exists()]
    config, _ = compose(PlotConfig, "plot", options, {})
    runs = [read(each) for each in run_folders(each for each in arguments if each not in options)]
    values = metrics(runs)
    if config.metric is None:
        width = max(map(len, values))
        lines = (f"{name:{width}}  {len(each)} values, last {each[-1]:.4g}" for name, each in values.items())
        return log.info("\n".join(lines))
    if config.metric not in values:
        same = [name for name in values if name.rpartition("/")[2] == config.metric]
        close = f"; did you mean {' or '.join(same)}?" if same else did_you_mean(config.metric, values)
        raise UserError(f"no run has the metric {config.metric}{close or '; without metric= all are listed'}")
    name = f"{config.metric.replace('/', '_')}_{datetime.now():%Y-%m-%d_%H-%M-%S}.png"
    log.info(draw(Path(config.output or f"outputs/plots/{name}"), runs, config.metric, config.x))


def describe(_: list[str]) -> str:
    """Describe the options."""
    return program.options(__doc__, PlotConfig)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:], lambda arguments: compose(PlotConfig, "plot", arguments, {})))
