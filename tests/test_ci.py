"""The commands of CI, with stubs that record their calls in place of the real ones."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READING = r"""environ\W.*"LIBERO_ASSETS"|"LIBERO_ASSETS".*os.environ|find_assets\(\)"""
SCRIPT = ROOT / ".ci" / "run"
COMMANDS = "make", "arm-none-eabi-gcc", "qemu-system-arm", "chromium", "docker"
IMAGE = [
    "none build --tag embodied-ci .",
    "none run --rm embodied-ci train.py task=quadrotor_hover env_steps=2000 evaluation_starts=4 video=false",
]


@pytest.fixture
def called(tmp_path: Path):
    """Calls the script in a checkout below `tmp_path`; returns its calls of make and docker, with their assets."""
    checkout, commands = tmp_path / "checkout", tmp_path / "commands"
    (checkout / ".ci").mkdir(parents=True)
    (checkout / "tests").mkdir()
    (checkout / "tests" / "test_a.py").write_text("pytestmark = pytest.mark.assets")
    (checkout / "tests" / "test_b.py").write_text("")
    (checkout / ".ci" / "run").write_text(SCRIPT.read_text())
    commands.mkdir()
    for name in COMMANDS:
        (commands / name).write_text('#!/bin/sh\necho "${LIBERO_ASSETS:-none} $*"\n')
        (commands / name).chmod(0o755)

    def call() -> list[str]:
        kept = {name: value for name, value in os.environ.items() if name != "LIBERO_ASSETS"}
        environment = kept | {"PATH": f"{commands}:{os.environ['PATH']}"}
        command = ["bash", checkout / ".ci" / "run"]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return run.stdout.splitlines()

    return call


def test_official_assets_beside_the_checkout_are_tested_with_too(tmp_path: Path, called):
    tests = "none test test-evidence test-ros test-isaac test-crazyflow test-ray"
    assert called() == [tests, "none check docs", *IMAGE]
    assets = tmp_path / "shared" / "libero_assets"
    assets.mkdir(parents=True)
    again = f"{assets} test ARGS=-m assets tests/test_a.py "
    assert called() == [tests, again, f"{assets} test-stock", "none check docs", *IMAGE]


def test_files_of_tests_that_read_official_assets_are_marked():
    stock = ROOT / "tests" / "sims" / "libero" / "stock"  # has a command of its own
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path.parent != stock]
    using = {path for path in files if re.search(READING, path.read_text())}
    assert len(using) > 10
    assert {path.name for path in using if "mark.assets" not in path.read_text()} == {"test_assets.py"}
