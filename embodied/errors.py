"""Error classes for mistakes of users, as opposed to bugs."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake that the user can correct: an option, a file, a device, a missing package, parts that do not fit.

    The message is one line or a table: the expected value, the actual value, and what to do. Programs print it without
    a traceback. Wrong calls within our own code (shapes, indices, order of calls) raise ValueError or fail an assert,
    and keep their traceback. If the caller may be either, decide by whether a traceback would help the reader.
    """


class OutOfMemoryError(UserError):
    """There is less memory than was requested; programs add which of their options need less."""


class DivergedError(UserError):
    """A number of the training is not finite any more: a setting of the run is wrong, such as its learning rate."""
