"""Program of a child process: `python worker.py DESCRIPTOR PACKAGES`; see `children.Child`.

DESCRIPTOR is its end of the socket. PACKAGES, JSON, has the folder of each of our packages: they come from the parent's
installation, all others from the interpreter's own. Standard input carries no data: when it closes, the parent is gone,
and the kernel ends this process at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder

OLDEST = (3, 11)


class Finder(MetaPathFinder):
    """Finds our packages in the parent's folders."""

    def __init__(self, folders: dict[str, str]) -> None:
        self.folders = folders

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """Spec of a top-level package of ours; its modules are found through its path."""
        return PathFinder.find_spec(fullname, [self.folders[fullname]]) if fullname in self.folders else None


def main(descriptor: int, packages: str) -> None:
    """Serve until the parent closes the connection."""
    if sys.version_info < OLDEST:
        sys.exit(f"Python {sys.version.split()[0]} is too old; expected 3.11 or later")
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO when it closes, which ends us
    sys.path.pop(0)  # the folder of this file
    sys.meta_path.insert(0, Finder(json.loads(packages)))
    from embodied import without_dynamo  # noqa: F401 - first
    from sims.remote.channel import Channel

    channel = Channel(socket.socket(fileno=descriptor))
    try:
        from sims.remote.server import Server
    except ImportError as error:
        channel.send({"error": f"{error.name or error} is not installed in {sys.executable}", "kind": "UserError"})
        return
    Server(channel).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
