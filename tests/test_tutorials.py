"""Newcomers' walks: files of the tutorials are saved, and commands are run, as printed, but for fewer steps."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from glob import glob
from pathlib import Path

import matplotlib as mpl
import pytest

import record
import train
from tests.programs import ROOT, Completed, restored_process, run_program

FOLDER = ROOT / "docs" / "tutorials"
NOTEBOOKS = ROOT / "docs" / "notebooks"
BLOCK = re.compile(r"^```(\w+)(?: title=\"(\S+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FEW_STEPS = {
    "train.py": ["env_steps=512", "num_envs=8", "evaluation_starts=4", "evaluation_envs=4", "video=false", "threads=1"],
    "evaluate.py": ["episodes=4", "num_envs=4", "video=false"],
}
"""Options that follow those printed, by program."""
MOST_COMMANDS = 5
"""The largest number of commands that a newcomer types up to the first result."""


def walk(name: str, folder: Path) -> list[Completed]:
    """Follow a tutorial in `folder`: save files that have a title, and run the commands in order.

    Blocks of the language "text" show output, or commands that need a robot.
    """
    answers, start_s = [], time.perf_counter()
    for language, title, text in BLOCK.findall((FOLDER / name).read_text()):
        if title:
            (path := folder / title).parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for command in text.replace("\\\n", "").splitlines() if language == "bash" else ():
            answers.append(answer := run(shlex.split(command), folder))
            assert answer.returncode == 0, f"{command}: {answer.stdout}{answer.stderr}"
            print(f"{name}: command {len(answers)} after {time.perf_counter() - start_s:.1f} s: {command}")
    return answers


def run(command: list[str], folder: Path) -> Completed:
    """Run `command` in `folder`: programs of the repository and of the folder in this process, others by themselves."""
    if command[0] != "python":
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        return Completed(process.returncode, process.stdout, process.stderr)
    name, *options = command[1:]
    options = [path for each in options for path in (sorted(glob(each, root_dir=folder)) if "*" in each else [each])]
    own = str(folder / name) if (folder / name).exists() else name
    return run_program(own, *options, *FEW_STEPS.get(name, ()), cwd=folder)


def first(answers: list[Completed], words: str) -> int:
    """Number of the first command that printed `words`."""
    return 1 + next(number for number, answer in enumerate(answers) if words in answer.stdout + answer.stderr)


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_tutorials_have_at_most_900_words(page: Path):
    assert len(BLOCK.sub("", page.read_text()).split()) <= 900


def test_a_student_trains_an_own_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)  # as `python train.py` does with its folder
    answers = walk("own_model.md", tmp_path)
    assert first(answers, "report.html") <= MOST_COMMANDS
    assert "distance_m" in (tmp_path / "outputs" / "my_arm" / "report.md").read_text()
    assert "MyArm-v0" in (tmp_path / "outputs" / "my_gym_arm" / "report.md").read_text()


@pytest.mark.evidence
def test_a_hobbyist_compiles_a_policy_for_a_crazyflie(tmp_path: Path):
    answers = walk("first_flight.md", tmp_path)
    assert first(answers, "crazyflie example") <= MOST_COMMANDS
    assert (tmp_path / "policy.o").exists()
    assert "CONFIG_CONTROLLER_OOT=y" in (tmp_path / "my_policy" / "crazyflie" / "app-config").read_text()
    assert "Margins were not measured" not in (tmp_path / "my_policy" / "policy.h").read_text()


@pytest.mark.evidence
def test_an_own_drone_is_identified_trained_and_exported(tmp_path: Path):
    answers = walk("own_drone.md", tmp_path)
    assert first(answers, "report.html") <= MOST_COMMANDS
    assert "fitted" in (tmp_path / "my_policy" / "policy.h").read_text()


@pytest.mark.evidence
def test_two_networks_are_compared_over_seeds(tmp_path: Path):
    answers = walk("comparing.md", tmp_path)
    assert first(answers, "compare.md") <= MOST_COMMANDS
    assert "policy.hidden=[16,16]" in (tmp_path / "outputs" / "widths_compared" / "compare.md").read_text()


@pytest.mark.evidence
def test_logs_with_failures_teach_more_than_imitation_of_their_successes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    answers = walk("learn_from_logs.md", tmp_path)
    assert first(answers, "report.html") <= MOST_COMMANDS
    assert "58 of 100 recorded drives docked" in answers[0].stdout
    imitation, offline = re.findall(r": (\d+) of 100 docked, after ([\d.]+) steps", answers[-1].stdout)
    assert int(offline[0]) >= 95
    assert float(offline[1]) < float(imitation[1]) - 1.0


@pytest.mark.evidence
def test_a_camera_learns_what_a_success_looks_like(tmp_path: Path):
    answers = walk("rewards_from_a_camera.md", tmp_path)
    assert first(answers, "report.html") <= MOST_COMMANDS
    results = json.loads((tmp_path / "classifier" / "results.json").read_text())["held_out"]
    assert results["episode_accuracy"]["rate"] > 0.9
    assert "of 60 episodes 60 had an unknown outcome: 30 are successes, 30 failures" in answers[-1].stdout


def cells(name: str) -> list[dict]:
    """Cells with code of a notebook."""
    every = json.loads((NOTEBOOKS / name).read_text())["cells"]
    return [cell for cell in every if cell["cell_type"] == "code"]


def test_notebooks_have_no_outputs():
    for path in NOTEBOOKS.glob("*.ipynb"):
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(path.name)), path.name


def run_notebook(name: str) -> dict:
    """Run the cells of a notebook in order; returns its variables."""
    variables = {"__name__": "__main__"}
    with restored_process():
        mpl.use("agg")
        for number, cell in enumerate(cells(name), start=1):
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), variables)
    return variables


@pytest.mark.evidence
def test_the_first_notebook_trains_a_policy_that_comes_to_its_goal():
    variables = run_notebook("first_policy.ipynb")
    assert variables["result"]["success"] > 0.9
    assert variables["distance_m"].shape == (300, 4)
    assert variables["distance_m"][-1].median() < 0.5 * variables["distance_m"][0].median()


@pytest.mark.evidence
def test_the_second_notebook_has_a_narrower_interval_where_starts_are_paired():
    variables = run_notebook("compare_two_runs.ipynb")
    width = {name: variables[name][2] - variables[name][1] for name in ("paired", "unpaired")}
    assert width["paired"] < width["unpaired"]
    assert variables["paired"][0] == pytest.approx(variables["unpaired"][0])
    assert all(0.5 < rate < 1.0 for rates in variables["rates"].values() for rate in rates.tolist())


def test_commands_that_teach_a_robot_are_valid():
    programs = {"train.py": train.composed, "record.py": record.composed}
    names = []
    for _, _, text in BLOCK.findall((FOLDER / "teach_a_robot.md").read_text()):
        _, name, *options = shlex.split(text)
        programs[name](options)
        names.append(name)
    assert names == ["train.py", "train.py", "record.py", "train.py"]
