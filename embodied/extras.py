"""Optional packages, which only parts of the library need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from embodied.errors import UserError


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Context around imports of packages that the `extra` of this distribution installs.

    Raises:
        UserError: on one line, if one is missing.
    """
    try:
        yield
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install 'embodied-rl[{extra}]'") from error
