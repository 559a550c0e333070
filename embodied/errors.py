"""The one error class that tells whose mistake it is."""

from __future__ import annotations


class UserError(ValueError):
    """What a person can put right: an option, a file, a device, a package that is not there, parts that do not fit.

    Its message is one line, or a table: what was expected, what was got, what to do. Programs print it alone. A call
    that our own code got wrong (shapes, indices, an order of calls) is a plain ValueError, or an assert: with any other
    error it keeps its traceback. Where it is not clear who calls, ask whether the traceback would help the reader.
    """
