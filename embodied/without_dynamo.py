"""Import hook, imported by programs before PyTorch, that saves start-up time and idle spinning.

It makes OpenMP's threads sleep while they wait, and imports tensordict without importing torch._dynamo. tensordict
marks a few of its functions for Dynamo, the compiler behind `torch.compile`, which imports all of Dynamo. Here they
are marked once something else imports it, such as `torch.compile` or an optimiser; nothing else changes, and programs
start in about half the time.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Execute = Callable[[ModuleType], None]

MARKS = ("allow_in_graph", "assume_constant_result")
"""Functions of torch.compiler that return their argument, after an import of Dynamo."""


class _Around(MetaPathFinder):
    """Finder that delegates the search for module `name`, and passes the module and its executor to `run`."""

    def __init__(self, name: str, run: Callable[[ModuleType, Execute], None]) -> None:
        self._name = name
        self._run = run

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._run(module, execute)  # type: ignore[method-assign]
        return spec


def _without_dynamo(tensordict: ModuleType, execute: Execute) -> None:
    """Import tensordict, and record the functions that it marks."""
    from torch import compiler

    marked: list[tuple[str, Any]] = []

    def mark(how: str) -> Callable[[Any], Any]:
        return lambda function: marked.append((how, function)) or function

    marks = {how: getattr(compiler, how) for how in MARKS}
    for how in MARKS:
        setattr(compiler, how, mark(how))
    try:
        execute(tensordict)
    finally:
        for how, own in marks.items():
            setattr(compiler, how, own)

    def with_marks(dynamo: ModuleType, execute: Execute) -> None:
        execute(dynamo)
        for how, function in marked:
            getattr(dynamo, how)(function)

    if dynamo := sys.modules.get("torch._dynamo"):
        with_marks(dynamo, lambda _: None)
    else:
        sys.meta_path.insert(0, _Around("torch._dynamo", with_marks))


# OpenMP reads this when PyTorch loads it. Otherwise its threads spin while they wait for each other, and where another
# process needs the cores, too, a small network's step takes 10 to 100 times as long (benchmarks/shared_cores.py).
if "GOMP_SPINCOUNT" not in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if not {"tensordict", "torch._dynamo"} & sys.modules.keys():
    sys.meta_path.insert(0, _Around("tensordict", _without_dynamo))
