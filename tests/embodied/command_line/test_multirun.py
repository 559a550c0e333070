"""Sweeps: every job is checked before the first begins, runs in a folder of its own, and is told of in a summary."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from embodied.command_line.multirun import SUMMARY, expanded, multirun
from embodied.errors import UserError

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, pathlib, signal, sys, time
given = dict(each.split("=", 1) for each in sys.argv[1:])
folder = pathlib.Path(given.pop("output").strip('"'))
folder.mkdir(exist_ok=True)
if given.get("wait"):
    def stop(*_):
        (folder / "saved").write_text("x")
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    (folder / "began").touch()
    time.sleep(60)
if given["seed"] == "3":
    sys.exit(3)
record = {"task": given["task"], "headline": "seed " + given["seed"], "given": given}
(folder / "report.json").write_text(json.dumps(record))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch) -> Path:
    """A program called train.py that writes what it was given into a report."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def check(arguments: list[str]) -> None:
    """Refuses a negative seed."""
    if "seed=-1" in arguments:
        raise UserError("expected seed of at least 0")


def reports(folder: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text())["given"] for path in sorted(folder.glob("*/report.json"))}


def test_every_combination_runs_in_a_folder_of_its_own(program: Path, capfd) -> None:
    given = ["seed=0,1", "task=a,b", "task.names=[x,y]", "width=1e6", "text='p,q'", "hydra.sweep.dir=all of it"]
    assert multirun(str(program), given, check) == 0
    found = reports(Path("all of it"))
    rest = {"task.names": "[x,y]", "width": "1000000", "text": "'p,q'"}
    assert found == {
        str(number): {"seed": seed, "task": task, **rest}
        for number, (seed, task) in enumerate([("0", "a"), ("0", "b"), ("1", "a"), ("1", "b")])
    }
    text = Path("all of it", SUMMARY).read_text()
    assert "| all of it/1 | seed=0, task=b | seed 0 |" in text
    compared = [line for line in text.splitlines() if "compare.py" in line]
    assert [line.partition("compare.py ")[2] for line in compared] == [
        "'all of it/0' 'all of it/2'",
        "'all of it/1' 'all of it/3'",
    ]


def test_folders_are_named_as_hydra_names_them(program: Path) -> None:
    given = ["task=a", "seed=range(2)", "hydra.sweep.dir=swept", "hydra.sweep.subdir=${hydra.job.override_dirname}"]
    assert multirun(str(program), given, check) == 0
    assert set(reports(Path("swept"))) == {"seed=0,task=a", "seed=1,task=a"}
    assert multirun(str(program), ["task=a", "seed=0,1"], check) == 0
    assert len(list(Path("multirun").glob("*/*/1/report.json"))) == 1


def test_a_sweep_into_the_folder_of_another_is_refused_before_any_job(program: Path) -> None:
    given = ["task=a", "seed=0,1", "hydra.sweep.dir=swept"]
    assert multirun(str(program), given, check) == 0
    before = Path("swept", SUMMARY).read_text()
    with pytest.raises(UserError, match="swept already has runs; choose another "):
        multirun(str(program), ["task=a", "seed=2,4", "hydra.sweep.dir=swept"], check)
    assert Path("swept", SUMMARY).read_text() == before
    assert reports(Path("swept"))["0"]["seed"] == "0"
    Path("swept", SUMMARY).unlink()
    with pytest.raises(UserError, match="already has runs"):
        multirun(str(program), given, check)


def test_a_job_that_fails_stops_no_other_and_is_told(program: Path) -> None:
    assert multirun(str(program), ["task=a", "seed=3,4", "hydra.sweep.dir=swept"], check) == 1
    assert set(reports(Path("swept"))) == {"1"}
    text = Path("swept", SUMMARY).read_text()
    assert "| swept/0 | seed=3 | failed with status 3 |" in text
    assert "compare.py" not in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("seed=0", "-m needs at least one list, such as seed=0,1,2; without one leave out -m"),
        ("seed=0,-1", "expected seed of at least 0"),
        ("seed=interval(0,1)", "cannot sweep 'seed=interval"),
        ("task=glob(*)", "cannot sweep 'task=glob"),
        ("seed=[0", "cannot read 'seed="),
        ("seed=0,1 output=x", "output=DIR is the folder of one run; that of a sweep is hydra.sweep.dir=DIR"),
        ("seed=0,1 hydra/sweeper=optuna", "hydra/sweeper=optuna is not supported"),
        ("seed=0,1 hydra/launcher=nosuch", r"nosuch.*basic.*; joblib and submitit_slurm: pip install"),
        ("seed=0,1 hydra.nosuch=3", "hydra.nosuch"),
    ],
)
def test_what_is_wrong_is_refused_before_the_first_job(program: Path, given: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace("[", r"\[")) as error:
        multirun(str(program), ["task=a", "hydra.sweep.dir=swept", *given.split()], check)
    assert "\n" not in str(error.value)
    assert not list(Path().glob("swept/*/*"))


def test_a_stop_lets_the_running_job_save_and_begins_no_other(program: Path) -> None:
    given = ["task=a", "seed=0,1", "wait=1", "hydra.sweep.dir=swept"]
    code = (
        "import sys; from embodied.command_line.multirun import multirun\n"
        "try: multirun(sys.argv[1], sys.argv[2:], lambda _: None)\n"
        "except KeyboardInterrupt: sys.exit(130)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    sweep = subprocess.Popen([sys.executable, "-c", code, str(program), *given], env=environment)
    deadline = time.monotonic() + 120
    while not Path("swept/0/began").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait(60) == 130
    assert Path("swept/0/saved").read_text() == "x"
    assert not Path("swept/1").exists()


def test_joblib_runs_jobs_beside_each_other(program: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    given = ["task=a", "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=swept"]
    assert multirun(str(program), given, check) == 0
    assert set(reports(Path("swept"))) == {"0", "1"}


def test_lists_are_expanded_in_order() -> None:
    assert expanded(["a=1,2", "b=[1,2]", "c=x,y"]) == (
        [["a=1", "b=[1,2]", "c=x"], ["a=1", "b=[1,2]", "c=y"], ["a=2", "b=[1,2]", "c=x"], ["a=2", "b=[1,2]", "c=y"]],
        ["a", "c"],
    )
