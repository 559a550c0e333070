"""The commands of CI, with stubs that record their calls in place of the real ones."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
COMMANDS = "make", "arm-none-eabi-gcc", "qemu-system-arm", "chromium"


@pytest.fixture
def called(tmp_path: Path):
    """Calls the script in a checkout below `tmp_path`; returns its calls of make, with the assets they were given."""
    checkout, commands = tmp_path / "checkout", tmp_path / "commands"
    (checkout / ".ci").mkdir(parents=True)
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
    assert called() == ["none test test-ros test-isaac test-crazyflow test-ray", "none check docs"]
    assets = tmp_path / "shared" / "libero_assets"
    assets.mkdir(parents=True)
    tests = "tests/sims/libero tests/conformance/test_environments.py"
    expected = [
        "none test test-ros test-isaac test-crazyflow test-ray",
        f"{assets} test ARGS={tests}",
        f"{assets} test-stock",
        "none check docs",
    ]
    assert called() == expected
    assert all((SCRIPT.parents[1] / path).exists() for path in tests.split())
