"""Imports of this tree's files, read from their syntax."""

from __future__ import annotations

import ast
from collections.abc import Container
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def dotted(path: Path) -> str:
    """Name of the module that the file `path` defines."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def syntax(path: Path) -> ast.Module:
    """Syntax tree of the file `path`."""
    return ast.parse(path.read_text(encoding="utf-8"))


def modules_in(code: ast.AST, modules: Container[str]) -> set[str]:
    """Names of the `modules` that `code` imports, also inside functions and only for type checkers."""
    names: set[str] = set()
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= whole if all(name in modules for name in whole) else {node.module, *whole}
    return {name for name in names if name in modules}
