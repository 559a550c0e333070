"""Look at a recording: python replay.py FILE.mcap [viewer=rerun|foxglove] [output=FILE].

Without a viewer a summary is printed. viewer=rerun opens rerun, or writes the .rrd file `output`; viewer=foxglove
writes a layout for Foxglove, which opens recordings itself. To compare a policy's decisions on a recording, use
evaluate.py sim_to_real=[simulator,bag].
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from embodied.command_line import program
from embodied.command_line.config import compose
from embodied.configuration import Configuration
from embodied.errors import UserError
from real_robot.recording.recording import Recording
from real_robot.recording.viewing import foxglove_layout, summary, to_rerun

log = logging.getLogger("embodied")


class Viewer(Enum):
    """Viewer of a recording."""

    NONE = "none"
    RERUN = "rerun"
    FOXGLOVE = "foxglove"


@dataclass
class ReplayConfig(Configuration):
    """`output` is a new .rrd file instead of rerun's window, or the layout (default: next to the recording)."""

    viewer: Viewer = Viewer.NONE
    output: str | None = None


def run(arguments: list[str]) -> None:
    """Show the recording, or print its summary."""
    files = [each for each in arguments if "=" not in each]
    if len(files) != 1:
        raise UserError(f"expected one recording, python replay.py FILE.mcap, got {', '.join(files) or 'none'}")
    config, _ = composed(arguments)
    recording = Recording(files[0])
    if config.viewer is Viewer.NONE:
        return log.info(summary(recording))
    if config.viewer is Viewer.RERUN:
        periods = to_rerun(recording, Path(config.output) if config.output else None)
        return log.info(f"showed {periods} control periods" + (f": rerun {config.output}" if config.output else ""))
    layout = Path(config.output or f"{files[0]}.layout.json")
    if layout.exists():
        raise UserError(f"{layout} exists; choose another output")
    layout.write_text(foxglove_layout(recording.contract), encoding="utf-8")
    log.info(f"wrote {layout}; in Foxglove: open {files[0]}, then Layouts, Import from file")


def composed(arguments: list[str]) -> tuple[ReplayConfig, dict[str, Any]]:
    """The options and their record."""
    return compose(ReplayConfig, "replay", [each for each in arguments if "=" in each], {})


def describe(_: list[str]) -> str:
    """Describe the options."""
    return program.options(__doc__, ReplayConfig)


if __name__ == "__main__":
    sys.exit(program.main(run, describe, sys.argv[1:], composed))
