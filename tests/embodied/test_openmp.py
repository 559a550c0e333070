"""OpenMP's threads sleep while they wait, in every program, and none imports Dynamo."""

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = sorted(path.stem for path in ROOT.glob("*.py"))


def start(code, **variables):
    """Output of `code` in an interpreter, and the settings by name that OpenMP prints when it is loaded."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment = kept | {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line.split("=") for line in done.stderr.splitlines() if " = '" in line]
    return done.stdout, {name.split()[-1]: value.strip(" '") for name, value in lines}


def test_threads_of_programs_do_not_spin_and_they_do_not_wait_for_the_compiler():
    for program in PROGRAMS:  # each begins with the import that prepares PyTorch's, or with a program that does
        assert first_import(ROOT / f"{program}.py") in ("embodied", "embodied.command_line", "train"), program
    names = ", ".join(PROGRAMS)
    loaded, printed = start(f"import sys, {names}\nprint('torch' in sys.modules, 'torch._dynamo' in sys.modules)")
    assert loaded == "True False\n"
    assert (printed["OMP_WAIT_POLICY"], printed["GOMP_SPINCOUNT"]) == ("PASSIVE", "0")


def first_import(program):
    """The first module that a program imports of those that could import PyTorch."""
    imports = (node for node in ast.parse(program.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom))
    names = (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports)
    return next(name for name in names if name.partition(".")[0] not in {*sys.stdlib_module_names, "omegaconf"})


def test_what_a_user_has_set_stays():
    code = "from embodied import without_dynamo\nimport torch"
    assert start(code, OMP_WAIT_POLICY="ACTIVE")[1]["OMP_WAIT_POLICY"] == "ACTIVE"
    assert start(code, GOMP_SPINCOUNT="7")[1]["GOMP_SPINCOUNT"] == "7"
