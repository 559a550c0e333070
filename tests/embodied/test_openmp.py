"""OpenMP's threads sleep while they wait, in every program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = sorted(path.name for path in ROOT.glob("*.py"))


def settings(command, **variables):
    """OpenMP's settings by name, as the library prints them when it is loaded."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment = kept | {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line.split("=") for line in done.stderr.splitlines() if " = '" in line]
    return {name.split()[-1]: value.strip(" '") for name, value in lines}


@pytest.mark.parametrize("program", PROGRAMS)
def test_threads_of_programs_do_not_spin(program):
    printed = settings([program, "--help"])
    if printed:  # a program that computes nothing loads no OpenMP
        assert (printed["OMP_WAIT_POLICY"], printed["GOMP_SPINCOUNT"]) == ("PASSIVE", "0")
    assert printed or program in ("compare.py", "replay.py")


def test_what_a_user_has_set_stays():
    command = ["-c", "from embodied import without_dynamo\nimport torch"]
    assert settings(command)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert settings(command, OMP_WAIT_POLICY="ACTIVE")["OMP_WAIT_POLICY"] == "ACTIVE"
    assert settings(command, GOMP_SPINCOUNT="7")["GOMP_SPINCOUNT"] == "7"
