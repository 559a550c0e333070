"""Start of the programs, before PyTorch is imported: --help needs none of it, and evaluate.py has a first line.

PyTorch and tensordict take most of a program's start. --help and completion only read config dataclasses, which lie
beside the classes that they build. For these requests both packages are stand-ins: modules that use them can be
imported, and classes can derive from theirs, but nothing can be computed with them.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from embodied import without_dynamo  # noqa: F401 - first
from embodied.commands import CLONE, NAMES
from embodied.runtime.console import setup_console

log = logging.getLogger(__name__)
PACKAGES = "torch", "tensordict"
DESCRIBES = {"-h", "--help", "--help=all", "-sc"}
"""Flags of requests that only read config classes."""
OUTSIDE = re.compile(r"^resume=|=.*([/\\]|\.py$)")
"""Pattern of an option that reads a run or code from outside, which may compute while it is imported."""


class StandIn(ModuleType):
    """Stand-in of a module, and of all that it contains."""

    __path__ = []  # noqa: RUF012 - of a package, whose modules are found

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **_: Any) -> Any:  # noqa: ANN401 - any decorator
        """Return the decorated function or class, where this is a decorator."""
        return arguments[0] if arguments and callable(arguments[0]) else self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[()]:
        return ()

    def __getitem__(self, _: Any) -> StandIn:  # noqa: ANN401 - Tensor["N"]
        return self

    def __or__(self, _: Any) -> StandIn:  # noqa: ANN401 - Tensor | None
        return self

    __ror__ = __or__


class _Finder(MetaPathFinder, Loader):
    """Finder of stand-ins for the modules of `PACKAGES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, as attributes are made when they are read."""


def other_package() -> str | None:
    """Message on PyPI's distribution `embodied`, where it is installed: it has a package of the same name as ours."""
    try:
        other = f"embodied {metadata.version('embodied')}"
    except metadata.PackageNotFoundError:
        return None
    if CLONE:
        return f"{other} is another package with our name, and hides ours outside this folder: pip uninstall embodied"
    return (
        f"{other} is another package with our name, and its files lie among ours: pip uninstall embodied, then install "
        "embodied-rl again with --force-reinstall --no-deps"
    )


def prepare(program: str, arguments: Sequence[str]) -> None:
    """Prepare the start of `program` with its `arguments`, before PyTorch is imported.

    It ends in an installed package whose files another one may have overwritten; a clone only warns.
    """
    if message := other_package():
        if not CLONE:
            sys.exit(f"error: {message}")
        setup_console()
        log.warning(f"warning: {message}")
    if DESCRIBES.intersection(arguments):
        if not any(map(OUTSIDE.search, arguments)):
            sys.meta_path.insert(0, _Finder())
    elif program == "evaluate" and (checkpoint := next((a for a in arguments if a.startswith("checkpoint=")), None)):
        setup_console()
        log.info(f"evaluating {checkpoint.partition('=')[2]}")


if "torch" not in sys.modules and (_program := Path(sys.argv[0]).stem) in NAMES:
    prepare(_program, sys.argv[1:])
