"""The options of programs that can show what they do in the browser."""

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
    """`viewer` shows the environments live in a browser on this machine, at port `viewer_port`; 0: any free one."""

    viewer: bool = False
    viewer_port: Port = 8080


@contextmanager
def viewing(options: ViewerOptions, known: str) -> Iterator[Callable[[Task], Task]]:
    """While entered the page is served, if the `options` ask for it; gives what shows the environments of a task.

    `known` tells which environments can be shown.

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
        yield lambda task: WatchedTask(task, viewer, known)
