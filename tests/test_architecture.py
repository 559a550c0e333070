"""Architecture: imports between packages, smallest install, file sizes."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.imports import ROOT, dotted, modules_in, syntax

PACKAGES = ("embodied", "policies", "sims", "real_robot")
ALLOWED = {"embodied": {"embodied"}} | {name: {name, "embodied"} for name in PACKAGES[1:]}
HEAVY = ("torch", "mujoco", "warp", "mujoco_warp", "tensordict", "matplotlib", "hydra", "wandb", "ray", "rclpy")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PROGRAMS = ROOT / "real_robot" / "ros2" / "embodied_ros2"
"""ROS 2's programs: they join the packages as train.py does."""

JOINING = ROOT / "embodied" / "command_line" / "train_options.py"
"""The module of the core that joins the packages, for the programs."""

SCRIPTS = {path.stem for path in ROOT.glob("*.py")}
"""Programs at the top of the tree."""

RUN = {ROOT / "sims" / "robosuite": {"robosuite"}, ROOT / "sims" / "libero" / "stock": {"libero", "robosuite"}}
"""What runs simulators of others, for that is what it is for."""


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


MODULES = {dotted(path): path for path in (*SOURCES, *ROOT.glob("*.py"))}


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Modules of this tree that a file imports anywhere."""
    return frozenset(modules_in(syntax(path), MODULES))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_arrows_point_to_the_core():
    checked = [path for path in SOURCES if path.parent != PROGRAMS and path != JOINING]
    assert len(checked) > 400
    upwards = {
        name(path): others
        for path in checked
        if (others := set(imported(path)) & set(PACKAGES) - ALLOWED[path.relative_to(ROOT).parts[0]])
    }
    assert upwards == {}


def test_packages_import_no_script():
    assert {"train", "evaluate", "record"} <= SCRIPTS
    assert [name(path) for path in SOURCES if set(imported(path)) & SCRIPTS] == []


def test_only_programs_import_what_joins_the_packages():
    joining = dotted(JOINING)
    users = {path for path in SOURCES if joining in imported_modules(path)}
    assert users == {PROGRAMS / "parts.py"}


def test_simulators_of_others_are_read_never_imported():
    others = {"libero", "robosuite"}
    assert [name(path) for path in SOURCES if set(imported(path)) & others - RUN.get(path.parent, set())] == []


def test_a_file_tells_one_story():
    lengths = {path: len(path.read_text().splitlines()) for path in (*SOURCES, *ROOT.glob("*.py"))}
    assert [name(path) for path, length in lengths.items() if length > (200 if path.parent == ROOT else 500)] == []


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Modules in import cycles, each with its shortest cycle."""
    found = []
    for first in arrows:
        ways = [[first]]
        seen = {first}
        for way in ways:
            for following in sorted(arrows.get(way[-1], set())):
                if following == first:
                    found.append([*way, first])
                elif following not in seen:
                    seen.add(following)
                    ways.append([*way, following])
    return sorted(found, key=len)


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"d"}}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})[0] == ["b", "c", "b"]
    code = "def f():\n    import embodied.seeding\nfrom embodied import errors, task\n"
    code += "from embodied.saving.files import flush\n"
    assert modules_in(ast.parse(code), MODULES) == {
        "embodied.seeding",
        "embodied.errors",
        "embodied.task",
        "embodied.saving.files",
    }


def test_imports_go_in_no_circle():
    # Nor inside functions or for type checkers: code that two modules need from each other belongs in a third.
    arrows = {module: imported_modules(path) - {module} for module, path in MODULES.items()}
    found = circles(arrows)
    assert not found, " -> ".join(found[0])


STOREYS = (
    ("command_line",),
    ("training",),
    ("placement",),
    ("report",),
    ("run_options",),
    ("evaluation", "viewer"),
    ("algorithms", "environments"),
    ("task",),
    ("data", "execution", "navigation"),
    ("rollout",),
    ("native", "environment"),
    ("export", "saving"),
    ("policy", "text"),
    ("contract", "networks"),
    ("configuration", "extras", "start_up"),
    ("runtime", "world"),
    ("commands", "errors", "scene", "seeding", "without_dynamo"),
)
"""Folders and modules of embodied/, from the top: each imports only what lies below it."""


def test_no_folder_of_the_core_imports_one_beside_or_above_it():
    height = {name: -row for row, names in enumerate(STOREYS) for name in names}
    arrows = {
        (module, other)
        for module, path in MODULES.items()
        for other in imported_modules(path)
        if module.startswith("embodied.") and other.startswith("embodied.")
    }
    between = {arrow for arrow in arrows if arrow[0].split(".")[1] != arrow[1].split(".")[1]}
    assert {module.split(".")[1] for module in MODULES if module.startswith("embodied.")} == height.keys()
    upwards = [f"{a} -> {b}" for a, b in between if height[a.split(".")[1]] <= height[b.split(".")[1]]]
    assert not sorted(upwards)


def test_the_tracer_knows_no_simulator():
    for path in (ROOT / "sims" / "tracer").glob("*.py"):
        known = {module for module in imported_modules(path) if not module.startswith("sims.tracer")}
        assert known <= {"embodied.native", "sims.counter_rng"}, path


def test_a_drone_knows_nothing_of_swarms():
    for path in (ROOT / "sims" / "quadrotor").rglob("*.py"):
        assert not [module for module in imported_modules(path) if module.startswith("sims.swarm")], path


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed_and_their_init_only_documents(package: str):
    assert (ROOT / package / "py.typed").exists()
    body = ast.parse((ROOT / package / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


def test_launch_is_no_package():
    # ROS 2 ships a Python package called launch; ours would shadow it.
    assert not (ROOT / "launch" / "__init__.py").exists()


def test_importing_the_packages_loads_nothing_heavy():
    code = f"import sys, {', '.join(PACKAGES)}; print([m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def _opens_text(call: ast.Call) -> bool:
    """Whether `call` reads or writes text in the encoding of the user's locale."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in options:
        return False
    if name in ("run", "Popen", "check_output"):
        return "text" in options
    if name in ("read_text", "write_text"):
        return isinstance(call.func, ast.Attribute)
    if name not in ("open", "fdopen", "NamedTemporaryFile"):
        return False
    position = 1 if name == "fdopen" or isinstance(call.func, ast.Name) else 0  # path.open(mode), open(path, mode)
    mode = options.get("mode", call.args[position] if len(call.args) > position else None)
    return isinstance(mode, ast.Constant) and re.fullmatch(r"[rwxa]\+?t?", str(mode.value)) is not None


@pytest.mark.parametrize("package", ["embodied", "policies", "sims", "real_robot"])
def test_text_is_utf8_whatever_the_locale(package: str):
    files = [*(ROOT / package).rglob("*.py"), *ROOT.glob("*.py")]
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.Call) and _opens_text(node)
    ]
    assert not calls
