"""Reader of LIBERO's task descriptions (BDDL: PDDL with regions, arXiv 2306.03310)."""

import re
from dataclasses import dataclass
from pathlib import Path

from embodied.errors import UserError

Atom = tuple[str, ...]
"""One proposition, predicate first: ("in", "milk_1", "basket_1_contain_region")."""


@dataclass(frozen=True)
class Region:
    """A named area of a workspace or object: `ranges` are (x0, y0, x1, y1) in m, `yaw` (low, high) in rad."""

    name: str
    target: str
    ranges: tuple[tuple[float, float, float, float], ...] = ()
    yaw: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Problem:
    """One task description; `fixtures` and `objects` map instance to category in stock LIBERO's order."""

    name: str
    language: str
    fixtures: dict[str, str]
    objects: dict[str, str]
    regions: dict[str, Region]
    obj_of_interest: list[str]
    init: list[Atom]
    goal: list[Atom]


def parse(path: Path | str) -> Problem:
    """Read a BDDL file; raises UserError if it is not a LIBERO problem. All names are lower case, as in stock."""
    tree = _tree(Path(path))
    if tree[:1] != ["define"]:
        raise UserError(f"{path}: expected a BDDL file that starts with (define (problem ...)), got {tree[:1]}")
    sections = {str(group[0]): group[1:] for group in tree[1:]}
    missing = {"problem", ":objects", ":regions", ":init", ":goal"} - sections.keys()
    if missing:
        raise UserError(f"{path}: missing BDDL sections: {', '.join(sorted(missing))}")
    return Problem(
        name=sections["problem"][0],
        language=" ".join(sections.get(":language", [])),
        fixtures=_instances(sections.get(":fixtures", [])),
        objects=_instances(sections[":objects"]),
        regions={region.name: region for region in map(_region, sections[":regions"])},
        obj_of_interest=list(sections.get(":obj_of_interest", [])),
        init=[tuple(atom) for atom in sections[":init"]],
        goal=_conjunction(sections[":goal"][0]),
    )


def _tree(path: Path) -> list:
    """Nested lists of the file's parentheses, comments dropped, lower case."""
    text = re.sub(r";.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).lower()
    stack: list[list] = [[]]
    for token in re.findall(r"[()]|[^\s()]+", text):
        if token == "(":
            stack.append([])
        elif token == ")" and len(stack) > 1:
            stack[-2].append(stack.pop())
        elif token == ")":
            raise UserError(f"{path}: unbalanced parentheses: one closing parenthesis too many")
        else:
            stack[-1].append(token)
    if len(stack) != 1 or len(stack[0]) != 1:
        raise UserError(f"{path}: expected one balanced expression in parentheses")
    return stack[0][0]


def _instances(tokens: list[str]) -> dict[str, str]:
    """`a b - category c - other` as {a: category, b: category, c: other}, grouped by category as stock does."""
    by_category: dict[str, list[str]] = {}
    waiting: list[str] = []
    iterator = iter(tokens)
    for token in iterator:
        if token == "-":
            by_category[next(iterator)] = waiting
            waiting = []
        else:
            waiting.append(token)
    return {name: category for category, names in by_category.items() for name in names}


def _region(group: list) -> Region:
    attributes = {attribute[0]: attribute[1:] for attribute in group[1:]}
    target = attributes[":target"][0]
    ranges = tuple(tuple(map(float, box)) for box in attributes.get(":ranges", [[]])[0])
    yaw = tuple(map(float, attributes[":yaw_rotation"][0][0])) if ":yaw_rotation" in attributes else (0.0, 0.0)
    return Region(f"{target}_{group[0]}", target, ranges, yaw)


def _conjunction(goal: list) -> list[Atom]:
    atoms = goal[1:] if goal[0] == "and" else [goal]
    return [tuple(atom) for atom in atoms]
