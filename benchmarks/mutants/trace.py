"""Records each Python function that runs in a copy of the tree, with the test or fixture that runs it.

It is loaded by the processes that tests start, too (as `sitecustomize`), so it imports the standard library alone and
writes every line at once: processes may end without any farewell.
"""

import os
import sys
import threading
from types import FrameType

TREE, LOG, CONTEXT = "MUTANTS_TREE", "MUTANTS_LOG", "MUTANTS_CONTEXT"
"""Environment variables: directory of the tree, file of the record, and the test that runs in the parent process."""

_recorded: set[int] = set()


def enter(context: str) -> None:
    """Attribute the functions that run from now on to `context`, here and in processes started from here."""
    os.environ[CONTEXT] = context
    _recorded.clear()


def start() -> None:
    """Record functions from now on, in all threads."""
    prefix = os.environ[TREE] + "/"
    log = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def trace(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if id(code) in _recorded:
            return
        _recorded.add(id(code))
        if code.co_filename.startswith(prefix):
            fields = os.environ.get(CONTEXT, ""), code.co_filename[len(prefix) :], code.co_qualname
            os.write(log, ("\t".join(fields) + "\n").encode())

    threading.settrace(trace)
    sys.settrace(trace)
