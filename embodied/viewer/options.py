"""Options of programs that can show environments in the browser."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from embodied.configuration import Configuration, Port
from embodied.task import Task

log = logging.getLogger(__name__)


@dataclass
class ViewerOptions(Configuration):
    """Options of the viewer: `viewer` shows environments live in a browser, at port `viewer_port`; 0: any free one."""

    viewer: bool = False
    viewer_port: Port = 8080


@contextmanager
def viewing(options: ViewerOptions, viewable: str) -> Iterator[Callable[[Task], Task]]:
    """Context that serves the page, if the `options` request it; yields a wrapper of tasks whose environments it shows.

    `viewable` describes which environments can be shown.

    Raises:
        UserError: without viser, and for a port that is taken.
    """
    if not options.viewer:
        yield lambda task: task
        return
    from embodied.viewer.viewer import Viewer
    from embodied.viewer.watching import WatchedTask

    with Viewer(options.viewer_port) as viewer:
        log.info(f"viewer: {viewer.address}")
        yield lambda task: WatchedTask(task, viewer, viewable)
