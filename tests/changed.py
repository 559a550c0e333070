"""Prints the files of tests that depend on what differs from a commit: python -m tests.changed main.

A file depends on those that it imports, and on those that its strings name: programs that it starts ("train.py"),
modules that it loads by name, data that it reads. A test depends on the conftest.py of its folders, too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from tests.imports import ROOT, dotted, modules_in, syntax

PACKAGES = ("benchmarks", "embodied", "policies", "real_robot", "sims", "tests")
Arrows = Mapping[Path, set[Path]]
"""Files that each Python file depends on."""


def git(*command: str) -> set[Path]:
    """Paths that a command of git lists."""
    run = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return {ROOT / line for line in run.stdout.splitlines()}


def changed_files(base: str) -> set[Path]:
    """Files that differ from the commit where this branch left `base`, committed or not."""
    return git("diff", "--name-only", "--merge-base", base) | git("ls-files", "--others", "--exclude-standard")


def names_of(path: Path) -> set[str]:
    """Strings of code that name the file `path`; data outside the packages goes by its top folder, too."""
    relative = path.relative_to(ROOT)
    names = {str(relative)}
    if path.suffix == ".py":
        return names | ({dotted(path)} if len(relative.parts) > 1 else set())
    names |= {path.name} if path.suffix else set()
    names |= {"*.md"} if path.suffix == ".md" else set()
    return names | {relative.parts[0]} - {*PACKAGES}


def words_in(code: ast.Module) -> set[str]:
    """Strings of `code` but documentation, and their words."""
    nodes = list(ast.walk(code))
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in documentation)
    texts = {node.value for node in constants if isinstance(node.value, str)}
    return texts | {word for text in texts for word in re.findall(r"[\w./-]+", text)}


def dependencies(files: Collection[Path]) -> dict[Path, set[Path]]:
    """Arrows from each Python file among `files` to the files that it imports or names.

    Programs and modules are named by tests and benchmarks alone: elsewhere such strings are messages.
    """
    python = {path for path in files if path.suffix == ".py"}
    modules = {dotted(path): path for path in python}
    named: dict[str, set[Path]] = {}
    for path in files:
        for name in names_of(path):
            named.setdefault(name, set()).add(path)
    arrows = {}
    for path in python:
        code, starts = syntax(path), path.relative_to(ROOT).parts[0] in ("benchmarks", "tests")
        arrows[path] = {modules[name] for name in modules_in(code, modules)}
        for word in words_in(code):
            arrows[path] |= {other for other in named.get(word, ()) if starts or other not in python}
            if re.fullmatch(r"\w+\.[\w.]*\.", word):  # the beginning of a module's name
                arrows[path] |= {other for name, other in modules.items() if name.startswith(word)}
        if path.name.startswith("test_"):
            arrows[path] |= {folder / "conftest.py" for folder in path.parents} & python
    for path in set(files) - python:  # data of the modules beside it
        for module in python:
            if module.parent == path.parent != ROOT and path.suffix != ".md":
                arrows[module].add(path)
    return arrows


def dependents(changed: Collection[Path], arrows: Arrows) -> list[Path]:
    """The `changed` files and all that depend on them, directly or not: the nearest first."""
    users: dict[Path, set[Path]] = {}
    for path, others in arrows.items():
        for other in others:
            users.setdefault(other, set()).add(path)
    reached = sorted(changed)
    for path in reached:
        reached += sorted(users.get(path, set()) - set(reached))
    return reached


def tests_of(changed: Collection[Path], arrows: Arrows) -> list[str]:
    """Files of tests that depend on the `changed` files, relative to the root: the nearest first."""
    tests = (path for path in dependents(changed, arrows) if path.name.startswith("test_") and path in arrows)
    return [str(path.relative_to(ROOT)) for path in tests]


if __name__ == "__main__":
    present = {path for path in git("ls-files", "--cached", "--others", "--exclude-standard") if path.is_file()}
    print(*tests_of(changed_files(sys.argv[1]), dependencies(present)), sep="\n")
