"""--help without PyTorch prints what it prints with it, and evaluate.py prints its first line before it is loaded."""

import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from embodied import start_up
from embodied.commands import NAMES

ROOT = Path(__file__).parents[2]
TEXTS = """
import train
from embodied.command_line import program
for classes in train.GROUPS.values():
    for kind in classes.values():
        print(program.options("", kind))
for arguments in ([], ["task=mjcf_lift"], ["task=quadrotor_any"]):
    print(train.summarise(arguments))
"""


def start(*command: str) -> str:
    completed = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert completed.stderr == ""
    return completed.stdout


def test_help_reads_the_same_options_from_stand_ins_of_pytorch():
    with redirect_stdout(StringIO()) as expected:
        exec(TEXTS, {})
    begin = "import sys; sys.argv = ['train.py', '--help']"
    kinds = "import torch; print(type(torch).__name__, torch.nn is torch.nn, 'torch._C' in sys.modules)"
    assert start("-c", f"{begin}{TEXTS}{kinds}") == f"{expected.getvalue()}StandIn True False\n"


@pytest.mark.parametrize(
    ("arguments", "stand_ins"),
    [
        (["--help", "task=mjcf"], True),
        (["-sc", "query=bash"], True),
        (["--help", "task=mjcf", "task.mdp=mine.py"], False),
        (["--help", "resume=run"], False),
        (["task=mjcf"], False),
    ],
)
def test_options_from_outside_and_other_requests_import_pytorch(monkeypatch, arguments: list[str], stand_ins: bool):
    monkeypatch.setattr(sys, "meta_path", finders := [])
    start_up.prepare("train", arguments)
    assert len(finders) == stand_ins


@pytest.mark.parametrize("name", NAMES)
def test_no_program_imports_pytorch_for_help(name: str):
    command = [sys.executable, "-X", "importtime", f"{name}.py", "--help"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in completed.stderr.splitlines()}
    assert "embodied.start_up" in imported
    assert "torch._C" not in imported


def test_evaluation_prints_its_first_line_before_it_imports_pytorch():
    code = "import sys; sys.argv = ['evaluate.py', 'checkpoint=run']; from embodied import start_up"
    assert start("-c", f"{code}; print('torch' in sys.modules)") == "evaluating run\nFalse\n"


def test_another_package_with_our_name_is_reported_with_what_to_do(tmp_path: Path):
    assert start_up.other_package() is None
    (tmp_path / "embodied-1.2.dist-info").mkdir()
    (tmp_path / "embodied-1.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: embodied\nVersion: 1.2\n"
    )
    code = "import sys; sys.argv = ['compare.py']; from embodied import start_up"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    completed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0
    assert completed.stderr.startswith("warning: embodied 1.2 is another package")
    assert completed.stderr.endswith(": pip uninstall embodied\n")
