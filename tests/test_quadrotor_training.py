"""The benchmark of the quadrotors: its statistics by hand, and valid options of the programs it runs."""

import json
import re

import pytest

from benchmarks import quadrotor_training
from benchmarks.quadrotor_training import MEASURED, RESULTS, mean, rows, with_intervals
from embodied.command_line.config import compose
from embodied.evaluation.evaluation import wilson
from evaluate import EvaluateConfig
from train import GROUPS, TrainConfig


@pytest.mark.parametrize("result", MEASURED)
def test_every_run_is_one_that_the_programs_know(result: str):
    for variant in MEASURED[result].values():
        config, _ = compose(TrainConfig, "train", list(variant.options), GROUPS)
        assert config.task.name.startswith("quadrotor_")
        for options in variant.evaluations.values():
            compose(TrainConfig, "train", [*variant.options, *options], GROUPS)
    compose(EvaluateConfig, "evaluate", ["checkpoint=x", "episodes=512", "num_envs=512"], {})


@pytest.mark.parametrize("result", [name for name in MEASURED if (RESULTS / f"quadrotor_{name}.json").exists()])
def test_stored_results_are_of_one_clean_commit(result: str):
    record = json.loads((RESULTS / f"quadrotor_{result}.json").read_text())
    assert re.fullmatch("[0-9a-f]{40}", record["git_commit"])
    assert {run["git_commit"] for run in record["runs"]} == {record["git_commit"]}
    assert {run["variant"] for run in record["runs"]} <= MEASURED[result].keys()  # fewer, if it was interrupted
    assert record["rows"] == rows(record["runs"])
    assert not record["options"]


@pytest.mark.parametrize("document", ["docs/results.md", "sims/quadrotor/README.md", "sims/libero/README.md"])
def test_results_that_documents_link_to_are_there(document: str):
    links = re.findall(r"\]\(([^)]*benchmarks/results/[^)]*)\)", (RESULTS.parents[1] / document).read_text())
    missing = [link for link in links if not (RESULTS.parents[1] / document).parent.joinpath(link).exists()]
    assert links
    assert not missing


def test_means_have_students_interval():
    found = mean([1.0, 2.0, None, 3.0])
    assert (found["mean"], found["seeds"]) == (2.0, 3)
    assert found["half_width"] == pytest.approx(4.303 / 3**0.5)
    assert mean([5.0]) == {"mean": 5.0, "seeds": 1}
    assert mean([None]) == {"mean": None, "seeds": 0}


def test_a_planners_evaluation_does_not_take_the_place_of_the_policys():
    rows = [{"distribution": "track", "stage": "baseline raceline", "title": "raceline"}]
    rows.append({"distribution": "track", "stage": "rl", "title": "RL"})
    assert [quadrotor_training.called(row) for row in rows] == ["track, raceline", "track"]


@pytest.mark.parametrize(("name", "worlds"), [("density_20", 64), ("drones_32", 16)])
def test_shares_have_wilsons_interval_and_worlds_count_once(name: str, worlds: int):
    row = {"episodes": 512, "survive": 0.5, "world_collision_free": 0.75, "distribution": name, "stage": "rl"}
    found = with_intervals({**row, "per_task": []})
    assert found["survive_95"] == pytest.approx((0.4568, 0.5432), abs=1e-4)
    assert found["world_collision_free_95"] == wilson(round(0.75 * worlds), worlds)
    assert not {"per_task", "stage", "collision_free_95"} & found.keys()


def test_a_row_is_the_mean_over_the_seeds_of_an_evaluation():
    times = dict.fromkeys(quadrotor_training.TIMES, 4.0)
    runs = [
        {"variant": "a", "seed": seed, **times, "evaluations": {"b": {"episodes": 8, "survive": survive, "low": 0.1}}}
        for seed, survive in ((0, 0.25), (1, 0.75))
    ]
    (row,) = rows(runs)
    assert (row["variant"], row["evaluation"], row["seeds"], row["episodes"]) == ("a", "b", [0, 1], 8)
    assert row["survive"]["mean"] == 0.5
    assert row["survive"]["half_width"] == pytest.approx(12.706 * 0.25)
    assert row["cpu_s"]["mean"] == 4.0
    assert "low" not in row


def test_tries_do_not_take_the_place_of_results(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        quadrotor_training.main(["hover", "--options", "env_steps=1"])
    assert "needs --output" in capsys.readouterr().err
    monkeypatch.setattr(quadrotor_training, "git_commit", lambda: "0123-dirty")
    with pytest.raises(SystemExit):
        quadrotor_training.main(["hover"])
    assert "measured on a clean commit, this is 0123-dirty" in capsys.readouterr().err
