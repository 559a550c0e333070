"""A search runs tries of train.py, learns from their scores, and goes on where it was stopped."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from embodied.command_line.tuning import Search, SearchOptions, Try
from embodied.commands import command
from embodied.errors import UserError
from tests.programs import run_program

pytest.importorskip("optuna", reason="needs the extra tune")
PROGRAM = """
import json, pathlib, sys, time
options = dict(each.split("=", 1) for each in sys.argv[1:])
folder = pathlib.Path(options["output"])
folder.mkdir()
metrics = (folder / "metrics.jsonl").open("w")
rate = float(options.get("rate", "0.5"))
if rate > 0.9:
    (folder / "run.log").write_text("today ERROR error: the loss is not finite\\n")
    sys.exit(1)
if options["evaluate_every_steps"] != "null":
    metrics.write(json.dumps({"step": 10, "time": 0.0, "evaluation/success": rate}) + "\\n")
    metrics.flush()
    if rate < 0.1:
        time.sleep(30)
outcomes = " ".join(["1"] * round(100 * rate) + ["0"] * (100 - round(100 * rate)))
row = {"stage": "rl", "distribution": "wide", "success": rate, "step_limit": 9}
row["per_task"] = [{"task": "a", "mean_steps": 5, "outcomes": outcomes}]
facts = {"task": "a", "assets": None, "seed": int(options["seed"]), "git_commit": "", "env_steps": 10, "wall_s": {}}
(folder / "report.json").write_text(json.dumps({**facts, "evaluations": [row], "options": options}))
"""


@dataclass
class Runs:
    """Searches by the program at `path`, whose only option is a rate in (0, 1), also its success."""

    path: Path

    def search(self, tries: int, *arguments: str, rates: object = (0.01, 0.99), name: str = "out") -> Search:
        options = SearchOptions({"rate": list(rates)}, tries, env_steps=50, starts=2)
        return Search(self.path, [*arguments], options, self.path.parent / name, self.composed)

    @staticmethod
    def composed(arguments: list[str]) -> tuple:
        options = dict(each.split("=", 1) for each in arguments)
        if float(options.get("rate", "0.5")) >= 1.0:
            raise UserError("rate=1: expected a number below 1")
        every = 10 if "evaluate_every_steps" in options else None
        task = SimpleNamespace(held_out_share=None, name="a")
        config = SimpleNamespace(task=task, evaluation_first_start=0, evaluation_starts=50, evaluate_every_steps=every)
        config.stages = ["offline"] if "stages" in options else None
        return config, {"values": {"rate": float(options.get("rate", "0.5"))}}


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return Runs(path)


def test_tries_begin_with_the_settings_of_the_command_and_fail_below_every_score(runs: Runs) -> None:
    first = runs.search(1, "task=a")
    first.run()
    assert first.tries[0].options == {"rate": 0.5}
    assert first.tries[0].score == 0.5
    extended = runs.search(10, "task=a")
    text = extended.run()
    rows = json.loads((runs.path.parent / "out" / "tune.json").read_text())["tries"]
    assert rows[0]["wall_s"] == first.tries[0].wall_s  # not run again
    assert [row["seed"] for row in rows] == list(range(100, 110))
    assert len({row["options"]["rate"] for row in rows}) == 10
    for row in rows:
        rate = row["options"]["rate"]
        assert 0.01 <= rate <= 0.99
        assert (row["score"], row["error"]) == (
            (round(rate, 2), None) if rate <= 0.9 else (None, "the loss is not finite")
        )
    assert any(row["error"] for row in rows)
    best = max((row for row in rows if row["score"] is not None), key=lambda row: row["score"])
    assert f"train.py task=a rate={best['options']['rate']}\n" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert lines[0].startswith(f"| {rows.index(best)} ")
    assert "failed" in lines[-1]
    # a range of a decade and more is logarithmic: half of the values are below its geometric mean
    assert sum(row["options"]["rate"] < 0.3 for row in rows) > 2
    report = json.loads((runs.path.parent / "out" / "3" / "report.json").read_text())
    expected = {"seed": "103", "evaluation_first_start": str(1 << 22), "evaluation_starts": "2", "env_steps": "50"}
    assert {name: report["options"][name] for name in expected} == expected
    assert "rate" not in json.loads((runs.path.parent / "out" / "0" / "report.json").read_text())["options"]


def test_a_search_without_any_score_is_an_error(runs: Runs) -> None:
    runs.path.write_text(PROGRAM.replace("rate > 0.9", "rate > 0.0"))
    with pytest.raises(UserError, match=r"no try has a score; .*out/tune\.json has the error of each"):
        runs.search(2, "task=a").run()
    rows = json.loads((runs.path.parent / "out" / "tune.json").read_text())["tries"]
    assert [row["score"] for row in rows] == [None, None]


def test_a_stopped_search_draws_as_an_uninterrupted_one(runs: Runs) -> None:
    whole = runs.search(6, name="whole")
    whole.run()
    for tries in (3, 6):
        stopped = runs.search(tries, name="stopped")
        stopped.run()
        stopped.tries[-1] = Try(stopped.tries[-1].options, stopped.tries[-1].seed)  # ended, but not recorded
        stopped._write()
    again = runs.search(6, name="stopped")
    again.run()
    assert [each.options for each in again.tries] == [each.options for each in whole.tries]
    assert [each.score for each in again.tries] == [each.score for each in whole.tries]


def test_hopeless_tries_end_early(runs: Runs) -> None:
    search = runs.search(5, "evaluate_every_steps=10", rates=(0.3, 0.4, 0.6, 0.7))
    search.run()
    search.tries.append(Try({"rate": 0.05}, 105))
    search._train(search.tries[-1])
    assert (search.tries[-1].pruned, search.tries[-1].error) == (True, None)
    assert search.tries[-1].points == [[10, 0.05]]
    assert "| ended early at 0.05 |" in search.summary()


def test_all_listed_values_are_tried_once(runs: Runs) -> None:
    search = runs.search(9, "rate=0.5", rates=(0.2, 0.4, 0.6))
    assert search.run().splitlines()[-3] == f"  {command('train')} rate=0.6"
    assert [search.tries[0].options["rate"], *sorted(each.options["rate"] for each in search.tries[1:])] == [
        0.5,
        0.2,
        0.4,
        0.6,
    ]


@pytest.mark.parametrize(
    ("arguments", "rates", "message"),
    [
        (["seed=3"], (0.1, 0.2), "seed=3 is set by the search itself"),
        (["stages=[offline]"], (0.1, 0.2), "tune.env_steps is the length of the stage rl"),
        ([], (0.1, 1.0), "expected a number below 1"),
        ([], (0.2, 0.1), "expected the lower bound"),
        ([], (0.2,), "expected two numbers"),
    ],
)
def test_mistakes_are_one_line_before_the_first_try(runs: Runs, arguments, rates, message: str) -> None:
    with pytest.raises(UserError, match=message):
        runs.search(2, *arguments, rates=rates)
    assert not (runs.path.parent / "out").exists()


def test_options_that_the_search_sets_cannot_be_chosen(runs: Runs) -> None:
    with pytest.raises(UserError, match=r"tune\.options\.seed is set by the search itself"):
        Search(runs.path, [], SearchOptions({"seed": [1, 2]}), runs.path.parent / "out", runs.composed)


def test_tries_of_another_command_are_not_continued(runs: Runs) -> None:
    runs.search(1, "task=a").run()
    with pytest.raises(UserError, match="has tries with other arguments; choose another output"):
        runs.search(1, "task=b")


def test_a_try_is_a_run_of_train_with_starts_and_a_seed_of_its_own(tmp_path: Path) -> None:
    small = ["task=quadrotor_hover", "evaluation_envs=4", "task.step_limit=20", "threads=1", "num_envs=4"]
    small += ["policy.hidden=[8]", "evaluation_starts=6"]
    search = ["tune.options={algorithm.learning_rate: [1e-4, 1e-2]}", "tune.tries=1", "tune.env_steps=400"]
    completed = run_program("tune.py", *small, *search, "tune.starts=3", f"output={tmp_path}/out")
    assert (completed.returncode, completed.stderr) == (0, "")
    report = json.loads((tmp_path / "out" / "0" / "report.json").read_text())
    assert (report["seed"], report["distributions"]) == (100, ["robust"])
    (row,) = [row for row in report["evaluations"] if row["stage"] == "rl"]
    assert (row["episodes"], row["first_start"]) == (3, 1 << 22)
    (tried,) = json.loads((tmp_path / "out" / "tune.json").read_text())["tries"]
    assert (tried["score"], tried["error"]) == (row["success"], None)
    refused = run_program("tune.py", *small, *search, "tune.first_start=5", f"output={tmp_path}/other")
    assert refused.stderr == (
        "error: tune.first_start=5 is an initial state of reported evaluations; expected at least 6\n"
    )
